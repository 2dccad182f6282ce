"""The public function :func:`packed_attention`, for callers that pack tokens themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import flex, flex_compiled
from dualkv_compile.kernels import packed_attention as operator
from dualkv_compile.kernels.strategy import Workload, check_repeatable, choose
from dualkv_compile.options import ATTENTION

if TYPE_CHECKING:
    from dualkv_compile.plan import PrefixPlan


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: PrefixPlan, scale: float | None = None, *, attention: str = "auto"
) -> Tensor:
    """Causal attention on the packed tokens of a prefix tree; differentiable in q, k and v.

    Args:
        q: ``[1, H, T, D]`` or ``[H, T, D]``, floating point, with ``T == plan.tokens``.
        k: ``[1, Hk, T, D]`` or ``[Hk, T, D]`` with H a multiple of Hk; query head h reads head ``h // (H // Hk)``.
        v: ``[1, Hk, T, Dv]`` or ``[Hk, T, Dv]``.
        plan: which token sees which, from :meth:`PrefixPlan.from_rows`; on the device of q.
        scale: factor on the scores; None for ``1 / sqrt(D)``.
        attention: the way to compute it, as the backend's option of that name.

    Returns:
        ``[1, H, T, Dv]`` (without the 1 if q has none), in the dtype of q (the autocast dtype under autocast).

    Raises:
        InputError: if a tensor has the wrong number of dimensions, size, dtype or device, or ``attention`` names no way
            or one that cannot run there.
        CompilationError: FlexAttention was asked for and could not be compiled.
    """
    if attention not in ATTENTION:
        raise InputError(f"packed_attention: attention: expected one of {ATTENTION}, got {attention!r}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise InputError(f"packed_attention: {name}: expected a tensor, got {type(x).__name__}")
        if x.dim() not in (3, 4) or x.dim() != q.dim() or (x.dim() == 4 and x.shape[0] != 1):
            raise InputError(
                f"packed_attention: {name}: expected [1, heads, T, dim] or [heads, T, dim], the same for q, k and v, "
                f"got {list(x.shape)}"
            )
        if x.shape[-2] != plan.tokens:
            raise InputError(f"packed_attention: {name}: expected T={plan.tokens} packed tokens, got {x.shape[-2]}")
        if not x.is_floating_point():
            raise InputError(f"packed_attention: {name}: expected a floating-point dtype, got {x.dtype}")
        if x.device != q.device:
            raise InputError(f"packed_attention: {name}: expected device {q.device} (that of q), got {x.device}")
        # Under autocast the operator casts all three, as scaled_dot_product_attention does.
        if x.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
            raise InputError(f"packed_attention: {name}: expected dtype {q.dtype} (that of q), got {x.dtype}")
    if k.shape[-1] != q.shape[-1] or q.shape[-1] == 0:
        raise InputError(f"packed_attention: k: expected head dimension {q.shape[-1]} (that of q), got {k.shape[-1]}")
    if v.shape[-3] != k.shape[-3]:
        raise InputError(f"packed_attention: v: expected {k.shape[-3]} heads (as k has), got {v.shape[-3]}")
    if k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise InputError(
            f"packed_attention: q: expected a multiple of the {k.shape[-3]} heads of k, got {q.shape[-3]} heads"
        )
    if plan.rank.device != q.device:
        raise InputError(f"packed_attention: plan: expected device {q.device} (that of q), got {plan.rank.device}")
    batched = q.dim() == 4
    if not batched:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    tree = (plan.rank, plan.column, plan.end)
    check_repeatable(attention)
    if attention == "auto" and q.device.type == "cuda" and not torch.compiler.is_compiling():
        sizes = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
        attention = choose(Workload.of(q.device, flex.compute_dtype(q), *sizes))
    if attention in flex.BACKENDS:
        out, _ = flex_compiled.run(q, k, v, *tree, scale=factor, strategy=attention)
    else:
        out, _ = operator.packed_attention(q, k, v, *tree, plan.nodes, scale=factor, strategy=attention)
    return out if batched else out.squeeze(0)
