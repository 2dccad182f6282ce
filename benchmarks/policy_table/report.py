"""A text table and a plot of policy updates."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from policy_table.measure import Row

COLUMNS = (
    ("micro rows", "micro_rows", "{:d}"),
    ("update s", "seconds", "{:.3f}"),
    ("runs", "runs", "{:d}"),
    ("speed-up", "times_baseline", "{:.2f}"),
    ("FLOP ratio", "flop_ratio", "{:.2f}"),
    ("executed TFLOP/s", "executed_tflops", "{:.0f}"),
    ("of ceiling", "of_ceiling", "{:.3f}"),
    ("effective TFLOP/s", "effective_tflops", "{:.0f}"),
    ("peak GB", "peak_gb", "{:.1f}"),
    ("activations GB", "activations_gb", "{:.1f}"),
    ("kept GB", "kept_gb", "{:.1f}"),
    ("cold s", "cold_s", "{:.0f}"),
    ("host ms", "host_ms", "{:.1f}"),
    ("grad max", "gradient_difference", "{:.1e}"),
    ("grad rms", "gradient_rms", "{:.1e}"),
)


def show(console: Console, title: str, rows: list[Row]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for name, _, _ in COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        values = {**vars(row), "runs": len(row.times)}
        table.add_row(
            row.contender, *("-" if values[key] is None else form.format(values[key]) for _, key, form in COLUMNS)
        )
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"  {row.contender}: {row.error}", markup=False)
        if row.statistics:
            used = row.statistics
            console.print(
                f"  {row.contender}: {used['packed_calls']} of {used['calls']} calls packed, "
                f"{used['tokens_computed']:,} of {used['tokens_given']:,} tokens computed; {used['reasons'] or ''}",
                markup=False,
            )


def plot(path: str, cases: list[dict[str, Any]], title: str) -> None:
    """Seconds of an update by case and contender; needs matplotlib."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["contender"] for case in cases for row in case["rows"]))
    figure = Figure(figsize=(2 + 2 * len(cases), 5), layout="constrained")
    axes = figure.subplots()
    width = 0.85 / max(len(names), 1)
    for place, name in enumerate(names):
        bars = [
            (at + (place - (len(names) - 1) / 2) * width, row["seconds"], row["times_baseline"])
            for at, case in enumerate(cases)
            for row in case["rows"]
            if row["contender"] == name and row["seconds"]
        ]
        drawn = axes.bar([x for x, _, _ in bars], [s for _, s, _ in bars], width, label=name, edgecolor="white")
        axes.bar_label(drawn, [f"{times:.2f}x" for _, _, times in bars], fontsize=7)
    axes.set_xticks(range(len(cases)), [case["case"].replace(", ", "\n") for case in cases])
    axes.set_yscale("log")
    axes.set_ylabel("policy update, s")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
