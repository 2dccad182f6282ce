"""All contenders of a case in turn, within a time budget."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attention_table.cases import Batch
from attention_table.contenders import Contender, Operands, Sizes, owned, packed_operands, replicated_operands
from attention_table.device import Device, Product, first_line
from dualkv_compile import PrefixPlan
from dualkv_compile.kernels.block_mask import block_mask

#: Executed work of a backward, in forwards: five products per pair instead of two.
BACKWARD = 2.5


#: Query-key pairs that take, at 32 heads of 128, about as long as the pauses of a run (15 ms), and about two seconds.
_LAUNCH, _SHORT = 150_000_000, 20_000_000_000


@dataclass
class Row:
    """One contender in one case. Times are medians over ``runs``, with the least and the greatest beside them."""

    contender: str
    packed: bool
    tokens: int
    pairs: int
    runs: int = 0
    forward_ms: float | None = None
    backward_ms: float | None = None
    forward_range_ms: tuple[float, float] | None = None
    backward_range_ms: tuple[float, float] | None = None
    forward_tflops: float | None = None
    backward_tflops: float | None = None
    forward_of_ceiling: float | None = None
    backward_of_ceiling: float | None = None
    peak_gb: float | None = None
    times_baseline: float | None = None  # how many times faster than the baseline, forward + backward
    output_error: float | None = None  # relative RMS difference from the baseline's output
    error: str | None = None

    @property
    def total_ms(self) -> float | None:
        return None if self.forward_ms is None or self.backward_ms is None else self.forward_ms + self.backward_ms


@dataclass
class CaseResult:
    """One case in one dtype."""

    case: str
    dtype: str
    batch_rows: int
    columns: int
    packed_tokens: int
    replicated_tokens: int
    padding: int  # tokens of the replicated rows that are padding
    plan_ms: float | None = None  # PrefixPlan.from_rows, wall clock
    mask_ms: float | None = None  # block lists, wall clock
    mask_device_ms: float | None = None  # block lists, device; part of the forward of "flex" and "flex_flash"
    matmul_tflops: float | None = None  # median of a matrix product timed in turn with the contenders
    rows: list[Row] = field(default_factory=list)


@dataclass
class History:
    """What earlier cases of a dtype taught: which contenders ran, and which failed before they ever did."""

    ran: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Entry:
    contender: Contender
    operands: Operands
    row: Row
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


def empty_result(batch: Batch, dtype: torch.dtype) -> CaseResult:
    """What is known of a case before anything ran."""
    rows, columns = batch.ids.shape
    padding = 0 if batch.keep is None else int((~batch.keep).sum())
    name = str(dtype).removeprefix("torch.")
    return CaseResult(batch.case.name, name, rows, columns, batch.plan.tokens, batch.replicated_tokens, padding)


class CaseRunner:
    """Measures the contenders of one case in turn.

    One set of replicated operands serves all replicated contenders, and is gone when the case is done. A contender that
    fails keeps its error and takes no further part; one that never ran is not tried again in later cases, as failing
    to compile takes time as well. ``replicated_limit``: the most tokens of a replicated batch that is run.
    """

    def __init__(
        self,
        device: Device,
        sizes: Sizes,
        dtype: torch.dtype,
        batch: Batch,
        contenders: Sequence[Contender],
        replicated_limit: int | None,
        history: History,
    ) -> None:
        self.device, self.sizes, self.dtype, self.batch = device, sizes, dtype, batch
        self.contenders, self.limit, self.history = contenders, replicated_limit, history

    def run(self, result: CaseResult, runs: int, seconds: Callable[[], float], matmul_size: int) -> None:
        """Fill ``result``; ``seconds`` says, after warming up, what this case may still take.

        A matrix product of ``matmul_size`` is timed in turn with the contenders: under load the clock falls, for all.
        """
        self._plan_times(result)
        entries = self._entries(result)
        costs = self._warm_up(entries)
        alive = [entry for entry in entries if entry.row.error is None]
        groups = _by_importance([entry.contender for entry in alive])
        counts = allot({e.row.contender: costs[e.row.contender] for e in alive}, groups, runs, seconds())
        rounds = max(counts.values(), default=0)
        product, products = Product(self.device, self.dtype, matmul_size), list[float]()
        for turn in range(rounds):
            products.append(product.tflops(self.device.timed(product.run)[1]))
            for entry in alive:
                count = counts[entry.row.contender]
                if entry.row.error is None and turn * count // rounds != (turn + 1) * count // rounds:
                    self._guarded(entry, self._measure)
        if products:
            result.matmul_tflops = statistics.median(products)
            for entry in alive:
                if entry.row.error is None:
                    self._summarise(entry, result.matmul_tflops)
        baseline = next((row.total_ms for row in result.rows if not row.packed), None)
        for row in result.rows:
            if baseline and row.total_ms:
                row.times_baseline = baseline / row.total_ms

    def _plan_times(self, result: CaseResult) -> None:
        batch, plan = self.batch, self.batch.plan
        result.plan_ms = self.device.wall(lambda: PrefixPlan.from_rows(batch.ids, keep=batch.keep), 10)
        result.mask_ms = self.device.wall(lambda: block_mask(plan.rank, plan.column, plan.end), 10)
        result.mask_device_ms = self.device.median(lambda: block_mask(plan.rank, plan.column, plan.end), 10)

    def _entries(self, result: CaseResult) -> list[_Entry]:
        batch = self.batch
        packed = packed_operands(batch, self.sizes, self.dtype)
        replicated: Operands | None = None
        problem: str | None = None
        if self.limit is not None and batch.replicated_tokens > self.limit:
            problem = f"left out: {batch.replicated_tokens:,} tokens, --replicated-limit {self.limit:,}"
        elif not all(contender.packed for contender in self.contenders):
            try:
                replicated = replicated_operands(packed, batch.plan)
            except RuntimeError as error:
                problem = first_line(error)
        entries = []
        for contender in self.contenders:
            tokens, pairs = batch.plan.tokens, batch.pairs
            if not contender.packed:
                tokens, pairs = batch.replicated_tokens, batch.replicated_pairs
            row = Row(contender.name, contender.packed, tokens, pairs)
            result.rows.append(row)
            operands = packed if contender.packed else replicated
            if contender.name in self.history.failed:
                row.error = f"not tried again: {self.history.failed[contender.name]}"
            elif operands is None:
                row.error = problem
            elif contender.largest is not None and operands.q.numel() > contender.largest:
                row.error = (
                    f"left out: q of {operands.q.numel():,} numbers, it is not safe beyond {contender.largest:,}"
                )
            else:
                entries.append(_Entry(contender, operands, row))
        return entries

    def _warm_up(self, entries: Sequence[_Entry]) -> dict[str, float]:
        """Run everything once (what has to be compiled first, twice), compare outputs; seconds of a run by name."""
        costs: dict[str, float] = {}
        expected: Tensor | None = None

        def run(entry: _Entry) -> None:
            nonlocal expected
            if entry.row.contender not in self.history.ran:
                self._sample(entry)
                self.history.ran.add(entry.row.contender)
            begin = time.perf_counter()
            before = self.device.allocated()
            out = self._sample(entry)[0]
            if self.device.cuda:
                entry.row.peak_gb = (self.device.peak() - before + entry.operands.nbytes) / 1e9
            costs[entry.row.contender] = time.perf_counter() - begin
            out = out.detach() if entry.contender.packed else owned(out, self.batch.plan)
            if expected is None and not entry.contender.packed:
                expected = out
            elif expected is not None:
                entry.row.output_error = relative_rms(out, expected)

        for entry in entries:
            self._guarded(entry, run)
            if entry.row.error is not None and entry.row.contender not in self.history.ran:
                self.history.failed[entry.row.contender] = entry.row.error
        return costs

    def _sample(self, entry: _Entry) -> tuple[Tensor, float, float]:
        """The output, and the milliseconds of a forward and of a backward."""
        x = entry.operands
        out, forward = self.device.timed(lambda: entry.contender.attend(x, self.batch.plan))
        _, backward = self.device.timed(lambda: torch.autograd.grad(out, (x.q, x.k, x.v), x.grad))
        return out, forward, backward

    def _measure(self, entry: _Entry) -> None:
        _, forward, backward = self._sample(entry)
        entry.forward.append(forward)
        entry.backward.append(backward)

    def _guarded(self, entry: _Entry, step: Callable[[_Entry], None]) -> None:
        """Run a step; an error is the row's."""
        try:
            step(entry)
        except Exception as error:
            entry.row.error = first_line(error)
        if entry.row.error is not None:
            self.device.release()  # outside of the handler, whose traceback holds tensors

    def _summarise(self, entry: _Entry, matmul_tflops: float) -> None:
        row = entry.row
        row.runs = len(entry.forward)
        row.forward_ms, row.backward_ms = statistics.median(entry.forward), statistics.median(entry.backward)
        row.forward_range_ms = (min(entry.forward), max(entry.forward))
        row.backward_range_ms = (min(entry.backward), max(entry.backward))
        work = 4 * row.pairs * self.sizes.heads * self.sizes.dim
        row.forward_tflops = work / row.forward_ms / 1e9
        row.backward_tflops = BACKWARD * work / row.backward_ms / 1e9
        row.forward_of_ceiling = row.forward_tflops / matmul_tflops
        row.backward_of_ceiling = row.backward_tflops / matmul_tflops


