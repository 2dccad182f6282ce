"""The operator ``dualkv::packed_attention``: attention on the packed tokens of a prefix tree.

    packed_attention(q, k, v, rank, column, end, nodes, vectors, mask, scale, strategy) -> (out, lse)

- ``q [1, H, T, D]``, ``k [1, Hk, T, D]``, ``v [1, Hk, T, Dv]``, of one dtype, any strides; query head h reads key/value
  head ``h // (H // Hk)``.
- ``rank``, ``column``, ``end``: int32 ``[T]``; key ``k`` is visible to query ``q`` iff
  ``rank[k] <= rank[q] < end[k] and column[k] <= column[q]`` and the mask expression holds.
- ``nodes``: int64 ``[M, 3]`` on the CPU, the same tree as ranges of packed tokens (start, stop, query_stop).
- ``vectors``, ``mask``: what :mod:`dualkv_compile.kernels.predicate` describes; ``""`` for no extra term.
- ``strategy``: ``"auto"``, ``"regions"`` (CPU), ``"dense"`` (CUDA, no mask expression) or ``"blocks"`` (anything);
  ``"dense_visible"`` is ``"dense"`` for a mask that hides the same keys from all queries, which ``nodes`` must then
  leave out (``PrefixPlan.visible``): the mask itself is not read.
- ``out [1, H, T, Dv]`` in the dtype of q, ordered by token in memory; ``lse [1, H, T]``, natural log, float32 (float64
  for float64), without gradient. Queries that see no key have out 0, lse -inf and gradient 0.

The operator is opaque to tracing: one compilation serves all trees and all T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import blocks, dense, regions
from dualkv_compile.kernels.merge import accumulation_dtype
from dualkv_compile.kernels.predicate import Expression, from_text, validate

STRATEGIES = ("auto", "regions", "dense", "dense_visible", "blocks")

_TREE = "Tensor rank, Tensor column, Tensor end, Tensor nodes, Tensor[] vectors, str mask, float scale, str strategy"
_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(
    "dualkv::packed_attention", f"(Tensor q, Tensor k, Tensor v, {_TREE}) -> (Tensor out, Tensor lse)", tags=_TAGS
)
torch.library.define(
    "dualkv::packed_attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TREE}) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor] = (),
    mask: str = "",
    *,
    scale: float,
    strategy: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Call the operator; see the module for arguments and results."""
    result: tuple[Tensor, Tensor] = torch.ops.dualkv.packed_attention(
        q, k, v, rank, column, end, nodes, list(vectors), mask, scale, strategy
    )
    return result


# ------------------------------------------------------------------------------------------------------ implementation
#: What the strategies that are not for everything expect.
_EXPECTED = {
    "regions": "CPU tensors of one floating dtype with Dv == D and a positive scale",
    "dense": "CUDA tensors (compute capability 8.0 or later) of one dtype, float16 or bfloat16, with Dv == D, D a "
    "multiple of 8 and at most 256, a positive scale and no mask expression",
}
_EXPECTED["dense_visible"] = _EXPECTED["dense"]


