"""Merging partial attention results by Triton kernels: one pass over memory, forward and backward.

Importable without triton; :func:`accepts` says whether the kernels can take given tensors. The meaning of every
function is that of its torch counterpart (:func:`dualkv_compile.kernels.merge.merge`,
:mod:`dualkv_compile.kernels.rows`).
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dualkv_compile.kernels.rows import Rows

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Most partial results that one kernel takes; more are merged in rounds, with float32 results in between.
MAX_PARTS = 16
#: Longest vector (D).
MAX_SIZE = 256

#: Whether triton is installed.
AVAILABLE = importlib.util.find_spec("triton") is not None
#: Numbers of one partial result that a program handles: enough wide loads in flight, few enough registers.
_TILE = 4096
_WARPS = 4


def accepts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
    """Whether the kernels can take these tensors: on CUDA, of DTYPES, ``outs`` with at most MAX_SIZE columns."""
    tensors = (*outs, *lses)
    return (
        AVAILABLE
        and all(x.device.type == "cuda" and x.device == outs[0].device and x.dtype in DTYPES for x in tensors)
        and 1 <= outs[0].shape[-1] <= MAX_SIZE
    )


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge 1 to MAX_PARTS partial results, differentiably.

    Args:
        outs: n tensors ``[..., D]`` of one shape and dtype, any strides, 1 <= D <= MAX_SIZE.
        lses: n tensors ``[...]``, natural log, any strides.

    Returns:
        ``out [..., D]`` in the dtype of ``outs`` and, where possible, the layout of the first; ``lse [...]`` in
        float32, contiguous.
    """
    out, lse = _Merge.apply(len(outs), *outs, *lses)
    return out, lse


def merge_rows(
    outs: Sequence[Tensor], lses: Sequence[Tensor], rows: Sequence[Rows], tokens: int
) -> tuple[Tensor, Tensor]:
    """See :func:`dualkv_compile.kernels.rows.merge_rows`."""
    from dualkv_compile.kernels.rows import Rows

    outs, lses, rows = list(outs), list(lses), list(rows)
    heads, size = outs[0].shape[1:]
    dtype = outs[0].dtype
    while True:
        last = len(outs) <= MAX_PARTS
        some, some_lses, some_rows = outs[:MAX_PARTS], lses[:MAX_PARTS], rows[:MAX_PARTS]
        out = some[0].new_empty((tokens, heads, size), dtype=dtype if last else torch.float32)
        lse = some[0].new_empty((heads, tokens), dtype=torch.float32)
        _launch(
            "merge_forward",
            (1, tokens, heads),
            size,
            tuple(some),
            tuple(some_lses),
            tuple((0, x.stride(0), x.stride(1), x.stride(2)) for x in some),
            tuple(_codes((0, x.stride(0), x.stride(1))) for x in some_lses),
            tuple(_codes((x.start, x.stop)) for x in some_rows),
            tuple(x.row for x in some_rows),
            out,
            lse,
            (0, *out.stride()),
            _codes((0, 1, tokens)),
            COUNT=len(some),
        )
        if last:
            return out, lse
        outs, lses = [out, *outs[MAX_PARTS:]], [lse.T, *lses[MAX_PARTS:]]
        rows = [Rows(0, tokens), *rows[MAX_PARTS:]]


