"""Operators that rearrange, split or insert dimensions.

Rows and columns must stay apart or be flattened together; a dimension that mixes tokens with features ends the proof.
Sizes in the arguments are re-targeted: a row dimension becomes 1, the column or token dimension -1 (that is, T).

Before:  ``view(linear[B, S, 32], [B, S, -1, 8])``   After:  ``reshape(linear[1, T, 32], [1, -1, 4, 8])``
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.rules.pointwise import broadcast
from dualkv_compile.passes.values import Dim, Size, Slice, Tags, Value, hint, ratio, same, simplified

aten = torch.ops.aten
_END = 2**62


def regroup(old: Sequence[Size], new: Sequence[Size], tags: Tags, rows: Size, columns: Size) -> Tags:
    """Tags of a view from sizes ``old`` (with ``tags``) to sizes ``new``.

    Matches the finest groups of dimensions with equal products, left to right, which is how a row-major view maps them.
    Tokens may be flattened with features before or after them (STACKED, ASSIGNMENT) and be taken apart again; any other
    mixture raises Unproven.
    """
    result: list[Dim] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left: list[int] = []
        right: list[int] = []
        product_left: Size = 1
        product_right: Size = 1
        if i < len(old):
            left.append(i)
            product_left = old[i]
            i += 1
        if j < len(new):
            right.append(j)
            product_right = new[j]
            j += 1
        while not same(product_left, product_right):
            if (_smaller(product_left, product_right) or j >= len(new)) and i < len(old):
                product_left = product_left * old[i]
                left.append(i)
                i += 1
            elif j < len(new):
                product_right = product_right * new[j]
                right.append(j)
                j += 1
            else:
                raise Unproven("the dimensions of the view cannot be matched")
        result.extend(_group([old[d] for d in left], [new[d] for d in right], [tags[d] for d in left], rows, columns))
    return tuple(result)


def _smaller(a: Size, b: Size) -> bool:
    """Which side of a view to extend. Symbolic products are compared by their present values: the choice only steers
    the search, equality is what is proven.
    """
    return hint(a) < hint(b)


def _group(old: list[Size], new: list[Size], tags: list[Dim], rows: Size, columns: Size) -> list[Dim]:
    kinds = [(tag, size) for tag, size in zip(tags, old, strict=True) if tag is not Dim.FEATURE or not same(size, 1)]
    if all(tag is Dim.FEATURE for tag, _ in kinds):
        return [Dim.FEATURE] * len(new)
    solid = [position for position, size in enumerate(new) if not same(size, 1)]
    if len(kinds) == len(solid) == 1 and same(new[solid[0]], kinds[0][1]):
        result = [Dim.FEATURE] * len(new)
        result[solid[0]] = kinds[0][0]
        return result
    before, tokens, after = _around(kinds, rows, columns)
    return _placed(new, before, tokens, after)


def _around(kinds: list[tuple[Dim, Size]], rows: Size, columns: Size) -> tuple[Size, tuple[Size, Size], Size]:
    """The sizes of a group as (features, (rows, columns), features): entry (e, r, c, f) in row-major order."""
    names = [tag for tag, _ in kinds]
    start = next(place for place, tag in enumerate(names) if tag is not Dim.FEATURE)
    stop = len(names) - next(place for place, tag in enumerate(reversed(names)) if tag is not Dim.FEATURE)
    before, after = _product(size for _, size in kinds[:start]), _product(size for _, size in kinds[stop:])
    middle = names[start:stop]
    if middle == [Dim.ROW, Dim.COLUMN]:
        return before, (kinds[start][1], kinds[start + 1][1]), after
    if middle in ([Dim.TOKEN], [Dim.ASSIGNMENT], [Dim.STACKED]):
        times = ratio(kinds[start][1], rows * columns)
        if times is not None:
            before, after = (before * times, after) if middle == [Dim.STACKED] else (before, after * times)
            return before, (rows, columns), after
    if Dim.SORTED in middle:
        raise Unproven("the view cuts a sorted dimension")
    raise Unproven("the view cuts rows or columns apart")


def _placed(new: list[Size], before: Size, tokens: tuple[Size, Size], after: Size) -> list[Dim]:
    """Where the tokens are among the sizes ``new`` of a group, by products of the sizes to their left."""
    result = [Dim.FEATURE] * len(new)
    count = tokens[0] * tokens[1]
    left: Size = 1
    for place, size in enumerate(new):
        if same(size, 1):
            continue
        if not same(left, before):
            rest = ratio(before, left)
            if rest is not None and same(size, count * rest):
                result[place] = Dim.STACKED
                return result
            left = left * size
        elif same(size, count):
            result[place] = Dim.TOKEN
            return result
        elif same(size, tokens[0]):
            following = next((other for other in range(place + 1, len(new)) if not same(new[other], 1)), None)
            if following is None or not same(new[following], tokens[1]):
                break
            result[place], result[following] = Dim.ROW, Dim.COLUMN
            return result
        else:
            times = ratio(size, count)
            if times is None or ratio(after, times) is None:
                break
            result[place] = Dim.ASSIGNMENT
            return result
    raise Unproven("the view cuts rows or columns apart, or mixes them with features")


def _product(sizes: Iterable[Size]) -> Size:
    product: Size = 1
    for size in sizes:
        product = product * size
    return product


def packed_sizes(shape: Sequence[Size], tags: Tags, given: Sequence[Any] | None = None) -> list[Any]:
    """The size argument of a view of packed tokens; a symbolic feature size is taken from the argument ``given``."""
    sizes: list[Any] = []
    for dim, (kind, size) in enumerate(zip(tags, shape, strict=True)):
        if kind is Dim.ROW:
            sizes.append(1)
        elif kind is not Dim.FEATURE:
            sizes.append(-1)
        elif isinstance(size, int):
            sizes.append(size)
        elif given is not None and len(given) == len(shape) and isinstance(given[dim], fx.Node):
            sizes.append(given[dim])
        else:
            raise Unproven("a feature dimension has a symbolic size")
    return sizes


def reshaped(cx: Scope, node: fx.Node, x: Value, given: Sequence[Any] | None = None) -> Value:
    """Any operator that is a row-major view: its output sizes say all."""
    assert x.tags is not None and x.frame is not None
    shape = [simplified(size) for size in node.meta["val"].shape]
    tags = regroup([simplified(size) for size in x.shape], shape, x.tags, x.frame.rows, x.frame.columns)
    new = cx.emit(aten.reshape.default, cx.packed(x), packed_sizes(shape, tags, given))
    return cx.result(node, tags, [x], new)


@register(aten.view.default, aten.reshape.default, aten._unsafe_view.default, family="views")
def view(cx: Scope, node: fx.Node, x: Value, size: Sequence[Any]) -> Value:
    """A view with given sizes."""
    return reshaped(cx, node, x, size)


@register(aten.flatten.using_ints, aten.unflatten.int, aten.view_as.default, aten.reshape_as.default, family="views")
def flatten(cx: Scope, node: fx.Node, x: Value, *_: Any) -> Value:
    """Views whose sizes are read off the result."""
    if not x.is_packed:
        raise Unproven("it takes the shape of another tensor")
    return reshaped(cx, node, x)


def _permuted(cx: Scope, node: fx.Node, x: Value, order: Sequence[int]) -> Value:
    assert x.tags is not None
    tags = tuple(x.tags[dim] for dim in order)
    return cx.result(node, tags, [x], cx.emit(aten.permute.default, cx.packed(x), list(order)))


@register(aten.transpose.int, aten.swapaxes.default, aten.swapdims.default, family="views")
def transpose(cx: Scope, node: fx.Node, x: Value, dim0: int, dim1: int) -> Value:
    """Two dimensions exchanged."""
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(cx, node, x, order)


@register(aten.t.default, aten.mT.default, aten.adjoint.default, family="views")
def matrix_transpose(cx: Scope, node: fx.Node, x: Value) -> Value:
    """The last two dimensions exchanged."""
    order = list(range(x.ndim))
    order[-2:] = reversed(order[-2:])
    return _permuted(cx, node, x, order)


@register(aten.permute.default, family="views")
def permute(cx: Scope, node: fx.Node, x: Value, dims: Sequence[int]) -> Value:
    """Dimensions in a new order; rows must stay before columns."""
    return _permuted(cx, node, x, [dim % x.ndim for dim in dims])


@register(aten.movedim.int, family="views")
def movedim(cx: Scope, node: fx.Node, x: Value, source: int, destination: int) -> Value:
    """One dimension moved."""
    order = list(range(x.ndim))
    order.insert(destination % x.ndim, order.pop(source % x.ndim))
    return _permuted(cx, node, x, order)


@register(aten.unsqueeze.default, family="views")
def unsqueeze(cx: Scope, node: fx.Node, x: Value, dim: int) -> Value:
    """A new feature dimension of size 1."""
    assert x.tags is not None
    place = dim % (x.ndim + 1)
    tags = (*x.tags[:place], Dim.FEATURE, *x.tags[place:])
    return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), place))


@register(aten.squeeze.dim, aten.squeeze.dims, family="views")
def squeeze(cx: Scope, node: fx.Node, x: Value, dim: int | Sequence[int]) -> Value:
    """Feature dimensions of size 1 dropped."""
    assert x.tags is not None
    dims = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    for d in dims:
        if x.tags[d] is not Dim.FEATURE:
            raise Unproven("squeezes rows or columns")
        if not isinstance(x.shape[d], int):
            raise Unproven("squeezes a dimension of symbolic size")
    gone = sorted(d for d in dims if x.shape[d] == 1)
    tags = tuple(tag for d, tag in enumerate(x.tags) if d not in gone)
    return cx.result(node, tags, [x], cx.emit(aten.squeeze.dims, cx.packed(x), gone))


@register(aten.expand.default, aten.expand_as.default, family="views")
def expand(cx: Scope, node: fx.Node, x: Value, size: Any, implicit: bool = False) -> Value:
    """Broadcast feature dimensions (the repetition of key and value heads); rows and columns keep their size.

    ``state.expand_as(tokens)`` gives every token the same as-written state (or that of its column).
    """
    if x.tags is None:
        if node.target is not aten.expand_as.default or size.tags is None:
            raise Unproven("it takes the shape of another tensor")
        assert size.frame is not None
        new = cx.emit(node.target, cx.operand(x, size.tags, size.frame), cx.packed(size))
        return cx.result(node, size.tags, [size], new)
    shape = node.meta["val"].shape
    extra = len(shape) - x.ndim
    tags = (Dim.FEATURE,) * extra + x.tags
    sizes: list[Any] = []
    for dim, (kind, new) in enumerate(zip(tags, shape, strict=True)):
        if kind is not Dim.FEATURE or (dim >= extra and same(x.shape[dim - extra], new)):
            sizes.append(-1)
        elif isinstance(new, int):
            sizes.append(new)
        else:
            raise Unproven("a feature dimension has a symbolic size")
    return cx.result(node, tags, [x], cx.emit(aten.expand.default, cx.packed(x), sizes))


@register(aten.repeat.default, family="views")
def repeat(cx: Scope, node: fx.Node, x: Value, repeats: Sequence[Any]) -> Value:
    """Features tiled, or all tokens stacked once per expert."""
    assert x.tags is not None
    tags = (Dim.FEATURE,) * (len(repeats) - x.ndim) + x.tags
    stacked = [place for place, times in enumerate(repeats) if tags[place] is not Dim.FEATURE and times != 1]
    if stacked:
        if tags[stacked[0]] is not Dim.TOKEN or not isinstance(repeats[stacked[0]], int):
            raise Unproven("repeats rows or columns")
        tags = (*tags[: stacked[0]], Dim.STACKED, *tags[stacked[0] + 1 :])
    return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), list(repeats)))


@register(aten.repeat_interleave.self_int, family="views")
def repeat_interleave(cx: Scope, node: fx.Node, x: Value, repeats: Any, dim: int | None = None, **_: Any) -> Value:
    """Each feature (a key head), or each token (for its experts), repeated in place."""
    assert x.tags is not None
    if dim is None or x.tags[dim] not in (Dim.FEATURE, Dim.TOKEN) or not isinstance(repeats, int):
        raise Unproven("repeats rows or columns")
    place = dim % x.ndim
    kind = Dim.ASSIGNMENT if x.tags[place] is Dim.TOKEN and repeats != 1 else x.tags[place]
    tags = (*x.tags[:place], kind, *x.tags[place + 1 :])
    return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), repeats, place))


@register(aten.slice.Tensor, family="views")
def slice_(
    cx: Scope, node: fx.Node, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    """A slice of features runs as it is; a slice of columns keeps only the tokens of those columns."""
    assert x.tags is not None
    place = dim % x.ndim
    if x.tags[place] is Dim.FEATURE:
        return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), place, start, end, step))
    if same(node.meta["val"].shape[place], x.shape[place]) and step == 1:
        return x
    if x.tags[place] is not Dim.COLUMN or step != 1:
        raise Unproven("takes a part of the rows, or every n-th column")
    # Symbolic bounds come from the original arguments, whose fake values are expressions of the input sizes.
    first, last = (_bound(arg) for arg in _slice_bounds(node))
    return cx.window(x, Slice(first, last), node.meta["val"].shape[place])


def _slice_bounds(node: fx.Node) -> tuple[Any, Any]:
    args = dict(zip(("x", "dim", "start", "end", "step"), node.args, strict=False))
    args.update(node.kwargs)
    start, end = args.get("start"), args.get("end")
    return (0 if start is None else start), (_END if end is None else end)


def _bound(arg: Any) -> Size:
    if isinstance(arg, fx.Node):
        val = arg.meta.get("val")
        if not isinstance(val, int | torch.SymInt):
            raise Unproven("the bounds of the slice are not sizes")
        return val
    return min(int(arg), _END)


@register(aten.narrow.default, family="views")
def narrow(cx: Scope, node: fx.Node, x: Value, dim: int, start: Any, length: Any) -> Value:
    """A part of the features, or of the columns."""
    assert x.tags is not None
    place = dim % x.ndim
    if x.tags[place] is Dim.FEATURE and isinstance(start, int):
        return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), place, start, length))
    if x.tags[place] is Dim.COLUMN and isinstance(start, int) and isinstance(length, int) and start >= 0:
        return cx.window(x, Slice(start, start + length), length)
    raise Unproven("takes a part of the rows or columns")


@register(aten.select.int, family="views")
def select(cx: Scope, node: fx.Node, x: Value, dim: int, index: Any) -> Value:
    """One feature runs as it is; one column is un-packed at once (``hidden[:, -1]`` has no columns left)."""
    assert x.tags is not None
    place = dim % x.ndim
    if x.tags[place] is Dim.FEATURE:
        tags = (*x.tags[:place], *x.tags[place + 1 :])
        return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), place, index))
    if x.tags[place] is Dim.COLUMN and isinstance(index, int):
        column = cx.window(x, Slice(index, _END if index == -1 else index + 1), 1)
        return Value(node, grid=cx.emit(node.target, cx.grid(column), place, 0))
    raise Unproven("selects one row")


def _pieces(cx: Scope, node: fx.Node, x: Value, dim: int, args: tuple[Any, ...]) -> tuple[Value, ...]:
    assert x.tags is not None
    if x.tags[dim] is not Dim.FEATURE:
        raise Unproven("splits rows or columns")
    new = cx.emit(node.target, cx.packed(x), *args)
    return tuple(
        cx.result(node, x.tags, [x], cx.emit(operator.getitem, new, index), position=index)
        for index in range(len(node.meta["val"]))
    )


@register(aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes, aten.chunk.default, family="views")
def split(cx: Scope, node: fx.Node, x: Value, size: Any, dim: int = 0) -> tuple[Value, ...]:
    """Features split into parts."""
    return _pieces(cx, node, x, dim % x.ndim, (size, dim))


@register(aten.unbind.int, family="views")
def unbind(cx: Scope, node: fx.Node, x: Value, dim: int = 0) -> tuple[Value, ...]:
    """Features taken apart."""
    assert x.tags is not None
    place = dim % x.ndim
    pieces = _pieces(cx, node, x, place, (place,))
    for piece in pieces:
        piece.tags = (*x.tags[:place], *x.tags[place + 1 :])
    return pieces


@register(aten.stack.default, family="views")
def stack(cx: Scope, node: fx.Node, parts: Sequence[Value], dim: int = 0) -> Value:
    """Packed tensors along a new feature dimension."""
    frame, _ = cx.join(parts)
    tags = broadcast(cx, list(parts))
    if not all(part.is_packed for part in parts):
        raise Unproven("stacks packed and other tensors")
    place = dim % (len(tags) + 1)
    new = cx.emit(node.target, [cx.operand(part, tags, frame) for part in parts], place)
    return cx.result(node, (*tags[:place], Dim.FEATURE, *tags[place:]), parts, new)


@register(aten.cat.default, aten.concat.default, family="views")
def cat(cx: Scope, node: fx.Node, parts: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation of features. Empty 1-d operands (an empty cache) are dropped."""
    solid = [part for part in parts if not (part.ndim == 1 and same(part.shape[0], 0))]
    frame, _ = cx.join(solid)
    first = next(part for part in solid if part.is_packed)
    assert first.tags is not None
    place = dim % first.ndim
    if len(solid) == 1:
        return cx.result(node, first.tags, solid, cx.packed(first))
    if not all(part.is_packed for part in solid):
        raise Unproven("concatenates packed and other tensors")
    if first.tags[place] is not Dim.FEATURE:
        raise Unproven("concatenates along rows or columns")
    new = cx.emit(node.target, [cx.operand(part, first.tags, frame) for part in solid], place)
    return cx.result(node, first.tags, solid, new)


