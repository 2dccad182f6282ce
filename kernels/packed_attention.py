"""The operator ``dualkv::packed_attention``: attention on the packed tokens of a prefix tree.

    packed_attention(q, k, v, rank, column, end, nodes, vectors, mask, scale, strategy, bias, sinks, softcap)
        -> (out, lse)

- ``q [1, H, T, D]``, ``k [1, Hk, T, D]``, ``v [1, Hk, T, Dv]``, of one dtype, any strides; query head h reads key/value
  head ``h // (H // Hk)``.
- ``rank``, ``column``, ``end``: int32 ``[T]``; key ``k`` is visible to query ``q`` iff
  ``rank[k] <= rank[q] < end[k] and column[k] <= column[q]`` and the mask expression holds.
- ``nodes``: int64 ``[M, 3]`` on the CPU, the same tree as ranges of packed tokens (start, stop, query_stop).
- ``vectors``, ``mask``: what :mod:`dualkv_compile.kernels.predicate` describes; ``""`` for no extra term.
- ``strategy``: ``"auto"``, ``"regions"`` (CPU), ``"dense"`` (CUDA, no mask expression) or ``"blocks"`` (anything);
  ``"dense_visible"`` is ``"dense"`` for a mask that hides the same keys from all queries, which ``nodes`` must then
  leave out (``PrefixPlan.visible``): the mask itself is not read.
- ``bias``: None, or ``[H or 1, T]``, added to the scores of the key at T; it may need a gradient.
- ``sinks``: None, or ``[H]``: a score that takes part in the softmax of every query of its head and has no value.
- ``softcap``: scores become ``softcap * tanh(score / softcap)`` before bias and mask; 0 for none.
  Only "blocks" computes a bias or a soft cap.
- ``out [1, H, T, Dv]`` in the dtype of q, ordered by token in memory; ``lse [1, H, T]``, natural log, float32 (float64
  for float64), without gradient, the sink included. Queries that see no key have out 0, lse -inf (the sink's score, if
  there is one) and gradient 0.

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

_TREE = (
    "Tensor rank, Tensor column, Tensor end, Tensor nodes, Tensor[] vectors, str mask, float scale, str strategy, "
    "Tensor? bias, Tensor? sinks, float softcap"
)
_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(
    "dualkv::packed_attention", f"(Tensor q, Tensor k, Tensor v, {_TREE}) -> (Tensor out, Tensor lse)", tags=_TAGS
)
torch.library.define(
    "dualkv::packed_attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TREE}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Call the operator; see the module for arguments and results."""
    result: tuple[Tensor, Tensor] = torch.ops.dualkv.packed_attention(
        q, k, v, rank, column, end, nodes, list(vectors), mask, scale, strategy, bias, sinks, softcap
    )
    return result


# ------------------------------------------------------------------------------------------------------ implementation
#: What the strategies that are not for everything expect.
_EXPECTED = {
    "regions": "CPU tensors of one floating dtype with Dv == D and a positive scale, no bias and no soft cap",
    "dense": "CUDA tensors (compute capability 8.0 or later) of one dtype, float16 or bfloat16, with Dv == D, D a "
    "multiple of 8 and at most 256, a positive scale, no mask expression, no bias and no soft cap",
}
_EXPECTED["dense_visible"] = _EXPECTED["dense"]


