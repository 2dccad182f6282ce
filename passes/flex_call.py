"""``flex_attention`` called by the model, as attention with a mask that the other passes can read.

Before (Dynamo):  ``flex_attention(q, k, v, score_mod, (S, S, block lists ..., mask_mod), scale, ...)``
After:            ``mask = mask_mod(b[B,1,1,1], h[1,H,1,1], q[1,1,S,1], k[1,1,1,S], *captured)``,
                  ``scaled_dot_product_attention(q, k, v, mask, scale=scale)``

Tracing a Dynamo graph to ATen does not keep the operator whole, so this comes before. The mask's tensor is never
computed: `mask.lift` reads the predicate from it. A ``mask_mod`` is written for numbers; evaluated on index tensors
that broadcast it means the same where each of its operators is elementwise, or reads a captured tensor at one index per
dimension. Others are refused, as are ``score_mod`` (other than none) and the log-sum-exp as a result.

What a call of the operator means also depends on its block lists: a block of keys that they leave out is skipped,
whatever ``mask_mod`` says. They are data. `BlockLists` compares them with ``mask_mod`` at each call, and the rewritten
graph runs only where both say the same. If an attention cannot be packed the plain graph runs, since the form made here
serves to be read, not to be run.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.normalize import CHECKPOINT
from dualkv_compile.passes.reasons import Reason, WholeGraphUnsupported, reason_at

FLEX = torch.ops.higher_order.flex_attention

_INDICES = 4  # row, head, query, key: the arguments of a mask_mod before what it captured
_ELEMENTWISE = {
    *(operator.add, operator.sub, operator.floordiv, operator.mod, operator.neg, operator.abs),
    *(operator.and_, operator.or_, operator.invert),
    *(operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne),
    *(torch.logical_and, torch.logical_or, torch.logical_not, torch.bitwise_and, torch.bitwise_or),
    *(torch.where, torch.abs, torch.minimum, torch.maximum),
    *(torch.le, torch.lt, torch.ge, torch.gt, torch.eq, torch.ne),
}
_ELEMENTWISE_METHODS = {"to", "bool", "int", "long", "abs", "logical_and", "logical_or", "logical_not"} | {
    *("le", "lt", "ge", "gt", "eq", "ne"),
}
_FILLS = {"new_ones", "new_zeros"}


@dataclass
class BlockLists:
    """The block lists of a call, to be compared with its mask.

    ``lists`` are the positions among the graph's inputs of ``kv_num_blocks [Bm, Hm, nq]``, ``kv_indices [Bm, Hm, nq,
    nk]`` and the same two for full blocks (None if there are none). ``captured`` are positions as well, or
    ``("number", n)``; so are ``sizes``, the numbers of queries and keys, and of queries and keys in a block.
    """

    reason: Reason
    mask: fx.GraphModule
    lists: tuple[int | None, ...]
    sizes: tuple[int | tuple[str, Any], ...]
    captured: tuple[int | tuple[str, Any], ...]
    _agreed: list[Any] = field(default_factory=list)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that need one comparison only (the layers of a model)."""
        return (self.mask.code, self.lists, self.sizes, self.captured)

    def disagree(self, args: Sequence[Any]) -> Reason | None:
        """Why the rewritten graph must not run on ``args``; None if lists and mask say the same.

        The comparison evaluates the mask on all pairs of queries and keys, row by row; a call with equal contents is
        recognised.
        """
        lists = [None if position is None else args[position].detach() for position in self.lists]
        sizes = [_argument(args, given) for given in self.sizes]
        captured = [_argument(args, given) for given in self.captured]
        present = [*lists, *sizes, *captured]
        if _equal(present, self._agreed):
            return None
        with torch.no_grad():
            agree = self._agree(lists, [int(size) for size in sizes], captured)
        if not agree:
            return self.reason
        self._agreed = [item.clone() if isinstance(item, torch.Tensor) else item for item in present]
        return None

    def _agree(self, lists: Sequence[torch.Tensor | None], sizes: Sequence[int], captured: Sequence[Any]) -> bool:
        counts, indices, full_counts, full_indices = lists
        queries, keys, *block = sizes
        assert counts is not None and indices is not None
        row, head, *_ = (node for node in self.mask.graph.nodes if node.op == "placeholder")
        rows = counts.shape[0]
        if head.users or (row.users and rows == 1):
            return False
        # [Bm, Hm, nq, nk]: how often each block is listed.
        partly, wrong = _times_listed(counts, indices)
        full = torch.zeros_like(partly)
        if full_counts is not None and full_indices is not None:
            full, also_wrong = _times_listed(full_counts, full_indices)
            wrong = wrong | also_wrong
        wrong = wrong | ((partly + full) > 1).any()
        column = torch.arange(keys, device=counts.device)
        query = torch.arange(queries, device=counts.device).unsqueeze(1)
        for index in range(rows):
            number = torch.tensor(index, device=counts.device)
            visible = self.mask(number, torch.zeros_like(number), query, column, *captured).expand(queries, keys)
            some, all_ = _by_block(visible, block)
            if some.shape != partly.shape[2:]:
                return False
            wrong = wrong | (some & (partly[index] + full[index] == 0)).any() | (~all_ & (full[index] > 0)).any()
        return not bool(wrong)


