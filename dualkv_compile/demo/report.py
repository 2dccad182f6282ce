"""What the demo prints: the surroundings, the table of ways, the responses, and whether all ways agree."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dualkv_compile.demo.measure import BACKEND, REFERENCE, Measurement
from dualkv_compile.demo.rollouts import Rollouts

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-5
#: What float32 rounding alone does to this model's gradients, where Inductor did not run to show it. In a GRPO loss the
#: advantages of a group add up to nothing, so much of a gradient cancels: eager itself is 4e-4 away from float64.
ROUNDING = 2e-4


def surroundings() -> dict[str, Any]:
    """Versions and processor, for a reader who compares two runs."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
    }


def gradient_tolerance(results: Sequence[Measurement]) -> float:
    """How far from eager our gradients may be: 1e-5, or where rounding is larger, twice as far as Inductor's are."""
    others = [2 * result.gradient_difference for result in results if result.way not in (REFERENCE, BACKEND)]
    return max(GRADIENT_TOLERANCE, *others) if others else ROUNDING


def failures(results: Sequence[Measurement], stats: Mapping[str, Any]) -> list[str]:
    """Why the run counts as failed: our results differ from eager's, or our backend did not pack every call."""
    reference = next(result for result in results if result.way == REFERENCE)
    allowed = gradient_tolerance(results)
    found = []
    for result in (result for result in results if result.way == BACKEND):
        difference = abs(result.loss - reference.loss)
        if not difference <= LOSS_TOLERANCE * max(1.0, abs(reference.loss)):
            found.append(f"{result.way}: the loss differs from eager by {difference:.2e}")
        if not result.gradient_difference <= allowed:
            found.append(
                f"{result.way}: gradients differ from eager by {result.gradient_difference:.2e}, not by {allowed:.2e}"
                " at most"
            )
    if any(result.way == BACKEND for result in results) and (
        not stats.get("packed_calls") or stats["packed_calls"] != stats["calls"]
    ):
        reasons = stats.get("reasons") or "no reason was given"
        found.append(f"{BACKEND}: packed {stats.get('packed_calls', 0)} of {stats.get('calls', 0)} calls: {reasons}")
    return found


def best_plain(results: Sequence[Measurement]) -> float:
    """Warm seconds of the fastest way that is not ours."""
    return min(result.warm for result in results if result.way != BACKEND)


def ways_table(results: Sequence[Measurement], title: str) -> Table:
    """One row per way."""
    table = Table(title=title, title_justify="left")
    table.add_column("way")
    for heading in (
        "tokens computed",
        "warm s",
        "compile s",
        "speed",
        "peak memory MiB",
        "loss",
        "log-prob diff",
        "gradient diff",
    ):
        table.add_column(heading, justify="right")
    best = best_plain(results)
    for result in results:
        table.add_row(
            result.way,
            f"{result.tokens:,}",
            f"{result.warm:.2f}",
            f"{result.compilation:.1f}",
            f"{best / result.warm:.2f}x",
            f"{result.peak_bytes / 2**20:,.0f}",
            f"{result.loss:.8f}",
            f"{result.log_prob_difference:.1e}",
            f"{result.gradient_difference:.1e}",
        )
    return table


def rollouts_table(batch: Rollouts, width: int = 90) -> Table:
    """One row per response, shortened to ``width`` characters."""
    table = Table(title="Responses", title_justify="left")
    for heading in ("row", "tokens", "reward", "advantage"):
        table.add_column(heading, justify="right")
    table.add_column("text")
    lengths = batch.response_lengths
    for row, text in enumerate(batch.texts):
        line = " ".join(text.split())
        shown = line if len(line) <= width else line[: width // 2 - 3] + " ... " + line[-(width // 2 - 2) :]
        table.add_row(
            str(row),
            str(lengths[row]),
            f"{batch.rewards[row].item():.0f}",
            f"{batch.advantages[row].item():+.2f}",
            escape(shown),
        )
    return table


def print_stats(console: Console, stats: Mapping[str, Any]) -> None:
    """The counters of the backend, in one line."""
    console.print(
        "dualkv_compile.stats(): " + ", ".join(f"{key} {value}" for key, value in stats.items()), markup=False
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
