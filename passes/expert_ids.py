"""Where expert ids come from: which tensor's entries they are, and how large they can be.

A grouped product gives row i to the group whose counts cover place i. That is the row's own expert only if the rows are
sorted by ids, if the counts count the same ids, and if no id lies outside of the counted range: ids that are left out
would shift all groups by their number, which depends on the batch. Both questions are answered by walking back in the
original graph.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from dualkv_compile.passes.values import Size, same

aten = torch.ops.aten

#: Types that hold every expert id, position and count exactly (below 2**24).
EXACT_TYPES = {torch.int32, torch.int64, torch.float32, torch.float64}
#: The same entries in the same row-major order.
_SAME_ENTRIES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
}
#: Some of the operand's entries, perhaps repeated or moved.
_SOME_ENTRIES = _SAME_ENTRIES | {
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.gather.default,
    aten.index_select.default,
}
_SORTS = {aten.sort.default, aten.sort.stable}
#: Operators with the place of an entry among ``dim`` as their second result; the position of the argument ``dim``.
_PLACES = {aten.topk.default: 2, aten.max.dim: 1, aten.min.dim: 1, aten.sort.default: 1, aten.sort.stable: 2}
_PLACE_ALONE = {aten.argmax.default: 1, aten.argmin.default: 1, aten.argsort.default: 1, aten.argsort.stable: 2}


def _is_tensor_call(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(node.args)


def origin(node: fx.Node) -> fx.Node:
    """The node whose entries ``node`` holds, in whatever shape and integer-exact type, possibly sorted."""
    while _is_tensor_call(node):
        source = node.args[0]
        if not isinstance(source, fx.Node):
            break
        if node.target in _SAME_ENTRIES and _is_exact(node):
            node = source
        elif node.target is operator.getitem and node.args[1] == 0 and source.target in _SORTS and _one_dim(source):
            node = source.args[0]  # type: ignore[assignment]
        else:
            break
    return node


def _is_exact(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.dtype in EXACT_TYPES


def _one_dim(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and source.meta["val"].ndim == 1


def bound(node: fx.Node) -> Size | None:
    """A size n such that every entry of ``node`` is an integer from 0 to n - 1; None if none is known."""
    node = origin(node)
    if not _is_tensor_call(node):
        return None
    source = node.args[0]
    if isinstance(source, list | tuple):
        joined = node.target in (aten.cat.default, aten.concat.default)
        return _common([bound(part) for part in source if isinstance(part, fx.Node)]) if joined else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is operator.getitem and isinstance(node.args[1], int):
        if node.args[1] == 1 and source.target in _PLACES:
            return _length(source, _PLACES[source.target])
        return bound(source.args[0]) if node.args[1] == 0 and source.target in _SORTS else None  # type: ignore[arg-type]
    if node.target in _PLACE_ALONE:
        return _length(node, _PLACE_ALONE[node.target])
    if node.target in _SOME_ENTRIES and _is_exact(node):
        return bound(source)
    return None


def _common(bounds: list[Size | None]) -> Size | None:
    """The bound that all parts of a concatenation have."""
    if bounds and all(item is not None and bounds[0] is not None and same(item, bounds[0]) for item in bounds):
        return bounds[0]
    return None


def _length(node: fx.Node, position: int) -> Size | None:
    """The size of the dimension that ``node`` looks for a place in."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1)
    shape = source.meta["val"].shape
    return shape[dim] if isinstance(dim, int) and len(shape) else None
