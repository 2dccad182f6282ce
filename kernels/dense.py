"""The strategy "dense": the fused CUDA kernels on dense regions of the tree, merged by LSE.

The tree is cut into few calls (:mod:`~dualkv_compile.kernels.tree_cut`), each through the fastest fused kernel that
torch ships (:mod:`~dualkv_compile.kernels.fused`); one pass over memory merges the results
(:mod:`~dualkv_compile.kernels.rows`). The backward needs no derivative through the merge: every call's own backward
runs with the merged ``out`` and the merged ``lse``, which makes its probabilities the true ones, and the gradients add
up, in float32 and again in one pass.

Keys that no query sees are no nodes: the table then has gaps, and queries that see nothing at all get out 0, lse -inf
and gradient 0.

Operands are read where they lie: a call's queries and keys are strided views of the packed tokens, or, if ragged
segments are not neighbours, one gathered copy. Nothing synchronises. Mask expressions are
not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import fused
from dualkv_compile.kernels.fused import Kernel, Offsets
from dualkv_compile.kernels.merge import accumulation_dtype
from dualkv_compile.kernels.predicate import Expression
from dualkv_compile.kernels.rows import Rows, merge_rows, sum_rows
from dualkv_compile.kernels.schedule import Range
from dualkv_compile.kernels.tree_cut import Ragged, Side, Stack, Worth, cut

DTYPES = (torch.float16, torch.bfloat16)


def supported(q: Tensor, k: Tensor, v: Tensor, scale: float, expression: Expression | None) -> bool:
    """Whether this strategy can take these operands and this mask."""
    return (
        expression is None
        and q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.device == k.device == v.device
        and q.shape[3] == v.shape[3]
        and scale > 0
        and fused.flash_usable(q.device, q.shape[3])
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    column: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
    scale: float,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention on packed tokens; shapes and results as for ``dualkv::packed_attention``.

    Args:
        q: ``[1, H, T, D]``.
        k: ``[1, Hk, T, D]``.
        v: ``[1, Hk, T, D]``.
        column: not needed: within a node, tokens are in the order of their columns.
        nodes: int64 ``[M, 3]`` on the CPU; tokens outside of all nodes are keys of nobody.
        vectors: not needed without a mask expression.
        expression: None.
        scale: factor on the scores, > 0.
        kernel: what computes the calls; None for the fused CUDA kernels.

    Raises:
        InputError: a mask expression.
    """
    _check(expression)
    kernel = kernel or fused.FusedCuda(q.device, q.shape[3])
    tokens = q.shape[2]
    q, k, v = map(_by_token, (q, k, v))
    calls = _calls(nodes, q.device, kernel.worth)
    outs, lses = [], []
    for call in calls:
        queries, keys = call.queries, call.keys
        if call.offsets is None:
            out, lse = kernel.stacked(queries.stack(q), keys.stack(k), keys.stack(v), call.causal, scale)
            out, lse = _unstacked(out), _unstacked(lse)
        else:
            operands = queries.rows.take(q), keys.rows.take(k), keys.rows.take(v)
            out, lse = kernel.ragged(*operands, call.offsets, call.causal, scale)
        outs.append(out)
        lses.append(lse)
    if not calls:
        nothing = q.new_full((1, q.shape[1], tokens), -torch.inf, dtype=accumulation_dtype(q.dtype))
        return _operator_layout(q.new_zeros(q.shape)), nothing
    out, lse = merge_rows(outs, lses, [call.queries.rows for call in calls], tokens)
    return _operator_layout(out), lse.unsqueeze(0)


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
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, each in the dtype of its operand and ordered by token in memory; see :func:`forward`."""
    _check(expression)
    kernel = kernel or fused.FusedCuda(q.device, q.shape[3])
    tokens = q.shape[2]
    grad_out, q, k, v, out = map(_by_token, (grad_out, q, k, v, out))
    lse = lse[0].T
    calls = _calls(nodes, q.device, kernel.worth)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for call in calls:
        queries, keys = call.queries, call.keys
        if call.offsets is None:
            grads = kernel.stacked_backward(
                queries.stack(grad_out),
                queries.stack(q),
                keys.stack(k),
                keys.stack(v),
                queries.stack(out),
                queries.stack(lse),
                call.causal,
                scale,
            )
            grads = (_unstacked(grads[0]), _unstacked(grads[1]), _unstacked(grads[2]))
        else:
            grads = kernel.ragged_backward(
                queries.rows.take(grad_out),
                queries.rows.take(q),
                keys.rows.take(k),
                keys.rows.take(v),
                queries.rows.take(out),
                queries.rows.take(lse),
                call.offsets,
                call.causal,
                scale,
            )
        parts.append(grads)
    if not calls:
        grad_q, grad_k, grad_v = (x.new_zeros(x.shape) for x in (q, k, v))
    else:
        query_rows, key_rows = [call.queries.rows for call in calls], [call.keys.rows for call in calls]
        grad_q = sum_rows([part[0] for part in parts], query_rows, tokens)
        grad_k = sum_rows([part[1] for part in parts], key_rows, tokens)
        grad_v = sum_rows([part[2] for part in parts], key_rows, tokens)
    return _operator_layout(grad_q), _operator_layout(grad_k), _operator_layout(grad_v)


def _check(expression: Expression | None) -> None:
    if expression is not None:
        raise InputError(f"strategy 'dense' expected no mask expression, got {expression}")


# -------------------------------------------------------------------------------------------------- calls on the device
@dataclass(frozen=True)
class _Operand:
    """The queries or the keys of a call: which tokens, and for a stack, where its ranges lie."""

    rows: Rows
    side: Side | None

    def stack(self, x: Tensor) -> Tensor:
        """View of ``[T, H, ...]`` as ``[count, H, length, ...]``."""
        side = self.side
        assert side is not None
        token, head, *rest = x.stride()
        size = (side.count, x.shape[1], side.length, *x.shape[2:])
        return x.as_strided(size, (side.step * token, head, token, *rest), x.storage_offset() + side.start * token)


@dataclass(frozen=True)
class _Call:
    """A call of a kernel; ``offsets`` is None for a stack."""

    queries: _Operand
    keys: _Operand
    causal: bool
    offsets: Offsets | None


def _calls(nodes: Tensor, device: torch.device, worth: Worth | None) -> tuple[_Call, ...]:
    """The calls for a tree; all layers, and both directions, of a batch find the same ones.

    Remembered by the tree's numbers, so a stale plan cannot be found; and by stream, because the index tensors are
    filled by work on the current one.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _calls_of(nodes.numpy().tobytes(), device, worth, stream)


