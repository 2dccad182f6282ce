"""dualkv::pack and dualkv::unpack."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkv_compile.kernels import gather
from dualkv_compile.kernels.gather import pack, unpack

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def unpack_by_hand(x: Tensor, inverse: Tensor, dim: int) -> Tensor:
    slices = [x.select(dim, i) if i >= 0 else 0 * x.select(dim, 0) for i in inverse.flatten().tolist()]
    shape = [*x.shape[:dim], *inverse.shape, *x.shape[dim + 1 :]]
    return torch.stack(slices, dim).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(-3, 2),
    tokens=st.integers(1, 6),
    grid=st.one_of(st.tuples(st.integers(0, 5)), st.tuples(st.integers(1, 3), st.integers(0, 4))),
    dropped=st.booleans(),
    seed=st.integers(0, 999),
)
def test_against_loops(dim: int, tokens: int, grid: tuple[int, ...], dropped: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = [2, 3, 4]
    shape[dim] = tokens
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    inverse = torch.randint(-1 if dropped else 0, tokens, grid, generator=generator)
    actual = unpack(x, inverse, dim)
    if inverse.numel():
        expected = unpack_by_hand(x, inverse, dim % 3)
        assert torch.equal(actual, expected)
        grad = torch.randn(actual.shape, generator=generator, dtype=torch.float64)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (actual, expected)))
    else:
        assert actual.numel() == 0
        assert (torch.autograd.grad(actual.sum(), x)[0] == 0).all()
    index = torch.randperm(tokens, generator=generator)[: max(1, tokens // 2)]
    packed, expected = pack(x, index, dim), x.index_select(dim, index)
    assert torch.equal(packed, expected)
    grad = torch.randn(packed.shape, generator=generator, dtype=torch.float64)
    assert torch.equal(*(torch.autograd.grad(y, x, grad)[0] for y in (packed, expected)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
def test_any_strides(dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(6, 2, 5).to(dtype).permute(2, 0, 1)[:, ::2]  # sizes 5, 3, 2
    inverse = torch.tensor([[0, 1, 1], [2, -1, 0]])
    grad = torch.ones(1, dtype=dtype).expand_as(unpack(x, inverse, dim))
    for layout in (x, x.contiguous()):
        leaf = layout.detach().requires_grad_()
        out = unpack(leaf, inverse, dim)
        assert torch.equal(out, unpack_by_hand(x, inverse, dim))
        (got,) = torch.autograd.grad(out, leaf, grad)
        counts = torch.zeros(x.shape[dim]).index_add_(0, inverse[inverse >= 0], torch.ones(5)).to(dtype)
        assert torch.equal(got, counts.reshape((-1,) + (1,) * (2 - dim)).expand_as(x))


def test_no_tokens_and_no_positions() -> None:
    x = torch.zeros(1, 0, 3, requires_grad=True)
    out = unpack(x, torch.full((2, 4), -1), 1)
    assert out.shape == (1, 2, 4, 3)
    assert (out == 0).all()
    assert torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    y = torch.ones(4, 3, requires_grad=True)
    packed = pack(y, torch.zeros(0, dtype=torch.int64), 0)
    assert packed.shape == (0, 3)
    assert (torch.autograd.grad(packed.sum(), y)[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32])
def test_integers_have_no_gradient_but_values(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0, 3]).to(dtype)
    assert torch.equal(unpack(x, torch.tensor([[2, -1], [0, 1]]), 0), torch.tensor([[3, 0], [1, 0]]).to(dtype))
    assert torch.equal(pack(x, torch.tensor([2, 0]), 0), torch.tensor([3, 1]).to(dtype))


def test_sum_over_copies_is_rounded_once() -> None:
    """128 copies in bfloat16: the error is that of one rounding; adding up in bfloat16 is far off."""
    copies, width = 128, 64
    grad = (torch.rand(copies, 1, width, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    x = torch.zeros(1, width, dtype=torch.bfloat16, requires_grad=True)
    (total,) = torch.autograd.grad(unpack(x, torch.zeros(copies, 1, dtype=torch.int64), 0), x, grad)
    assert torch.equal(total[0], grad.double().sum((0, 1)).bfloat16())
    naive = torch.zeros(width, dtype=torch.bfloat16)
    for row in grad[:, 0]:
        naive += row
    assert not torch.equal(naive, total[0])


def test_half_precision_gradient_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "_CHUNK", 7)
    inverse = torch.randint(-1, 4, (5, 6), generator=torch.Generator().manual_seed(0))
    x = torch.zeros(2, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    out = unpack(x, inverse, 1)
    grad = torch.randint(-8, 8, out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    (got,) = torch.autograd.grad(out, x, grad)
    wide = torch.zeros(2, 4, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(unpack_by_hand(wide, inverse, 1), wide, grad.double())
    assert torch.equal(got.double(), expected)


def test_results_own_their_memory() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    everything = torch.arange(3)
    for result in (pack(x, everything, 0), unpack(x, everything, 0), unpack(x, everything.reshape(1, 3), 0)):
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert result.is_contiguous()


@pytest.mark.parametrize("inverse", [torch.tensor([[0, 1], [0, -1]]), torch.tensor([1, 1, 0])])
def test_opcheck(inverse: Tensor) -> None:
    for x in (torch.randn(2, 4, requires_grad=True), torch.randn(3, 2, 4).transpose(0, 1)[:, 0].requires_grad_()):
        torch.library.opcheck(torch.ops.dualkv.unpack, (x, inverse, 0))
    torch.library.opcheck(torch.ops.dualkv.pack, (torch.randn(3, 4, 2, requires_grad=True), torch.tensor([2, 0]), -2))
    torch.library.opcheck(torch.ops.dualkv.pack_backward, (torch.randn(3, 2), torch.tensor([1, 4]), 1, 5))
    torch.library.opcheck(torch.ops.dualkv.unpack_backward, (torch.randn(2, *inverse.shape), inverse, 1, 2))


def test_offsets_beyond_32_bits() -> None:
    """The result has 2^31 + 2^16 elements of one byte, and its last one is addressed right."""
    width = 1 << 16
    rows = (1 << 15) + 1
    x = torch.zeros(2, width, dtype=torch.uint8)
    x[1] = 7
    inverse = torch.zeros(rows, dtype=torch.int64)
    inverse[-1] = 1
    out = unpack(x, inverse, 0)
    assert out.numel() > 2**31
    assert int(out[-1].sum()) == 7 * width
    assert int(out[-2].sum()) == 0
    assert torch.equal(pack(out, torch.tensor([rows - 1, 0]), 0)[0], x[1])


def test_error_of_sum_is_the_float32_error() -> None:
    """float32 gradients add up in float32, float64 ones in float64."""
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(1, 1, dtype=dtype, requires_grad=True)
        grad = torch.full((1000, 1), 0.1, dtype=dtype)
        (total,) = torch.autograd.grad(unpack(x, torch.zeros(1000, dtype=torch.int64), 0), x, grad)
        assert math.isclose(total.item(), 100.0, rel_tol=1e-4 if dtype == torch.float32 else 1e-12)
