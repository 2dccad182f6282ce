"""``explain``: what the backend would do with a function and its inputs, in words and as a dictionary.

The function runs once under ``torch.compile`` with a collecting backend: each graph that Dynamo finds goes through the
passes, its plan is made from the actual inputs, and the graph then runs as written (where it would run packed, packed
as well, to count operations). Nothing is compiled, nothing is counted in `stats`, and gradients, buffers, training
flags and random number generators are put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dualkv_compile.kernels import packed_attention
from dualkv_compile.kernels.flex import BACKENDS
from dualkv_compile.kernels.predicate import from_text
from dualkv_compile.options import Options
from dualkv_compile.passes.pack import live_nodes
from dualkv_compile.passes.pipeline import Analysis, analyse, mentions_attention
from dualkv_compile.passes.reasons import Reason, operator_name
from dualkv_compile.passes.values import Frame
from dualkv_compile.plan import PrefixPlan
from dualkv_compile.runtime import Batch, Dispatcher, Unshared, validity_of, value_function

_SHOWN = 10  # prompts and operators listed in the text of one graph
_count = itertools.count()


@dataclass(frozen=True)
class Prompt:
    """A run of columns that several rows have in common, behind ``start`` columns that they share as well."""

    rows: tuple[int, ...]
    start: int
    stop: int
    tokens: int  # stop - start, without padding where that is known


@dataclass(frozen=True)
class BatchReport:
    """The prefix tree of one batch of rows."""

    rows: int
    columns: int
    prompts: list[Prompt]
    tokens_given: int
    tokens_computed: int
    padding_given: int | None  # of these, what the attention mask declares padding; None where it is not known
    padding_computed: int | None

    @property
    def ratio(self) -> float:
        """Tokens given per token computed."""
        return self.tokens_given / self.tokens_computed if self.tokens_computed else float("inf")


@dataclass
class GraphReport:
    """What the backend would do with one graph."""

    runs: str = "plain"  # "packed", "plain", or "error" with on_unsupported="error"
    why: str = ""
    compiler: str = ""
    batches: list[BatchReport] = field(default_factory=list)
    attentions: int = 0
    packed_attentions: int = 0
    strategy: str | None = None  # how attention on packed tokens is computed; None where there is none
    packed_share: float = 0.0  # part of the operations that the packed graph does on packed tokens
    flops_plain: int | None = None  # forward pass; None where it could not be counted
    flops_packed: int | None = None
    operators_packed: dict[str, int] = field(default_factory=dict)
    operators_as_written: dict[str, int] = field(default_factory=dict)
    ended: list[Reason] = field(default_factory=list)  # operators that ended the proof, with the user's line
    hints: list[str] = field(default_factory=list)

    @property
    def saving(self) -> float | None:
        """The part of the forward pass's operations that packing saves (0 to 1)."""
        if not self.flops_plain or self.flops_packed is None:
            return None
        return 1 - self.flops_packed / self.flops_plain

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries."""
        report = dataclasses.asdict(self)
        for batch, described in zip(self.batches, report["batches"], strict=True):
            described["ratio"] = batch.ratio
        report["saving"] = self.saving
        return report


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`: one report for each graph that Dynamo made of the function."""

    name: str
    graphs: list[GraphReport]

    @property
    def tokens_given(self) -> int:
        """Grid positions of all batches."""
        return sum(batch.tokens_given for graph in self.graphs for batch in graph.batches)

    @property
    def tokens_computed(self) -> int:
        """Tokens that would be computed: those of the trees where the packed graph runs."""
        return sum(
            batch.tokens_computed if graph.runs == "packed" else batch.tokens_given
            for graph in self.graphs
            for batch in graph.batches
        )

    @property
    def ratio(self) -> float:
        """Tokens given per token computed; 1 where nothing is packed."""
        return self.tokens_given / self.tokens_computed if self.tokens_computed else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dictionaries."""
        return {
            "name": self.name,
            "tokens_given": self.tokens_given,
            "tokens_computed": self.tokens_computed,
            "ratio": self.ratio,
            "graphs": [graph.to_dict() for graph in self.graphs],
        }

    def __str__(self) -> str:
        lines = [f"dualkv: {self.name}, {_number(len(self.graphs), 'graph')}"]
        if not self.graphs:
            lines.append("  torch.compile found nothing to compile")
        for number, graph in enumerate(self.graphs, 1):
            lines.append(f"graph {number} of {len(self.graphs)}: {_headline(graph)}")
            lines.extend(f"  {name:<12}{text}" for name, text in _details(graph))
        return "\n".join(lines)


def explain(
    fn_or_model: Callable[..., Any], *args: Any, dualkv_options: Mapping[str, Any] | None = None, **kwargs: Any
) -> Explanation:
    """Say what ``backend="dualkv"`` would do with ``fn_or_model(*args, **kwargs)``.

    The function runs once, as written, in the present grad mode; tensors among the arguments are copied for it.
    Compiled functions and models are explained as if they were not compiled. Gradients, buffers and training flags of
    the models that are found (the model itself, arguments, what the function closes over) are put back, as are the
    random number generators; other effects of the function, such as an optimizer's step, stay.

    Args:
        fn_or_model: what would be given to ``torch.compile``.
        args: its arguments.
        dualkv_options: the backend's options, see `Options`.
        kwargs: its keyword arguments.

    Raises:
        OptionError: a bad option. Unsupported graphs never raise; the explanation says why they run as written.
    """
    options = Options.parse(dualkv_options)
    target = _uncompiled(fn_or_model)
    collector = _Collector(options)
    extra: dict[str, Any] = {}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        extra["isolate_recompiles"] = True  # our entries must not count against the recompile limit of the user's
    compiled = torch.compile(_fresh_function(target), backend=collector, **extra)
    with _undone(fn_or_model, target, args, kwargs):
        args, kwargs = _copied(args, kwargs)
        compiled(*args, **kwargs)
    return Explanation(_name(fn_or_model), collector.reports)


# ----------------------------------------------------------------------------------------------------------- collecting


class _Collector:
    """A backend that reports on each graph and runs it as written."""

    def __init__(self, options: Options) -> None:
        self.reports: list[GraphReport] = []
        self._options = options

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            # Nothing is compiled here, and FlexAttention never runs uncompiled; operations and tokens are the same.
            analysis = analyse(gm, example_inputs, strategy=self._options.attention, compiled=False)
        except Exception as error:  # as the backend: any failure of ours means the plain graph
            failure = Reason("", f"the passes failed ({type(error).__name__}: {error})")
            analysis = Analysis(has_attention=mentions_attention(gm), reasons=[failure])
        report = _static_report(analysis, self._options)
        self.reports.append(report)
        dispatcher: Dispatcher | None = None
        if analysis.packed is not None:
            dynamic = any(isinstance(example, torch.SymInt) for example in example_inputs)
            dispatcher = Dispatcher(gm, analysis, self._options, dynamic=dynamic)
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            if not first:
                return gm.forward(*args)
            first = False
            if dispatcher is not None:
                try:
                    _describe_call(report, dispatcher, args, self._options)
                except Exception as error:  # a packed graph that fails at run time: the plain one would take the call
                    report.runs, report.why = "plain", f"the packed graph failed ({type(error).__name__}: {error})"
            with _counting() as counter:
                result = gm.forward(*args)
            report.flops_plain = counter.get_total_flops()
            return result

        return run


def _static_report(analysis: Analysis, options: Options) -> GraphReport:
    """What is known of a graph without its inputs."""
    report = GraphReport(compiler=options.compiler, attentions=analysis.attentions, ended=list(analysis.reasons))
    if not analysis.has_attention:
        report.why = "it contains no attention"
        report.ended = []
        return report
    if analysis.reasons and options.on_unsupported == "error":
        report.runs, report.why = "error", "UnsupportedGraphError, since on_unsupported='error'"
    elif analysis.packed is None:
        report.why = "it is not proven that equal prefixes give equal values"
    if analysis.packed is not None:
        records = analysis.packed.records
        alive = set(live_nodes(analysis.packed.module))
        report.packed_attentions, report.packed_share = analysis.packed_attentions, analysis.share
        kept = [node for node, new in records.emitted.items() if new in alive]
        report.operators_packed = _tally(node for node in kept if node in records.packed)
        report.operators_as_written = _tally(node for node in kept if node not in records.packed)
    return report


def _tally(nodes: Iterator[fx.Node]) -> dict[str, int]:
    return dict(Counter(map(operator_name, nodes)).most_common())


def _describe_call(report: GraphReport, dispatcher: Dispatcher, args: Sequence[Any], options: Options) -> None:
    """Add what the inputs of a call tell: rows, prompts, tokens, operations of the packed graph, hints."""
    try:
        plans, _ = dispatcher.share(args)
    except Unshared as failure:
        report.runs, report.why = "plain", str(failure)
        if options.on_unsupported == "error":
            report.runs, report.why = "error", f"UnsupportedGraphError, since on_unsupported='error': {failure}"
        return
    for batch in dispatcher.batches:
        valid = _validity(dispatcher, batch.frame, args)
        report.batches.append(_batch_report(plans[batch.frame], valid))
        report.hints.extend(_hints(batch, plans[batch.frame], valid, args, options))
    given = sum(plan.rows * plan.columns for plan in plans.values())
    computed = sum(plan.tokens for plan in plans.values())
    if report.runs != "error":
        report.runs = "packed" if dispatcher.worth(given, computed, plans.values()) else "plain"
    if report.runs == "plain":
        ratio = given / computed if computed else 1.0
        report.why = f"its rows share too little: {ratio:.2f} tokens given per token computed"
        if ratio > 1:
            report.why += f", below min_saving={options.min_saving} after counting what stays as written"
        return
    disagreement = dispatcher.disagreement(args)
    if disagreement is not None:
        report.runs, report.why = "plain", str(disagreement)
        return
    spy = _StrategySpy()
    with torch.no_grad(), _counting() as counter, spy:
        dispatcher.packed.module(*dispatcher.prepare(args, plans))
    report.flops_packed = counter.get_total_flops()
    compiled = options.attention if options.attention in BACKENDS else None
    report.strategy = compiled or " and ".join(sorted(spy.found)) or None


def _batch_report(plan: PrefixPlan, valid: Tensor | None) -> BatchReport:
    prompts = []
    for span in plan.prompts():
        length = span.stop - span.start
        if valid is not None:
            length = int(valid[span.rows[0], span.start : span.stop].sum())
        prompts.append(Prompt(span.rows, span.start, span.stop, length))
    return BatchReport(
        rows=plan.rows,
        columns=plan.columns,
        prompts=prompts,
        tokens_given=plan.rows * plan.columns,
        tokens_computed=plan.tokens,
        padding_given=None if valid is None else int((~valid).sum()),
        padding_computed=None if valid is None else int((~valid.reshape(-1)[plan.token]).sum()),
    )


def _validity(dispatcher: Dispatcher, frame: Frame, args: Sequence[Any]) -> Tensor | None:
    """Bool ``[B, S]``: what the attention mask does not declare padding; None where no such mask is known."""
    value = validity_of(dispatcher.packed, frame)
    if value is None or dispatcher.analysis.normal is None:
        return None
    with torch.no_grad():
        return value_function(dispatcher.analysis.normal.module, value.source)(*args).bool()


# ---------------------------------------------------------------------------------------------------------------- hints


def _hints(
    batch: Batch, plan: PrefixPlan, valid: Tensor | None, args: Sequence[Any], options: Options
) -> Iterator[str]:
    keys = batch.keys(args)
    if keys and options.min_shared > 1:
        whole = PrefixPlan.from_rows(keys, min_shared=1)
        hidden = [span.stop for span in whole.prompts() if span.stop < options.min_shared]
        if hidden and whole.tokens < plan.tokens:
            yield (
                f"common prefixes of up to {_number(max(hidden), 'column')} are shorter than "
                f"min_shared={options.min_shared} and are not shared"
            )
    if valid is None:
        return
    computed = int(valid.reshape(-1)[plan.token].sum())
    padding = plan.tokens - computed
    if padding and options.padding == "keep":
        yield f"padding='drop' would skip {_number(padding, 'position')} of padding"
    aligned = _without_left_padding(keys, valid, options.min_shared) if keys else None
    if aligned is not None and aligned.tokens < computed:
        prefix = max((span.stop for span in aligned.prompts() if span.start == 0), default=0)
        yield (
            f"left padding hides a common prefix (of up to {_number(prefix, 'token')}) between prompts of different "
            f"length: with every row's first token in one column, {aligned.tokens} tokens would be computed instead of "
            f"{computed}"
        )


def _without_left_padding(keys: Sequence[Tensor], valid: Tensor, min_shared: int) -> PrefixPlan | None:
    """The tree of the same rows shifted to the left by their padding; None where all are padded alike."""
    pads = (valid.cumsum(1) == 0).sum(1, keepdim=True)
    if bool((pads == pads[0]).all()):
        return None
    rows, columns = valid.shape
    moved = (torch.arange(columns, device=valid.device) + pads) % columns
    row = torch.arange(rows, device=valid.device).unsqueeze(1)
    return PrefixPlan.from_rows([key[row, moved] for key in keys], min_shared=min_shared, keep=valid[row, moved])


# ----------------------------------------------------------------------------------------------------------- operations


def _cpu_attention_flops(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _counting() -> FlopCounterMode:
    """Counts operations; torch itself has no formula for its fused attention on the CPU."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={fused: _cpu_attention_flops})