@register(aten.constant_pad_nd.default, aten.pad.default, family="views")
def pad(cx: Scope, node: fx.Node, x: Value, pads: Sequence[Any], *args: Any, **kwargs: Any) -> Value:
    """Padding of features."""
    assert x.tags is not None
    touched = [x.ndim - 1 - pair for pair in range(len(pads) // 2) if tuple(pads[2 * pair : 2 * pair + 2]) != (0, 0)]
    if any(x.tags[place] is not Dim.FEATURE for place in touched):
        raise Unproven("pads or shifts rows or columns")
    return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), list(pads), *args, **kwargs))


@register(aten.view_as_complex.default, family="views")
def view_as_complex(cx: Scope, node: fx.Node, x: Value) -> Value:
    """Pairs of features as complex numbers. Packed tensors may have other strides, which the view does not take."""
    assert x.tags is not None
    if x.tags[-1] is not Dim.FEATURE:
        raise Unproven("it pairs rows or columns")
    new = cx.emit(node.target, cx.emit(aten.contiguous.default, cx.packed(x)))
    return cx.result(node, x.tags[:-1], [x], new)


@register(aten.view_as_real.default, family="views")
def view_as_real(cx: Scope, node: fx.Node, x: Value) -> Value:
    """Complex numbers as pairs of features."""
    assert x.tags is not None
    return cx.result(node, (*x.tags, Dim.FEATURE), [x], cx.emit(node.target, cx.packed(x)))
