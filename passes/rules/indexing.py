"""Look-ups by index in which each token reads its own features, or a table."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Dim, Frame, Tags, Value

aten = torch.ops.aten


@register(aten.gather.default, family="indexing")
def gather(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value, **kwargs: Any) -> Value:
    """Each token picks among its own features, or reads a table that all rows share, by an index that is known from
    the tokens.
    """
    if x.tags is None:
        assert index.tags is not None and index.frame is not None
        place = dim % index.ndim
        tags = (*index.tags[:place], Dim.FEATURE, *index.tags[place + 1 :])
        if Dim.COLUMN in tags or Dim.TOKEN in tags:
            raise Unproven("it gathers from a table by position")
        new = cx.emit(node.target, cx.operand(x, tags, index.frame), place, cx.packed(index), **kwargs)
        return cx.result(node, index.tags, [index], new)
    if x.tags[dim] is not Dim.FEATURE:
        raise Unproven("it gathers along rows or columns")
    if index.tags != x.tags:
        raise Unproven("its index is not known from the tokens")
    frame, _ = cx.join([x, index])
    new = cx.emit(node.target, cx.packed(x), dim % x.ndim, cx.operand(index, x.tags, frame), **kwargs)
    return cx.result(node, x.tags, [x, index], new)


@register(aten.scatter.value, aten.scatter.src, aten.scatter_add.default, family="indexing")
def scatter(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value, src: Any, **kwargs: Any) -> Value:
    """Each token writes among its own features, at an index that is known from the tokens (group masks of routers)."""
    tags = index.tags
    if tags is None or tags[dim] is not Dim.FEATURE:
        raise Unproven("it writes along rows or columns, or at an index that is not known from the tokens")
    values = [value for value in (x, index, src) if isinstance(value, Value)]
    frame, _ = cx.join(values)
    place = dim % index.ndim
    written = spread(cx, x, tags, frame, index)
    given = spread(cx, src, tags, frame, index) if isinstance(src, Value) else src
    new = cx.emit(node.target, written, place, cx.packed(index), given, **kwargs)
    return cx.result(node, tags, values, new)


def spread(cx: Scope, x: Value, tags: Tags, frame: Frame, like: Value) -> fx.Node:
    """``x`` with as many tokens as ``like``: an as-written operand (``zeros[N, E]``), the same for all, is expanded."""
    node = cx.operand(x, tags, frame)
    if x.is_packed:
        return node
    token = cx.packed(like)
    for dim, kind in enumerate(tags):
        if kind is Dim.FEATURE:
            token = cx.emit(aten.narrow.default, token, dim, 0, 1)
    pair = cx.emit(aten.broadcast_tensors.default, [node, token])
    return cx.emit(operator.getitem, pair, 0)


@register(aten.one_hot.default, family="indexing")
def one_hot(cx: Scope, node: fx.Node, x: Value, num_classes: int = -1) -> Value:
    """Each token's index as a vector of given length (by default the length depends on the largest index there is)."""
    if x.tags is None or not isinstance(num_classes, int) or num_classes < 1:
        raise Unproven("its number of classes depends on all tokens")
    return cx.result(node, (*x.tags, Dim.FEATURE), [x], cx.emit(node.target, cx.packed(x), num_classes))


@register(aten.index_select.default, family="indexing")
def index_select(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value) -> Value:
    """Features picked by an as-written index."""
    if x.tags is None or x.tags[dim] is not Dim.FEATURE or index.is_packed:
        raise Unproven("it selects among rows or columns")
    return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), dim % x.ndim, cx.grid(index)))


@register(aten.index.Tensor, family="indexing")
def index(cx: Scope, node: fx.Node, x: Value, indices: Sequence[Value | None]) -> Value:
    """``table[ids]``, a table that does not come from the tokens at one index per token; or ``x[..., [2, 0]]``, the
    same features of every token.
    """
    given = [(place, item) for place, item in enumerate(indices) if item is not None]
    if x.tags is not None and len(given) == 1:
        place, picks = given[0]
        if x.tags[place] is not Dim.FEATURE or picks.is_packed or picks.meta.dtype == torch.bool:
            raise Unproven("it reads tokens by position")
        tags = (*x.tags[:place], *(Dim.FEATURE,) * picks.ndim, *x.tags[place + 1 :])
        before: list[Any] = [None] * place
        return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), [*before, cx.grid(picks)]))
    if x.is_packed or len(given) != 1:
        raise Unproven("it reads tokens by position")
    place, ids = given[0]
    if ids.tags is None or ids.meta.dtype == torch.bool:
        raise Unproven("it reads tokens by position")
    features = (Dim.FEATURE,) * (x.ndim - place - 1)
    tags = ((Dim.FEATURE,) * place) + ids.tags + features
    held: list[Any] = [None] * place + [cx.packed(ids)]
    return cx.result(node, tags, [ids], cx.emit(node.target, cx.grid(x), held))


@register(aten.index_put.default, family="indexing")
def index_put(
    cx: Scope, node: fx.Node, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    """``x[flags] = number``: tokens or features are set where a mask that is known from the tokens says so."""
    flags = indices[0]
    if x.tags is None or len(indices) != 1 or flags is None or flags.tags is None or flags.meta.dtype != torch.bool:
        raise Unproven("it writes to tokens by position")
    if flags.tags != x.tags[: flags.ndim] or flags.frame is not x.frame:
        raise Unproven("operands disagree on which dimensions are rows and columns")
    if values.is_packed or values.ndim or accumulate:
        raise Unproven("it writes more than one number")
    new = cx.emit(node.target, cx.packed(x), [cx.packed(flags)], cx.grid(values))
    return cx.result(node, x.tags, [x, flags], new)