def choose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    expression: Expression | None,
    scale: float,
    strategy: str,
    bias: Tensor | None = None,
    softcap: float = 0.0,
) -> str:
    """The strategy that computes these operands: the one asked for, or for "auto", the fastest that can.

    Raises:
        InputError: an unknown strategy, or one that cannot compute them.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"packed_attention: strategy: expected one of {STRATEGIES}, got {strategy!r}")
    plain = bias is None and not softcap
    able = {
        "regions": plain and regions.supported(q, k, v, scale),
        "dense": plain and dense.supported(q, k, v, scale, expression),
        "blocks": True,
    }
    if strategy == "auto":
        return next(name for name in able if able[name])
    if strategy == "dense_visible":
        able[strategy] = plain and dense.supported(q, k, v, scale, None)
    if not able[strategy]:
        raise InputError(
            f"packed_attention: strategy {strategy!r} expected {_EXPECTED[strategy]}, got {q.dtype}, {k.dtype}, "
            f"{v.dtype} on {q.device} with D={q.shape[3]}, Dv={v.shape[3]}, scale={scale}, mask {expression}"
            + ("" if plain else f", soft cap {softcap}, bias {bias is not None}")
        )
    return strategy


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    column: Tensor,
    vectors: Sequence[Tensor],
    mask: str,
    bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> Expression | None:
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
    if bias is not None and bias.shape not in ((heads, tokens), (1, tokens)):
        raise InputError(f"packed_attention: bias: expected [{heads} or 1, {tokens}], got {list(bias.shape)}")
    if sinks is not None and sinks.shape != (heads,):
        raise InputError(f"packed_attention: sinks: expected [{heads}], got {list(sinks.shape)}")
    if not 0 <= softcap < torch.inf:
        raise InputError(f"packed_attention: softcap: expected a finite number, 0 (none) or more, got {softcap}")
    expression = from_text(mask)
    if expression is not None:
        validate(expression, len(vectors))
    return expression


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Let the sinks take their share of the softmax.

    With out and lse so changed, the backward of every strategy gives the true gradients of q, k and v: their
    probabilities are ``exp(score - lse)``, and what flows into a score is ``probability * (grad_out . (v - out))``.
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid(lse - sink)
    return (out * share.unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sink)


def _sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's value is 0, so what flows into its score is ``- probability * (grad_out . out)``."""
    total = lse.dtype
    flow = (grad_out.to(total) * out.to(total)).sum(-1)
    return -(torch.exp(sinks.to(total)[None, :, None] - lse) * flow).sum((0, 2)).to(sinks.dtype)


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
    bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    expression = _check(q, k, v, column, vectors, mask, bias, sinks, softcap)
    chosen = choose(q, k, v, expression, scale, strategy, bias, softcap)
    if chosen == "regions":
        out, lse = regions.forward(q, k, v, column, nodes, vectors, expression, scale)
    elif chosen in ("dense", "dense_visible"):
        out, lse = dense.forward(q, k, v, column, nodes, (), None, scale)
    else:
        out, lse = blocks.forward(q, k, v, rank, column, end, nodes, vectors, expression, scale, softcap, bias)
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


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
    bias: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, bias and sinks; empty tensors for a bias or sinks that are None."""
    expression = from_text(mask)
    chosen = choose(q, k, v, expression, scale, strategy, bias, softcap)
    grad_bias: Tensor | None = None
    if chosen == "regions":
        grads = regions.backward(grad_out, q, k, v, out, lse, column, nodes, vectors, expression, scale)
    elif chosen in ("dense", "dense_visible"):
        grads = dense.backward(grad_out, q, k, v, out, lse, column, nodes, (), None, scale)
    else:
        *three, grad_bias = blocks.backward(
            grad_out, q, k, v, out, lse, rank, column, end, nodes, vectors, expression, scale, softcap, bias
        )
        grads = (three[0], three[1], three[2])
    grad_sinks = None if sinks is None else _sinks_gradient(grad_out, out, lse, sinks)
    of_bias, of_sinks = (q.new_empty(0) if grad is None else grad for grad in (grad_bias, grad_sinks))
    return (*grads, of_bias, of_sinks)


torch.library.impl("dualkv::packed_attention", "CompositeExplicitAutograd", _forward)
torch.library.impl("dualkv::packed_attention_backward", "CompositeExplicitAutograd", _backward)


@torch.library.register_fake("dualkv::packed_attention")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    heads, tokens = q.shape[1], q.shape[2]
    lse = q.new_empty((1, heads, tokens), dtype=accumulation_dtype(q.dtype))
    return regions.token_major(q, heads, tokens, v.shape[3], q.dtype), lse


@torch.library.register_fake("dualkv::packed_attention_backward")
def _backward_fake(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    grads = [regions.token_major(x, x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in (q, k, v)]
    bias, sinks, _ = rest[-3:]
    return (*grads, *(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (bias, sinks)))


# ------------------------------------------------------------------------------------------------------------ autograd
def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rank, column, end, nodes, vectors, ctx.mask, ctx.scale, ctx.strategy, bias, sinks, ctx.softcap = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, rank, column, end, nodes, bias, sinks, *vectors)


def _autograd(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, rank, column, end, nodes, bias, sinks, *vectors = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * 5
    if grad_out is not None:
        rest = (rank, column, end, nodes, vectors, ctx.mask, ctx.scale, ctx.strategy, bias, sinks, ctx.softcap)
        grads = list(torch.ops.dualkv.packed_attention_backward(grad_out, q, k, v, out, lse, *rest))
    of_bias, of_sinks = (grad if x is not None else None for grad, x in zip(grads[3:], (bias, sinks), strict=True))
    return (*grads[:3], None, None, None, None, [None] * len(vectors), None, None, None, of_bias, of_sinks, None)


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
