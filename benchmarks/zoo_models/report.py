"""Records as a line, a summary, and the table of ``docs/models.md``."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence

import torch
import transformers

from zoo_models.run import STATUSES, Record, Settings


def versions() -> dict[str, str]:
    """The versions that the numbers belong to."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()}


def line(record: Record) -> str:
    """One line of progress."""
    text = f"{record.status:11} {record.name:22} {record.seconds:5.1f} s"
    if record.plain_flops and record.status in ("packed", "partly", "plain", "wrong"):
        text += f"  flops {record.flops_ratio:.3f} (share {record.share:.3f})  {record.dtype} {record.attention}"
        text += f"  logits {record.logits_error:.0e} gradients {record.gradient_error:.0e}"
    if record.graph_breaks:
        text += f"  {record.graph_breaks} graph breaks"
    return f"{text}  {explanation(record)}"


def explanation(record: Record) -> str:
    """The first thing that kept the model from being packed; empty for packed models."""
    if record.problem:
        return record.problem
    if record.status == "packed":
        return ""
    found = [shortened(reason) for reason in record.reasons]
    if record.graph_breaks:
        found.append(f"{record.graph_breaks} graph breaks")
    return found[0] if found else ""


def shortened(reason: str) -> str:
    """A reason with its file named from the package on."""
    return re.sub(r"\[\S*?((?:models|integrations)/\S+?|\w+\.py):(\d+) in (\w+)", r"[\1:\2 in \3", reason)


def summary(records: Sequence[Record], core: Sequence[str]) -> str:
    """Counts by status, of the core list and of the rest."""
    lines = []
    for title, chosen in (
        ("core", [r for r in records if r.name in core]),
        ("others", [r for r in records if r.name not in core]),
    ):
        if chosen:
            counts = Counter(record.status for record in chosen)
            found = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
            lines.append(f"{title} ({len(chosen)}): {found}")
    return "\n".join(lines)


def markdown(records: Sequence[Record], settings: Settings, core: Sequence[str]) -> str:
    """A table of all records."""
    rows = ["| architecture | status | first reason |", "| --- | --- | --- |"]
    for record in records:
        rows.append(f"| {record.name} | {record.status} | {explanation(record).replace('|', ' ')} |")
    return summary(records, core) + "\n\n" + "\n".join(rows) + "\n"
