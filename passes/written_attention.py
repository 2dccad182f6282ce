"""Attention that a model writes out itself: which nodes of a graph belong together as one.

Before:  ``p = softmax(matmul(q[B,H,S,D], k.transpose(2, 3)) * scale + mask[B,1,S,S], -1)``; ``matmul(p, v[B,H,S,Dv])``
After:   the same graph, and the note that its last node is attention of q, k and v with these scores

The nodes stay as they are. Packing (:func:`passes.attention.written`) replaces the last one, and the others are dead
then; where it finds no proof they run as the user wrote them.

What is looked at here is the form alone: a product, then operators that keep or change scores (:data:`_SCORES`), a
softmax over the last dimension, copies, and a product with the values. What the scores mean is asked for later
(:mod:`passes.scores`), when it is known which values are per token. Batched products of three dimensions
(``[B * H, S, D]``) are the same thing where views lead to and from ``[B, H, S, D]``. Probabilities or scores that
anything else reads (returned attentions) end the search: they are needed as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from dualkv_compile.passes.collapse import VIEWS
from dualkv_compile.passes.regions import region_between
from dualkv_compile.passes.values import Size, same

aten = torch.ops.aten

#: The key of the rule for attention that is written out.
WRITTEN = "attention written as softmax of a product"

_PRODUCTS = {aten.matmul.default, aten.bmm.default}
_SCORE_PRODUCTS = {*_PRODUCTS, aten.baddbmm.default}
_SOFTMAX = {aten.softmax.int, aten._softmax.default}
_COPIES = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.type_as.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.clone.default,
}
#: What may stand between the product and the softmax.
_SCORES = {
    *_COPIES,
    *VIEWS,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.tanh.default,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.max.other,
    aten.maximum.default,
    aten.clamp.default,
    aten.clamp_min.default,
}


@dataclass(frozen=True)
class Operand:
    """A four-dimensional operand of a product; ``swapped``: the product reads its last two dimensions exchanged."""

    node: fx.Node
    swapped: bool


@dataclass(frozen=True)
class Written:
    """One attention that is written out.

    ``query`` is read as ``[B, H, S, D]``, ``key`` as ``[B, Hk, D, S]`` and ``value`` as ``[B, Hk, S, Dv]``, with Hk = H
    or 1. ``scores`` goes into the softmax, without the column of the ``sinks`` (``[..., 1]``, None for none).
    ``products``: the nodes that do the work, of scores and of values. ``inside``: all nodes but the last.
    """

    query: Operand
    key: Operand
    value: Operand
    scores: fx.Node
    sinks: fx.Node | None
    products: tuple[fx.Node, fx.Node]
    inside: frozenset[fx.Node]


def find_written(graph: fx.Graph) -> dict[fx.Node, Written]:
    """The written-out attentions of one graph, by the node that has their result ``[B, H, S, Dv]``."""
    found: dict[fx.Node, Written] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _PRODUCTS:
            match = _match(node)
            if match is not None:
                found[match[0]] = match[1]
    return found


def _match(product: fx.Node) -> tuple[fx.Node, Written] | None:
    probabilities, values = product.args[:2]
    if not isinstance(probabilities, fx.Node) or not isinstance(values, fx.Node):
        return None
    inside: set[fx.Node] = set()
    softmax, dropped = _to_softmax(probabilities, inside)
    if softmax is None:
        return None
    scores = _without_shift(_argument(softmax), inside)
    sinks: fx.Node | None = None
    if scores.target is aten.cat.default:
        inside.add(scores)
        parts = _sink_column(scores)
        if parts is None:
            return None
        scores, sinks = parts
    if (sinks is not None) != dropped:
        return None
    before = _to_product(scores, {}, inside)
    if before is None:
        return None
    left, right = before.args[-2:] if before.target is aten.baddbmm.default else before.args[:2]
    operands = [_operand(x, at) for x, at in ((left, before), (right, before), (values, product))]
    query, key, value = operands
    if query is None or key is None or value is None:
        return None
    result = _result(product, query, inside)
    if result is None or region_between(before, result):
        return None
    if any(user not in inside and user is not result for node in inside for user in node.users):
        return None
    return result, Written(query, key, value, scores, sinks, (before, product), frozenset(inside))


def _argument(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def _last(node: fx.Node) -> Size:
    size: Size = node.meta["val"].shape[-1]
    return size


def _to_softmax(node: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node | None, bool]:
    """The softmax that ``node`` is a copy of, and whether its last column was dropped on the way."""
    dropped = False
    while node.op == "call_function":
        inside.add(node)
        if node.target in _SOFTMAX:
            last = node.meta["val"].ndim - 1
            return (node if int(node.args[1]) % (last + 1) == last else None), dropped  # type: ignore[arg-type]
        if node.target is aten.slice.Tensor and not dropped:
            if not _drops_last_column(node):
                return None, False
            dropped = True
        elif node.target is aten.dropout.default:
            if node.args[1] and node.args[2]:
                return None, False
        elif node.target not in _COPIES and (node.target not in VIEWS or not same(_last(node), _last(_argument(node)))):
            return None, False
        node = _argument(node)
    return None, False


def _drops_last_column(node: fx.Node) -> bool:
    rank = node.meta["val"].ndim
    dim, start = (node.args[place] if len(node.args) > place else 0 for place in (1, 2))
    step = node.args[4] if len(node.args) > 4 else 1
    whole = int(dim) % rank == rank - 1 and start in (0, None) and step == 1  # type: ignore[arg-type]
    return bool(whole) and same(_last(node) + 1, _last(_argument(node)))


def _without_shift(node: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """The scores without the subtraction of their own largest one, which a softmax does not notice."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return node
    scores, shift = node.args
    seen = [node]
    while isinstance(shift, fx.Node):
        seen.append(shift)
        reduction = shift
        if shift.target not in (aten.detach.default, aten.alias.default):
            break
        shift = shift.args[0]
    else:
        return node
    if getattr(reduction.target, "__name__", "") == "getitem" and reduction.args[1] == 0:
        reduction = _argument(reduction)
        if reduction.target is not aten.max.dim:
            return node
        seen.append(reduction)
        # The positions of the maxima are a second, unused result.
        seen.extend(user for user in reduction.users if not user.users)
    elif reduction.target is not aten.amax.default:
        return node
    dims = reduction.args[1] if len(reduction.args) > 1 else ()
    dim = dims if isinstance(dims, int) else dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else None
    keeps = same(_last(seen[1]), 1) and seen[1].meta["val"].ndim == node.meta["val"].ndim
    if reduction.args[0] is not scores or dim not in (-1, node.meta["val"].ndim - 1) or not keeps:
        return node
    inside.update(seen)
    assert isinstance(scores, fx.Node)
    return scores


