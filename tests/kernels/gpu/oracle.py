"""What attention over a tree is held against on a GPU: float64, and torch's fused attention on the undivided rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dualkv_compile.kernels import reference
from dualkv_compile.plan import PrefixPlan
from tests.kernels.helpers import NAMES

DEVICE = torch.device("cuda")


def make_plan(rows: Sequence[Sequence[int]]) -> PrefixPlan:
    """The plan of rows of token ids, ragged ones padded on the right."""
    width = max(map(len, rows))
    grid = torch.tensor([[*row, *(-1 for _ in range(width - len(row)))] for row in rows])
    return PrefixPlan.from_rows(grid, min_shared=1, keep=grid >= 0)


def operands(plan: PrefixPlan, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, ordered by token in memory as linear layers give them."""
    generator = torch.Generator(DEVICE).manual_seed(plan.tokens + heads + dim)
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        torch.randn(1, plan.tokens, count, dim, device=DEVICE, generator=generator).to(dtype).transpose(1, 2)
        for count in counts
    ]


def exact(plan: PrefixPlan, tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    """out, lse and the gradients of q, k, v in float64, every query against every key."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors[:3])
    tree = (x.to(DEVICE) for x in (plan.rank, plan.column, plan.end))
    out, lse = reference.packed_attention(q, k, v, *tree, scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].double())]


def replicated(plan: PrefixPlan, tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    """What a user has today: every row through SDPA on its own, gradients of copies added up exactly."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)

    return _by_rows(plan, tensors, attend)


def exact_by_rows(plan: PrefixPlan, tensors: Sequence[Tensor], scale: float) -> list[Tensor]:
    """As :func:`exact`, but without lse, for trees of too many tokens for that: one key head and one row at a time."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=DEVICE).triu(1)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    heads = [x.double().chunk(tensors[1].shape[1], dim=1) for x in tensors]
    results = [_by_rows(plan, part, attend) for part in zip(*heads, strict=True)]
    return [torch.cat(parts, dim=1) if parts[0].ndim > 1 else parts[0] for parts in zip(*results, strict=True)]


def _by_rows(
    plan: PrefixPlan, tensors: Sequence[Tensor], attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> list[Tensor]:
    results = [torch.zeros(x.shape, dtype=torch.float64, device=DEVICE) for x in (tensors[3], *tensors[:3])]
    seen = torch.zeros(plan.tokens, dtype=torch.bool)
    for row in plan.inverse:
        token = row[row >= 0]
        mine = ~seen[token]
        seen[token] = True
        token, mine = token.to(DEVICE), mine.to(DEVICE)
        q, k, v = (x.detach()[:, :, token].requires_grad_() for x in tensors[:3])
        out = attend(q, k, v)
        # Copies of a token get the gradient of its output once.
        grad = tensors[3][:, :, token] * mine[:, None]
        results[0][:, :, token] = out.detach().double()
        for total, x in zip(results[1:], torch.autograd.grad(out, (q, k, v), grad), strict=True):
            total.index_add_(2, token, x.double())
    out, *grads = results
    return [out, torch.empty(0), *grads]


def rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference."""
    return float((actual.double() - expected).square().mean().sqrt())


def faults(
    actual: Sequence[Tensor], plain: Sequence[Tensor], expected: Sequence[Tensor], dtype: torch.dtype
) -> list[str]:
    """Which of out and the gradients are further from ``expected`` than 1.25 times the error of ``plain`` allows.

    Two units in the last place of the largest value are always allowed.
    """
    found = []
    for name, ours, theirs, truth in zip(NAMES, actual, plain, expected, strict=True):
        if name == "lse":
            continue
        if ours.dtype != dtype or not bool(ours.isfinite().all()):
            found.append(f"{name}: {ours.dtype}, not finite")
            continue
        bound = max(1.25 * rms(theirs, truth), 2 * torch.finfo(dtype).eps * float(truth.abs().max()))
        if not rms(ours, truth) <= bound:
            found.append(f"{name}: {rms(ours, truth):.2e} against {rms(theirs, truth):.2e}")
    return found
