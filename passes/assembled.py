"""Memory that is filled piece by piece -> a concatenation.

Before:  ``x = new_empty(k, [B, H, S, 12]); x[..., :8].copy_(a); x[..., 8:].copy_(b)``, then ``x`` is read
After:   ``x = cat([a, b], -1)``

Only where the pieces are slices of whole numbers along one dimension that cover it exactly, each written once, in one
grad-mode and autocast region without other writes, before anything reads the memory. Everything else stays an in-place
operator, which :mod:`passes.effects` judges.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.regions import region_between
from dualkv_compile.passes.values import same

aten = torch.ops.aten

_NEW_MEMORY = {
    aten.new_empty.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.zeros.default,
    aten.zeros_like.default,
}


def assemble(module: fx.GraphModule) -> None:
    """Replace filled memory by concatenations, in a traced graph and its checkpoint bodies."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                if node.op == "call_function" and node.target in _NEW_MEMORY:
                    _assemble(part.graph, node)
            part.graph.lint()


def _assemble(graph: fx.Graph, memory: fx.Node) -> None:
    pieces: dict[fx.Node, fx.Node] = {}  # slice -> the copy into it
    for user in memory.users:
        writers = list(user.users)
        if user.target is not aten.slice.Tensor or len(writers) != 1 or writers[0].target is not aten.copy_.default:
            continue
        if writers[0].args[0] is user and not writers[0].users:
            pieces[user] = writers[0]
    readers = [user for user in memory.users if user not in pieces]
    spans = [_span(memory, piece) for piece in pieces]
    dims = {span[0] for span in spans if span is not None}
    if not pieces or None in spans or len(dims) != 1:
        return
    (dim,) = dims
    size = memory.meta["val"].shape[dim]
    ordered = sorted(zip([span[1:] for span in spans if span is not None], pieces, strict=True), key=lambda x: x[0])
    ends = [0, *(stop for (_, stop), _ in ordered)]
    if [start for (start, _), _ in ordered] != ends[:-1] or not same(size, ends[-1]):
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    last = max(pieces.values(), key=order.__getitem__)
    if any(order[reader] < order[last] for reader in readers):
        return
    if region_between(memory, last) or _written_between(memory, last, set(pieces.values())):
        return
    sources = [_source(piece, pieces[piece]) for _, piece in ordered]
    if any(source is None for source in sources):
        return
    dtype = memory.meta["val"].dtype
    with graph.inserting_after(last):
        whole = graph.call_function(aten.cat.default, ([], dim))
    whole.meta.update({name: memory.meta[name] for name in ("val", "stack_trace") if name in memory.meta})
    with graph.inserting_before(whole):
        whole.args = ([_cast(graph, source, dtype) for source in sources if source is not None], dim)
    memory.replace_all_uses_with(whole, delete_user_cb=lambda user: user in readers)
    for piece, copy in pieces.items():
        graph.erase_node(copy)
        graph.erase_node(piece)
    graph.erase_node(memory)


def _written_between(memory: fx.Node, last: fx.Node, copies: set[fx.Node]) -> bool:
    """Whether anything but ``copies`` is written: what was copied early would be read late, by the concatenation."""
    node = memory
    while node is not last:
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if writes and node not in copies:
            return True
        node = node.next
    return False


def _span(memory: fx.Node, piece: fx.Node) -> tuple[int, int, int] | None:
    """Dimension, start and stop of a slice in whole numbers, None for another kind of slice."""
    shape = memory.meta["val"].shape
    given: tuple[Any, ...] = (*piece.args[1:], *(0, None, None, 1)[len(piece.args) - 1 :])
    dim, start, stop, step = given
    place = int(dim) % len(shape)
    size = shape[place]
    start = 0 if start is None else start
    if not isinstance(size, int) or not isinstance(start, int) or step != 1 or piece.kwargs:
        return None
    if stop is not None and not isinstance(stop, int):
        return None
    first, last, _ = slice(start, stop).indices(size)
    return place, first, last


def _source(piece: fx.Node, copy: fx.Node) -> fx.Node | None:
    """What is copied into a piece, if it fills it without being broadcast."""
    source = copy.args[1]
    if not isinstance(source, fx.Node):
        return None
    given, wanted = source.meta["val"].shape, piece.meta["val"].shape
    return source if len(given) == len(wanted) and all(map(same, given, wanted)) else None


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    val = source.meta["val"]
    if val.dtype == dtype:
        return source
    cast = graph.call_function(aten.to.dtype, (source, dtype))
    cast.meta["val"] = val.to(dtype)
    return cast
