"""Records as a line, a summary, and the table of ``docs/models.md``."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from zoo_models.run import GRADIENTS, LOGITS, SLACK, STATUSES, Record, Settings


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
    # How a mask was built matters least: it is asked for its origin, not computed.
    found = sorted(map(shortened, record.reasons), key=lambda reason: "[masking_utils.py" in reason)
    if record.graph_breaks:
        found.append(f"Dynamo breaks the graph {record.graph_breaks} times")
    return found[0] if found else "no attention operator in the graph"


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


_HEAD = """# Models

Every causal language model that transformers {transformers} registers, tiny and random (two to four layers, one of each
type that the architecture has; windows and chunks that cut; four experts, two per token), trained on one batch on the
CPU: two prompts, three rollouts each, left-padded, rows shuffled. torch {torch}, {dtype}, attention "{attention}" where
the model has it, `compiler="{compiler}"`{checkpointing}.
Written by `python benchmarks/zoo.py --jobs 2 --json all.json --markdown docs/models.md --beside eager.json ckpt.json`;
the files beside come from `--core --attn eager --json eager.json` and `--core --checkpointing --json ckpt.json`.

* **packed**: the operations of the compiled call, forward and backward, are at most {slack} times the share of distinct
  tokens ({share:.2f} of the tokens given); the column *operations* is what was counted, packed / plain.
* **partly**: some of it runs on packed tokens. **plain**: none; the model runs as without this backend.
* Logits at real tokens and all gradients agree with eager, to {logits:.0e} and {gradients:.0e} of the largest value, in
  every row that is packed, partly or plain: first in float32; in float64 where the model routes (rounding may flip a
  choice of experts) or where float32 disagrees. Another prompt token moves the response, in both. **wrong** would say
  that they do not agree.
* **eager fails**: transformers' own model does not run on such a batch here (another input, a missing package, NaN), or
  gives something else each time. **error**: no such model can be built tiny, or the changed prompt token hardly moves
  the response, so that agreement would show little.
* ● marks the architectures this project sets out to pack.
"""


def markdown(
    records: Sequence[Record], settings: Settings, core: Sequence[str], others: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The page ``docs/models.md``: counts, also of ``others`` (runs as JSON), then a row per model, by status."""
    ran = [record for record in records if record.plain_flops]
    head = _HEAD.format(
        **versions(),
        dtype=settings.dtype if settings.dtype != "auto" else "float32 and float64",
        attention=settings.attention,
        compiler=settings.compiler,
        checkpointing=", activation checkpointing" if settings.checkpointing else "",
        slack=SLACK,
        share=ran[0].share if ran else 1.0,
        logits=LOGITS,
        gradients=GRADIENTS,
    )
    parts = [head, *(f"{line}\n" for line in summary(records, core).splitlines())]
    for other in others:
        how = f'attention "{other["settings"]["attention"]}"'
        how += ", activation checkpointing" if other["settings"]["checkpointing"] else ""
        counts = summary([Record.from_dict(item) for item in other["models"]], core)
        parts += [f"With {how}: {line}\n" for line in counts.splitlines()]
    for status in STATUSES:
        chosen = [record for record in records if record.status == status]
        if not chosen:
            continue
        parts.append(f"## {status.capitalize()} ({len(chosen)})\n")
        parts.append("| architecture | class | operations | tokens | logits | gradients | by | what stops it |")
        parts.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
        parts.extend(_row(record, record.name in core) for record in chosen)
        parts.append("")
    return "\n".join(parts)


def _row(record: Record, core: bool) -> str:
    name = f"{record.name}{' ●' if core else ''}"
    why = explanation(record).replace("|", "\\|").replace("<", "&lt;")
    if not record.plain_flops:
        return f"| {name} | {record.model} | | | | | | {why} |"
    tokens = f"{record.tokens_computed} / {record.tokens_given}" if record.tokens_given else ""
    errors = f"{record.logits_error:.0e} | {record.gradient_error:.0e}"
    by = f"{record.dtype}, {record.attention}"
    return f"| {name} | {record.model} | {record.flops_ratio:.2f} | {tokens} | {errors} | {by} | {why} |"
