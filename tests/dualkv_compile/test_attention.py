"""The public packed_attention: shapes, scale, and errors that say which tensor is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dualkv_compile.attention import packed_attention
from dualkv_compile.errors import InputError
from tests.kernels.helpers import TREES, expect, make_plan, operands

PLAN: Any = make_plan(TREES["two_prompts"])


@pytest.mark.parametrize("scale", [None, 0.4])
def test_with_and_without_batch_dimension(scale: float | None) -> None:
    q, k, v, grad = operands(PLAN)
    expected, _, *grads = expect(PLAN, (q, k, v, grad), scale=scale)
    for batched in (True, False):
        leaves = [(x if batched else x[0]).detach().requires_grad_() for x in (q, k, v)]
        out = packed_attention(*leaves, PLAN, scale=scale)
        torch.testing.assert_close(out, expected if batched else expected[0], rtol=0, atol=1e-12)
        out.backward(grad if batched else grad[0])
        for leaf, want in zip(leaves, grads, strict=True):
            torch.testing.assert_close(leaf.grad, want if batched else want[0], rtol=0, atol=1e-12)


def test_scale_defaults_to_that_of_sdpa() -> None:
    q, k, v, _ = operands(PLAN)
    assert torch.equal(packed_attention(q, k, v, PLAN), packed_attention(q, k, v, PLAN, scale=1 / math.sqrt(8)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.tolist(), k, v), "q: expected a tensor, got list"),
        (lambda q, k, v: (q[0], k, v), r"k: expected \[1, heads, T, dim\]"),
        (lambda q, k, v: (q.expand(2, -1, -1, -1), k, v), r"q: expected \[1, heads, T, dim\].*got \[2, 4"),
        (lambda q, k, v: (q, k[:, :, 1:], v), "k: expected T=43 packed tokens, got 42"),
        (lambda q, k, v: (q, k, v.long()), "v: expected a floating-point dtype, got torch.int64"),
        (lambda q, k, v: (q, k.float(), v), r"k: expected dtype torch.float64 \(that of q\), got torch.float32"),
        (lambda q, k, v: (q, k.to("meta"), v), r"k: expected device cpu \(that of q\), got meta"),
        (lambda q, k, v: (q, k[..., :4], v), r"k: expected head dimension 8 \(that of q\), got 4"),
        (lambda q, k, v: (q, k, v[:, :1]), r"v: expected 2 heads \(as k has\), got 1"),
        (lambda q, k, v: (q[:, :3], k, v), "q: expected a multiple of the 2 heads of k, got 3"),
        (lambda q, k, v: (q.to("meta"), k.to("meta"), v.to("meta")), "plan: expected device meta"),
    ],
)
def test_errors(change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        packed_attention(*change(*operands(PLAN)[:3]), PLAN)


def test_mixed_dtypes_under_autocast() -> None:
    q, k, v, _ = operands(PLAN, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed_attention(q, k, v.bfloat16(), PLAN).dtype == torch.bfloat16
    with pytest.raises(InputError, match="v: expected dtype"):
        packed_attention(q, k, v.bfloat16(), PLAN)
