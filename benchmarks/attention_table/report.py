"""What is shown of the results: a text table, a JSON file, a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from attention_table.measure import CaseResult, Row


def show(console: Console, result: CaseResult, baseline: str) -> None:
    """One case as a table."""
    padding = f", {result.padding:,} of them padding" if result.padding else ""
    title = (
        f"{result.case}, {result.dtype}: {result.batch_rows} rows of {result.columns:,}; {result.packed_tokens:,} "
        f"packed tokens, {result.replicated_tokens:,} replicated{padding}\n"
        f"plan {_number(result.plan_ms, 2)} ms, block mask {_number(result.mask_ms, 2)} ms "
        f"(device {_number(result.mask_device_ms, 2)} ms, in flex's forward); matrix product "
        f"{_number(result.matmul_tflops, 1)} TFLOP/s"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    names = (
        "fwd ms",
        "bwd ms",
        "runs",
        "TFLOP/s fwd",
        "bwd",
        "of ceiling fwd",
        "bwd",
        "peak GB",
        f"x {baseline}",
        "diff",
    )
    for name in names:
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(row.contender if row.packed else f"{row.contender}, replicated", *_cells(row))
    console.print(table)
    for row in result.rows:
        if row.error:
            console.print(f"  {row.contender}: {row.error}", markup=False)


def _cells(row: Row) -> list[str]:
    if row.error:
        return ["-"] * 10
    return [
        _number(row.forward_ms, 2),
        _number(row.backward_ms, 2),
        str(row.runs),
        _rate(row.forward_tflops),
        _rate(row.backward_tflops),
        _number(row.forward_of_ceiling, 3),
        _number(row.backward_of_ceiling, 3),
        _number(row.peak_gb, 1),
        _number(row.times_baseline, 2),
        "-" if row.output_error is None else f"{row.output_error:.1e}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}".rstrip(".")


def write_json(path: Path, header: dict[str, Any], results: Sequence[CaseResult]) -> None:
    """Everything so far; the file is whole at any time."""
    text = json.dumps({**header, "cases": [asdict(result) for result in results]}, indent=1)
    partial = path.with_name(path.name + ".part")
    partial.write_text(text + "\n")
    partial.replace(path)


def plot(path: Path, results: Sequence[CaseResult], title: str) -> None:
    """Forward + backward of each contender by case, on a logarithmic scale; needs matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.contender for result in results for row in result.rows))
    figure = Figure(figsize=(2 + 1.6 * len(results), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / max(len(names), 1)
    for place, name in enumerate(names):
        bars = [
            (at, row.total_ms)
            for at, result in enumerate(results)
            for row in result.rows
            if row.contender == name and row.total_ms
        ]
        packed = any(row.packed for result in results for row in result.rows if row.contender == name)
        label = name if packed else f"{name}, replicated"
        where = [at + (place - (len(names) - 1) / 2) * width for at, _ in bars]
        axes.bar(where, [ms for _, ms in bars], width, label=label, hatch=None if packed else "//", edgecolor="white")
    several = len({result.dtype for result in results}) > 1
    labels = [f"{result.case}\n{result.dtype}" if several else result.case for result in results]
    axes.set_xticks(range(len(results)), labels)
    axes.set_yscale("log")
    axes.set_ylabel("forward + backward, ms")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
