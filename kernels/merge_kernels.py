"""The Triton kernels behind :mod:`dualkv_compile.kernels.triton_merge`; importing this module needs triton.

All kernels walk over a grid of rows ``[planes, tokens, heads]``, each row a vector of SIZE numbers, in tiles of BLOCK_T
tokens x BLOCK_H heads: neighbouring heads are neighbours in the results, neighbouring tokens in LSEs ordered by head,
so both are read in whole sectors. Values are summed in float32, offsets are 64-bit.

Several tensors of one kind come as a tuple. Triton compiles a kernel anew for every pattern of divisibility by 16 among
the integers in a tuple. For strides of rows this is wanted (it makes wide loads possible); numbers that depend on the
lengths of sequences are passed as ``2 x + 3`` instead, which is never divisible: see ``_number``.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _number(code):
    return (code - 3) // 2


@triton.jit
def _tile(tokens, heads, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr):
    """The plane, token and head of each row of this program's tile, and whether the row exists."""
    program = tl.program_id(0)
    across = tl.cdiv(heads, BLOCK_H)
    down = tl.cdiv(tokens, BLOCK_T)
    lane = tl.arange(0, BLOCK_T * BLOCK_H)
    # Widened only now: divisions of 64-bit numbers are slow.
    head = (program % across * BLOCK_H + lane % BLOCK_H).to(tl.int64)
    token = (program // across % down * BLOCK_T + lane // BLOCK_H).to(tl.int64)
    plane = (program // across // down).to(tl.int64)
    return plane, token, head, (token < tokens) & (head < heads)


@triton.jit
def _find(token, exists, span, index):
    """The row of each token in a partial result, and whether there is one; without a span they are the same."""
    row = token
    here = exists
    if span is not None:
        here = exists & (token >= _number(span[0])) & (token < _number(span[1]))
        row = token - _number(span[0])
        if index is not None:
            row = tl.load(index + row, mask=here, other=-1).to(tl.int64)
            here = here & (row >= 0)
    return row, here


@triton.jit
def _offsets(plane, row, head, stride, BLOCK_D: tl.constexpr):
    start = plane * stride[0] + row * stride[1] + head * stride[2]
    return start[:, None] + tl.arange(0, BLOCK_D).to(tl.int64)[None, :] * stride[3]


@triton.jit
def _lse_offsets(plane, row, head, stride):
    return plane * _number(stride[0]) + row * _number(stride[1]) + head * _number(stride[2])


@triton.jit
def _weight(lse, top):
    # Equality keeps exp(inf - inf) out of the sum, and the first test exp(-inf - -inf).
    return tl.where(lse == -float("inf"), 0.0, tl.where(lse == top, 1.0, tl.exp(lse - top)))


@triton.jit(do_not_specialize=["tokens", "heads"])
def merge_forward(
    outs,
    lses,
    out_strides,
    lse_strides,
    spans,
    indices,
    merged,
    merged_lse,
    merged_stride,
    merged_lse_stride,
    tokens,
    heads,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge COUNT partial results; ``spans`` and ``indices`` say whose rows they are (None: everyone's)."""
    plane, token, head, exists = _tile(tokens, heads, BLOCK_T, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :] < SIZE
    top = tl.full([BLOCK_T * BLOCK_H], -float("inf"), tl.float32)
    for part in tl.static_range(COUNT):
        row, here = _find(token, exists, spans[part], indices[part])
        place = lses[part] + _lse_offsets(plane, row, head, lse_strides[part])
        top = tl.maximum(top, tl.load(place, mask=here, other=-float("inf")).to(tl.float32))
    total = tl.zeros([BLOCK_T * BLOCK_H], tl.float32)
    result = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_D], tl.float32)
    for part in tl.static_range(COUNT):
        row, here = _find(token, exists, spans[part], indices[part])
        # Loaded before the weight is known, so that the loads of all parts are under way at the same time.
        place = outs[part] + _offsets(plane, row, head, out_strides[part], BLOCK_D)
        value = tl.load(place, mask=here[:, None] & column, other=0.0).to(tl.float32)
        lse_place = lses[part] + _lse_offsets(plane, row, head, lse_strides[part])
        weight = _weight(tl.load(lse_place, mask=here, other=-float("inf")).to(tl.float32), top)
        total += weight
        result += tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * value)
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    place = merged + _offsets(plane, token, head, merged_stride, BLOCK_D)
    tl.store(place, result.to(merged.dtype.element_ty), mask=exists[:, None] & column)
    tl.store(merged_lse + _lse_offsets(plane, token, head, merged_lse_stride), top + tl.log(total), mask=exists)


@triton.jit(do_not_specialize=["tokens", "heads"])
def merge_backward(
    outs,
    lses,
    out_strides,
    lse_strides,
    grad_outs,
    grad_lses,
    grad_out_strides,
    grad_lse_strides,
    grad,
    grad_lse,
    grad_stride,
    grad_lse_stride,
    tokens,
    heads,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Gradients of COUNT partial results and of their LSEs, from those of the merged one."""
    plane, token, head, exists = _tile(tokens, heads, BLOCK_T, BLOCK_H)
    inside = exists[:, None] & (tl.arange(0, BLOCK_D)[None, :] < SIZE)
    # One column per part: what is known of a row about each part.
    number = tl.arange(0, COLUMNS)[None, :]
    weights = tl.zeros([BLOCK_T * BLOCK_H, COLUMNS], tl.float32)
    products = tl.zeros([BLOCK_T * BLOCK_H, COLUMNS], tl.float32)
    top = tl.full([BLOCK_T * BLOCK_H], -float("inf"), tl.float32)
    for part in tl.static_range(COUNT):
        place = lses[part] + _lse_offsets(plane, token, head, lse_strides[part])
        top = tl.maximum(top, tl.load(place, mask=exists, other=-float("inf")).to(tl.float32))
    for part in tl.static_range(COUNT):
        place = lses[part] + _lse_offsets(plane, token, head, lse_strides[part])
        weight = _weight(tl.load(place, mask=exists, other=-float("inf")).to(tl.float32), top)
        weights = tl.where(number == part, weight[:, None], weights)
    total = tl.sum(weights, axis=1)
    shares = weights / tl.where(total == 0.0, 1.0, total)[:, None]

    place = grad + _offsets(plane, token, head, grad_stride, BLOCK_D)
    upstream = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(COUNT):
        place = outs[part] + _offsets(plane, token, head, out_strides[part], BLOCK_D)
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        share = tl.sum(tl.where(number == part, shares, 0.0), axis=1)[:, None]
        product = tl.sum(tl.where(share == 0.0, 0.0, upstream * value), axis=1)
        products = tl.where(number == part, product[:, None], products)
        place = grad_outs[part] + _offsets(plane, token, head, grad_out_strides[part], BLOCK_D)
        gradient = tl.where(share == 0.0, 0.0, share * upstream)
        tl.store(place, gradient.to(grad_outs[part].dtype.element_ty), mask=inside)
    # d out / d lse_p = share_p (out_p - out), so its product with the gradient needs only the products from above.
    common = tl.sum(tl.where(shares == 0.0, 0.0, shares * products), axis=1)
    place = grad_lse + _lse_offsets(plane, token, head, grad_lse_stride)
    common -= tl.load(place, mask=exists, other=0.0).to(tl.float32)
    gradients = tl.where(shares == 0.0, 0.0, shares * (products - common[:, None]))
    for part in tl.static_range(COUNT):
        gradient = tl.sum(tl.where(number == part, gradients, 0.0), axis=1)
        place = grad_lses[part] + _lse_offsets(plane, token, head, grad_lse_strides[part])
        tl.store(place, gradient.to(grad_lses[part].dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["tokens", "heads"])
def sum_rows(
    parts,
    strides,
    spans,
    indices,
    total,
    total_stride,
    tokens,
    heads,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add COUNT partial results; ``spans`` and ``indices`` say whose rows they are."""
    plane, token, head, exists = _tile(tokens, heads, BLOCK_T, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :] < SIZE
    result = tl.zeros([BLOCK_T * BLOCK_H, BLOCK_D], tl.float32)
    for part in tl.static_range(COUNT):
        row, here = _find(token, exists, spans[part], indices[part])
        place = parts[part] + _offsets(plane, row, head, strides[part], BLOCK_D)
        result += tl.load(place, mask=here[:, None] & column, other=0.0).to(tl.float32)
    place = total + _offsets(plane, token, head, total_stride, BLOCK_D)
    tl.store(place, result.to(total.dtype.element_ty), mask=exists[:, None] & column)
