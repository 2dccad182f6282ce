"""Time and memory of the plan and of the block lists for about T = 110,000 packed tokens.

    python benchmarks/block_mask.py [--device cuda] [--json FILE]

Two trees (one prompt of 32,768 tokens with 28 responses of 2,750; four prompts near 8,192 with 16 responses each, of
131 to 2,048 tokens) and three masks (none; key validity and a window; documents as well). The plan is made from token
ids that are already on the device, as in a training step.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attention_table.cases import RAGGED, Case
from dualkv_compile import PrefixPlan
from dualkv_compile.kernels.block_mask import block_mask
from dualkv_compile.kernels.pair_mask import pair_vectors
from dualkv_compile.kernels.predicate import Expression, conjoin, to_text

WINDOW: Expression = ("gt", ("kcol",), ("sub", ("qcol",), ("const", 4096)))
DOCUMENTS: Expression = ("eq", ("q", 1), ("k", 1))
MASKS = {
    "none": "",
    "validity + window": to_text(conjoin([("k", 0), WINDOW])),
    "validity + window + documents": to_text(conjoin([("k", 0), WINDOW, DOCUMENTS])),
}


TREES = {"one prompt": Case("one prompt", (32_768,), (2_750,) * 28), "four prompts": RAGGED}


def measure(function: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Median milliseconds, and the most megabytes that were allocated beyond what was there before."""
    function()
    times = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1000)
    peak = (torch.cuda.max_memory_allocated() - before) / 1e6 if device.type == "cuda" else float("nan")
    return sorted(times)[len(times) // 2], peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    results = []
    for tree, case in TREES.items():
        ids, keep = (x.to(device) for x in case.grid(torch.Generator().manual_seed(0)))
        plan = PrefixPlan.from_rows(ids, keep=keep)
        vectors = [plan.column >= 7, plan.column.long() // 3000]

        def add(what: str, function: Callable[[], Any], tree: str = tree, tokens: int = plan.tokens) -> None:
            milliseconds, megabytes = measure(function, device, arguments.repeats)
            results.append({"tree": tree, "tokens": tokens, "what": what, "ms": milliseconds, "MB": megabytes})

        add("plan", lambda ids=ids, keep=keep: PrefixPlan.from_rows(ids, keep=keep))
        for text, mask in MASKS.items():
            given = (plan.rank, plan.column, plan.end, vectors, mask)
            add(f"block lists, mask: {text}", lambda given=given: block_mask(*given))
            if mask:
                add(f"vectors, mask: {text}", lambda given=given: pair_vectors(*given))
    table = Table("tree", "T", "what", "ms (median)", "peak MB", title=f"torch {torch.__version__}, {name}")
    for row in results:
        table.add_row(row["tree"], f"{row['tokens']:,}", row["what"], f"{row['ms']:.2f}", f"{row['MB']:.1f}")
    Console(width=120).print(table)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"torch": torch.__version__, "device": name, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
