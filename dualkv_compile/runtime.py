"""What runs at each call: read the rows, find the tree, choose the graph.

args -> keys -> PrefixPlan (cached by content) -> worth it?  yes: packed graph(args, plan tensors)
no:  plain graph(args)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import Tensor

# Not an error: how a checkpoint ends a recomputation that has given all it needs.
from torch.utils.checkpoint import _StopRecomputationError

from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.errors import CompilationError, DualKVError, UnsupportedGraphError
from dualkv_compile.kernels.data_mask import read_mask, readable
from dualkv_compile.kernels.flex import BACKENDS, check
from dualkv_compile.kernels.strategy import check_repeatable
from dualkv_compile.options import Options
from dualkv_compile.passes.pack import PackedGraph, PlanInput
from dualkv_compile.passes.pipeline import Analysis
from dualkv_compile.passes.reasons import Reason
from dualkv_compile.passes.symbols import SymbolTable
from dualkv_compile.passes.values import Frame, Root, Value
from dualkv_compile.plan import PlanWindow, PrefixPlan
from dualkv_compile.plan_cache import PlanCache
from dualkv_compile.published import CARRIERS, Publication, copies_agree
from dualkv_compile.statistics import STATISTICS

log = logging.getLogger("dualkv_compile")


class Unshared(Exception):
    """Raised when a published prefix tree cannot be used for a call; the text says why."""


class Batch:
    """The tree of one frame of the graph (one batch of rows), from the inputs of a call."""

    def __init__(
        self, frame: Frame, roots: Sequence[Root], analysis: Analysis, options: Options, records_validity: Value | None
    ) -> None:
        assert analysis.symbols is not None and analysis.normal is not None
        self.frame = frame
        self._symbols: SymbolTable = analysis.symbols
        self._options = options
        self._data = [root for root in roots if root.input_index is not None]
        module = analysis.normal.module
        self._masks = [(root, value_function(module, root.node)) for root in roots if root.is_mask]
        self._static = [root for root in roots if root.static]
        self._cache = PlanCache()
        self._static_plans: dict[tuple[Any, ...], PrefixPlan] = {}
        self._keep: Callable[..., torch.Tensor] | None = None
        self._valid: Callable[..., torch.Tensor] | None = None
        if options.padding == "drop" and records_validity is not None:
            self._keep = value_function(analysis.normal.module, records_validity.source)
        visible = analysis.packed.records.visible.get(frame) if analysis.packed is not None else None
        if visible is not None:
            self._valid = value_function(analysis.normal.module, visible.source)

    def plan(self, args: Sequence[Any], publication: Publication | None = None) -> tuple[PrefixPlan, int]:
        """The tree of this call's rows, and how often the device had to be waited for.

        Raises Unshared if the tree of ``publication`` is not that of the inputs.
        """
        rows = self._symbols.evaluate(self.frame.rows, args)
        columns = self._symbols.evaluate(self.frame.columns, args)
        device = _device(args)
        heads = [self._head(root, rows, args) for root in self._static]
        if not self._data and not self._masks and self._keep is None and self._valid is None and len(set(heads)) == 1:
            key = (heads[0], columns, device)
            if key not in self._static_plans:
                groups, shared = heads[0]
                self._static_plans[key] = PrefixPlan.static(
                    groups, shared, columns, device=device, min_shared=self._options.min_shared
                )
            return self._static_plans[key], 0
        surrogates = [_surrogate(groups, shared, columns, device) for groups, shared in heads]
        if publication is not None:
            return self._published(publication, (rows, columns), surrogates, args)
        keys = self.keys(args)
        keys.extend(surrogates)
        grid = torch.empty(rows, columns, device="meta")
        waits = 0
        for root, function in self._masks:
            mask = function(*args)
            key_valid, first = read_mask(mask, grid)
            waits += int(device.type != "cpu")
            if not readable(mask, key_valid, first):
                raise Unshared(_UNREADABLE.format(root.node.name))
            keys.extend((key_valid, first))
        keep = None if self._keep is None else self._keep(*args).bool()
        valid = None if self._valid is None else self._valid(*args).bool()
        plan, syncs = self._cache.get(keys, min_shared=self._options.min_shared, keep=keep, valid=valid)
        return plan, syncs + waits

    def keys(self, args: Sequence[Any]) -> list[Tensor]:
        """The per-token inputs of a call, ``[B, S, ...]`` each."""
        return [root.by_column(args[root.input_index].detach()) for root in self._data if root.input_index is not None]

    def _published(
        self, publication: Publication, sizes: tuple[int, int], extra: Sequence[Tensor], args: Sequence[Any]
    ) -> tuple[PrefixPlan, int]:
        if sizes != (publication.rows, publication.columns):
            raise Unshared(
                f"the published batch has {publication.rows} rows of {publication.columns} columns, this graph works "
                f"on {sizes[0]} of {sizes[1]}"
            )
        if self._keep is not None:
            raise Unshared("padding='drop' does not work with published prefixes")
        valid = None if self._valid is None else self._valid(*args).bool()
        plan, syncs = publication.plan(*extra, min_shared=self._options.min_shared, valid=valid)
        inputs = [(root, args[root.input_index]) for root in self._data if root.input_index is not None]
        inputs += [(root, function(*args)) for root, function in self._masks]
        new = [(root, x) for root, x in inputs if not CARRIERS.known_equal(x, publication)]
        if new:
            found = [_agreement(root, x, plan) for root, x in new]
            syncs += int(plan.token.device.type != "cpu")
            for (root, _), (form, equal) in zip(new, torch.stack(found).tolist(), strict=True):
                if not form:
                    raise Unshared(_UNREADABLE.format(root.node.name))
                if not equal:
                    raise Unshared(f"input {root.node.name} differs between rows that share the published prefixes")
            CARRIERS.remember([x for _, x in new], publication, equal=True)
        return plan, syncs

    def _head(self, root: Root, rows: int, args: Sequence[Any]) -> tuple[tuple[int, ...], int]:
        assert root.groups is not None and root.shared is not None
        count = self._symbols.evaluate(root.groups.count, args)
        return tuple(root.groups.ids(rows, count)), self._symbols.evaluate(root.shared, args)

    def bounds(self, frame: Frame, args: Sequence[Any]) -> tuple[int, int]:
        """The absolute columns ``[start, stop)`` of a derived frame."""
        start, stop = 0, self._symbols.evaluate(frame.base.columns, args)
        for piece in frame.slices():
            first = self._symbols.evaluate(piece.start, args)
            last = self._symbols.evaluate(piece.stop, args)
            low, high, _ = slice(first, last).indices(stop - start)
            start, stop = start + low, start + max(low, high)
        return start, stop


_UNREADABLE = (
    "mask {} is not made of causality, a first key for each query and hidden keys (or adds numbers to the scores)"
)


def _agreement(root: Root, x: Tensor, plan: PrefixPlan) -> Tensor:
    """Whether an input has the form that was read in it, and whether its copies agree: bool ``[2]``."""
    if not root.is_mask:
        equal = copies_agree(root.by_column(x), plan)
        return torch.stack([torch.ones_like(equal), equal])
    valid, first = read_mask(x, plan.inverse)
    return torch.stack([readable(x, valid, first), copies_agree(valid, plan) & copies_agree(first, plan)])


def _surrogate(groups: Sequence[int], shared: int, columns: int, device: torch.device) -> torch.Tensor:
    """A key that agrees exactly where the graph itself repeats rows: the group first, then a number of the row's
    own.
    """
    group = torch.tensor(groups, device=device).unsqueeze(1)
    own = torch.arange(len(groups), device=device).unsqueeze(1) + len(groups)
    column = torch.arange(columns, device=device).unsqueeze(0)
    return torch.where(column < shared, group, own)


def travels(value: Any) -> bool:
    """Whether a value of a graph is a tensor that can be recognised when it comes again."""
    return type(value) is Tensor and value.layout == torch.strided and not value.is_inference()


def _device(args: Sequence[Any]) -> torch.device:
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
            return arg.device
    return torch.device("cpu")


def value_function(module: fx.GraphModule, node: fx.Node) -> Callable[..., torch.Tensor]:
    """A function of the graph's inputs that computes the one value ``node`` (a mask of the tokens)."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for original in module.graph.nodes:
        if original.op == "output":
            break
        copied[original] = graph.node_copy(original, lambda other: copied[other])
    graph.output(copied[node])
    part = fx.GraphModule(module, graph)
    part.graph.eliminate_dead_code()
    part.recompile()
    return part.forward


