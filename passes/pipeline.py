"""The passes in their order.

Dynamo graph
-> flex_call                    flex_attention as attention with a mask that can be read
-> effects.check_dynamo_graph   only known higher-order operators
-> normalize                    pre-dispatch ATen, same inputs
-> assemble                     memory filled piece by piece becomes a concatenation
-> effects.check_normal_graph   no randomness, no visible mutation, no collectives
-> collapse_views               views of views, as batched products need them
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
from dualkv_compile.passes.assembled import assemble
from dualkv_compile.passes.collapse import collapse_views
from dualkv_compile.passes.flex_call import BlockLists, translate
from dualkv_compile.passes.normalize import NormalGraph, normalize
from dualkv_compile.passes.pack import PackedGraph, pack
from dualkv_compile.passes.reasons import Reason, WholeGraphUnsupported, reason_at
from dualkv_compile.passes.roles import ATTENTION, Links, Roles, find_roles
from dualkv_compile.passes.symbols import SymbolTable
from dualkv_compile.passes.worth import costly_reasons, flops, packed_share

log = logging.getLogger("dualkv_compile.passes")


@dataclass
class Analysis:
    """What the passes found for one graph.

    ``packed`` is None when the plain graph must run; ``reasons`` then say why. With a packed graph, reasons are the
    operators that kept part of the work on the grid. With ``unpublished``, ``packed`` is for calls whose prefix tree is
    published from outside; other calls run plain, for that reason.
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
    unpublished: Reason | None = None
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
        assemble(normal.module)
        effects.check_normal_graph(normal.module)
        collapse_views(normal.module)
    except WholeGraphUnsupported as stop:
        return Analysis(has_attention=mentions_attention(gm), reasons=[stop.reason])
    links = Links(normal.module)
    if not links.attentions:
        return Analysis(has_attention=False, normal=normal)

    def packed(*, published: bool) -> Analysis:
        roles = find_roles(normal, links, published=published)
        result = _pack(normal, links, roles, strategy, compiled)
        # With one attention left as written, what was made to be read would be run: a mask of all pairs.
        if translation is not None and result.packed is not None:
            result.conditions = translation.conditions
            if result.packed_attentions < result.attentions:
                result.packed = None
        if result.packed is None and not result.reasons:
            result.reasons = [Reason("", "no attention of this graph works on rows that could share a prefix")]
        return result

    result = packed(published=False)
    assert result.roles is not None
    if result.packed is None and result.roles.refused:
        given = packed(published=True)
        if given.packed is not None:
            attention, name = next(iter(result.roles.refused.items()))
            given.unpublished = reason_at(
                attention,
                f"input {name} requires grad: equal rows have gradients of their own, unless it is told that they come "
                "from the same tokens (dualkv_compile.attach(model), or dualkv_compile.shared_prefixes)",
            )
            result = given
    if result.packed is not None:
        _artifact("packed", result.packed.module)
    return result


def _pack(normal: NormalGraph, links: Links, roles: Roles, strategy: str, compiled: bool) -> Analysis:
    graph = pack(normal, roles, strategy=strategy, compiled=compiled)
    result = Analysis(True, costly_reasons(links, graph), normal, roles, SymbolTable(normal.module))
    result.operations = sum(flops(node) for node in links.nodes)
    result.attentions = len(links.attentions)
    result.packed_attentions = len(graph.records.attention_masks)
    if result.packed_attentions:
        result.packed = graph
        result.share = packed_share(links, graph)
    return result


def mentions_attention(gm: fx.GraphModule) -> bool:
    """Whether a Dynamo graph calls attention anywhere (its names differ from the normalised graph's)."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is ATTENTION or "attention" in str(node.target) or _weighs_values(node):
                    return True
    return False


def _weighs_values(node: fx.Node) -> bool:
    """Whether ``node`` is a softmax whose result goes, copied at most, into a product with another tensor."""
    if node.op not in ("call_function", "call_method") or _name(node) not in ("softmax", "_softmax"):
        return False
    while len(node.users) == 1:
        (node,) = node.users
        if _name(node) in ("matmul", "bmm"):
            return True
        if _name(node) not in ("to", "type_as", "float", "type", "dropout", "view", "reshape", "getitem", "contiguous"):
            return False
    return False


def _name(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _artifact(name: str, gm: fx.GraphModule) -> None:
    """Send a graph to the log and to torch's structured trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"dualkv_{name}_graph", "encoding": "string"},
        payload_fn=lambda: gm.print_readable(print_output=False),
    )
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s graph:\n%s", name, gm.print_readable(print_output=False))
