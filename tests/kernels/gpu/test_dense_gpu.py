"""The strategy "dense" and the Triton merge on a GPU, against float64 and against undivided calls of torch's SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from dualkv_compile.kernels import dense, fused, triton_merge
from dualkv_compile.kernels import merge as torch_merge
from dualkv_compile.kernels import rows as torch_rows
from dualkv_compile.kernels.packed_attention import choose, packed_attention
from dualkv_compile.kernels.rows import Rows
from dualkv_compile.kernels.tree_cut import Worth
from dualkv_compile.plan import PrefixPlan
from tests.kernels.gpu.oracle import DEVICE, exact, faults, make_plan, operands, replicated
from tests.kernels.helpers import group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

INF = math.inf

#: Every stack that cuDNN may get, however small, so that small trees reach it.
SMALL_STACKS = Worth(share=0, pairs=0, length=64)


# ------------------------------------------------------------------------------------------------------------ attention
def three_levels(system: int, prompts: Sequence[int], responses: Sequence[int]) -> list[list[int]]:
    rows = []
    for n, prompt in enumerate(prompts):
        shared = [*range(system), *(10_000 * (n + 1) + i for i in range(prompt))]
        rows += [[*shared, *(100_000 * (m + 1) + i for i in range(length))] for m, length in enumerate(responses)]
    return rows


def run(plan: PrefixPlan, tensors: Sequence[Tensor], scale: float, worth: Worth | None) -> list[Tensor]:
    """Through the operator; or, with a ``worth``, through the strategy with it."""
    if worth is None:
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        tree = (x.to(DEVICE) for x in (plan.rank, plan.column, plan.end))
        out, lse = packed_attention(q, k, v, *tree, plan.nodes, scale=scale, strategy="dense")
        return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), tensors[3])]
    kernel = fused.FusedCuda(DEVICE, tensors[0].shape[3])
    if kernel.worth is None:
        pytest.skip("cuDNN does not take this head dimension here")
    kernel.worth = worth
    tree = (plan.column, plan.nodes, (), None, scale)
    out, lse = dense.forward(*tensors[:3], *tree, kernel=kernel)
    return [out, lse, *dense.backward(tensors[3], *tensors[:3], out, lse, *tree, kernel=kernel)]


def check(
    rows: Sequence[Sequence[int]],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    worth: Worth | None = None,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    plan = make_plan(rows)
    tensors = operands(plan, *heads, dim, dtype)
    scale = dim**-0.5
    actual = run(plan, [layout(x) for x in tensors], scale, worth)
    expected, plain = exact(plan, tensors, scale), replicated(plan, tensors, scale)
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=0, atol=2e-3)
    assert not faults(actual, plain, expected, dtype)


DTYPES = [torch.bfloat16, torch.float16]
WORTHS = pytest.mark.parametrize("worth", [None, SMALL_STACKS], ids=["operator", "small stacks"])


@WORTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 96, 128, 192, 256])
def test_head_dimensions(dim: int, dtype: torch.dtype, worth: Worth | None) -> None:
    check(group(130, [70, 70, 70]), (8, 2), dim, dtype, worth)


@WORTHS
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 2), (14, 2), (8, 1)])
@pytest.mark.parametrize("dim", [64, 128])
def test_grouped_heads(heads: tuple[int, int], dim: int, worth: Worth | None) -> None:
    check(group(257, [65, 65, 64]), heads, dim, torch.bfloat16, worth)


LENGTHS = [1, 2, 15, 63, 64, 65, 127, 128, 129, 255, 257]


@WORTHS
@pytest.mark.parametrize(
    ("prompt", "response"),
    [*product([1, 63, 128, 129], LENGTHS), (1023, 64), (1024, 255), (2049, 127), (4096, 1), (4096, 65)],
)
def test_lengths(prompt: int, response: int, worth: Worth | None) -> None:
    check(group(prompt, [response] * 2), (8, 2), 128, torch.bfloat16, worth)


@WORTHS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows",
    [
        group(128, [16, 32, 64, 128]),
        group(512, [1, 255, 128, 2, 512]),
        group(100, [0, 0, 3, 200]),
        group(300, [100] * 3) + group(70, [65] * 2, first_id=500_000) + group(1, [400], first_id=700_000),
        group(200, [70, 70]) + group(200, [70, 70], first_id=500_000),
        three_levels(90, [130, 130, 7], [66, 66, 1]),
        three_levels(1, [1, 300], [129, 64]),
        [[5]],
        [[5], [6], [7]],
    ],
    ids=["ragged", "very ragged", "empty", "groups", "equal groups", "levels", "short levels", "token", "tokens"],
)
def test_trees(rows: list[list[int]], dtype: torch.dtype, worth: Worth | None) -> None:
    check(rows, (8, 2), 64, dtype, worth)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [group(4096, [1024] * 4), three_levels(1024, [1500, 1024], [512, 300, 512])])
def test_large_enough_for_stacks_as_shipped(rows: list[list[int]]) -> None:
    check(rows, (4, 1), 128, torch.bfloat16)


def _inside(x: Tensor) -> Tensor:
    wide = torch.full((1, x.shape[1] + 1, x.shape[2] + 7, x.shape[3] + 3), torch.nan, dtype=x.dtype, device=x.device)
    return wide[:, 1:, 5:-2, 2:-1].copy_(x)


def _fused(x: Tensor) -> Tensor:
    return torch.cat([x, x * torch.nan], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]


@WORTHS
@pytest.mark.parametrize("layout", [_inside, _fused, torch.Tensor.contiguous])
def test_strides(layout: Callable[[Tensor], Tensor], worth: Worth | None) -> None:
    check(group(130, [70, 70, 33]), (8, 2), 64, torch.bfloat16, worth, layout)


def test_is_chosen_and_does_not_synchronise() -> None:
    plan = make_plan(group(300, [100, 100, 64]))
    q, k, v, grad = operands(plan, 8, 2, 128, torch.bfloat16)
    assert choose(q, k, v, None, 1.0, "auto") == "dense"
    tree = [x.to(DEVICE) for x in (plan.rank, plan.column, plan.end)]
    q.requires_grad_()
    packed_attention(q, k, v, *tree, plan.nodes, scale=1.0)[0].backward(grad)  # compiles
    dense._calls_of.cache_clear()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed_attention(q, k, v, *tree, plan.nodes, scale=1.0)[0].backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic() -> None:
    """With deterministic algorithms asked for, gradients are bitwise repeatable."""
    plan = make_plan(group(1000, [500] * 4))
    tensors = operands(plan, 8, 2, 128, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        assert fused.FusedCuda(DEVICE, 128).worth is None
        first, *others = (run(plan, tensors, 0.1, None) for _ in range(5))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        for x, y in zip(first, other, strict=True):
            assert torch.equal(x, y)


# ---------------------------------------------------------------------------------------------------------------- merge
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def draw(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def parts(count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    outs = [draw(shape, seed, dtype) for seed in range(count)]
    lses = [draw(shape[:-1], 100 + seed) * 5 for seed in range(count)]
    return outs, [lse.masked_fill(draw(lse.shape, 200 + n) > 0.8, -INF) for n, lse in enumerate(lses)]


def differentiate(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> list[Tensor]:
    outs, lses = ([x.detach().requires_grad_() for x in group_] for group_ in (outs, lses))
    out, lse = torch_merge.merge(outs, lses)
    gradients = draw(out.shape, 7, torch.bfloat16).to(out.dtype), draw(lse.shape, 8).to(lse.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (*outs, *lses), gradients)]


def check_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """float64 goes to the torch code, everything else to the kernel."""
    assert triton_merge.accepts(outs, lses)
    actual = differentiate(outs, lses)
    expected = differentiate([x.double() for x in outs], [x.double() for x in lses])
    for x, y in zip(actual, expected, strict=True):
        finite = y[y.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(x.double(), y, rtol=0, atol=TOLERANCE[outs[0].dtype] * max(1.0, largest))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("shape", [(1, 32, 1000, 128), (5, 333, 80), (3, 1, 16), (1000, 256), (2, 7)])
def test_merge(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> None:
    check_merge(*parts(count, shape, dtype))


@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
@pytest.mark.parametrize("sides", [(-INF, -INF), (-INF, 0.5), (0.5, -INF), (INF, 0.5), (INF, -INF), (INF, INF, 0.5)])
def test_merge_of_infinite_sides(sides: tuple[float, ...], garbage: float) -> None:
    outs = [torch.full((3, 8), garbage if side == -INF else n + 1.0, device=DEVICE) for n, side in enumerate(sides)]
    lses = [torch.full((3,), side, device=DEVICE) for side in sides]
    check_merge(outs, lses)
    assert not any(x.isnan().any() for x in differentiate(outs, lses))


def test_merge_of_strided_operands() -> None:
    outs, lses = parts(3, (4, 333, 64), torch.bfloat16)
    token_major = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in outs]
    check_merge(token_major, lses)
    dim_major = outs[2].transpose(1, 2).contiguous().transpose(1, 2)
    check_merge([outs[0], token_major[1], dim_major], [x.T.contiguous().T for x in lses])
    check_merge([x[:, ::3, 8:40] for x in outs], [x[:, ::3] for x in lses])
    check_merge([x[:1].expand(4, 333, 64) for x in outs], [x[:1].expand(4, 333) for x in lses])


def test_merge_beyond_31_bits() -> None:
    """2^31 numbers and some in each operand; the last rows are looked at."""
    tokens = 2**31 // (32 * 128) + 64
    outs = [torch.ones(tokens, 32, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    lses = [torch.zeros(tokens, 32, device=DEVICE) for _ in range(2)]
    outs[0][-50:] = draw((50, 32, 128), 0, torch.bfloat16)
    lses[0][-50:] = draw((50, 32), 1)
    out, lse = torch_merge.merge(outs, lses)
    expected, expected_lse = torch_merge.merge([x[-60:].double() for x in outs], [x[-60:].double() for x in lses])
    torch.testing.assert_close(out[-60:].double(), expected, rtol=2**-7, atol=1e-6)
    torch.testing.assert_close(lse[-60:].double(), expected_lse, rtol=1e-6, atol=1e-6)
    total = torch_rows.sum_rows(outs, [Rows(0, tokens)] * 2, tokens)
    torch.testing.assert_close(total[-60:], outs[0][-60:] + outs[1][-60:])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_rows(count: int, dtype: torch.dtype) -> None:
    tokens, heads, size = 1000, 12, 80
    spans = [[(n, 990)] if n % 2 else [(500 + n, 700), (n, 40 + n), (800, 999)] for n in range(count)]
    rows = [Rows.of(ranges, DEVICE) for ranges in spans]
    outs = [draw((x.count, heads, size), n, dtype) for n, x in enumerate(rows)]
    lses = [draw((heads, x.count), 50 + n).T * 3 for n, x in enumerate(rows)]
    exact_out, exact_lse = torch_rows.merge_rows([x.double() for x in outs], [x.double() for x in lses], rows, tokens)
    out, lse = torch_rows.merge_rows(outs, lses, rows, tokens)
    torch.testing.assert_close(out.double(), exact_out, rtol=TOLERANCE[dtype], atol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    total = torch_rows.sum_rows(outs, rows, tokens)
    exact_total = torch_rows.sum_rows([x.double() for x in outs], rows, tokens)
    torch.testing.assert_close(total.double(), exact_total, rtol=TOLERANCE[dtype], atol=1e-5)