def choose(q: Tensor, k: Tensor, v: Tensor, expression: Expression | None, scale: float, strategy: str) -> str:
    """The strategy that computes these operands: the one asked for, or for "auto", the fastest that can.

    Raises:
        InputError: an unknown strategy, or one that cannot compute them.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"packed_attention: strategy: expected one of {STRATEGIES}, got {strategy!r}")
    able = {
        "regions": regions.supported(q, k, v, scale),
        "dense": dense.supported(q, k, v, scale, expression),
        "blocks": True,
    }
    if strategy == "auto":
        return next(name for name in able if able[name])
    if strategy == "dense_visible":
        able[strategy] = dense.supported(q, k, v, scale, None)
    if not able[strategy]:
        raise InputError(
            f"packed_attention: strategy {strategy!r} expected {_EXPECTED[strategy]}, got {q.dtype}, {k.dtype}, "
            f"{v.dtype} on {q.device} with D={q.shape[3]}, Dv={v.shape[3]}, scale={scale}, mask {expression}"
        )
    return strategy


def _check(q: Tensor, k: Tensor, v: Tensor, column: Tensor, vectors: Sequence[Tensor], mask: str) -> Expression | None:
    """What a wrong graph or a wrong plan would get wrong; everything else fails by itself."""
    batch, heads, tokens = q.shape[:3]
    if batch != 1 or k.shape[0] != 1 or v.shape[0] != 1 or k.shape[1] != v.shape[1] or heads % k.shape[1]:
        raise InputError(
            "packed_attention: q, k, v: expected [1, H, T, D], [1, Hk, T, D], [1, Hk, T, Dv] with H a multiple of Hk, "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if any(length != tokens for length in (k.shape[2], v.shape[2], column.shape[0], *(x.shape[0] for x in vectors))):
        raise InputError(
            f"packed_attention: expected T={tokens} tokens everywhere, got k {k.shape[2]}, v {v.shape[2]}, "
            f"column {column.shape[0]}, vectors {[x.shape[0] for x in vectors]}"
        )
    expression = from_text(mask)
    if expression is not None:
        validate(expression, len(vectors))
    return expression


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    scale: float,
    strategy: str,
) -> tuple[Tensor, Tensor]:
    expression = _check(q, k, v, column, vectors, mask)
    chosen = choose(q, k, v, expression, scale, strategy)
    if chosen == "regions":
        return regions.forward(q, k, v, column, nodes, vectors, expression, scale)
    if chosen in ("dense", "dense_visible"):
        return dense.forward(q, k, v, column, nodes, (), None, scale)
    return blocks.forward(q, k, v, rank, column, end, nodes, vectors, expression, scale)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    scale: float,
    strategy: str,
) -> tuple[Tensor, Tensor, Tensor]:
    expression = from_text(mask)
    chosen = choose(q, k, v, expression, scale, strategy)
    if chosen == "regions":
        return regions.backward(grad_out, q, k, v, out, lse, column, nodes, vectors, expression, scale)
    if chosen in ("dense", "dense_visible"):
        return dense.backward(grad_out, q, k, v, out, lse, column, nodes, (), None, scale)
    return blocks.backward(grad_out, q, k, v, out, lse, rank, column, end, nodes, vectors, expression, scale)


torch.library.impl("dualkv::packed_attention", "CompositeExplicitAutograd", _forward)
torch.library.impl("dualkv::packed_attention_backward", "CompositeExplicitAutograd", _backward)


@torch.library.register_fake("dualkv::packed_attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads, tokens = q.shape[1], q.shape[2]
    lse = q.new_empty((1, heads, tokens), dtype=accumulation_dtype(q.dtype))
    return regions.token_major(q, heads, tokens, v.shape[3], q.dtype), lse


@torch.library.register_fake("dualkv::packed_attention_backward")
def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (regions.token_major(x, x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in (q, k, v))
    return grad_q, grad_k, grad_v


# ------------------------------------------------------------------------------------------------------------ autograd
def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rank, column, end, nodes, vectors, ctx.mask, ctx.scale, ctx.strategy = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, rank, column, end, nodes, *vectors)


def _autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, rank, column, end, nodes, *vectors = ctx.saved_tensors
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad_out is not None:
        grads = torch.ops.dualkv.packed_attention_backward(
            grad_out, q, k, v, out, lse, rank, column, end, nodes, vectors, ctx.mask, ctx.scale, ctx.strategy
        )
    return (*grads, None, None, None, None, [None] * len(vectors), None, None, None)


torch.library.register_autograd("dualkv::packed_attention", _autograd, setup_context=_setup_context)


# ------------------------------------------------------------------------------------------------------------ autocast
def _autocast_kernel(device_type: str, key: torch._C.DispatchKey) -> Callable[..., tuple[Tensor, Tensor]]:
    """What autocast does to scaled_dot_product_attention: cast q, k, v, then go on below autocast."""

    def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
        eligible = x.device.type == device_type and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    def kernel(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            result: tuple[Tensor, Tensor] = torch.ops.dualkv.packed_attention(
                cast(q, dtype), cast(k, dtype), cast(v, dtype), *rest
            )
        return result

    return kernel


for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
    _kernel = _autocast_kernel(_device_type, getattr(torch._C.DispatchKey, _key))
    torch.library.impl("dualkv::packed_attention", _key, _kernel)


# --------------------------------------------------------------------------------------------------------------- flops
def visible_pairs(nodes: Tensor, tokens: int) -> int:
    """Query-key pairs of the tree as rectangles, squares counted in full as the formulas for SDPA do.

    Where the numbers in ``nodes`` are not known (tracing), the upper bound ``tokens ** 2``.
    """
    if isinstance(nodes, FakeTensor) or nodes.device.type == "meta" or torch._is_functional_tensor(nodes):
        return tokens * tokens
    return sum((stop - start) * (query_stop - start) for start, stop, query_stop in nodes.tolist())


@register_flop_formula(torch.ops.dualkv.packed_attention, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, rank: Tensor, column: Tensor, end: Tensor, nodes: Tensor, *_: Any, **__: Any
) -> int:
    """Two products per pair and head: scores (D) and values (Dv)."""
    return 2 * q.shape[1] * visible_pairs(nodes, q.shape[2]) * (q.shape[3] + v.shape[3])


@register_flop_formula(torch.ops.dualkv.packed_attention_backward, get_raw=True)
def _backward_flops(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    """Five products per pair and head: the scores again, dV and dP (Dv each), dQ and dK (D each)."""
    return 2 * q.shape[1] * visible_pairs(nodes, q.shape[2]) * (3 * q.shape[3] + 2 * v.shape[3])