def _sink_column(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The scores and the one column behind them of a concatenation along the last dimension."""
    parts = node.args[0]
    rank = node.meta["val"].ndim
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if not isinstance(parts, list | tuple) or len(parts) != 2 or int(dim) % rank != rank - 1:  # type: ignore[arg-type]
        return None
    scores, sinks = parts
    if not isinstance(scores, fx.Node) or not isinstance(sinks, fx.Node) or not same(_last(sinks), 1):
        return None
    return scores, sinks


def _to_product(node: fx.Node, seen: dict[fx.Node, fx.Node | None], inside: set[fx.Node]) -> fx.Node | None:
    """The only product that the scores are made of; the nodes on the way to it are put into ``inside``."""
    if node in seen:
        return seen[node]
    seen[node] = None
    found: fx.Node | None = None
    if node.op == "call_function" and node.target in _SCORE_PRODUCTS:
        found = node
    elif node.op == "call_function" and node.target in _SCORES:
        sources = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
        products = {product for source in sources if (product := _to_product(source, seen, inside)) is not None}
        found = products.pop() if len(products) == 1 else None
    if found is not None:
        inside.add(node)
    seen[node] = found
    return found


def _operand(node: object, product: fx.Node) -> Operand | None:
    """An operand of a product as four-dimensional: rows and heads before they were made one dimension."""
    swapped = False
    while isinstance(node, fx.Node):
        val = node.meta["val"]
        rank = val.ndim
        if region_between(node, product):
            return Operand(node, swapped) if rank == 4 else None
        if node.target is aten.transpose.int and {int(dim) % rank for dim in node.args[1:3]} == {rank - 2, rank - 1}:  # type: ignore[arg-type]
            swapped = not swapped
            node = node.args[0]
        elif rank == 3 and node.target in VIEWS and _merges_rows_and_heads(node):
            node = node.args[0]
        else:
            return Operand(node, swapped) if rank == 4 else None
    return None


def _merges_rows_and_heads(node: fx.Node) -> bool:
    old, new = _argument(node).meta["val"].shape, node.meta["val"].shape
    return len(old) == 4 and same(old[0] * old[1], new[0]) and same(old[2], new[1]) and same(old[3], new[2])


def _result(product: fx.Node, query: Operand, inside: set[fx.Node]) -> fx.Node | None:
    """The node with four dimensions that has the result."""
    shape = product.meta["val"].shape
    if len(shape) == 4:
        return product
    rows, heads = query.node.meta["val"].shape[:2]
    wanted = (rows, heads, *shape[1:])
    views = [user for user in product.users if user.target in VIEWS]
    if len(views) != 1 or len(product.users) != 1 or len(views[0].meta["val"].shape) != 4:
        return None
    inside.add(product)
    return views[0] if all(map(same, views[0].meta["val"].shape, wanted)) else None
