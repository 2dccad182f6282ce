"""Merging partial attention over disjoint keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import reference
from dualkv_compile.kernels.merge import merge, merge_

INF = math.inf


def test_opposite_values_cancel_exactly() -> None:
    """Prefix logits {0}, suffix logits {0}, v = +1 and -1: exactly 0 (not so with an LSE in another base)."""
    one = torch.ones(1, 1)
    lse = torch.zeros(1)
    out, merged = merge([one, -one], [lse, lse])
    assert out.item() == 0.0
    assert merged.item() == pytest.approx(math.log(2), rel=1e-7)
    # With unequal sums the base shows: one key against three, all logits 0.
    out, merged = merge([one, -one], [lse, lse + math.log(3)])
    assert out.item() == pytest.approx(-0.5, rel=1e-6)
    assert merged.item() == pytest.approx(math.log(4), rel=1e-6)


@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
@pytest.mark.parametrize(
    "sides", [(-INF, -INF), (-INF, 0.5), (0.5, -INF), (INF, 0.5), (0.5, INF), (INF, -INF), (INF, INF)]
)
def test_infinite_sides(sides: tuple[float, float], garbage: float) -> None:
    """No NaN in either direction; an empty side's out may hold anything."""
    values = [torch.tensor([garbage if side == -INF else n + 1.0]) for n, side in enumerate(sides)]
    outs = [value.requires_grad_() for value in values]
    lses = [torch.tensor(side).requires_grad_() for side in sides]
    out, lse = merge(outs, lses)
    top = max(sides)
    heaviest = [n + 1.0 for n, side in enumerate(sides) if side == top != -INF]
    assert out.item() == (sum(heaviest) / len(heaviest) if heaviest else 0.0)
    assert lse.item() == top
    (out.sum() + lse.clamp(-9, 9).sum()).backward()
    for tensor, side in zip([*outs, *lses], [*sides, *sides], strict=True):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        if side == -INF:
            assert tensor.grad.item() == 0.0
    assert sum(float(x.grad) for x in outs) == (1.0 if heaviest else 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("sides", [(-INF, -INF), (-INF, 0.5), (0.5, -INF), (INF, 0.5), (0.5, INF), (INF, INF)])
def test_infinite_sides_in_place(sides: tuple[float, float]) -> None:
    values = [torch.tensor([0.0 if side == -INF else n + 1.0]) for n, side in enumerate(sides)]
    expected = merge(values, [torch.tensor(side) for side in sides])
    out, lse = values[0].clone(), torch.tensor(sides[0])
    merge_(out, lse, values[1], torch.tensor(sides[1]))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def parts_of(scores: Tensor, values: Tensor, owner: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Attention of every query over each part of the keys, empty parts included."""
    outs, lses = [], []
    for part in range(count):
        mine = scores.masked_fill(owner != part, -INF)
        empty = (mine == -INF).all(-1)
        safe = mine.masked_fill(empty[..., None], 0.0)
        outs.append((torch.softmax(safe, -1) @ values).masked_fill(empty[..., None], 0.0))
        lses.append(torch.logsumexp(safe, -1).masked_fill(empty, -INF))
    return outs, lses


@settings(max_examples=100, deadline=None)
@given(
    keys=st.integers(1, 12),
    count=st.integers(1, 5),
    seed=st.integers(0, 10_000),
    hidden=st.sampled_from([0.0, 0.3, 0.9]),
    spread=st.sampled_from([0.1, 3.0, 100.0]),
)
def test_any_split_equals_undivided(keys: int, count: int, seed: int, hidden: float, spread: float) -> None:
    """Random splits of the keys with empty sides and all-masked queries: values and gradients."""
    generator = torch.Generator().manual_seed(seed)
    queries = 6
    scores = (torch.randn(queries, keys, generator=generator, dtype=torch.float64) * spread).requires_grad_()
    values = torch.randn(keys, 3, generator=generator, dtype=torch.float64).requires_grad_()
    seen = torch.rand(queries, keys, generator=generator) >= hidden
    seen[0] = False
    owner = torch.randint(0, count, (keys,), generator=generator)
    masked = scores.masked_fill(~seen, -INF)
    (whole,), (whole_lse,) = parts_of(masked, values, torch.zeros(keys), 1)
    outs, lses = parts_of(masked, values, owner, count)
    out, lse = merge(outs, lses)
    torch.testing.assert_close(out, whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-11)
    grad = torch.randn(queries, 3, generator=generator, dtype=torch.float64)
    grad_lse = torch.randn(queries, generator=generator, dtype=torch.float64)
    finite = whole_lse.isfinite()

    def gradients(x: Tensor, x_lse: Tensor) -> tuple[Tensor, ...]:
        loss = (x * grad).sum() + (x_lse[finite] * grad_lse[finite]).sum()
        return torch.autograd.grad(loss, (scores, values), retain_graph=True)

    for actual, expected in zip(gradients(out, lse), gradients(whole, whole_lse), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    running, running_lse = outs[0].detach().clone(), lses[0].detach().clone()
    for other, other_lse in zip(outs[1:], lses[1:], strict=True):
        merge_(running, running_lse, other.detach(), other_lse.detach())
    torch.testing.assert_close(running, whole.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(running_lse, whole_lse.detach(), rtol=1e-12, atol=1e-11)


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    lses = [torch.randn(2, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: merge(x[:3], x[3:]), (*outs, *lses))


def test_half_precision_accumulates_in_float32() -> None:
    """64 equal parts of 1 + 2^-7: a running bfloat16 sum of weights 1/64 would drift."""
    out = torch.full((1, 4), 1.0078125, dtype=torch.bfloat16)
    merged, lse = merge([out] * 64, [torch.zeros(1)] * 64)
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, out)
    assert lse.dtype == torch.float32


def test_two_halves_of_real_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 9, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    everything = torch.ones(9, 9, dtype=torch.bool)
    left = everything.clone()
    left[:, 4:] = False
    parts = [reference.dense_attention(q, k, v, side, 0.5) for side in (left, ~left)]
    whole, lse = reference.dense_attention(q, k, v, everything, 0.5)
    merged, merged_lse = merge([part[0] for part in parts], [part[1] for part in parts])
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(merged_lse, lse)


def test_errors() -> None:
    with pytest.raises(InputError, match="at least one, got 0 and 0"):
        merge([], [])
    with pytest.raises(InputError, match=r"\(2, 3\).*got \(2, 3\) and \(3,\)"):
        merge([torch.zeros(2, 3)], [torch.zeros(3)])