def sum_rows(parts: Sequence[Tensor], rows: Sequence[Rows], tokens: int) -> Tensor:
    """See :func:`dualkv_compile.kernels.rows.sum_rows`."""
    from dualkv_compile.kernels.rows import Rows

    parts, rows = list(parts), list(rows)
    heads, size = parts[0].shape[1:]
    dtype = parts[0].dtype
    while True:
        last = len(parts) <= MAX_PARTS
        some, some_rows = parts[:MAX_PARTS], rows[:MAX_PARTS]
        total = some[0].new_empty((tokens, heads, size), dtype=dtype if last else torch.float32)
        _launch(
            "sum_rows",
            (1, tokens, heads),
            size,
            tuple(some),
            tuple((0, x.stride(0), x.stride(1), x.stride(2)) for x in some),
            tuple(_codes((x.start, x.stop)) for x in some_rows),
            tuple(x.row for x in some_rows),
            total,
            (0, *total.stride()),
            COUNT=len(some),
        )
        if last:
            return total
        parts, rows = [total, *parts[MAX_PARTS:]], [Rows(0, tokens), *rows[MAX_PARTS:]]


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        merged = torch.empty_like(tensors[0])
        merged_lse = torch.empty(tensors[count].shape, dtype=torch.float32, device=merged.device)
        for sizes, ((*outs, out), (*lses, lse)) in _grids((*tensors[:count], merged), (*tensors[count:], merged_lse)):
            _launch(
                "merge_forward",
                sizes,
                merged.shape[-1],
                tuple(outs),
                tuple(lses),
                tuple(x.stride() for x in outs),
                tuple(_codes(x.stride()) for x in lses),
                (None,) * count,
                (None,) * count,
                out,
                lse,
                out.stride(),
                _codes(lse.stride()),
                COUNT=count,
            )
        ctx.save_for_backward(*tensors)
        return merged, merged_lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        count = len(tensors) // 2
        results = tuple(map(torch.empty_like, tensors))
        vectors = (*tensors[:count], *results[:count], grad_out)
        numbers = (*tensors[count:], *results[count:], grad_lse)
        for sizes, ((*outs, grad), (*lses, lse)) in _grids(vectors, numbers):
            strides, lse_strides = tuple(x.stride() for x in outs), tuple(_codes(x.stride()) for x in lses)
            _launch(
                "merge_backward",
                sizes,
                grad_out.shape[-1],
                tuple(outs[:count]),
                tuple(lses[:count]),
                strides[:count],
                lse_strides[:count],
                tuple(outs[count:]),
                tuple(lses[count:]),
                strides[count:],
                lse_strides[count:],
                grad,
                lse,
                grad.stride(),
                _codes(lse.stride()),
                COUNT=count,
                COLUMNS=_power(count),
            )
        return None, *results


def _launch(kernel: str, sizes: tuple[int, int, int], size: int, *args: Any, **constants: Any) -> None:
    """Run a kernel of :mod:`~dualkv_compile.kernels.merge_kernels`.

    ``sizes``: planes, tokens, heads; ``size``: D; ``args``: the kernel's arguments, the first a tuple of tensors.
    """
    from dualkv_compile.kernels import merge_kernels

    planes, tokens, heads = sizes
    block_d = max(16, _power(size))
    lanes = _TILE // block_d
    block_h = min(lanes, _power(heads), max(4, lanes // _power(tokens)))
    block_t = lanes // block_h
    programs = planes * -(-tokens // block_t) * -(-heads // block_h)
    if not programs:
        return
    device = args[0][0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        getattr(merge_kernels, kernel)[(programs,)](
            *args,
            tokens,
            heads,
            SIZE=size,
            BLOCK_T=block_t,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=_WARPS,
            **constants,
        )


def _grids(
    vectors: Sequence[Tensor], numbers: Sequence[Tensor]
) -> Iterator[tuple[tuple[int, int, int], tuple[list[Tensor], list[Tensor]]]]:
    """Views ``[planes, tokens, heads, D]`` of vectors ``[..., D]``, ``[planes, tokens, heads]`` of numbers ``[...]``.

    Dimensions that are one in every tensor's memory become one; their order is that of the first vector's memory. Where
    more than three are left, the outermost is walked through.
    """
    tensors = (*vectors, *numbers)
    shape = numbers[0].shape
    order = sorted((i for i in range(len(shape)) if shape[i] != 1), key=vectors[0].stride, reverse=True)
    dims: list[tuple[int, list[int]]] = []
    for i in order:
        strides = [x.stride(i) for x in tensors]
        if dims and all(outer == shape[i] * inner for outer, inner in zip(dims[-1][1], strides, strict=True)):
            dims[-1] = (dims[-1][0] * shape[i], strides)
        else:
            dims.append((shape[i], strides))
    if len(dims) > 3:
        for at in range(shape[order[0]]):
            yield from _grids([x.select(order[0], at) for x in vectors], [x.select(order[0], at) for x in numbers])
        return
    dims = [(1, [0] * len(tensors))] * (3 - len(dims)) + dims
    sizes = (dims[0][0], dims[1][0], dims[2][0])

    def view(x: Tensor, at: int) -> Tensor:
        rest = slice(len(shape), None)
        return x.as_strided((*sizes, *x.shape[rest]), (*(strides[at] for _, strides in dims), *x.stride()[rest]))

    views = [view(x, at) for at, x in enumerate(tensors)]
    yield sizes, (views[: len(vectors)], views[len(vectors) :])


def _codes(numbers: Sequence[int]) -> tuple[int, ...]:
    """Numbers for a kernel that is not to be compiled for their divisibility; see the kernels' module."""
    return tuple(2 * number + 3 for number in numbers)


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