class Dispatcher:
    """The callable that Dynamo's compiled frame calls: packed graph or plain graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        analysis: Analysis,
        options: Options,
        *,
        dynamic: bool,
        plain: Callable[..., Any] | None = None,
    ) -> None:
        """``plain``: the compiled plain graph, for a graph that must be compiled at once."""
        assert analysis.packed is not None and analysis.normal is not None
        self.analysis = analysis
        self.options = options
        self.packed: PackedGraph = analysis.packed
        self._constants = analysis.normal.constants
        self.plain_module = gm
        self._plain = CompiledGraph(gm, options, dynamic=dynamic, name="plain") if plain is None else plain
        self._compiled = CompiledGraph(self.packed.module, options, dynamic=dynamic, name="packed")
        self._broken: Reason | None = None
        self.batches = [
            Batch(frame, roots, analysis, options, validity_of(self.packed, frame))
            for frame, roots in self.packed.roots.items()
        ]
        self._by_frame = {batch.frame: batch for batch in self.batches}
        # Graphs that have the tokens themselves need no tree from elsewhere.
        roots = [root for found in self.packed.roots.values() for root in found if not root.is_mask]
        self._takes_publications = any(root.node.meta["val"].is_floating_point() for root in roots)
        self._activations = [index for index, given in enumerate(analysis.normal.inputs) if not given.is_parameter]
        self._told: set[str] = set()
        self._verified = False
        self.plans: list[PrefixPlan] = []

    def __call__(self, *args: Any) -> Any:
        """Run one call: the packed graph where it is worth it, the plain graph otherwise."""
        STATISTICS.add(calls=1)
        for reason in self.analysis.reasons:
            STATISTICS.reason(str(reason))
        refused = self._broken or self._changed_constant(args)
        if refused is not None:
            STATISTICS.reason(str(refused))
            return self._run_plain(args)
        try:
            plans, publication = self.share(args)
        except Unshared as failure:
            return self._unshared(failure, args)
        given = sum(plan.rows * plan.columns for plan in plans.values())
        computed = sum(plan.tokens for plan in plans.values())
        STATISTICS.add(tokens_given=given)
        if not self.worth(given, computed, plans.values()):
            STATISTICS.add(tokens_computed=given)
            return self._run_plain(args)
        refused = self.disagreement(args)
        if refused is not None:
            STATISTICS.reason(str(refused))
            STATISTICS.add(tokens_computed=given)
            return self._run_plain(args)
        check_repeatable(self.options.attention)
        if self.options.attention in BACKENDS:
            gradients = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
            check(self.options.attention, _device(args), gradients=gradients)
        inputs = self.prepare(args, plans)
        try:
            result = self._compiled(*inputs)
        except CompilationError:
            raise
        except _StopRecomputationError:
            STATISTICS.add(packed_calls=1, tokens_computed=computed)
            raise
        except Exception as error:
            return self._failed(error, args, given)
        STATISTICS.add(packed_calls=1, tokens_computed=computed)
        if publication is not None:
            CARRIERS.remember(self._proven(result), publication, equal=True)
        if self.options.verify is not False and not (self.options.verify == "first" and self._verified):
            from dualkv_compile.verify import verify_call

            verify_call(self, args, inputs, plans, result)
            self._verified = True
        return result

    @property
    def packed_compilations(self) -> int:
        """How often the inner compiler compiled the packed graph."""
        return self._compiled.compilations

    @property
    def plain_compilations(self) -> int:
        """How often the inner compiler compiled the plain graph."""
        return self._plain.compilations if isinstance(self._plain, CompiledGraph) else 1

    def run_plain(self, *args: Any) -> Any:
        """The untouched graph, compiled; used by verification."""
        return self._plain(*args)

    def run_packed(self, *inputs: Any) -> Any:
        """The rewritten graph, compiled, on prepared inputs; used by verification."""
        return self._compiled(*inputs)

    def _run_plain(self, args: Sequence[Any]) -> Any:
        STATISTICS.add(plain_calls=1)
        return self._plain(*args)

    def _changed_constant(self, args: Sequence[Any]) -> Reason | None:
        for index, value in self._constants.items():
            present = args[index].item()
            if present != value:
                return Reason(
                    "", f"a number of the model changed from {value} to {present} since the graph was rewritten"
                )
        return None

    def disagreement(self, args: Sequence[Any]) -> Reason | None:
        """The first condition on the data of a call that does not hold."""
        for condition in self.analysis.conditions:
            STATISTICS.add(device_syncs=int(_device(args).type != "cpu"))
            reason = condition.disagree(args)
            if reason is not None:
                return reason
        return None

    def share(self, args: Sequence[Any]) -> tuple[dict[Frame, PrefixPlan], Publication | None]:
        """The tree of each batch in a call with ``args``, and the publication it comes from, if it comes from one.

        Raises Unshared if this call cannot share (its tree must be published and is not, or does not fit), and
        RecomputationError if it cannot be told what the call's forward pass shared.
        """
        publication = None
        if self._takes_publications:
            publication = CARRIERS.find(self._carried(args))
            if publication is None and self.analysis.unpublished is not None:
                raise Unshared(str(self.analysis.unpublished))
        plans = self.find_plans(args, publication)
        if self._takes_publications:
            CARRIERS.remember(self._carried(args), publication)
        return plans, publication

    def _carried(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[index] for index in self._activations if travels(args[index])]

    def _proven(self, result: Any) -> list[Tensor]:
        """The outputs of the packed graph that are proven to be equal wherever the tree says so."""
        pairs = zip(pytree.tree_leaves(result), self.packed.outputs, strict=True)
        return [x for x, value in pairs if isinstance(value, Value) and value.is_packed and travels(x)]

    def _unshared(self, failure: Unshared, args: Sequence[Any]) -> Any:
        if self.options.on_unsupported == "error":
            raise UnsupportedGraphError(f"not shareable: {failure}")
        STATISTICS.reason(str(failure))
        if str(failure) not in self._told:
            self._told.add(str(failure))
            log.warning("%s; the plain graph runs", failure)
        CARRIERS.remember(self._carried(args), None)
        return self._run_plain(args)

    def find_plans(self, args: Sequence[Any], publication: Publication | None = None) -> dict[Frame, PrefixPlan]:
        """The tree of each batch of the graph in a call with ``args``: the published one, or that of the rows.

        Raises Unshared if the published one does not fit.
        """
        plans: dict[Frame, PrefixPlan] = {}
        for batch in self.batches:
            plans[batch.frame], syncs = batch.plan(args, publication)
            STATISTICS.add(device_syncs=syncs)
        self.plans = list(plans.values())
        return plans

    def worth(self, given: int, computed: int, plans: Iterable[PrefixPlan]) -> bool:
        """Whether computing ``computed`` tokens instead of ``given`` saves what ``min_saving`` asks of the whole
        graph.
        """
        # With fewer than two tokens in a plan, sizes 0 and 1 would be built into the graph as constants.
        if any(plan.tokens < 2 for plan in plans):
            return False
        share = self.analysis.share
        ratio = 1.0 / ((1.0 - share) + share * computed / given)
        return ratio >= self.options.min_saving

    def prepare(self, args: Sequence[Any], plans: dict[Frame, PrefixPlan]) -> list[Any]:
        """The inputs of the packed graph: some of ``args``, and tensors of the plans."""
        windows: dict[Frame, PlanWindow] = {}

        def window(frame: Frame) -> PlanWindow:
            if frame not in windows:
                windows[frame] = plans[frame.base].window(*self._by_frame[frame.base].bounds(frame, args))
            return windows[frame]

        inputs: list[Any] = []
        for item in self.packed.inputs:
            if not isinstance(item, PlanInput):
                inputs.append(args[item])
                continue
            base = item.frame.base
            holder: PrefixPlan | PlanWindow = plans[base] if item.frame is base else window(item.frame)
            tensor = getattr(holder, item.name)
            if item.name == "index" and item.frame.parent is not None and item.frame.parent is not base:
                # A slice of a slice is packed from the tokens of the outer slice, which stand in packed order as well.
                tensor = torch.searchsorted(window(item.frame.parent).index, tensor)
            if item.name != "inverse":
                # "maybe": a dimension of size 1 is specialised by torch, which mark_dynamic would call an error.
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            inputs.append(tensor)
        return inputs

    def _failed(self, error: Exception, args: Sequence[Any], given: int) -> Any:
        """The packed graph could not be compiled or run: count it, say it once, take the plain graph."""
        if isinstance(error, DualKVError) or self.options.on_unsupported == "error":
            raise UnsupportedGraphError(f"the packed graph failed: {type(error).__name__}: {error}") from error
        reason = Reason(
            "", f"the packed graph failed ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        )
        STATISTICS.reason(str(reason))
        STATISTICS.add(tokens_computed=given)
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if not out_of_memory:
            self._broken = reason
        log.warning(
            "%s; the plain graph runs %s", reason, "for this call" if out_of_memory else "from now on", exc_info=error
        )
        return self._run_plain(args)


def validity_of(packed: PackedGraph, frame: Frame) -> Value | None:
    """The mask of the tokens of ``frame``, if every attention hides the same keys by it."""
    found = packed.records.validity.get(frame, [])
    first = found[0] if found else None
    if first is None or any(value is None or value.source is not first.source for value in found):
        return None
    return first


def can_drop_padding(packed: PackedGraph) -> bool:
    """Whether ``padding="drop"`` finds the padding of every batch of the graph in its masks."""
    return all(validity_of(packed, frame) is not None for frame in packed.roots)


class Refused:
    """The callable for a graph that is not rewritten: counts the call and its reasons, and runs the plain graph."""

    def __init__(self, compiled: Callable[..., Any], reasons: Sequence[Reason]) -> None:
        self._compiled = compiled
        self._reasons = [str(reason) for reason in reasons]

    def __call__(self, *args: Any) -> Any:
        """Run the plain graph."""
        STATISTICS.add(calls=1, plain_calls=1)
        for reason in self._reasons:
            STATISTICS.reason(reason)
        return self._compiled(*args)
