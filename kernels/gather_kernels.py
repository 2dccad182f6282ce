"""The Triton kernels behind :mod:`dualkv_compile.kernels.triton_gather`; importing this module needs triton.

Both walk over tiles of BLOCK_ROWS rows x BLOCK_SIZE numbers of contiguous tensors ``[planes, rows, size]``. Offsets are
64-bit, sums float32 (float64 for float64).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(rows, size, BLOCK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The plane, rows and columns of this program's tile, and which of its rows and columns exist."""
    program = tl.program_id(0)
    across = tl.cdiv(size, BLOCK_SIZE)
    down = tl.cdiv(rows, BLOCK_ROWS)
    column = program % across * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    row = program // across % down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    plane = (program // across // down).to(tl.int64)
    return plane, row.to(tl.int64), column, row < rows, column < size


@triton.jit(do_not_specialize=["rows", "tokens"])
def copy_rows(
    source,
    inverse,
    target,
    rows,
    tokens,
    size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """``target[p, r] = source[p, inverse[r]]``, 0 where ``inverse[r]`` is negative."""
    plane, row, column, exists, inside = _tile(rows, size, BLOCK_ROWS, BLOCK_SIZE)
    token = tl.load(inverse + row, mask=exists, other=-1)
    here = exists & (token >= 0)
    places = ((plane * tokens + token) * size)[:, None] + column[None, :]
    values = tl.load(source + places, mask=here[:, None] & inside[None, :], other=0)
    places = ((plane * rows + row) * size)[:, None] + column[None, :]
    tl.store(target + places, values, mask=exists[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows", "tokens"])
def sum_copies(
    grad,
    order,
    starts,
    total,
    rows,
    tokens,
    size,
    WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """``total[p, t]``: sum of ``grad[p, order[j]]`` for ``starts[t] <= j < starts[t + 1]``, in that order."""
    plane, token, column, exists, inside = _tile(tokens, size, BLOCK_ROWS, BLOCK_SIZE)
    start = tl.load(starts + token, mask=exists, other=0)
    stop = tl.load(starts + token + 1, mask=exists, other=0)
    kind = tl.float64 if WIDE else tl.float32
    result = tl.zeros([BLOCK_ROWS, BLOCK_SIZE], dtype=kind)
    most = tl.max(stop - start, 0)
    for step in range(most):
        here = start + step < stop
        row = tl.load(order + start + step, mask=here, other=0)
        places = ((plane * rows + row) * size)[:, None] + column[None, :]
        result += tl.load(grad + places, mask=here[:, None] & inside[None, :], other=0).to(kind)
    places = ((plane * tokens + token) * size)[:, None] + column[None, :]
    tl.store(total + places, result.to(total.dtype.element_ty), mask=exists[:, None] & inside[None, :])