def relative_rms(x: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, over that of what is expected."""
    return float((x.float() - expected.float()).norm() / expected.float().norm())


def allot(costs: dict[str, float], groups: Sequence[Sequence[str]], runs: int, seconds: float) -> dict[str, int]:
    """How often each contender runs in about ``seconds``: once at least, then a group after the other up to ``runs``.

    ``costs``: seconds of a run by name. ``groups`` part the names.
    """
    counts = dict.fromkeys(costs, 1)
    seconds -= sum(costs.values())
    for group in groups:
        of_group = sum(costs[name] for name in group)
        if of_group > 0 and seconds > 0:
            extra = min(runs - 1, int(seconds / of_group))
            for name in group:
                counts[name] += extra
            seconds -= extra * of_group
    return counts


def weight(batch: Batch, contenders: Sequence[Contender], runs: int, limit: int | None) -> float:
    """A case's share of the time, in pairs: all runs of ours; of the others, all if they are short, or a few."""
    ours = sum(contender.packed for contender in contenders)
    others = len(contenders) - ours if limit is None or batch.replicated_tokens <= limit else 0
    repeats = min(runs, max(3, _SHORT // batch.replicated_pairs))
    work = runs * ours * batch.pairs + repeats * others * batch.replicated_pairs
    return work + runs * (ours + others) * _LAUNCH


def _by_importance(contenders: Sequence[Contender]) -> tuple[list[str], list[str], list[str]]:
    """Names of ours, of the baseline and of all others."""
    others = [contender.name for contender in contenders if not contender.packed]
    return [contender.name for contender in contenders if contender.packed], others[:1], others[1:]
