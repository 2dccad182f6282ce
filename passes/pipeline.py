"""The passes in their order.

Dynamo graph
-> flex_call                    flex_attention as attention with a mask that can be read
-> effects.check_dynamo_graph   only known higher-order operators
-> normalize                    pre-dispatch ATen, same inputs
-> effects.check_normal_graph   no randomness, no visible mutation, no collectives
-> roles                        which inputs are per-token, which attentions share a tree
-> pack                         layout proof, mask lifting and rewriting in one walk
-> worth                        what share of the work was packed, and what stopped the rest
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch._logging._internal import trace_structured

import dualkv_compile.passes.rules  # noqa: F401  (registers the rules)
from dualkv_compile.passes import effects
from dualkv_compile.passes.flex_call import BlockLists, translate
from dualkv_compile.passes.normalize import NormalGraph, normalize
from dualkv_compile.passes.pack import PackedGraph, pack
from dualkv_compile.passes.reasons import Reason, WholeGraphUnsupported
from dualkv_compile.passes.roles import ATTENTION, Links, Roles, find_roles
from dualkv_compile.passes.symbols import SymbolTable
from dualkv_compile.passes.worth import costly_reasons, flops, packed_share

log = logging.getLogger("dualkv_compile.passes")


@dataclass
class Analysis:
    """What the passes found for one graph.

    ``packed`` is None when the plain graph must run; ``reasons`` then say why. With a packed graph, reasons are the
    operators that kept part of the work on the grid.
    """

    has_attention: bool
    reasons: list[Reason] = field(default_factory=list)
    normal: NormalGraph | None = None
    roles: Roles | None = None
    symbols: SymbolTable | None = None
    packed: PackedGraph | None = None
    share: float = 0.0
    operations: int = 0
    attentions: int = 0
    packed_attentions: int = 0
    conditions: list[BlockLists] = field(default_factory=list)  # of a call, without which the plain graph runs


def analyse(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, strategy: str = "auto", compiled: bool = True
) -> Analysis:
    """Run the passes on a Dynamo graph. Never raises for an unsupported graph: the result says why.

    ``strategy`` is the option "attention"; ``compiled`` says whether Inductor will compile the rewritten graph.
    """
    try:
        translation = translate(gm)
        readable = gm if translation is None else translation.module
        effects.check_dynamo_graph(readable)
        normal = normalize(readable, example_inputs)
        _artifact("normalized", normal.module)
        effects.check_normal_graph(normal.module)
    except WholeGraphUnsupported as stop:
        return Analysis(has_attention=mentions_attention(gm), reasons=[stop.reason])
    links = Links(normal.module)
    if not links.attentions:
        return Analysis(has_attention=False, normal=normal)
    roles = find_roles(normal, links)
    graph = pack(normal, roles, strategy=strategy, compiled=compiled)
    _artifact("packed", graph.module)
    result = Analysis(True, costly_reasons(links, graph), normal, roles, SymbolTable(normal.module))
    result.operations = sum(flops(node) for node in links.nodes)
    result.attentions = len(links.attentions)
    result.packed_attentions = len(graph.records.attention_masks)
    # With one attention left as written, what was made to be read would be run: a mask of all pairs.
    if result.packed_attentions and (translation is None or result.packed_attentions == result.attentions):
        result.conditions = [] if translation is None else translation.conditions
        result.packed = graph
        result.share = packed_share(links, graph)
    elif not result.reasons:
        result.reasons = [Reason("", "no attention of this graph works on rows that could share a prefix")]
    return result


def mentions_attention(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph calls attention anywhere (its names differ from the normalised graph's)."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is ATTENTION or "attention" in str(node.target):
                    return True
    return False


def _artifact(name: str, gm: fx.GraphModule) -> None:
    """Send a graph to the log and to torch's structured trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"dualkv_{name}_graph", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
    )
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s graph:\n%s", name, gm.print_readable(print_output=False))