@lru_cache(maxsize=8)
def _calls_of(table: bytes, device: torch.device, worth: Worth | None, stream: int) -> tuple[_Call, ...]:
    nodes = np.frombuffer(table, dtype=np.int64).reshape(-1, 3).tolist()
    with torch.inference_mode(False):
        return tuple(_on_device(call, device) for call in cut(nodes, worth))


def _on_device(call: Stack | Ragged, device: torch.device) -> _Call:
    if isinstance(call, Stack):
        sides = (call.queries, call.keys)
        queries, keys = (_Operand(Rows.of(side.ranges, device), side) for side in sides)
        return _Call(queries, keys, call.causal, None)
    queries, keys = (_Operand(Rows.of(ranges, device), None) for ranges in (call.queries, call.keys))
    offsets = Offsets(
        _offsets(call.queries, device), _offsets(call.keys, device), _longest(call.queries), _longest(call.keys)
    )
    return _Call(queries, keys, call.causal, offsets)


def _offsets(ranges: Sequence[Range], device: torch.device) -> Tensor:
    lengths = [0, *(stop - start for start, stop in ranges)]
    return torch.from_numpy(np.cumsum(lengths).astype(np.int32)).to(device, non_blocking=True)


def _longest(ranges: Sequence[Range]) -> int:
    return max(stop - start for start, stop in ranges)


# --------------------------------------------------------------------------------------------------------------- layout
def _by_token(x: Tensor) -> Tensor:
    """``[1, H, T, D]`` as ``[T, H, D]`` that the kernels can read: a view where rows start at multiples of 16 bytes."""
    x = x[0].transpose(0, 1)
    width = 16 // x.element_size()
    aligned = x.data_ptr() % 16 == 0 and all(
        stride % width == 0 for stride, size in zip(x.stride()[:2], x.shape, strict=False) if size > 1
    )
    return x if x.stride(2) == 1 and aligned else x.contiguous()


def _operator_layout(x: Tensor) -> Tensor:
    """Contiguous ``[T, H, D]`` as ``[1, H, T, D]``."""
    return x.unsqueeze(0).transpose(1, 2)


def _unstacked(x: Tensor) -> Tensor:
    """``[count, H, length, ...]`` as rows ``[count * length, H, ...]``: a view where memory is ordered by token."""
    return x.transpose(1, 2).flatten(0, 1)
