"""Mixture-of-experts layers in which each token chooses its experts.

Sorting the assignments by expert, counting them and multiplying group by group mixes all tokens of a batch, but the
composite does not: it gives each assignment to the weights of its own expert and puts the result back. The rules follow
the pieces by type (see `values`): which order a row is in, and which assignments a count has counted.

Before:  ``ids[N*k] -> sort -> (sorted ids, perm);  x[N, C][perm // k];  histc -> cumsum -> grouped_mm(rows, weights)
          -> rows[inverse of perm] -> view(N, k, C) -> sum(1)``
After:   the same on T tokens: ``ids[T*k] -> sort -> ... -> view(T, k, C) -> sum(1)``

What depends on the number of tokens has no rule here and runs on the grid: counts used for anything but the groups of a
grouped product (a balancing loss, a bias update), positions compared with a capacity, a choice among tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.expert_ids import EXACT_TYPES, bound, origin
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.rules.indexing import index as table
from dualkv_compile.passes.rules.indexing import spread
from dualkv_compile.passes.values import Dim, Numbering, Numbers, Ordering, Size, Tags, Value, ratio, same

aten = torch.ops.aten


def is_assignments(x: Value) -> bool:
    """Whether ``x`` is a vector with one entry per assignment (or per token: one assignment each)."""
    return x.tags in ((Dim.ASSIGNMENT,), (Dim.TOKEN,))


# ---------------------------------------------------------------------------------------------------------- into order


def _ordering(x: Value, descending: bool) -> Ordering:
    assert x.tags is not None and x.frame is not None
    times = ratio(x.shape[0], x.frame.rows * x.frame.columns)
    if isinstance(x.frame, Ordering) or times is None:
        raise Unproven("it sorts what is sorted already")
    return Ordering(
        x.frame.index,
        x.frame.rows,
        x.frame.columns,
        x.frame,
        keys=origin(x.source),
        key_roots=x.roots,
        assignments=times,
        tag=x.tags[0],
        ascending=not descending,
    )


def sort_assignments(
    cx: Scope, node: fx.Node, x: Value, dim: int = -1, descending: bool = False, **kwargs: Any
) -> tuple[Value, Value]:
    """``sort(ids[N*k])``: the ids in order, and which assignment stands where.

    The order of equal ids is left open (and may differ from the grid's): no rule lets a result depend on it.
    """
    ordering = _ordering(x, bool(kwargs.get("descending", descending)))
    new = cx.emit(node.target, cx.packed(x), *node.args[1:], **node.kwargs)
    values, places = (cx.emit(operator.getitem, new, position) for position in (0, 1))
    keys = cx.result_in(node, (Dim.SORTED,), ordering, x.roots, values, 0)
    return keys, Value(node, packed=places, position=1, numbering=Numbering(Numbers.PERMUTATION, ordering))


@register(aten.argsort.default, aten.argsort.stable, family="experts")
def argsort(cx: Scope, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Which assignment stands where; or, along features, the order of each token's own entries."""
    assert x.tags is not None
    position = 0 if node.target is aten.argsort.default else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    descending = args[position + 1] if len(args) > position + 1 else kwargs.get("descending", False)
    new = cx.emit(node.target, cx.packed(x), *args, **kwargs)
    if x.tags[dim] is Dim.FEATURE:
        return cx.result(node, x.tags, [x], new)
    if not is_assignments(x):
        raise Unproven("it sorts rows or columns")
    return _numbering(cx, node, new, Numbering(Numbers.PERMUTATION, _ordering(x, descending)))


def _numbering(cx: Scope, node: fx.Node, new: fx.Node, numbering: Numbering) -> Value:
    if node.meta["val"].dtype not in EXACT_TYPES:
        raise Unproven("its positions or counts are rounded")
    cx.records.emitted[node] = new
    return Value(node, packed=new, numbering=numbering)


def _ordered_by(value: Any, *kinds: Numbers) -> tuple[Numbering, Ordering]:
    """The numbering of ``value``, which must be of one of ``kinds``."""
    numbering = value.numbering if isinstance(value, Value) else None
    if numbering is None or numbering.kind not in kinds or numbering.ordering is None:
        raise Unproven("its index does not say which assignment or token stands at which sorted place")
    return numbering, numbering.ordering


_CASTS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten._to_copy.default)


