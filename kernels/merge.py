"""Merging attention over disjoint sets of keys, by the natural-log sums of exponentials (LSE).

Two partial results combine as ``lse = logaddexp(l1, l2)``, ``out = exp(l1 - lse) o1 + exp(l2 - lse) o2``. A side that
saw no key has ``lse = -inf`` and counts for nothing, whatever its ``out`` holds; where every side is empty the result
is ``out = 0, lse = -inf``. Sides at ``+inf`` share the weight equally. No NaN comes up in either direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import triton_merge


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge n partial results; differentiable in every ``out`` and every ``lse``.

    On CUDA, in float16, bfloat16 and float32, by a Triton kernel in one pass over memory; elsewhere, and without
    triton, by the torch code here, which says what the kernel has to compute.

    Args:
        outs: n tensors ``[..., D]`` of one shape and dtype.
        lses: n tensors ``[...]``, natural log.

    Returns:
        ``out [..., D]`` in the dtype of ``outs``, and ``lse [...]`` in float32 (float64 for float64 inputs).

    Raises:
        InputError: for no partial results, or shapes that do not belong together.
    """
    if not outs or len(outs) != len(lses):
        raise InputError(f"merge: expected as many lses as outs and at least one, got {len(outs)} and {len(lses)}")
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise InputError(
                f"merge: expected outs of shape {tuple(outs[0].shape)} and lses without its last dimension, "
                f"got {tuple(out.shape)} and {tuple(lse.shape)}"
            )
    if len(outs) <= triton_merge.MAX_PARTS and triton_merge.accepts(outs, lses):
        return triton_merge.merge(outs, lses)
    out, lse = _Merge.apply(len(outs), *outs, *lses)
    return out, lse


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge a second partial result into ``(out, lse)`` in place, without autograd.

    ``out [..., D]`` and ``lse [...]`` are in the accumulation dtype. Unlike in :func:`merge`, an empty side's ``out``
    must be finite, which the kernels guarantee (they give 0).
    """
    # NaN comes from two sides both at -inf or both at +inf: half and half is right for both, as empty outs are 0.
    weight = torch.sigmoid(other_lse - lse).nan_to_num_(nan=0.5)
    out.lerp_(other_out.to(out.dtype), weight.to(out.dtype).unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        outs, lses = tensors[:count], tensors[count:]
        dtype = accumulation_dtype(torch.promote_types(outs[0].dtype, lses[0].dtype))
        stacked = torch.stack([lse.to(dtype) for lse in lses])
        top = stacked.amax(0)
        # `stacked == top` keeps exp(inf - inf) and exp(-inf - -inf) out of the sum.
        weight = torch.where(stacked == top, 1.0, torch.exp(stacked - top))
        weight = weight.masked_fill(stacked == -torch.inf, 0.0)
        total = weight.sum(0)
        weight = weight / torch.where(total == 0, 1.0, total)
        out = torch.zeros(outs[0].shape, dtype=dtype, device=outs[0].device)
        for part, share in zip(outs, weight, strict=True):
            out += _weighted(part.to(dtype), share)
        lse = top + torch.log(total)
        ctx.save_for_backward(weight, out, *outs)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return out.to(outs[0].dtype), lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        weight, out, *outs = ctx.saved_tensors
        grad_out, grad_lse = grad_out.to(out.dtype), grad_lse.to(out.dtype)
        out_grads = [_weighted(grad_out, share) for share in weight]
        lse_grads = []
        for part, share in zip(outs, weight, strict=True):
            through_out = (grad_out * (part.to(out.dtype) - out)).sum(-1)
            lse_grads.append(torch.where(share == 0, 0.0, share * (through_out + grad_lse)))
        return None, *(grad.to(dtype) for grad, dtype in zip(out_grads + lse_grads, ctx.dtypes, strict=True))


def _weighted(value: Tensor, weight: Tensor) -> Tensor:
    """``weight * value``, and 0 where the weight is 0 whatever the value."""
    weight = weight.unsqueeze(-1)
    return torch.where(weight == 0, 0.0, weight * value)
