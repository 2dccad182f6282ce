"""How much of a rewritten graph's work runs on packed tokens, and which operators kept the rest on the grid."""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import PackedGraph, live_nodes
from dualkv_compile.passes.reasons import Reason
from dualkv_compile.passes.roles import ATTENTION, Links
from dualkv_compile.passes.values import Size, hint

aten = torch.ops.aten
_PRODUCTS = {
    "aten::linear",
    "aten::mm",
    "aten::matmul",
    "aten::bmm",
    "aten::_grouped_mm",
    "transformers::grouped_mm_fallback",
}
_SUMS_OF_PRODUCTS = {"aten::addmm", "aten::baddbmm"}


def flops(node: fx.Node) -> int:
    """Floating-point operations of one original node at the present sizes (products and attention; others count 0)."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, torch.Tensor):
        return 0
    if node.target is ATTENTION:
        query, key, value = (arg.meta["val"].shape for arg in node.args[:3])  # type: ignore[union-attr]
        return 2 * _product(query[:-1]) * hint(key[-2]) * (hint(query[-1]) + hint(value[-1]))
    name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
    if name in _PRODUCTS or name in _SUMS_OF_PRODUCTS:
        left = node.args[1] if name in _SUMS_OF_PRODUCTS else node.args[0]
        return 2 * _product(val.shape) * hint(left.meta["val"].shape[-1])  # type: ignore[union-attr]
    return 0


def _product(sizes: tuple[Size, ...] | torch.Size) -> int:
    return math.prod(hint(size) for size in sizes)


def packed_share(links: Links, graph: PackedGraph) -> float:
    """The part (0 to 1) of the graph's operations that the rewritten graph does on packed tokens."""
    total = done = 0
    for node in links.nodes:
        work = flops(node)
        total += work
        if node in graph.records.packed:
            done += work
    return done / total if total else 0.0


def costly_reasons(links: Links, graph: PackedGraph) -> list[Reason]:
    """The operators that un-packed a computed value so that real work behind them runs on the grid.

    The un-packing before a loss costs nothing and is not reported; neither is an operator that is dead in the rewritten
    graph (the mask tensor's construction).
    """
    alive = set(live_nodes(graph.module))
    records = graph.records
    working = [
        node for node in links.nodes if node not in records.packed and flops(node) and _alive(node, graph, alive)
    ]
    behind: set[fx.Node] = set()
    inside: set[fx.Node] = set()
    for attention, chain in links.written.items():
        if attention not in records.packed:
            inside |= chain.inside
            working.append(attention)
    for node in working:
        behind.add(node)
        if node in inside:
            continue
        # A mask is judged by the attention that reads it: how its tensor was built does not matter.
        behind.update(links.ancestors(node, masks=False))
    found: list[Reason] = []
    for node, reason in records.unproven.items():
        # One reason tells of an attention that is written out, not one for each of its parts.
        ended = (node in records.unpacked_operands or node in links.attentions) and node not in inside
        if ended and node in behind and _alive(node, graph, alive) and reason not in found:
            found.append(reason)
    return found


def _alive(node: fx.Node, graph: PackedGraph, alive: set[fx.Node]) -> bool:
    return graph.records.emitted.get(node) in alive