def _argument(args: Sequence[Any], given: int | tuple[str, Any]) -> Any:
    if isinstance(given, tuple):
        return given[1]
    value = args[given]
    return value.detach() if isinstance(value, torch.Tensor) else value


def _equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    if len(a) != len(b):
        return False
    for left, right in zip(a, b, strict=True):
        if isinstance(left, torch.Tensor):
            if not isinstance(right, torch.Tensor) or left.dtype != right.dtype or not torch.equal(left, right):
                return False
        elif left is not right and left != right:
            return False
    return True


def _times_listed(counts: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each block of keys is among the first ``counts[b, h, q]`` of ``indices[b, h, q, :]``, and whether one
    of these is no block.
    """
    number = indices.shape[-1]
    listed = torch.arange(number, device=indices.device) < counts.unsqueeze(-1)
    # Entries behind the count may hold anything.
    places = torch.where(listed, indices, 0).long()
    known = places.clamp(0, number - 1)
    times = torch.zeros(indices.shape, dtype=torch.int32, device=indices.device)
    return times.scatter_add_(-1, known, listed.to(torch.int32)), (known != places).any()


def _by_block(visible: torch.Tensor, block: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a block of ``visible [Sq, Sk]`` sees some pair, and all of its pairs (of those that exist)."""
    size_q, size_k = block
    pads = (0, -visible.shape[1] % size_k, 0, -visible.shape[0] % size_q)

    def blocks(fill: bool) -> torch.Tensor:
        padded = torch.nn.functional.pad(visible, pads, value=fill)
        return padded.unflatten(1, (-1, size_k)).unflatten(0, (-1, size_q)).transpose(1, 2).flatten(2)

    return blocks(False).any(-1), blocks(True).all(-1)


@dataclass(frozen=True)
class Translation:
    """A Dynamo graph without ``flex_attention``, and what must hold at a call for it to mean the same."""

    module: fx.GraphModule
    conditions: list[BlockLists]


def translate(gm: fx.GraphModule) -> Translation | None:
    """Rewrite the ``flex_attention`` calls of a Dynamo graph; None if it has none. ``gm`` is left as it was.

    Raises WholeGraphUnsupported where a call is not attention with a mask, see the module's text.
    """
    if not _calls_flex(gm):
        return None
    conditions: dict[tuple[Any, ...], BlockLists] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    origins = {node: position for position, node in enumerate(placeholders)}
    module = _rewrite(gm, origins, conditions)
    return Translation(module, list(conditions.values()))


def _calls_flex(gm: fx.GraphModule) -> bool:
    return any(
        node.target is FLEX for part in gm.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes
    )


def _rewrite(
    module: fx.GraphModule, origins: Mapping[fx.Node, int], conditions: dict[tuple[Any, ...], BlockLists]
) -> fx.GraphModule:
    """A copy of ``module`` without the operator; ``origins`` are positions of the whole graph's inputs."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {}
    for node in module.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.target is FLEX:
            call = _Call(node, module, origins)
            condition = call.block_lists()
            conditions.setdefault(condition.key, condition)
            copied[node] = call.emit(graph, copied)
        elif node.target is operator.getitem and isinstance(source, fx.Node) and source.target is FLEX:
            copied[node] = copied[source]
            if node.args[1] != 0 and node.users:
                raise WholeGraphUnsupported(reason_at(source, "more of it is used than the attention's output"))
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
            if node.op in ("get_attr", "call_module"):
                attributes[str(node.target)] = _held(module, node)
        if node.target is CHECKPOINT:
            body = _held(module, source)
            inner = [n for n in body.graph.nodes if n.op == "placeholder"]
            known = {
                argument: origins[given]
                for argument, given in zip(inner, node.args[1:], strict=True)
                if isinstance(given, fx.Node) and given in origins
            }
            attributes[source.target] = _rewrite(body, known, conditions) if _calls_flex(body) else body
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:  # the functions given to the operator
            graph.erase_node(node)
            attributes.pop(str(node.target), None)
    result = fx.GraphModule(attributes, graph)
    result.meta.update(module.meta)
    return result


def _held(module: fx.GraphModule, node: fx.Node) -> Any:
    held: Any = module
    for part in str(node.target).split("."):
        held = getattr(held, part)
    return held


class _Call:
    """One call of the operator in ``module``."""

    def __init__(self, node: fx.Node, module: fx.GraphModule, origins: Mapping[fx.Node, int]) -> None:
        names = ("query", "key", "value", "score_mod", "block_mask", "scale", "options", "score_held", "mask_held")
        held: dict[str, Any] = {"score_held": (), "mask_held": ()}
        given: dict[str, Any] = {**held, **dict(zip(names, node.args, strict=False)), **node.kwargs}
        self.node = node
        self.query, self.key, self.value = given["query"], given["key"], given["value"]
        self.scale, self.captured = given["scale"], given["mask_held"]
        self.origins = origins
        # (length of queries, of keys, 2 lists, 2 lists of full blocks, ..., block of queries, of keys, mask_mod)
        block_mask: Any = given["block_mask"]
        self.lists, self.sizes = block_mask[2:6], (*block_mask[:2], *block_mask[-3:-1])
        score: fx.GraphModule = _held(module, given["score_mod"])
        self.mask: fx.GraphModule = _held(module, block_mask[-1])
        (output,) = (n for n in score.graph.nodes if n.op == "output")
        if output.args[0] is not next(iter(score.graph.nodes)):
            raise self.refuse("its scores are modified (score_mod)")
        self.arguments = [n for n in self.mask.graph.nodes if n.op == "placeholder"]
        if len(self.arguments) != _INDICES + len(self.captured):
            raise self.refuse("what its mask_mod takes is not understood")
        for part in self.mask.graph.nodes:
            if part.op not in ("placeholder", "output") and not self._is_elementwise(part):
                raise self.refuse(f"its mask_mod calls {getattr(part.target, '__name__', part.target)}")

    def refuse(self, message: str) -> WholeGraphUnsupported:
        """The error that ends the rewriting of the graph."""
        return WholeGraphUnsupported(reason_at(self.node, message))

    def _is_elementwise(self, part: fx.Node) -> bool:
        """Whether a node of ``mask_mod`` means the same on indices that broadcast."""
        result = part.meta.get("example_value")
        if isinstance(result, torch.Tensor) and result.ndim:
            return False
        if part.op == "call_function" and part.target is operator.getitem:
            source, index = part.args
            places = index if isinstance(index, tuple) else (index,)
            held = isinstance(source, fx.Node) and source in self.arguments[_INDICES:]
            value = source.meta.get("example_value") if isinstance(source, fx.Node) else None
            numbers = all(isinstance(place, fx.Node | int) and not isinstance(place, bool) for place in places)
            return held and numbers and isinstance(value, torch.Tensor) and value.ndim == len(places)
        if part.op == "call_function":
            return part.target in _ELEMENTWISE
        if part.op == "call_method" and part.target in _FILLS:
            return part.args[1:] in (((),), ([],))
        return part.op == "call_method" and part.target in _ELEMENTWISE_METHODS

    def block_lists(self) -> BlockLists:
        """What to compare at each call."""
        lists = tuple(None if item is None else self._origin(item) for item in self.lists)
        sizes = tuple(self._origin_or_number(item) for item in self.sizes)
        captured = tuple(self._origin_or_number(item) for item in self.captured)
        reason = reason_at(self.node, "its block lists say something else than its mask_mod")
        return BlockLists(reason, self.mask, lists, sizes, captured)

    def _origin(self, item: Any) -> int:
        if not isinstance(item, fx.Node) or item not in self.origins:
            raise self.refuse("its block mask is made inside of the graph, not given to it")
        return self.origins[item]

    def _origin_or_number(self, item: Any) -> int | tuple[str, Any]:
        return self._origin(item) if isinstance(item, fx.Node) else ("number", item)

    def emit(self, graph: fx.Graph, copied: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """Append the mask and the attention to ``graph``; the new node is the attention's output."""
        query, key, value = (copied[part] for part in (self.query, self.key, self.value))
        before = len(graph.nodes)
        indices = [
            self._index(graph, source, dim, place)
            for place, (source, dim) in enumerate(((query, 0), (query, 1), (query, 2), (key, 2)))
        ]
        held = [copied[item] if isinstance(item, fx.Node) else item for item in self.captured]
        inside: dict[fx.Node, Any] = dict(zip(self.arguments, [*indices, *held], strict=True))
        mask: Any = None
        for part in self.mask.graph.nodes:
            if part.op == "output":
                mask = inside[part.args[0]]
            elif part.op != "placeholder":
                args, kwargs = fx.map_arg((part.args, part.kwargs), inside.__getitem__)
                inside[part] = graph.create_node(part.op, part.target, args, kwargs)
        heads = [part.meta["example_value"].shape[1] for part in (self.query, self.key)]
        grouped = not all(isinstance(count, int) for count in heads) or heads[0] != heads[1]
        new = graph.call_function(
            torch.nn.functional.scaled_dot_product_attention,
            (query, key, value, mask),
            {"scale": fx.map_arg(self.scale, copied.__getitem__), "enable_gqa": grouped},
        )
        for made in list(graph.nodes)[before:]:
            made.meta["stack_trace"] = self.node.meta.get("stack_trace")
        return new

    @staticmethod
    def _index(graph: fx.Graph, source: fx.Node, dim: int, place: int) -> fx.Node:
        """The numbers along dimension ``dim`` of ``source``, as dimension ``place`` of four."""
        size = graph.call_method("size", (source, dim))
        device = graph.call_function(getattr, (source, "device"))
        numbers = graph.call_function(torch.arange, (size,), {"device": device})
        shape = [1] * _INDICES
        shape[place] = -1
        return graph.call_method("view", (numbers, *shape))