@register(
    *_CASTS,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    family="experts",
    numbering=True,
)
def same_numbers(cx: Scope, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """Casts and copies of positions and counts."""
    if x.numbering is None:
        raise Unproven("it uses positions or counts of the batch's tokens")
    return _numbering(cx, node, cx.emit(node.target, cx.packed(x), *args, **kwargs), x.numbering)


@register(aten.floor_divide.default, aten.div.Tensor_mode, aten.div.Scalar_mode, family="experts", numbering=True)
def token_of(cx: Scope, node: fx.Node, x: Value, other: Any, *, rounding_mode: str = "floor") -> Value:
    """``perm // k``: assignments stand token by token, so this is the token of each sorted place."""
    _, ordering = _ordered_by(x, Numbers.PERMUTATION)
    if other != ordering.assignments or rounding_mode not in ("floor", "trunc"):
        raise Unproven("it divides positions by something else than the number of experts of each token")
    new = cx.emit(node.target, cx.packed(x), *node.args[1:], **node.kwargs)
    return _numbering(cx, node, new, Numbering(Numbers.TOKENS, ordering))


@register(aten.index.Tensor, family="experts", numbering=True)
def index(cx: Scope, node: fx.Node, x: Value, indices: Sequence[Value | None]) -> Value:
    """``x[perm // k]`` and ``weights[perm]`` put rows into the order, ``rows[inverse]`` brings them back.

    ``counts[ids]`` reads the counts of the grid.
    """
    if x.numbering is not None:
        return table(cx, node, Value(x.source, grid=cx.grid(x), position=x.position), indices)
    given = [(place, item) for place, item in enumerate(indices) if item is not None]
    if len(given) != 1:
        raise Unproven("it reads by several indices")
    place, number = given[0]
    held: list[Any] = [None] * place + [cx.packed(number)]
    return _moved(cx, node, x, place, number, lambda: cx.emit(node.target, cx.packed(x), held))


@register(aten.index_select.default, family="experts", numbering=True)
def index_select(cx: Scope, node: fx.Node, x: Value, dim: int, number: Value) -> Value:
    """The same as ``x[number]``."""
    place = dim % x.ndim
    return _moved(cx, node, x, place, number, lambda: cx.emit(node.target, cx.packed(x), place, cx.packed(number)))


def _moved(cx: Scope, node: fx.Node, x: Value, place: int, number: Value, emit: Any) -> Value:
    numbering, ordering = _ordered_by(number, Numbers.PERMUTATION, Numbers.TOKENS, Numbers.INVERSE)
    if x.tags is None:
        raise Unproven("it reads by position what is not known from the tokens")
    back = numbering.kind is Numbers.INVERSE
    source, target = (ordering, ordering.parent) if back else (ordering.parent, ordering)
    assert target is not None
    expected = {Numbers.PERMUTATION: ordering.tag, Numbers.TOKENS: Dim.TOKEN, Numbers.INVERSE: Dim.SORTED}
    if x.frame is not source or x.tags[place] is not expected[numbering.kind]:
        raise Unproven("its index belongs to other assignments")
    if numbering.kind is Numbers.PERMUTATION and not same(x.shape[place], _length(ordering)):
        raise Unproven("its index belongs to other assignments")
    kind = ordering.tag if back else Dim.SORTED
    tags = (*x.tags[:place], kind, *x.tags[place + 1 :])
    return cx.result_in(node, tags, target, x.roots | ordering.key_roots, emit())


def _length(ordering: Ordering) -> Size:
    return ordering.rows * ordering.columns * ordering.assignments


# ------------------------------------------------------------------------------------------------------- and back again


@register(aten.argsort.default, family="experts", numbering=True)
def inverse_by_sorting(cx: Scope, node: fx.Node, x: Value, dim: int = -1, descending: bool = False) -> Value:
    """``argsort(perm)`` is the inverse of a permutation."""
    _, ordering = _ordered_by(x, Numbers.PERMUTATION)
    if descending:
        raise Unproven("it sorts positions backwards")
    return _numbering(cx, node, cx.emit(node.target, cx.packed(x)), Numbering(Numbers.INVERSE, ordering))


@register(aten.index_put.default, family="experts", numbering=True)
def put(cx: Scope, node: fx.Node, x: Value, indices: Sequence[Value | None], values: Value, add: bool = False) -> Value:
    """``out[perm] = rows`` brings rows back; ``inverse[perm] = arange(N*k)`` makes the inverse.

    Every entry is written once, so what ``x`` held does not matter.
    """
    if len(indices) != 1 or add:
        raise Unproven("it adds, or writes by several indices")
    return _written(cx, node, x, indices[0], values)


@register(aten.scatter.src, family="experts", numbering=True)
def scatter(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value, values: Value) -> Value:
    """``inverse.scatter(0, perm, arange(N*k))``, for vectors."""
    if x.ndim != 1 or values.ndim != 1:
        raise Unproven("it writes by position into rows")
    return _written(cx, node, x, index, values)


@register(aten.index_copy.default, family="experts", numbering=True)
def index_copy(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value, values: Value) -> Value:
    """``out.index_copy(0, perm, rows)``."""
    if dim % x.ndim != 0:
        raise Unproven("it writes by position along features")
    return _written(cx, node, x, index, values)


def _written(cx: Scope, node: fx.Node, x: Value, index: Value | None, values: Value) -> Value:
    _, ordering = _ordered_by(index, Numbers.PERMUTATION)
    assert index is not None and ordering.parent is not None
    if not same(x.shape[0], _length(ordering)) or x.numbering is not None or values.numbering is not None:
        raise Unproven("it writes by position into another number of places")
    places, dtype = cx.packed(index), x.meta.dtype
    if _is_whole_range(values.source, _length(ordering)) and x.ndim == 1:
        numbers = cx.emit(aten.arange.default, cx.emit(aten.sym_size.int, places, 0), dtype=dtype, device=x.meta.device)
        empty = cx.emit(aten.empty_like.default, places, dtype=dtype)
        new = cx.emit(aten.index_put.default, empty, [places], numbers)
        return _numbering(cx, node, new, Numbering(Numbers.INVERSE, ordering))
    if values.frame is not ordering or values.tags is None or values.tags[0] is not Dim.SORTED or values.ndim != x.ndim:
        raise Unproven("it writes by position what is in another order")
    rows = cx.packed(values)
    new = cx.emit(aten.index_put.default, cx.emit(aten.empty_like.default, rows, dtype=dtype), [places], rows)
    tags = (ordering.tag, *values.tags[1:])
    return cx.result_in(node, tags, ordering.parent, values.roots | ordering.key_roots, new)


def _is_whole_range(node: fx.Node, length: Size) -> bool:
    """Whether ``node`` is ``arange(length)``, in whatever integer type."""
    node = origin(node)
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.ndim != 1 or not same(val.shape[0], length):
        return False
    if node.target is aten.arange.start:
        return isinstance(node.args[0], int) and node.args[0] == 0
    return node.target is aten.arange.default


@register(aten.index_add.default, family="experts", numbering=True)
def index_add(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value, rows: Value, **kwargs: Any) -> Value:
    """``x.index_add(0, perm // k, rows)``: each token adds the rows of its own assignments."""
    _, ordering = _ordered_by(index, Numbers.TOKENS)
    frame = ordering.parent
    assert frame is not None
    if dim % x.ndim != 0 or rows.frame is not ordering or rows.tags is None or rows.tags[0] is not Dim.SORTED:
        raise Unproven("it adds by position what is in another order")
    tags: Tags = (Dim.TOKEN, *rows.tags[1:])
    if x.numbering is not None or not same(x.shape[0], frame.rows * frame.columns):
        raise Unproven("it adds by position into another number of places")
    if x.is_packed:
        base = cx.operand(x, tags, frame)
    else:
        per_token = cx.emit(aten.unflatten.int, cx.packed(rows), 0, [-1, ordering.assignments])
        like = Value(node, tags, frame, packed=cx.emit(aten.select.int, per_token, 1, 0))
        base = spread(cx, x, tags, frame, like)
    new = cx.emit(node.target, base, 0, cx.packed(index), cx.packed(rows), **kwargs)
    return cx.result_in(node, tags, frame, x.roots | rows.roots | ordering.key_roots, new)


# ---------------------------------------------------------------------------------------- groups of a grouped product


@register(aten.histc.default, family="experts")
def histc(cx: Scope, node: fx.Node, x: Value, bins: int = 100, min: float = 0, max: float = 0) -> Value:
    """``histc(ids, E, 0, E - 1)``: how many assignments each expert has, whatever shape the ids are in."""
    if min != 0 or max not in (bins - 1, bins):
        raise Unproven("it counts by ranges that are not the experts' ids")
    new = cx.emit(node.target, cx.packed(x), bins, min, max)
    return _numbering(cx, node, new, Numbering(Numbers.COUNTS, keys=origin(x.source), bins=bins))


@register(aten.cumsum.default, family="experts", numbering=True)
def offsets(cx: Scope, node: fx.Node, x: Value, dim: int, **kwargs: Any) -> Value:
    """``cumsum(counts)``: where each expert's group ends."""
    numbering = x.numbering
    if numbering is None or numbering.kind is not Numbers.COUNTS:
        raise Unproven("it adds up positions of the batch's tokens")
    new = cx.emit(node.target, cx.packed(x), dim, **kwargs)
    return _numbering(cx, node, new, Numbering(Numbers.OFFSETS, keys=numbering.keys, bins=numbering.bins))


@register(aten._grouped_mm.default, "transformers::grouped_mm_fallback", family="experts", numbering=True)
def grouped_mm(
    cx: Scope, node: fx.Node, rows: Value, weight: Value, offs: Value | None = None, *args: Any, **kwargs: Any
) -> Value:
    """Each sorted row times the weights of the group it stands in, which is its own expert's.

    Holds if the rows are sorted upwards by ids from 0 to E - 1, ``offs`` counts these ids, and there are E weights.
    """
    numbering = offs.numbering if isinstance(offs, Value) else None
    if numbering is None or numbering.kind is not Numbers.OFFSETS or weight.is_packed or weight.numbering:
        raise Unproven("its groups are no offsets of the tokens' experts")
    ordering = rows.frame
    if rows.tags != (Dim.SORTED, Dim.FEATURE) or not isinstance(ordering, Ordering) or not ordering.ascending:
        raise Unproven("its rows are not sorted by expert")
    if ordering.keys is not numbering.keys:
        raise Unproven("its groups count other ids than its rows are sorted by")
    assert ordering.keys is not None and offs is not None
    limit = bound(ordering.keys)
    if limit is None or not same(limit, numbering.bins) or not same(weight.shape[0], numbering.bins):
        raise Unproven("an expert's id may lie outside of the counted range")
    if any(isinstance(value, Value) and (value.is_packed or value.numbering) for value in (*args, *kwargs.values())):
        raise Unproven("its bias comes from the tokens")
    operands = [cx.packed(rows), cx.grid(weight), cx.packed(offs), *cx.to_grid(args)]
    return cx.result(node, rows.tags, [rows], cx.emit(node.target, *operands, **cx.to_grid(kwargs)))
