"""Plans by brute force, and the comparisons that all kernel tests share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dualkv_compile.kernels import reference
from dualkv_compile.kernels.packed_attention import packed_attention


@dataclass(frozen=True)
class Plan:
    """The fields of a prefix plan that the kernels read, and the grid it came from (ragged rows are padded with -1)."""

    grid: Tensor
    tokens: int
    rank: Tensor
    column: Tensor
    end: Tensor
    nodes: Tensor
    index: Tensor
    inverse: Tensor


def make_plan(rows: Sequence[Sequence[int]]) -> Plan:
    """The prefix tree of the rows, by definition: quadratic, and independent of the product's own plan."""
    width = max(map(len, rows))
    order = sorted(range(len(rows)), key=lambda i: list(rows[i]))
    ranked = [list(rows[i]) for i in order]
    owner: dict[tuple[int, ...], tuple[int, int, int]] = {}  # prefix -> packed index, rank, grid index
    tokens: list[tuple[int, int, int]] = []
    index: list[int] = []
    inverse = torch.full((len(rows), width), -1, dtype=torch.int64)
    for rank, row in enumerate(ranked):
        for column in range(len(row)):
            prefix = tuple(row[: column + 1])
            if prefix not in owner:
                owner[prefix] = (len(tokens), rank, order[rank] * width + column)
                end = rank + 1
                while end < len(ranked) and tuple(ranked[end][: column + 1]) == prefix:
                    end += 1
                tokens.append((rank, column, end))
                index.append(owner[prefix][2])
            inverse[order[rank], column] = owner[prefix][0]
    nodes, start = [], 0
    for at in range(1, len(tokens) + 1):
        if at == len(tokens) or tokens[at][0] != tokens[start][0] or tokens[at][2] != tokens[start][2]:
            query_stop = at
            while query_stop < len(tokens) and tokens[query_stop][0] < tokens[start][2]:
                query_stop += 1
            nodes.append((start, at, query_stop))
            start = at
    rank_, column_, end_ = (torch.tensor([t[i] for t in tokens], dtype=torch.int32) for i in range(3))
    grid = torch.tensor([list(row) + [-1] * (width - len(row)) for row in rows])
    node_table = torch.tensor(nodes, dtype=torch.int64).reshape(-1, 3)
    return Plan(grid, len(tokens), rank_, column_, end_, node_table, torch.tensor(index), inverse)


def group(prompt: int, responses: Sequence[int], first_id: int = 0) -> list[list[int]]:
    """Rows of one prompt with responses of the given lengths, no two of which begin alike."""
    base = [first_id + i for i in range(prompt)]
    return [base + [first_id + 1000 * (n + 1) + i for i in range(length)] for n, length in enumerate(responses)]


TREES: dict[str, list[list[int]]] = {
    "one_prompt": group(20, [7, 7, 7]),
    "ragged": group(13, [5, 1, 9, 0, 2]),
    "two_prompts": group(9, [4, 4]) + group(17, [3, 6], first_id=100_000),
    "multi_level": [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, 3, 4, 5, 9],
        [1, 2, 3, 8, 8],
        [1, 2, 3, 8, 7, 7, 7],
        [1, 5],
        [2, 2, 2],
    ],
    "identical": [[3, 1, 4, 1, 5]] * 4,
    "distinct": [[1, 2, 3], [2, 2, 3, 4], [3]],
    "one_token": [[5]],
    "one_token_each": [[5], [6], [7]],
    "empty_responses": group(11, [0, 0, 0]),
    "long": group(200, [90, 40, 150]) + group(2, [280], first_id=500_000),
    "prompt_in_prompt": [*group(32, [3, 5]), [*range(48), 77], [*range(48), 78, 79], [*range(20)], [*range(24)]],
}


def operands(
    plan: Plan, heads: int = 4, kv_heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float64, value_dim: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a gradient for the output, seeded."""
    generator = torch.Generator().manual_seed(plan.tokens * 1000 + heads * 100 + dim)

    def draw(count: int, size: int) -> Tensor:
        return torch.randn(1, count, plan.tokens, size, generator=generator, dtype=torch.float64).to(dtype)

    value_dim = value_dim or dim
    return draw(heads, dim), draw(kv_heads, dim), draw(kv_heads, value_dim), draw(heads, value_dim)


def run(
    plan: Plan,
    tensors: Sequence[Tensor],
    vectors: Sequence[Tensor] = (),
    mask: str = "",
    strategy: str = "auto",
    scale: float | None = None,
) -> list[Tensor]:
    """The operator: out, lse, and the gradients of q, k, v."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    out, lse = packed_attention(q, k, v, *tree, vectors, mask, scale=scale, strategy=strategy)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def expect(
    plan: Plan, tensors: Sequence[Tensor], extra: Tensor | None = None, scale: float | None = None
) -> list[Tensor]:
    """The float64 reference for :func:`run`; ``extra`` is the mask as a bool [T, T]."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors[:3])
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = reference.packed_attention(q, k, v, plan.rank, plan.column, plan.end, scale, extra)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


NAMES = ("out", "lse", "grad q", "grad k", "grad v")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference over the largest absolute expected value (1 if less); infinities must agree."""
    infinite = expected.isinf()
    assert torch.equal(actual.double()[infinite], expected[infinite])
    assert actual[~infinite].isfinite().all()
    if infinite.all():
        return 0.0
    difference = (actual.double() - expected)[~infinite].abs().max()
    return float(difference / expected[~infinite].abs().max().clamp(min=1.0))


def assert_close(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for name, x, y in zip(NAMES, actual, expected, strict=True):
        assert x.shape == y.shape, name
        error = relative_error(x, y)
        assert error <= tolerance, f"{name}: error {error:.2e}"


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
