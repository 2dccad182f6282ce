"""Where per-token data enters a graph, and which attentions share one prefix tree.

Roles are hypotheses: calling an input ``(ROW, COLUMN, ...)`` means "compare rows by it". A wrong hypothesis can cost
sharing but never exactness, because every packed value is derived from roots whose data is compared (or whose
repetition the graph itself proves). The shapes of attention propose the batch: a query ``[B, H, S, D]`` means B rows
of S columns, and inputs ``[B, S, ...]`` that the attention depends on are roots. Parameters and buffers never are; an
input that requires grad never is either, since its gradient differs between copies whose values agree (unless the tree
is published from outside with the promise that the copies come from the same tokens and parameters). An input that no
attention depends on (labels, advantages, old log-probabilities) is not a root, so it cannot shorten the prefixes.

Repeats written in the graph are roots as well: ``cat([prompt.expand(N, -1), responses], 1)`` shares its first columns
between all rows whatever the data, and may carry a gradient, since its copies have one common source.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from dualkv_compile.passes.normalize import CHECKPOINT, NormalGraph
from dualkv_compile.passes.uniform import CONSTANT_FILL, is_uniform
from dualkv_compile.passes.values import Dim, Frame, Root, RowGroups, Size, Tags, hint, same
from dualkv_compile.passes.written_attention import Written, find_written

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
_REPEATS = (aten.expand.default, aten.repeat.default, aten.repeat_interleave.self_int)


@dataclass
class Roles:
    """The frames of a graph and the root (if any) of each original node."""

    frames: list[Frame] = field(default_factory=list)
    roots: dict[fx.Node, tuple[Root, Frame]] = field(default_factory=dict)
    attentions: list[fx.Node] = field(default_factory=list)
    refused: dict[fx.Node, str] = field(default_factory=dict)  # attention -> a per-token input of it that requires grad
    written: dict[fx.Node, Written] = field(default_factory=dict)  # those attentions that the model writes out
    _count: int = 0

    def next_index(self) -> int:
        """A number for a new frame, unique in this graph."""
        self._count += 1
        return self._count - 1


def find_roles(graph: NormalGraph, links: Links, *, published: bool = False) -> Roles:
    """Find the attentions of ``graph``, the batches they work on, and the roots of each batch.

    ``published``: the prefix tree will be given from outside, with the promise that per-token inputs that require grad
    were computed from tokens and parameters (see ``dualkv_compile.published``); they are roots then.
    """
    roles = Roles(attentions=links.attentions, written=links.written)
    placeholders = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    held = {node for node, described in zip(placeholders, graph.inputs, strict=True) if described.is_parameter}
    for attention in links.attentions:
        sizes = _batch_of(links.operands(attention)[0])
        if sizes is None:
            continue
        rows, columns = sizes
        reached = links.ancestors(attention)
        found: list[Root] = []
        for index, (node, described) in enumerate(zip(placeholders, graph.inputs, strict=True)):
            # A residual may pass the attention by; nobody but the model made it, if it requires grad.
            if described.is_parameter or not (node in reached or (published and described.requires_grad)):
                continue
            column = _column_of(node, rows, columns)
            if column is None:
                continue
            if described.requires_grad and not published:
                roles.refused.setdefault(attention, described.source or described.name)
            elif _made_equal(node, column, rows, columns):
                tags = _tags(node.meta["val"].ndim, 0, column)
                found.append(Root(node, tags, input_index=index, requires_grad=described.requires_grad))
        # A repeat may itself be computed from another one (embedded prompts): the outermost are enough.
        for node in reached:
            repeat = _repeat_in_graph(node, rows, columns, links, held)
            if repeat is not None:
                found.append(repeat)
        _add(roles, found, rows, columns)
    return roles


def _add(roles: Roles, found: list[Root], rows: Size, columns: Size) -> None:
    """Put roots into the frame that already holds one of them, or into a new one; frames that meet become one."""
    if not found:
        return
    frames: list[Frame] = []
    for root in found:
        if root.node in roles.roots:
            frame = roles.roots[root.node][1]
            if frame not in frames:
                frames.append(frame)
    fitting = [frame for frame in frames if same(frame.rows, rows) and same(frame.columns, columns)]
    if fitting:
        target = fitting[0]
    else:
        target = Frame(roles.next_index(), rows, columns)
        roles.frames.append(target)
    for other in fitting[1:]:
        for root in other.roots:
            roles.roots[root.node] = (root, target)
            target.roots.append(root)
        other.roots.clear()
    for root in found:
        if root.node not in roles.roots:
            roles.roots[root.node] = (root, target)
            target.roots.append(root)


def _batch_of(query: fx.Node) -> tuple[Size, Size] | None:
    """``(B, S)`` of a 4-d query; None where there is nothing to share (one row) or the form is another."""
    shape = query.meta["val"].shape
    if len(shape) != 4 or same(shape[0], 1):
        return None
    return shape[0], shape[2]


def _column_of(node: fx.Node, rows: Size, columns: Size) -> int | None:
    """The column dimension of an input whose sizes are those of the grid: ``[B, S, ...]``, or ``[B, heads, S, D]`` as
    queries, keys and values have it where a graph was cut inside of an attention; None for any other.

    The sizes must be equal for every call, or symbols that are equal in this one.
    """
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.ndim < 2 or not _equal_now(val.shape[0], rows):
        return None
    if _equal_now(val.shape[1], columns):
        return 1
    by_head = val.ndim == 4 and val.is_floating_point() and _equal_now(val.shape[2], columns)
    # A mask [B, 1, S, S] is no value per token.
    return 2 if by_head and not _equal_now(val.shape[3], columns) else None


def _equal_now(size: Size, expected: Size) -> bool:
    return same(size, expected) or (
        isinstance(size, torch.SymInt) and isinstance(expected, torch.SymInt) and hint(size) == hint(expected)
    )


def _made_equal(node: fx.Node, column: int, rows: Size, columns: Size) -> bool:
    """Guard sizes that are not known to be equal: automatic dynamic shapes give ids and mask symbols of their own."""
    sizes = (node.meta["val"].shape[0], node.meta["val"].shape[column])
    return all(
        same(size, expected) or bool(size == expected) for size, expected in zip(sizes, (rows, columns), strict=True)
    )


def _tags(rank: int, row: int, column: int) -> Tags:
    return tuple(Dim.ROW if d == row else Dim.COLUMN if d == column else Dim.FEATURE for d in range(rank))


def _repeat_in_graph(node: fx.Node, rows: Size, columns: Size, links: Links, held: Set[fx.Node]) -> Root | None:
    """A root for a repeat written in the graph that fills the whole grid, or None."""
    val = node.meta.get("val")
    if node.op != "call_function" or not isinstance(val, torch.Tensor) or val.ndim < 2 or not same(val.shape[0], rows):
        return None
    if node.target is aten.cat.default:
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        column = int(dim) % val.ndim  # type: ignore[arg-type]
        if column == 0 or not same(val.shape[column], columns):
            return None
        parts: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        groups, shared, leading = _shared_head(parts, column)
        # Constants and column numbers are the same in every row whatever the batch: they repeat nothing. Weights do in
        # front of other tokens (a learned prompt), but not alone (rotary angles).
        known: Set[fx.Node] = held if len(leading) == len(parts) else frozenset()
        if groups is None or all(part.target in CONSTANT_FILL or not links.reads_data(part, known) for part in leading):
            return None
        return Root(node, _tags(val.ndim, 0, column), groups=groups, shared=shared)
    if node.target in _REPEATS and same(val.shape[1], columns) and links.reads_data(node, held):
        groups = _row_groups(node)
        if groups is not None:
            return Root(node, _tags(val.ndim, 0, 1), groups=groups, shared=columns)
    return None


def _shared_head(parts: list[fx.Node], column: int) -> tuple[RowGroups | None, Size, list[fx.Node]]:
    """How the leading parts of a concatenation repeat over the rows, how many columns they cover, and these parts."""
    leading: list[fx.Node] = []
    groups: RowGroups | None = None
    shared: Size = 0
    for part in parts:
        val = part.meta["val"]
        if val.ndim == 1:  # the legacy empty operand of a concatenation
            continue
        own = RowGroups(1, True) if is_uniform(part, 0) else _row_groups(part)
        if own is None or (groups is not None and own != groups):
            break
        groups, shared = own, shared + val.shape[column]
        leading.append(part)
    return groups, shared, leading


def _row_groups(node: fx.Node) -> RowGroups | None:
    """How ``node`` repeats its operand's rows; None if it is no repeat along dimension 0."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0].meta.get("val")
    val = node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(val, torch.Tensor):
        return None
    if node.target is aten.expand.default:
        return RowGroups(1, True) if is_uniform(node, 0) else None
    if node.target is aten.repeat.default:
        repeats = node.args[1]
        assert isinstance(repeats, list | tuple)
        if not all(isinstance(times, int) and times == 1 for times in repeats[1:]):
            return None
        # A repeat that makes the row dimension has one source row.
        return RowGroups(source.shape[0], False) if source.ndim == val.ndim else RowGroups(1, True)
    if node.target is aten.repeat_interleave.self_int:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        return RowGroups(source.shape[0], True) if dim in (0, -val.ndim) else None
    return None


