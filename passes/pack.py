"""Annotated graph -> packed graph, in one walk over the nodes.

Before:   ``embedding(w, ids[B, S]) -> linear -> view(B, S, H, D) -> transpose -> scaled_dot_product_attention
          -> ... -> logits[B, S, V]``
After:    ``embedding(w, pack(ids, token)[1, T]) -> linear -> view(1, T, H, D) -> transpose -> dualkv.packed_attention
          -> ... -> unpack(logits[1, T, V], inverse)``

There are no loops in a graph, so one pass in graph order decides and emits at once: the rule of each operator either
states how it runs on packed tokens, or the operator runs as written on un-packed operands. Conversions are emitted
where a value is defined, never where it is used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

import dualkv_compile.kernels  # noqa: F401  (registers the operators)
from dualkv_compile.passes import registry
from dualkv_compile.passes.normalize import CHECKPOINT, NormalGraph
from dualkv_compile.passes.reasons import Reason, Unproven, reason_at, source_of
from dualkv_compile.passes.regions import REGIONS
from dualkv_compile.passes.roles import ATTENTION, Roles
from dualkv_compile.passes.uniform import is_uniform
from dualkv_compile.passes.values import (
    Dim,
    Frame,
    Ordering,
    Root,
    Size,
    Slice,
    Tags,
    Value,
    align,
    dim_of,
    fake_value,
    flat_dim,
    hint,
    ratio,
    same,
    well_formed,
)
from dualkv_compile.passes.written_attention import WRITTEN

aten = torch.ops.aten


@dataclass(frozen=True)
class PlanInput:
    """A tensor of the plan that the packed graph takes as an input."""

    frame: Frame
    name: str


@dataclass
class Records:
    """What the walk did, by original node; read by the report and by the decision whether packing is worth it."""

    packed: set[fx.Node] = field(default_factory=set)
    unproven: dict[fx.Node, Reason] = field(default_factory=dict)
    unpacked_operands: dict[fx.Node, list[Value]] = field(default_factory=dict)
    pack_sites: dict[fx.Node, frozenset[Root]] = field(default_factory=dict)
    attention_masks: dict[fx.Node, str] = field(default_factory=dict)
    emitted: dict[fx.Node, fx.Node] = field(default_factory=dict)
    validity: dict[Frame, list[Value | None]] = field(default_factory=dict)
    visible: dict[Frame, Value] = field(default_factory=dict)  # which keys are to be left out of the plan's nodes
    strategies: set[str] = field(default_factory=set)  # how attention is computed; "auto" is left to the operator


@dataclass
class PackedGraph:
    """A rewritten graph and what it takes: original inputs by position, and plan tensors."""

    module: fx.GraphModule
    inputs: list[int | PlanInput]
    roots: dict[Frame, list[Root]]
    outputs: list[Any]
    records: Records


def pack(graph: NormalGraph, roles: Roles, *, strategy: str, compiled: bool = True) -> PackedGraph:
    """Rewrite ``graph`` onto packed tokens as far as the rules prove it exact.

    ``compiled``: whether Inductor will compile the result; only then may it call FlexAttention.
    """
    records = Records()
    scope = Scope(graph.module, roles, records, strategy, compiled)
    scope.run()
    return scope.finish()


class Scope:
    """Rewrites one graph: the top level, or the body of an activation checkpoint inside its caller's scope.

    A body sees its caller's values through `Value.outer`; whichever form of a value (packed, grid) or plan tensor the
    body needs becomes an argument of the call.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        roles: Roles,
        records: Records,
        strategy: str,
        compiled: bool,
        parent: Scope | None = None,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.module = module
        self.roles = roles
        self.records = records
        self.strategy = strategy
        self.compiled = compiled
        self.parent = parent
        self.arguments = list(arguments)
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self.callers: dict[fx.Node, fx.Node] = {}
        self.node: fx.Node | None = None
        self._tail: fx.Node | None = None
        self._inputs: dict[fx.Node, int | PlanInput] = {}
        self._plan: dict[PlanInput, fx.Node] = {}
        self._captures: dict[fx.Node, fx.Node] = {}
        self._made: dict[tuple[Any, ...], Any] = {}
        self._bodies = 0
        self._grad_modes: dict[fx.Node, Any] | None = None
        self.outputs: list[Any] = []

    # ------------------------------------------------------------------ the walk

    def run(self) -> None:
        """Visit every node in order."""
        position = 0
        for node in self.module.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                self.values[node] = self._placeholder(node, position)
                position += 1
            elif node.op == "get_attr":
                self.values[node] = self._attribute(node)
            elif node.op == "call_function":
                self.values[node] = self._call(node)
            elif node.op == "output":
                self._output(node)
            else:  # pragma: no cover - make_fx emits no other kind
                raise AssertionError(f"unexpected {node.op} node {node.name}")

    def _placeholder(self, node: fx.Node, position: int) -> Any:
        if self.parent is not None:
            outer = self.arguments[position]
            if isinstance(outer, Value):
                return Value(node, outer.tags, outer.frame, outer.roots, outer=outer, numbering=outer.numbering)
            return self.capture(outer) if isinstance(outer, fx.Node) else outer
        new = self._new_placeholder(node.name, node)
        self._inputs[new] = position
        if not isinstance(fake_value(node), torch.Tensor):
            return new
        return self._with_root(node, Value(node, grid=new))

    def _with_root(self, node: fx.Node, value: Value) -> Value:
        if node in self.roles.roots:
            root, frame = self.roles.roots[node]
            value.tags, value.frame, value.roots = root.tags, frame, frozenset([root])
        return value

    def _attribute(self, node: fx.Node) -> Any:
        held = self.held(node)
        if isinstance(held, fx.GraphModule):
            return held
        self.attributes[str(node.target)] = held
        new = self.graph.get_attr(str(node.target))
        return Value(node, grid=new) if isinstance(fake_value(node), torch.Tensor) else new

    def held(self, node: fx.Node) -> Any:
        """The module, tensor or number that a get_attr node reads."""
        held: Any = self.module
        for part in str(node.target).split("."):
            held = getattr(held, part)
        return held

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            container = self.lookup(node.args[0])
            if isinstance(container, tuple | list):
                return container[node.args[1]]  # type: ignore[index]
        if node.target is CHECKPOINT:
            return self._checkpoint(node)
        if node.target in REGIONS:
            return self.emit(node.target, *self.lookup(node.args), **self.lookup(node.kwargs))
        args, kwargs = self.lookup(node.args), self.lookup(node.kwargs)
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value)]
        failed: Reason | None = None
        if node in self.roles.written:
            try:
                return self._apply_written(node)
            except Unproven as failure:
                failed = Reason(WRITTEN, str(failure), *source_of(node))
                self.records.unproven[node] = failed
        numbering = any(value.numbering for value in operands)
        if numbering or any(value.is_packed for value in operands):
            try:
                result = self._apply_rule(node, args, kwargs, numbering)
                self.records.packed.add(node)
                self.records.unproven.pop(node, None)
                for value in pytree.tree_leaves(result):
                    if isinstance(value, Value) and value.depends_on_order and value.source is node:
                        value.call = (args, kwargs)
                return result
            except Unproven as failure:
                self.records.unproven[node] = failed or reason_at(node, str(failure))
        elif node.target is ATTENTION:
            message = "its query does not come from values proven equal for equal prefixes"
            if node in self.roles.refused:
                message += f" (input {self.roles.refused[node]} requires grad: equal rows have gradients of their own)"
            self.records.unproven[node] = reason_at(node, message)
        return self.as_written(node, args, kwargs)

    def _apply_written(self, node: fx.Node) -> Any:
        """The result of attention that is written out; its two products count as packed."""
        chain = self.roles.written[node]
        entry = registry.lookup(WRITTEN)
        assert entry is not None
        result = entry.rule(self, node, chain)
        self.records.packed.update((node, *chain.products))
        return result

    def _apply_rule(self, node: fx.Node, args: Any, kwargs: Any, numbering: bool) -> Any:
        entry = registry.lookup(node.target, numbering=numbering)
        if entry is None and numbering:
            raise Unproven("it uses positions or counts of the batch's tokens")
        if entry is None:
            raise Unproven("no rule is known for this operator")
        return entry.rule(self, node, *args, **kwargs)

    def as_written(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Run ``node`` as the user's graph does, on grid operands."""
        lost = [
            value
            for value in pytree.tree_leaves((args, kwargs))
            if isinstance(value, Value) and (value.is_packed or value.numbering) and self._would_unpack(value)
        ]
        if lost:
            self.records.unpacked_operands[node] = lost
        new = self.emit(node.target, *self.to_grid(args), **self.to_grid(kwargs))
        self.records.emitted[node] = new
        val = fake_value(node)
        if isinstance(val, torch.Tensor):
            return self._with_root(node, Value(node, grid=new))
        if isinstance(val, tuple | list) and any(isinstance(item, torch.Tensor) for item in val):
            return tuple(
                Value(node, grid=self.emit(operator.getitem, new, index), position=index) for index in range(len(val))
            )
        return new

    def _would_unpack(self, value: Value) -> bool:
        while value.grid is None and value.outer is not None:
            value = value.outer
        return value.grid is None

    def in_autocast_region(self) -> bool:
        """Whether the graph has entered an autocast region so far (the trace knows no dtypes inside one)."""
        entered = any(node.target is torch.amp.autocast_mode._enter_autocast for node in self.graph.nodes)
        return entered or (self.parent is not None and self.parent.in_autocast_region())

    def in_another_grad_mode(self, node: fx.Node) -> bool:
        """Whether ``node`` of the original graph may stand in another grad mode than the node that is visited now."""
        if self._grad_modes is None:
            mode: Any = None
            self._grad_modes = {}
            for other in self.module.graph.nodes:
                if other.target is torch._C._set_grad_enabled:
                    mode = other.args[0]
                self._grad_modes[other] = mode
        assert self.node is not None
        return bool(self._grad_modes[node] != self._grad_modes[self.node])

    # ------------------------------------------------------------------ emission

    def lookup(self, tree: Any) -> Any:
        """Replace original nodes in ``tree`` by what they became."""
        if isinstance(tree, fx.Node):
            return self.values[tree]
        if isinstance(tree, tuple):
            return tuple(self.lookup(item) for item in tree)
        if isinstance(tree, list):
            return [self.lookup(item) for item in tree]
        if isinstance(tree, dict):
            return {key: self.lookup(item) for key, item in tree.items()}
        return tree

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call (or insert it, inside `at_definition`) that keeps the present node's source line."""
        new = self.graph.call_function(target, args, kwargs)
        if self.node is not None and "stack_trace" in self.node.meta:
            new.meta["stack_trace"] = self.node.meta["stack_trace"]
        return new

    @contextmanager
    def at_definition(self, node: fx.Node) -> Iterator[None]:
        """Insert what is emitted in the block right after ``node`` (after all inputs, if it is one)."""
        anchor = node
        if node.op == "placeholder":
            assert self._tail is not None
            anchor = self._tail
        following = anchor.next
        with self.graph.inserting_before(following):
            yield

    def _new_placeholder(self, name: str, source: fx.Node | None = None) -> fx.Node:
        if self._tail is None:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                new = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self._tail):
                new = self.graph.placeholder(name)
        if source is not None and isinstance(fake_value(source), torch.Tensor):
            new.meta["val"] = fake_value(source)
        self._tail = new
        return new

    def capture(self, outer: fx.Node) -> fx.Node:
        """The argument through which a body reads the caller's node ``outer``."""
        if outer not in self._captures:
            self._captures[outer] = self._new_placeholder(f"{outer.name}_in")
        return self._captures[outer]

    def plan(self, frame: Frame, name: str) -> fx.Node:
        """The plan tensor ``name`` of ``frame``."""
        key = PlanInput(frame, name)
        if key not in self._plan:
            if self.parent is not None:
                self._plan[key] = self.capture(self.parent.plan(frame, name))
            else:
                new = self._new_placeholder(f"plan{frame.index}_{name}")
                self._inputs[new] = key
                self._plan[key] = new
        return self._plan[key]

    def once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What ``make`` emitted when first asked for ``key`` in this scope."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # ------------------------------------------------------------------ forms of a value

    def packed(self, value: Value) -> fx.Node:
        """The node that holds the packed form of ``value``."""
        if value.packed is None:
            if value.outer is not None and self.parent is not None:
                value.packed = self.capture(self.parent.packed(value.outer))
            else:
                value.packed = self._pack(value)
        return value.packed

    def grid(self, value: Value) -> fx.Node:
        """The node that holds the grid form of ``value``."""
        if value.grid is None:
            if value.outer is not None and self.parent is not None:
                value.grid = self.capture(self.parent.grid(value.outer))
            elif value.call is not None:
                value.grid = self._run_on_grid(value)
            else:
                value.grid = self._unpack(value)
        return value.grid

    def _run_on_grid(self, value: Value) -> fx.Node:
        """A value in an order of its own: the batch's order differs from that of the packed tokens, so run it again."""
        assert value.call is not None and value.packed is not None
        node, (args, kwargs) = value.source, value.call

        def run() -> fx.Node:
            assert value.packed is not None
            operands, named = self.to_grid(args), self.to_grid(kwargs)
            with self.at_definition(value.packed):
                return self.emit(node.target, *operands, **named)

        new: fx.Node = self.once(("on the grid", node), run)
        if value.position is None:
            return new
        with self.at_definition(new):
            return self.emit(operator.getitem, new, value.position)

    def to_grid(self, tree: Any) -> Any:
        """Replace every `Value` in ``tree`` by its grid form."""
        return pytree.tree_map_only(Value, self.grid, tree)

    def _pack(self, value: Value) -> fx.Node:
        assert value.grid is not None and value.tags is not None and value.frame is not None
        # Only values of the base frame are ever born on the grid: a window is cut from a packed tensor.
        assert value.frame.parent is None
        tags = value.tags
        with self.at_definition(value.grid):
            token = self.plan(value.frame, "token")
            if (flat_place := flat_dim(tags)) >= 0:
                apart, place = self._apart(value, value.grid)
                site = self.emit(torch.ops.dualkv.pack.default, apart, token, place)
                result = self._flatten(site, tags[flat_place], flat_place)
            else:
                order, row = _together(tags), dim_of(tags, Dim.ROW)
                flat = self.emit(aten.flatten.using_ints, self._permute(value.grid, order), row, row + 1)
                site = self.emit(torch.ops.dualkv.pack.default, flat, token, row)
                result = self._permute(self.emit(aten.unsqueeze.default, site, row), _inverse(order))
            self.records.pack_sites[site] = value.roots
        return result

    def _unpack(self, value: Value) -> fx.Node:
        assert value.packed is not None and value.tags is not None and value.frame is not None
        tags = value.tags
        with self.at_definition(value.packed):
            inverse = self.plan(value.frame, "inverse")
            if (flat_place := flat_dim(tags)) >= 0:
                flat = self.emit(aten.reshape.default, inverse, [-1])
                apart, place = self._apart(value, value.packed)
                new = self.emit(torch.ops.dualkv.unpack.default, apart, flat, place)
                return self._flatten(new, tags[flat_place], flat_place)
            order = _together(tags)
            row = dim_of(tags, Dim.ROW)
            flat = self.emit(aten.squeeze.dim, self._permute(value.packed, order), row)
            return self._permute(self.emit(torch.ops.dualkv.unpack.default, flat, inverse, row), _inverse(order))

    def _apart(self, value: Value, node: fx.Node) -> tuple[fx.Node, int]:
        """``node`` with a dimension of its own for tokens, and its place."""
        assert value.tags is not None and value.frame is not None
        place = flat_dim(value.tags)
        kind = value.tags[place]
        if kind is Dim.TOKEN:
            return node, place
        assert kind is not Dim.SORTED
        times = ratio(value.shape[place], value.frame.rows * value.frame.columns)
        assert times is not None
        sizes = [-1, times] if kind is Dim.ASSIGNMENT else [times, -1]
        return self.emit(aten.unflatten.int, node, place, sizes), place + (kind is Dim.STACKED)

    def _flatten(self, node: fx.Node, kind: Dim, place: int) -> fx.Node:
        return node if kind is Dim.TOKEN else self.emit(aten.flatten.using_ints, node, place, place + 1)

    def _permute(self, node: fx.Node, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return node
        return self.emit(aten.permute.default, node, list(order))

    def window(self, value: Value, piece: Slice, columns: Size) -> Value:
        """``value`` restricted to the ``columns`` columns of ``piece``, with only the tokens of those columns."""
        assert value.tags is not None and value.frame is not None
        parent = value.frame
        for frame in parent.windows:
            if frame.window is not None and frame.window.equals(piece):
                break
        else:
            frame = Frame(self.roles.next_index(), parent.rows, columns, parent, piece)
            parent.windows.append(frame)
        index = self.plan(frame, "index")
        dim = dim_of(value.tags, Dim.COLUMN)
        packed = self.emit(torch.ops.dualkv.pack.default, self.packed(value), index, dim)
        assert self.node is not None
        return Value(self.node, value.tags, frame, value.roots, packed=packed)

    # ------------------------------------------------------------------ helpers for rules

    def join(self, values: Sequence[Value]) -> tuple[Frame, frozenset[Root]]:
        """The common frame of packed operands and the union of their roots."""
        packed = [value for value in values if value.is_packed]
        frame = packed[0].frame
        assert frame is not None
        if any(value.frame is not frame for value in packed):
            raise Unproven("its operands cover different columns or different batches")
        return frame, frozenset().union(*(value.roots for value in packed))

    def result(
        self, node: fx.Node, tags: Tags, like: Sequence[Value], packed: fx.Node, position: int | None = None
    ) -> Value:
        """A packed result of ``node`` computed from the operands ``like``."""
        frame, roots = self.join(like)
        return self.result_in(node, tags, frame, roots, packed, position)

    def result_in(
        self,
        node: fx.Node,
        tags: Tags,
        frame: Frame,
        roots: frozenset[Root],
        packed: fx.Node,
        position: int | None = None,
    ) -> Value:
        """A packed result of ``node`` in a frame that need not be that of its operands."""
        if not well_formed(tags):
            raise Unproven("rows and columns do not stay apart and in order")
        assert (Dim.SORTED in tags) == isinstance(frame, Ordering)
        flat = flat_dim(tags)
        if flat >= 0 and tags[flat] in (Dim.ASSIGNMENT, Dim.STACKED):
            val = fake_value(node) if position is None else fake_value(node)[position]
            if ratio(val.shape[flat], frame.rows * frame.columns) is None:
                raise Unproven("how many entries each token has is not one number for all batches")
        self.records.emitted[node] = packed
        return Value(node, tags, frame, roots, packed=packed, position=position)

    def operand(self, value: Value, tags: Tags, frame: Frame) -> fx.Node:
        """``value`` as an operand that broadcasts against packed tensors with ``tags``.

        A packed value must carry the same tags. An as-written value must not vary between rows; where it has one entry
        per column (position embeddings, cos and sin), the entry of each token's column is taken.
        """
        if value.tags is not None:
            if value.frame is not frame or align(value.tags, len(tags)) != tags:
                raise Unproven("operands disagree on which dimensions are rows and columns")
            return self.packed(value)
        if value.ndim > len(tags):
            raise Unproven("an operand has more dimensions than the result")
        own = tags[len(tags) - value.ndim :]
        if (own, frame) not in value.aligned:
            if value.outer is not None and self.parent is not None:
                value.aligned[own, frame] = self.capture(self.parent.operand(value.outer, own, frame))
            else:
                value.aligned[own, frame] = self._align(value, own, frame)
        return value.aligned[own, frame]

    def _align(self, value: Value, tags: Tags, frame: Frame) -> fx.Node:
        node = self.grid(value)
        with self.at_definition(node):
            for dim, kind in enumerate(tags):
                if kind is Dim.FEATURE or same(value.shape[dim], 1):
                    continue
                if value.position is None and is_uniform(value.source, dim):
                    node = self.emit(aten.narrow.default, node, dim, 0, 1)
                elif kind is Dim.COLUMN and same(value.shape[dim], frame.columns):
                    node = self.emit(torch.ops.dualkv.unpack.default, node, self.plan(frame, "column"), dim)
                elif kind is Dim.COLUMN:
                    raise Unproven("an operand has another number of columns")
                else:
                    raise Unproven("an operand differs from row to row and is not known from the tokens")
        return node

    def on_grid(self, node: fx.Node, tags: Tags, like: Sequence[Value], args: Any, kwargs: Any) -> Value:
        """Run ``node`` as written and keep the proof: its result is determined by the prefix and may be packed
        again.
        """
        frame, roots = self.join(like)
        if frame.parent is not None:
            raise Unproven("it runs along the columns of a slice")
        new = self.emit(node.target, *self.to_grid(args), **self.to_grid(kwargs))
        self.records.emitted[node] = new
        return Value(node, tags, frame, roots, grid=new)

    # ------------------------------------------------------------------ checkpoint bodies

    def _checkpoint(self, node: fx.Node) -> Any:
        body = self.lookup(node.args[0])
        inner = Scope(body, self.roles, self.records, self.strategy, self.compiled, self, self.lookup(node.args[1:]))
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        inner.callers = dict(zip(placeholders, node.args[1:], strict=True))  # type: ignore[arg-type]
        inner.run()
        module, captured, outputs = inner.finish_body()
        self._bodies += 1
        name = f"checkpoint_body_{self._bodies}"
        self.attributes[name] = module
        call = self.emit(CHECKPOINT, self.graph.get_attr(name), *captured, **node.kwargs)
        self.records.emitted[node] = call
        results: list[Any] = []
        for index, (outer_form, value) in enumerate(outputs):
            new = self.emit(operator.getitem, call, index)
            if not isinstance(value, Value):
                results.append(new)
            elif outer_form == "packed":
                results.append(Value(node, value.tags, value.frame, value.roots, packed=new, position=index))
            else:
                results.append(Value(node, value.tags, value.frame, value.roots, grid=new, position=index))
        return tuple(results)

    def finish_body(self) -> tuple[fx.GraphModule, list[fx.Node], list[tuple[str, Any]]]:
        """The rewritten body, the caller's nodes it takes, and the form and value of each output."""
        outputs: list[tuple[str, Any]] = []
        nodes: list[Any] = []
        for item in self.outputs:
            if isinstance(item, Value) and item.depends_on_order:
                item = Value(item.source, grid=self.grid(item), position=item.position)
            if isinstance(item, Value):
                form = "packed" if item.is_packed and (item.packed is not None or self._would_unpack(item)) else "grid"
                nodes.append(self.packed(item) if form == "packed" else self.grid(item))
                outputs.append((form, item))
            else:
                nodes.append(item)
                outputs.append(("grid", item))
        self.graph.output(tuple(nodes))
        module = self._build(self.module)
        sources = {inside: outer for outer, inside in self._captures.items()}
        kept = [n for n in module.graph.nodes if n.op == "placeholder"]
        return module, [sources[n] for n in kept], outputs

    # ------------------------------------------------------------------ the end

    def _output(self, node: fx.Node) -> None:
        results = self.lookup(node.args[0])
        self.outputs = pytree.tree_leaves(results)
        if self.parent is not None:
            return
        # To the caller a tensor with several entries a token, or in another order, is no per-token output.
        self.outputs = [
            Value(item.source, position=item.position) if isinstance(item, Value) and not _per_token(item) else item
            for item in self.outputs
        ]
        done: dict[int, fx.Node] = {}

        def form(value: Value) -> fx.Node:
            # One node returned twice is one tensor to the caller, so it must stay one.
            if id(value) not in done:
                done[id(value)] = self._output_form(value)
            return done[id(value)]

        self.graph.output(pytree.tree_map_only(Value, form, results))

    def _output_form(self, value: Value) -> fx.Node:
        """The grid form, with the strides the plain graph would give (a transposed cache stays transposed)."""
        unpacked = value.is_packed and self._would_unpack(value)
        node = self.grid(value)
        strides = value.meta.stride()
        if not unpacked or value.ndim < 2:
            return node
        hints = [hint(stride) for stride in strides]
        order = sorted(range(value.ndim), key=lambda dim: -hints[dim])
        with self.at_definition(node):
            permuted = self._permute(node, order)
            solid = self.emit(aten.contiguous.default, permuted)
            return self._permute(solid, _inverse(order))

    def _build(self, like: fx.GraphModule) -> fx.GraphModule:
        self.graph.eliminate_dead_code()
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users:
                self.graph.erase_node(node)
        used = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        root = torch.nn.Module()
        for name, held in self.attributes.items():
            if name in used:
                if isinstance(held, torch.Tensor) and not isinstance(held, torch.nn.Parameter):
                    root.register_buffer(name, held)
                else:
                    setattr(root, name, held)
        module = fx.GraphModule(root, self.graph, class_name="PackedGraph")
        module.meta.update(like.meta)
        module.graph.lint()
        return module

    def finish(self) -> PackedGraph:
        """The rewritten top-level graph."""
        module = self._build(self.module)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        originals = {node.name: given for node, given in self._inputs.items()}
        inputs = [originals[node.name] for node in placeholders]
        roots: dict[Frame, list[Root]] = {}
        for site in live_nodes(module):
            for root in self.records.pack_sites.get(site, ()):
                frame = self.roles.roots[root.node][1]
                held = roots.setdefault(frame, [])
                if root not in held:
                    held.append(root)
        return PackedGraph(module, inputs, roots, self.outputs, self.records)


def live_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Every node of a rewritten graph and of its checkpoint bodies."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from part.graph.nodes


def _per_token(value: Value) -> bool:
    return value.tags is None or flat_dim(value.tags) < 0 or Dim.TOKEN in value.tags


def _together(tags: Tags) -> list[int]:
    """The permutation that puts the column dimension right behind the row dimension."""
    row, column = dim_of(tags, Dim.ROW), dim_of(tags, Dim.COLUMN)
    order = [dim for dim in range(len(tags)) if dim != column]
    order.insert(row + 1, column)
    return order


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(dim) for dim in range(len(order))]
