"""The Triton kernels of un-packing on the CPU, against the torch code. Run by test_triton_gather.py in its own process.

Needs TRITON_INTERPRET=1 before triton is imported: the kernels are then Python functions on numpy arrays.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv_compile.kernels import gather, triton_gather


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(0, 2),
    tokens=st.integers(1, 40),
    size=st.sampled_from([1, 3, 16, 100]),
    grid=st.one_of(st.tuples(st.integers(0, 90)), st.tuples(st.integers(1, 9), st.integers(0, 40))),
    dropped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 999),
)
def test_against_torch(
    dim: int, tokens: int, size: int, grid: tuple[int, ...], dropped: bool, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = [2, 3, size]
    shape[dim] = tokens
    x = torch.randn(shape, generator=generator).to(dtype)
    inverse = torch.randint(-1 if dropped else 0, tokens, grid, generator=generator)
    out = triton_gather.unpack(x, inverse, dim)
    assert torch.equal(out, gather.unpack(x, inverse, dim))
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    got = triton_gather.unpack_backward(grad, inverse, dim, tokens)
    right = torch.ops.dualkv.unpack_backward(grad.double(), inverse, dim, tokens)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert got.is_contiguous()
    # One rounding of the sum, and those of a float32 sum of up to 360 numbers.
    torch.testing.assert_close(got.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_rows_longer_than_a_tile() -> None:
    x = torch.randn(5, 4100)
    inverse = torch.tensor([4, 0, -1, 4, 2])
    assert torch.equal(triton_gather.unpack(x, inverse, 0), gather.unpack(x, inverse, 0))
    grad = torch.randn(5, 4100)
    got = triton_gather.unpack_backward(grad, inverse, 0, 5)
    torch.testing.assert_close(got, torch.stack([grad[1], 0 * grad[0], grad[4], 0 * grad[0], grad[0] + grad[3]]))


def test_any_strides() -> None:
    x = torch.randn(6, 2, 10).permute(2, 0, 1)[::2]
    inverse = torch.tensor([[0, 1, 1], [2, -1, 0]])
    assert torch.equal(triton_gather.unpack(x, inverse, 1), gather.unpack(x, inverse, 1))
    grad = torch.randn(2, 2, 3, 5).permute(3, 1, 2, 0)
    got = triton_gather.unpack_backward(grad, inverse, 1, 6)
    torch.testing.assert_close(got, torch.ops.dualkv.unpack_backward(grad, inverse, 1, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_rounding_at_128_copies(dtype: torch.dtype) -> None:
    grad = torch.randn(128, 16).to(dtype)
    got = triton_gather.unpack_backward(grad, torch.zeros(128, dtype=torch.int64), 0, 1)
    assert (
        torch.equal(got, grad.float().sum(0, keepdim=True).to(dtype))
        or (
            (got.double() - grad.double().sum(0)).abs() <= torch.finfo(dtype).eps * grad.double().sum(0).abs() + 1e-6
        ).all()
    )