class Links:
    """Data flow of a graph and its checkpoint bodies as one graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.attentions: list[fx.Node] = []
        self.written: dict[fx.Node, Written] = {}
        self.nodes: list[fx.Node] = []
        self._callers: dict[fx.Node, fx.Node] = {}
        self._bodies: dict[fx.Node, fx.Node] = {}
        self._visit(module)

    def _visit(self, module: fx.GraphModule) -> None:
        written = find_written(module.graph)
        self.written.update(written)
        for node in module.graph.nodes:
            self.nodes.append(node)
            if node.op != "call_function":
                continue
            if node.target is ATTENTION or node in written:
                self.attentions.append(node)
            elif node.target is CHECKPOINT:
                body = getattr(module, node.args[0].target)
                inner = [n for n in body.graph.nodes if n.op == "placeholder"]
                for placeholder, argument in zip(inner, node.args[1:], strict=True):
                    if isinstance(argument, fx.Node):
                        self._callers[placeholder] = argument
                (self._bodies[node],) = [n for n in body.graph.nodes if n.op == "output"]
                self._visit(body)

    def operands(self, attention: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Query, key and value of an attention (without its mask)."""
        if attention in self.written:
            chain = self.written[attention]
            return chain.query.node, chain.key.node, chain.value.node
        query, key, value = attention.args[:3]
        assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
        return query, key, value

    def ancestors(self, node: fx.Node, *, masks: bool = True) -> dict[fx.Node, None]:
        """Every node that ``node`` depends on, through checkpoint bodies in both directions, in a stable order.

        Without ``masks``, attention depends on nothing but its query, key and value.
        """
        seen: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            current = stack.pop()
            whole = masks or current not in self.attentions
            for source in self._inputs(current) if whole else self.operands(current):
                if source not in seen:
                    seen[source] = None
                    stack.append(source)
        return seen

    def reads_data(self, node: fx.Node, held: Set[fx.Node]) -> bool:
        """Whether ``node`` depends on any tensor input but those of ``held``, the weights (rotary angles do not)."""
        return any(
            other.op == "placeholder"
            and other not in self._callers
            and other not in held
            and isinstance(other.meta.get("val"), torch.Tensor)
            for other in self.ancestors(node)
        )

    def _inputs(self, node: fx.Node) -> Iterator[fx.Node]:
        if node in self._callers:
            yield self._callers[node]
        elif node in self._bodies:
            yield self._bodies[node]
        else:
            yield from node.all_input_nodes
