"""Packing and un-packing on a GPU: values, sums of copies, the same bits each time, offsets beyond 32 bits."""

from __future__ import annotations

import pytest
import torch

from dualkv_compile.kernels import triton_gather
from dualkv_compile.kernels.gather import pack, unpack

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "shape"), [(1, (1, 700, 520)), (2, (1, 6, 700, 64)), (0, (700, 3000)), (0, (700,))])
def test_unpack_and_its_gradient(dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    inverse = torch.randint(-1, 700, (9, 300), generator=generator)
    leaf = x.cuda().requires_grad_()
    out = unpack(leaf, inverse.cuda(), dim)
    assert triton_gather.accepts(leaf)
    assert torch.equal(out.detach().cpu(), unpack(x, inverse, dim))
    grad = torch.randn(out.shape, generator=generator).to(dtype)
    first, second = (torch.autograd.grad(out, leaf, grad.cuda(), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    right = torch.ops.dualkv.unpack_backward(grad.double(), inverse, dim, 700)
    torch.testing.assert_close(first.cpu().double(), right, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_pack_and_its_gradient() -> None:
    x = torch.randn(4, 50, 70, device="cuda", requires_grad=True)
    index = torch.randperm(50, device="cuda")[:30]
    out = pack(x, index, 1)
    assert torch.equal(out, x[:, index])
    (grad,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.equal(grad[:, index], torch.ones_like(out))
    assert grad.sum() == out.numel()


def test_offsets_beyond_32_bits() -> None:
    tokens, size = 40, 2**21 + 64
    x = torch.randn(tokens, size, device="cuda", dtype=torch.bfloat16)
    inverse = torch.arange(1100, device="cuda") % tokens
    out = unpack(x, inverse, 0)
    assert out.numel() > 2**31
    assert torch.equal(out[-1], x[inverse[-1]])
    assert torch.equal(out[1025:1030], x[inverse[1025:1030]])
    (total,) = (torch.ops.dualkv.unpack_backward(out, inverse, 0, tokens),)
    copies = inverse.bincount(minlength=tokens).to(torch.float32)
    for token in (0, 19, 20, 39):
        right = (x[token].float() * copies[token]).to(torch.bfloat16)
        torch.testing.assert_close(total[token], right, rtol=2**-7, atol=0)
