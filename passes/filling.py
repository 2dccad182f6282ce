"""A fresh tensor that is filled slice by slice -> a concatenation.

Before:   ``keys = new_empty(x, [B, H, S, 12]); copy_(slice(keys, 3, 0, 8), a); copy_(slice(keys, 3, 8, 12), b)``
After:    ``keys = cat([a, b], 3)``

Latent attention assembles its keys in this way. The rewriting is exact where the slices cover the tensor without
overlap and nothing else looks at its memory before the last of them is written.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.values import same

aten = torch.ops.aten
_EMPTY = {aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default, aten.new_zeros.default}


@dataclass(frozen=True)
class _Part:
    """``copy_(slice(tensor, dim, start, stop), source)``."""

    dim: int
    start: int
    stop: int
    slice: fx.Node
    copy: fx.Node
    source: fx.Node


def concatenate_filled(graph: fx.Graph) -> None:
    """Rewrite every tensor of ``graph`` that is filled in parts."""
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in order:
        if node.op == "call_function" and node.target in _EMPTY:
            parts = _parts(node, order)
            if parts:
                _concatenate(graph, node, parts, max((part.copy for part in parts), key=order.__getitem__))


def _parts(tensor: fx.Node, order: dict[fx.Node, int]) -> list[_Part]:
    """The parts that fill ``tensor``, by position; empty where it is not filled so."""
    found = [part for user in tensor.users if (part := _part(tensor, user)) is not None]
    if not found:
        return []
    copies = sorted((part.copy for part in found), key=order.__getitem__)
    slices = {part.slice for part in found}
    if any(user not in slices and order[user] < order[copies[-1]] for user in tensor.users):
        return []
    if not _quiet(copies[0], copies[-1], set(copies)):
        return []
    found.sort(key=lambda part: part.start)
    size = tensor.meta["val"].shape[found[0].dim]
    ends = [0, *(part.stop for part in found)]
    covered = all(part.start == end for part, end in zip(found, ends, strict=False)) and ends[-1] == size
    return found if covered and len({part.dim for part in found}) == 1 else []


def _quiet(first: fx.Node, last: fx.Node, copies: set[fx.Node]) -> bool:
    """Whether between two nodes nothing is written but by ``copies``, and no grad-mode or autocast region changes."""
    node = first
    while node is not last:
        target = node.target
        quiet = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
        if node.op == "call_function" and node not in copies and target is not operator.getitem and not quiet:
            return False
        node = node.next
    return True


def _part(tensor: fx.Node, piece: fx.Node) -> _Part | None:
    if piece.target is not aten.slice.Tensor or piece.kwargs or len(piece.users) != 1:
        return None
    (copy,) = piece.users
    if copy.target is not aten.copy_.default or copy.args[0] is not piece or copy.users or copy.kwargs:
        return None
    source = copy.args[1]
    rank = tensor.meta["val"].ndim
    given: list[Any] = [*piece.args[1:], *[0, None, None, 1][len(piece.args) - 1 :]]
    dim, start, stop, step = given
    size = tensor.meta["val"].shape[int(dim) % rank]
    start, stop = (0 if start is None else start), (size if stop is None else stop)
    if not all(isinstance(number, int) for number in (size, start, stop)) or step != 1 or start < 0 or stop < 0:
        return None
    if not isinstance(source, fx.Node) or len(copy.args) != 2:
        return None
    value, place = source.meta["val"], piece.meta["val"]
    # A copy would cast and broadcast; a concatenation does neither.
    if value.dtype != place.dtype or value.device != place.device or value.ndim != place.ndim:
        return None
    if not all(map(same, value.shape, place.shape)):
        return None
    return _Part(int(dim) % rank, start, min(stop, size), piece, copy, source)


def _concatenate(graph: fx.Graph, tensor: fx.Node, parts: list[_Part], last: fx.Node) -> None:
    with graph.inserting_after(last):
        whole = graph.call_function(aten.cat.default, ([part.source for part in parts], parts[0].dim))
    whole.meta.update({**tensor.meta, **{key: last.meta[key] for key in ("stack_trace",) if key in last.meta}})
    slices = {part.slice for part in parts}
    tensor.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in slices)
    for part in parts:
        graph.erase_node(part.copy)
        graph.erase_node(part.slice)
    graph.erase_node(tensor)
