"""Packing tokens out of the grid and putting them back: two operators with their own backward.

``dualkv::pack`` takes every token once, so its backward is a plain scatter without sums. ``dualkv::unpack`` copies a
token to all grid positions that share it, so its backward is a sum over the copies: done in float32 (float64 for
float64) and rounded once, where the backward of ``index`` sums in the dtype of the gradient (1% off in bfloat16 at 128
copies) and, on a GPU, in an order that changes between runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualkv_compile.kernels import triton_gather
from dualkv_compile.kernels.merge import accumulation_dtype

_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define("dualkv::pack", "(Tensor x, Tensor index, int dim) -> Tensor", tags=_TAGS)
torch.library.define("dualkv::pack_backward", "(Tensor grad, Tensor index, int dim, SymInt size) -> Tensor", tags=_TAGS)
torch.library.define("dualkv::unpack", "(Tensor x, Tensor inverse, int dim) -> Tensor", tags=_TAGS)
torch.library.define(
    "dualkv::unpack_backward", "(Tensor grad, Tensor inverse, int dim, SymInt size) -> Tensor", tags=_TAGS
)

#: Elements of a half-precision gradient that are converted to the accumulation dtype at a time.
_CHUNK = 1 << 22


def pack(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """``x`` at ``index`` along ``dim``.

    Args:
        x: any shape, dtype and strides.
        index: int64 ``[T]`` with values in ``[0, x.shape[dim])``, each at most once.
        dim: may be negative.
    """
    result: Tensor = torch.ops.dualkv.pack(x, index, dim)
    return result


def unpack(x: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """``x`` with dimension ``dim`` (size T) replaced by the shape of ``inverse``.

    Args:
        x: any shape, dtype and strides.
        inverse: int64 ``[N]`` or ``[B, S]``, positions along ``dim`` in any number of copies; -1 gives zeros.
        dim: may be negative.
    """
    result: Tensor = torch.ops.dualkv.unpack(x, inverse, dim)
    return result


def _replaced(x: Tensor, dim: int, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of ``x`` with dimension ``dim`` replaced by ``sizes``."""
    dim %= x.dim()
    return (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


# ---------------------------------------------------------------------------------------------------------------- pack
def _pack(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.index_select(dim, index).contiguous()


torch.library.impl("dualkv::pack", "CompositeExplicitAutograd", _pack)


@torch.library.register_fake("dualkv::pack")
def _pack_fake(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.new_empty(_replaced(x, dim, (index.shape[0],)))


def _pack_backward(grad: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    return grad.new_zeros(_replaced(grad, dim, (size,))).index_copy_(dim, index, grad)


torch.library.impl("dualkv::pack_backward", "CompositeExplicitAutograd", _pack_backward)


@torch.library.register_fake("dualkv::pack_backward")
def _pack_backward_fake(grad: Tensor, index: Tensor, dim: int, size: int) -> Tensor:
    return grad.new_empty(_replaced(grad, dim, (size,)))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, index, dim = inputs
    ctx.save_for_backward(index)
    ctx.dim, ctx.size = dim % x.dim(), x.shape[dim]


def _pack_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (index,) = ctx.saved_tensors
    return torch.ops.dualkv.pack_backward(grad, index, ctx.dim, ctx.size), None, None


torch.library.register_autograd("dualkv::pack", _pack_autograd, setup_context=_save)


# -------------------------------------------------------------------------------------------------------------- unpack
def _unpack(x: Tensor, inverse: Tensor, dim: int) -> Tensor:
    dim %= x.dim()
    shape = _replaced(x, dim, tuple(inverse.shape))
    flat = inverse.reshape(-1)
    if x.shape[dim] == 0:
        return x.new_zeros(shape)
    if triton_gather.accepts(x):
        return triton_gather.unpack(x, inverse, dim)
    dropped = flat < 0
    # Written into its final form: autograd would forbid the user to change a view made by a custom operator in place.
    result = x.new_empty(shape)
    merged = result.view(_replaced(x, dim, (flat.shape[0],)))
    # On a GPU the question "is there any -1" would wait for the device: fill in any case there.
    if x.device.type != "cpu" or bool(dropped.any()):
        torch.index_select(x, dim, flat.clamp(min=0), out=merged)
        mask = dropped.reshape((-1,) + (1,) * (x.dim() - dim - 1))
        merged.masked_fill_(mask, 0)
    else:
        torch.index_select(x, dim, flat, out=merged)
    return result


torch.library.impl("dualkv::unpack", "CompositeExplicitAutograd", _unpack)


@torch.library.register_fake("dualkv::unpack")
def _unpack_fake(x: Tensor, inverse: Tensor, dim: int) -> Tensor:
    return x.new_empty(_replaced(x, dim, tuple(inverse.shape)))


def _unpack_backward(grad: Tensor, inverse: Tensor, dim: int, size: int) -> Tensor:
    if triton_gather.accepts(grad):
        return triton_gather.unpack_backward(grad, inverse, dim, size)
    flat = inverse.reshape(-1)
    grad = grad.flatten(dim, dim + inverse.dim() - 1)
    dtype = accumulation_dtype(grad.dtype) if grad.is_floating_point() else grad.dtype
    if grad.device.type != "cpu":
        # Sorted sums in a fixed order; the extra last slot takes what belongs to dropped positions.
        moved = grad.movedim(dim, 0)
        total = torch.zeros((size + 1, *moved.shape[1:]), dtype=dtype, device=grad.device)
        total.index_put_((torch.where(flat < 0, size, flat),), moved.to(dtype), accumulate=True)
        return total[:size].movedim(0, dim).to(grad.dtype).contiguous()
    if bool((flat < 0).any()):
        kept = (flat >= 0).nonzero().squeeze(1)
        flat, grad = flat[kept], grad.index_select(dim, kept)
    result = torch.zeros(_replaced(grad, dim, (size,)), dtype=dtype)
    step = flat.shape[0] if dtype == grad.dtype else max(1, _CHUNK * flat.shape[0] // max(1, grad.numel()))
    for start in range(0, flat.shape[0], max(1, step)):
        part = slice(start, start + step)
        result.index_add_(dim, flat[part], grad.narrow(dim, start, flat[part].shape[0]).to(dtype))
    return result.to(grad.dtype)


torch.library.impl("dualkv::unpack_backward", "CompositeExplicitAutograd", _unpack_backward)


@torch.library.register_fake("dualkv::unpack_backward")
def _unpack_backward_fake(grad: Tensor, inverse: Tensor, dim: int, size: int) -> Tensor:
    return grad.new_empty((*grad.shape[:dim], size, *grad.shape[dim + inverse.dim() :]))


def _unpack_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (inverse,) = ctx.saved_tensors
    return torch.ops.dualkv.unpack_backward(grad, inverse, ctx.dim, ctx.size), None, None


torch.library.register_autograd("dualkv::unpack", _unpack_autograd, setup_context=_save)
