"""Attention over shared prompts: our strategies against replicated prompts through the fastest kernels there are.

    python benchmarks/kernel_table.py [--json FILE] [--plot FILE]
    python benchmarks/kernel_table.py --quick          tiny sizes, also on the CPU

The paper's Table 1 (N responses of 2,048 tokens to one prompt of P tokens; "28x4096" is N=28, P=4096; 32 heads, 8
key/value heads, D=128), a ragged batch and a tree of three levels. Ours are "dense", "flex" and "flex_flash" through
`dualkv_compile.packed_attention`, block lists included; replicated rows go through cuDNN and FlashAttention 2 as torch
ships them, and flash-attn-4. Ragged rows are padded on the right for those, as a grid is. All operands lie as a model's
projections leave them, token by token.

Times are medians of runs in turn, forward and backward apart, without the launches. TFLOP/s count executed work:
4 * pairs * heads * D, causal halves as halves, 2.5 times that backward; "of ceiling" is against a large matrix
product timed in turn with the contenders. "peak" is a contender's own operands and all it allocates. "diff" is the
relative RMS difference of the output from that of the first replicated contender.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention_table.cases import CASES, QUICK_CASES, Batch
from attention_table.contenders import Contender, Sizes, available
from attention_table.device import Budget, Device, DeviceLostError, ceilings
from attention_table.measure import CaseResult, CaseRunner, History, empty_result, weight
from attention_table.report import plot, show, write_json

SIZES, QUICK_SIZES = Sizes(32, 8, 128), Sizes(4, 2, 64)
DTYPES = {"bfloat16": ("bfloat16",), "float16": ("float16",), "both": ("bfloat16", "float16")}
#: The output of ours may differ from the baseline's by this much (relative RMS); both round to 16 bits.
TOLERANCE = 1e-2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=_names, help="comma-separated names; default all")
    parser.add_argument("--contenders", type=_names, help="comma-separated names; default all")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each contender, if the budget allows")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--budget", type=float, default=230, help="seconds for everything; lowers the runs")
    parser.add_argument("--replicated-limit", type=int, help="no replicated contender beyond this many tokens")
    parser.add_argument("--json", type=Path, help="written after each case")
    parser.add_argument("--plot", type=Path, help="needs matplotlib (pip install dualkv-compile[plot])")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    args = parser.parse_args(arguments)
    if not args.quick and not torch.cuda.is_available():
        parser.error("no CUDA device: only --quick runs on the CPU")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install dualkv-compile[plot]")
    if args.runs < 1:
        parser.error(f"--runs: expected at least 1, got {args.runs}")
    return args


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _chosen(kind: str, everything: dict[str, Any], names: list[str] | None) -> list[Any]:
    unknown = [name for name in names or () if name not in everything]
    if unknown:
        raise SystemExit(f"--{kind}: expected names among {', '.join(everything)}; got {', '.join(unknown)}")
    return [value for name, value in everything.items() if names is None or name in names]


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-attn-4"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if device.type != "cuda":
        return {"device": platform.processor() or platform.machine(), "versions": versions}
    properties = torch.cuda.get_device_properties(device)
    versions |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
    return {
        "device": f"{properties.name}, {properties.total_memory / 1e9:.0f} GB, {properties.multi_processor_count} SMs",
        "versions": versions,
    }


def disagreements(results: list[CaseResult]) -> list[str]:
    """Outputs of ours that are not the baseline's."""
    return [
        f"{result.case}, {result.dtype}, {row.contender}: output differs by {row.output_error:.1e} (relative RMS)"
        for result in results
        for row in result.rows
        if row.output_error is not None and not row.output_error < TOLERANCE
    ]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if the device was lost or an output is wrong."""
    args, console = parse(arguments), Console(width=132)
    budget = Budget(args.budget)
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    sizes = QUICK_SIZES if args.quick else SIZES
    named = {case.name: case for case in (QUICK_CASES if args.quick else CASES)}
    batches = [Batch.of(case, device.device) for case in _chosen("cases", named, args.cases)]
    contenders: list[Contender] = _chosen("contenders", {c.name: c for c in available(device.device)}, args.contenders)
    baseline = next((c.name for c in contenders if not c.packed), "baseline")
    header = machine(device.device) | {"sizes": asdict(sizes), "runs": args.runs, "baseline": baseline, "ceilings": {}}
    console.print(header["device"], ", ".join(f"{name} {v}" for name, v in header["versions"].items()), highlight=False)
    console.print(
        f"{sizes.heads} heads, {sizes.kv_heads} key/value heads, D={sizes.dim}; at most {args.runs} runs each"
    )
    weights = [weight(batch, contenders, args.runs, args.replicated_limit) for batch in batches]
    dtypes = DTYPES[args.dtype]
    results: list[CaseResult] = []
    lost = False
    for number, name in enumerate(dtypes):
        if lost:
            break
        dtype, history = getattr(torch, name), History()
        header["ceilings"][name] = found = ceilings(device, dtype, args.quick)
        console.print(
            f"{name}, idle device: matrix product {found['matmul_tflops']:,.1f} TFLOP/s, "
            f"copy {found['copy_gb_per_s']:,.0f} GB/s"
        )
        for place, batch in enumerate(batches):
            share = weights[place] / (sum(weights[place:]) + sum(weights) * (len(dtypes) - number - 1))
            results.append(empty_result(batch, dtype))
            runner = CaseRunner(device, sizes, dtype, batch, contenders, args.replicated_limit, history)
            try:
                runner.run(results[-1], args.runs, lambda share=share: share * budget.left(), int(found["matmul_size"]))
                device.release()
            except DeviceLostError as error:
                lost = True
                console.print(f"{batch.case.name}: the device does not answer any more: {error}", markup=False)
            show(console, results[-1], baseline)
            if args.json:
                write_json(args.json, header, results)
            if lost:
                break
    if args.plot:
        plot(args.plot, results, f"{header['device']}, torch {torch.__version__}")
    wrong = disagreements(results)
    for line in wrong or [f"every output within {TOLERANCE:.0e} of the baseline's, where that ran"]:
        console.print(line, markup=False)
    console.print(f"{args.budget - budget.left():.0f} s")
    return int(lost or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