class _StrategySpy(TorchDispatchMode):
    """Notes how each packed attention that runs is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.dualkv.packed_attention.default:
            mask, scale, strategy, bias, _, softcap = args[8:14]
            operands = (*args[:3], from_text(mask), scale, strategy, bias, softcap)
            self.found.add(packed_attention.choose(*operands))
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------- running without a trace


def _uncompiled(target: Any) -> Callable[..., Any]:
    """What ``torch.compile`` was given, for compiled functions and models; anything else as it is."""
    if isinstance(target, torch._dynamo.OptimizedModule):
        target = target._orig_mod
    while (inner := getattr(target, "_torchdynamo_orig_callable", None)) is not None:
        target = inner
    if isinstance(target, torch.nn.Module):
        # After model.compile(), calling the model would run what was compiled.
        original: Callable[..., Any] = target._call_impl
        return original
    return target


def _fresh_function(target: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``target``, with a code object and name of its own.

    Dynamo keeps compilations by code object, and the sizes it has seen by file, line and name.
    """

    def explained(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    code = explained.__code__.replace(co_name=f"explained_{next(_count)}")
    return types.FunctionType(code, explained.__globals__, closure=explained.__closure__)


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every tensor that is no parameter replaced by a copy; one tensor given twice stays one."""
    copies: dict[int, Tensor] = {}

    def copy(x: Tensor) -> Tensor:
        if isinstance(x, torch.nn.Parameter):
            return x
        if id(x) not in copies:
            copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return copies[id(x)]

    result: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(Tensor, copy, (args, kwargs))
    return result


@contextlib.contextmanager
def _undone(*roots: Any) -> Iterator[None]:
    """Put back gradients, buffers and training flags of the models among ``roots``, and the random generators."""
    found = {id(module): module for root in roots for top in _models(root) for module in top.modules()}
    modules = list(found.values())
    parameters = {id(p): p for module in modules for p in module.parameters(recurse=False)}
    buffers = {id(b): b for module in modules for b in module.buffers(recurse=False)}
    gradients = [(parameter, parameter.grad) for parameter in parameters.values()]
    copies = [(buffer, buffer.detach().clone()) for buffer in buffers.values()]
    training = [(module, module.training) for module in modules]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, flag in training:
            module.training = flag
        with torch.no_grad():
            for buffer, before in copies:
                buffer.copy_(before)


def _models(root: Any) -> Iterator[torch.nn.Module]:
    """The modules in arguments, and those that a function belongs to or closes over."""
    for leaf in pytree.tree_leaves(root):
        if isinstance(leaf, torch.nn.Module):
            yield leaf
        elif callable(leaf):
            owner = getattr(leaf, "__self__", None)
            if isinstance(owner, torch.nn.Module):
                yield owner
            code = getattr(leaf, "__code__", None)
            cells = [cell.cell_contents for cell in getattr(leaf, "__closure__", None) or () if _filled(cell)]
            names = code.co_names if code is not None else ()
            spaces = [getattr(leaf, "__globals__", {}).get(name) for name in names]
            yield from (held for held in (*cells, *spaces) if isinstance(held, torch.nn.Module))


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _name(target: Any) -> str:
    if isinstance(target, torch._dynamo.OptimizedModule):
        target = target._orig_mod
    return getattr(target, "__name__", None) or type(target).__name__


# ----------------------------------------------------------------------------------------------------------------- text


def _headline(graph: GraphReport) -> str:
    if graph.runs == "packed":
        return f"runs packed, compiled by {graph.compiler}"
    if graph.runs == "error":
        return f"raises {graph.why}"
    return f"runs as written, compiled by {graph.compiler}; {graph.why}"


def _details(graph: GraphReport) -> Iterator[tuple[str, str]]:
    for batch in graph.batches:
        yield "rows", f"{_number(batch.rows, 'row')} of {_number(batch.columns, 'column')}"
        for prompt in batch.prompts[:_SHOWN]:
            padding = prompt.stop - prompt.start - prompt.tokens
            text = f"{_number(prompt.tokens, 'token')}{f' and {padding} of padding' if padding else ''}"
            yield "prompt", f"{text} in columns {prompt.start} to {prompt.stop - 1}, shared by {_rows(prompt.rows)}"
        if len(batch.prompts) > _SHOWN:
            yield "", f"and {len(batch.prompts) - _SHOWN} more"
        given = _with_padding(batch.tokens_given, batch.padding_given)
        computed = _with_padding(batch.tokens_computed, batch.padding_computed)
        yield "tokens", f"given {given}, computed {computed}: {batch.ratio:.2f} given per token computed"
    if graph.flops_plain is not None and graph.flops_packed is not None:
        saving = f", {100 * graph.saving:.0f}% saved" if graph.saving is not None else ""
        plain, packed = _operations(graph.flops_plain), _operations(graph.flops_packed)
        yield "operations", f"forward pass {plain} as written, {packed} packed{saving}"
    if graph.attentions:
        how = f", computed by strategy {graph.strategy!r}" if graph.strategy else ""
        yield "attention", f"{graph.packed_attentions} of {graph.attentions} packed{how}"
    if graph.operators_packed:
        yield "packed", f"{_listed(graph.operators_packed)} ({100 * graph.packed_share:.1f}% of the operations)"
    if graph.operators_as_written:
        yield "as written", _listed(graph.operators_as_written)
    for reason in graph.ended:
        yield "ended by", str(reason)
    for hint in graph.hints:
        yield "hint", hint


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _rows(rows: Sequence[int]) -> str:
    listed = ", ".join(map(str, rows[:_SHOWN]))
    return f"{len(rows)} rows ({listed}{', ...' if len(rows) > _SHOWN else ''})"


def _with_padding(tokens: int, padding: int | None) -> str:
    return str(tokens) if padding is None else f"{tokens} ({tokens - padding} and {padding} of padding)"


def _operations(count: int) -> str:
    for unit, size in (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} FLOP"


def _listed(tally: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} {count}" for name, count in list(tally.items())[:_SHOWN])
    return shown + (f", and {len(tally) - _SHOWN} others" if len(tally) > _SHOWN else "")


__all__ = ["BatchReport", "Explanation", "GraphReport", "Prompt", "explain"]
