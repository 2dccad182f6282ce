"""Updates in turn: time, memory, gradients, and the host's time around the compiled graphs."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import dualkv_compile
from attention_table.device import Device, first_line
from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.runtime import Dispatcher
from policy_table.batch import Batch
from policy_table.contenders import Contender
from policy_table.loss import log_probs, policy_loss
from policy_table.work import count


@dataclass
class Row:
    """One contender's result; times in seconds, memory in GB (10^9 bytes).

    ``cold_s``: from the first call to the first gradient (None if memory ran out on the way). ``kept_gb``: what the
    decoder's forward pass of one micro-batch keeps for its backward pass. ``activations_gb``: the peak over weights
    and gradients. ``host_ms``: of a call, what is not spent in the compiled graph: reading the rows, the prefix tree,
    preparing the inputs; the device is waited for in it. ``gradient_difference``: largest difference from the first
    contender's gradients, relative to each tensor's largest; ``gradient_rms`` the same over all numbers (RMS).
    """

    contender: str
    micro_rows: int = 0
    seconds: float | None = None
    times: list[float] = field(default_factory=list)
    cold_s: float | None = None
    peak_gb: float | None = None
    activations_gb: float | None = None
    kept_gb: float | None = None
    executed_tflops: float | None = None
    effective_tflops: float | None = None
    of_ceiling: float | None = None
    times_baseline: float | None = None
    flop_ratio: float | None = None
    gradient_difference: float | None = None
    gradient_rms: float | None = None
    host_ms: float | None = None
    statistics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Runner:
    """One batch, and the contenders that compute its update."""

    def __init__(self, device: Device, model: PreTrainedModel, batch: Batch, *, recomputed: bool) -> None:
        self.device, self.model, self.batch, self.recomputed = device, model, batch, recomputed
        self._reference: dict[str, Tensor] = {}

    # ------------------------------------------------------------------------------------------------------- one update
    def update(self, contender: Contender, micro_rows: int) -> float:
        """Seconds of forward, loss and backward over all micro-batches; gradients are left on the parameters."""
        self.model.zero_grad(set_to_none=True)
        self.device.synchronize()
        begin = time.perf_counter()
        for part in self.batch.split(micro_rows):
            self.loss(contender.hidden(part), part).backward()
        self.device.synchronize()
        return time.perf_counter() - begin

    def loss(self, hidden: Tensor, part: Batch) -> Tensor:
        """The part's share of the loss of the whole batch."""
        new = log_probs(hidden, self.model.lm_head.weight, part.targets())
        return policy_loss(new, part.advantage_of_each()) * (part.scored / self.batch.scored)

    # ---------------------------------------------------------------------------------------------------------- measure
    def first(self, contender: Contender, micro_rows: int | None) -> Row:
        """Compile; find the micro-batch that fits (halving) if none is given; gradients and memory."""
        row = Row(contender.name)
        dualkv_compile.reset_stats()
        sizes = [micro_rows] if micro_rows else _halves(self.batch.rows)
        for size in sizes:
            row.micro_rows, row.error = size, None
            try:
                cold = self.update(contender, size)
                if size == sizes[0]:
                    row.cold_s = cold
                self._compare(row)
                self.update(contender, size)
                self._memory(row, contender, size)
                break
            except (RuntimeError, AssertionError, dualkv_compile.DualKVError) as error:
                row.error = first_line(error)
                if not isinstance(error, torch.OutOfMemoryError):
                    break
            self.model.zero_grad(set_to_none=True)
            self.device.release()
        row.statistics = dict(dualkv_compile.stats()) if contender.shared else {}
        self.model.zero_grad(set_to_none=True)
        self.device.release()
        return row

    def _memory(self, row: Row, contender: Contender, size: int) -> None:
        part = self.batch.split(size)[0]
        self.model.zero_grad(set_to_none=True)
        before = self.device.allocated()
        hidden = contender.hidden(part)
        self.device.synchronize()
        row.kept_gb = (self.device.allocated() - before - hidden.nbytes) / 1e9
        del hidden
        self.device.allocated()
        self.update(contender, size)
        row.peak_gb = self.device.peak() / 1e9
        fixed = sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in self.model.parameters())
        row.activations_gb = row.peak_gb - fixed / 1e9 if self.device.cuda else None

    def _compare(self, row: Row) -> None:
        """Gradients against those of the first contender, which are kept on the host."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        if not self._reference:
            self._reference = {name: grad.cpu() for name, grad in gradients.items()}
            return
        if gradients.keys() != self._reference.keys():
            raise AssertionError(f"{row.contender}: gradients of other parameters than the first contender's")
        worst, squares, total = 0.0, 0.0, 0.0
        for name, grad in gradients.items():
            expected = self._reference[name].to(grad.device).float()
            apart = grad.float() - expected
            worst = max(worst, float(apart.abs().max() / expected.abs().max().clamp(min=1e-30)))
            squares += float(apart.square().sum(dtype=torch.float64))
            total += float(expected.square().sum(dtype=torch.float64))
        row.gradient_difference, row.gradient_rms = worst, math.sqrt(squares / total)

    def timed(self, pairs: list[tuple[Contender, Row]], runs: int, seconds: float) -> None:
        """``runs`` updates of each contender in turn, fewer if ``seconds`` are over (one at least)."""
        begin = time.perf_counter()
        for number in range(runs):
            for contender, row in pairs:
                with host_clock() as host:
                    row.times.append(self.update(contender, row.micro_rows))
                if contender.shared:
                    row.host_ms = min(host["ms"], row.host_ms or math.inf)
            if number + 1 < runs and (time.perf_counter() - begin) * (number + 2) / (number + 1) > seconds:
                break
        self.model.zero_grad(set_to_none=True)

    def kernels(self, contender: Contender, micro_rows: int) -> list[dict[str, Any]]:
        """What one update spends its time in, longest first: kernels on a GPU, operators on a CPU."""
        self.update(contender, micro_rows)
        with torch.profiler.profile() as profile:
            self.update(contender, micro_rows)
        self.model.zero_grad(set_to_none=True)
        spent: dict[str, dict[str, Any]] = {}
        for event in profile.key_averages():
            if self.device.cuda and event.device_type != torch.autograd.DeviceType.CUDA:
                continue  # an operator, which has the time of its kernels once more
            microseconds = event.self_device_time_total if self.device.cuda else event.self_cpu_time_total
            if microseconds:
                row = spent.setdefault(event.key[:150], {"name": event.key[:150], "ms": 0.0, "calls": 0})
                row["ms"] += microseconds / 1e3
                row["calls"] += event.count
        return sorted(spent.values(), key=lambda row: -row["ms"])

    def rate(self, pairs: list[tuple[Contender, Row]], ceiling: float) -> None:
        """Fill in what follows from times: rates and ratios. ``ceiling``: TFLOP/s of a matrix product."""
        whole = count(self.model, self.batch, shared=False, padded=False, recomputed=False).total
        base = self._executed(pairs[0][0])
        for contender, row in pairs:
            row.seconds = statistics.median(row.times)
            executed = self._executed(contender)
            row.executed_tflops = executed / row.seconds
            row.effective_tflops = whole / row.seconds
            row.of_ceiling = row.executed_tflops / ceiling
            row.flop_ratio = base / executed
            first = pairs[0][1].seconds
            row.times_baseline = first / row.seconds if first else None

    def _executed(self, contender: Contender) -> float:
        shared, padded = contender.shared, contender.padded
        return count(self.model, self.batch, shared=shared, padded=padded, recomputed=self.recomputed).total


def paired(first: Row, second: Row) -> Mapping[str, float]:
    """Median of ``second / first - 1`` over the runs in turn, and the 95% interval of that median (by ranks)."""
    ratios = sorted(b / a - 1 for a, b in zip(first.times, second.times, strict=True))
    # The median lies between the k-th smallest and largest with at least 95%: binomial(n, 1/2).
    n, k, below = len(ratios), 0, 0.5 ** len(ratios)
    while below <= 0.025 and k < n // 2:
        k += 1
        below += math.comb(n, k) * 0.5**n
    low, high = (ratios[k - 1], ratios[n - k]) if k else (-math.inf, math.inf)
    return {"median": statistics.median(ratios), "low": low, "high": high, "pairs": n}


def _halves(rows: int) -> list[int]:
    sizes = [rows]
    while sizes[-1] % 2 == 0:
        sizes.append(sizes[-1] // 2)
    return sizes


@contextlib.contextmanager
def host_clock() -> Iterator[dict[str, float]]:
    """Collects, as "ms", the host's time in the dispatcher outside of the compiled graphs."""
    spent = {"ms": 0.0}
    whole, inner = Dispatcher.__call__, CompiledGraph.__call__

    def dispatched(self: Dispatcher, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return whole(self, *args)
        finally:
            spent["ms"] += (time.perf_counter() - begin) * 1e3

    def compiled(self: CompiledGraph, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return inner(self, *args)
        finally:
            spent["ms"] -= (time.perf_counter() - begin) * 1e3

    Dispatcher.__call__, CompiledGraph.__call__ = dispatched, compiled  # type: ignore[method-assign]
    try:
        yield spent
    finally:
        Dispatcher.__call__, CompiledGraph.__call__ = whole, inner  # type: ignore[method-assign]
