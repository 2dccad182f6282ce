"""The strategy "regions": the fused CPU kernel on the rectangles of the tree, merged by LSE.

The kernel (``aten._scaled_dot_product_flash_attention_for_cpu``) takes grouped heads in both directions and almost any
strides, but several things it gets wrong without a word or worse, found by experiment on torch 2.13:

- an empty query or key range kills the process (SIGFPE): :mod:`~dualkv_compile.kernels.schedule` makes no empty calls;
- a last dimension with a stride other than 1 is read wrongly, in queries, keys, values and gradients alike;
- an additive mask must have the dtype of the queries (float32 with float64 queries gives garbage);
- ``is_causal`` and a mask may be given together; masks may broadcast with stride 0;
- a query whose keys are all masked gets ``out = 0, lse = 0``: the -inf must come from the mask;
- the scale must be positive: it is applied after the -inf of masked keys and after the maximum of the row;
- in the backward ``lse = +inf`` makes all probabilities of a query exactly 0, ``-inf`` makes them NaN.

The backward needs no derivative through the merge: every call's own backward runs with the merged ``out`` and the
merged ``lse``, which makes its probabilities the true ones, and the gradients add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualkv_compile.kernels.merge import accumulation_dtype, merge_
from dualkv_compile.kernels.predicate import Expression
from dualkv_compile.kernels.schedule import Range, schedule

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: What the fused kernel computes in.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def supported(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether this strategy can take these operands."""
    one_dtype = q.dtype in DTYPES and q.dtype == k.dtype == v.dtype
    return q.device.type == "cpu" and one_dtype and q.shape[3] == v.shape[3] and scale > 0


def token_major(like: Tensor, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """An empty ``[1, heads, tokens, dim]``, ordered by token in memory as fused kernels and linear layers have it."""
    return like.new_empty((1, tokens, heads, dim), dtype=dtype).transpose(1, 2)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    column: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention on packed tokens; shapes and results as for ``dualkv::packed_attention``."""
    heads, tokens, dim = q.shape[1:]
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    total = accumulation_dtype(q.dtype)
    plan = schedule(nodes, vectors, column, expression, q.dtype)
    out = token_major(q, heads, tokens, dim, total)
    lse = q.new_empty((1, tokens, heads), dtype=total).transpose(1, 2)
    if not plan.complete:
        out.zero_()
        lse.fill_(-torch.inf)
    for call in plan.calls:
        part, part_lse = _forward(
            _rows(q, call.queries, call.stack),
            _rows(k, call.keys, call.stack),
            _rows(v, call.keys, call.stack),
            0.0,
            call.causal,
            attn_mask=call.bias,
            scale=scale,
        )
        into, into_lse = _rows(out, call.queries, call.stack), _rows(lse, call.queries, call.stack)
        if call.empty is not None:
            part_lse = part_lse.masked_fill(call.empty, -torch.inf)
        if call.first:
            into.copy_(part)
            into_lse.copy_(part_lse)
        else:
            merge_(into, into_lse, part, part_lse)
    if plan.queries is not None:
        out.masked_fill_(~plan.queries[:, None], 0.0)
        lse.masked_fill_(~plan.queries, -torch.inf)
    return out.to(q.dtype), lse.contiguous()


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    column: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each in the dtype of its operand and ordered by token in memory."""
    grad_out, q, k, v, out = map(_unit_stride, (grad_out, q, k, v, out))
    total = accumulation_dtype(q.dtype)
    plan = schedule(nodes, vectors, column, expression, q.dtype)
    grads = [token_major(x, x.shape[1], x.shape[2], x.shape[3], total) for x in (q, k, v)]
    if not plan.complete:
        for grad in grads:
            grad.zero_()
    if expression is not None:
        unseeing = lse == -torch.inf
        if bool(unseeing.any()):
            lse = lse.masked_fill(unseeing, torch.inf)
            grad_out = grad_out.masked_fill(unseeing.unsqueeze(-1), 0.0)
    for call in plan.calls:
        parts = _backward(
            _rows(grad_out, call.queries, call.stack),
            _rows(q, call.queries, call.stack),
            _rows(k, call.keys, call.stack),
            _rows(v, call.keys, call.stack),
            _rows(out, call.queries, call.stack),
            _rows(lse, call.queries, call.stack),
            0.0,
            call.causal,
            attn_mask=call.bias,
            scale=scale,
        )
        for grad, part, span in zip(grads, parts, (call.queries, call.keys, call.keys), strict=True):
            into = _rows(grad, span, call.stack)
            if call.first:
                into.copy_(part)
            else:
                into.add_(part)
    grad_q, grad_k, grad_v = (grad.to(q.dtype) for grad in grads)
    return grad_q, grad_k, grad_v


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor, span: Range, stack: int) -> Tensor:
    """View of tokens [start, stop) of ``[1, heads, T, ...]``, as ``stack`` batch entries of equal length."""
    part = x.narrow(2, span[0], span[1] - span[0])
    return part if stack == 1 else part[0].unflatten(1, (stack, -1)).transpose(0, 1)
