"""The policy update of a real model's shape: transformers as it is, against ``model.compile(backend="dualkv")``.

    python benchmarks/policy_update.py --shape qwen3-8b --layers 8 --rollouts 32 --prompt 8192 --response 1024
    python benchmarks/policy_update.py --shape tiny --prompt 96 --response 16 --rollouts 4       also on a CPU

An update is forward, GRPO loss on the log-probabilities of the responses (logits by chunks, the same code for all) and
backward; random bfloat16 weights. Contenders (`policy_table/contenders.py`) have the same parameters and run in turn;
replicated rows are cut into the largest micro-batches that fit, if ``--micro`` names none. Times are medians; "cold" is
the first update, compilation included; "executed" counts the operations that run, recomputation of checkpointed layers
included, "effective" those of the replicated rows without recomputation, by the same time. The ceiling is a large
matrix product timed before.

With six runs or more, the median of the last contender's time over the first's, run by run, with its 95% interval.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention_table.device import Device, ceilings
from dualkv_compile.kernels.strategy import Workload, choose
from policy_table.batch import Batch
from policy_table.contenders import MAKERS, contenders
from policy_table.measure import Row, Runner, paired
from policy_table.report import plot, show
from policy_table.shapes import SHAPES


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="default: as many as the model has")
    parser.add_argument("--prompts", type=int, default=1, help="different prompts in the batch")
    parser.add_argument("--rollouts", type=int, default=16, help="responses to each prompt")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=1024, help="tokens of a response, of the longest if ragged")
    parser.add_argument("--ragged", action="store_true", help="responses of 131 tokens to the longest")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--contenders", default="inductor,dualkv", help=f"of {', '.join(MAKERS)}; the first is 1.00")
    parser.add_argument("--micro", type=int, help="rows of a micro-batch of replicated contenders")
    parser.add_argument("--attention", default="auto", help='option "attention" of dualkv')
    parser.add_argument("--runs", type=int, default=5, help="timed updates of each")
    parser.add_argument("--seconds", type=float, default=120, help="for the timed updates; lowers the runs")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--init", type=float, help="standard deviation of the random weights; default the model's")
    parser.add_argument("--profile", type=int, default=0, help="show this many kernels that take most of an update")
    parser.add_argument("--json", type=Path, help="results are added to those in this file")
    parser.add_argument("--plot", help="of everything in --json; needs matplotlib")
    args = parser.parse_args(arguments)
    unknown = [name for name in args.contenders.split(",") if name not in MAKERS]
    if unknown:
        parser.error(f"--contenders: expected names among {', '.join(MAKERS)}; got {', '.join(unknown)}")
    if args.runs < 1:
        parser.error(f"--runs: expected at least 1, got {args.runs}")
    if args.plot and not args.json:
        parser.error("--plot needs --json")
    return args


def versions(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "triton", "flash-attn-4"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    if device.type == "cuda":
        found |= {"cudnn": str(torch.backends.cudnn.version())}
    return found


def trial_seconds(config: Any, dtype: torch.dtype) -> float:
    """How long it takes to choose the way attention is computed, which is kept on disk and not part of "cold"."""
    begin = time.perf_counter()
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
    choose(Workload.of(torch.device("cuda"), dtype, *heads, "keys"))
    return time.perf_counter() - begin


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a contender failed, or one of ours did not share."""
    args, console, begin = parse(arguments), Console(width=190), time.perf_counter()
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = getattr(torch, args.dtype)
    name = torch.cuda.get_device_name() if device.cuda else platform.processor() or platform.machine()
    used = versions(device.device)
    ceiling = ceilings(device, dtype, quick=not device.cuda)["matmul_tflops"]
    changes: dict[str, Any] = {"num_hidden_layers": args.layers} if args.layers else {}
    if args.init:
        changes["initializer_range"] = args.init
    model = SHAPES[args.shape].build(device.device, dtype, **changes)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = Batch.of(
        args.prompts,
        args.rollouts,
        args.prompt,
        args.response,
        model.config.vocab_size,
        device.device,
        ragged=args.ragged,
    )
    case = (
        f"{args.shape}, {model.config.num_hidden_layers} layers, {args.prompts} x {args.rollouts} rows, "
        f"P={args.prompt}, R={'131..' if args.ragged else ''}{args.response}"
        f"{', checkpointing' if args.checkpointing else ''}"
    )
    console.print(name, ", ".join(f"{key} {value}" for key, value in used.items()), highlight=False)
    console.print(f"matrix product {ceiling:,.1f} TFLOP/s; {batch.scored:,} tokens scored", highlight=False)

    trial = trial_seconds(model.config, dtype) if device.cuda and args.attention == "auto" else None
    if trial is not None:
        console.print(f"trials of attention strategies, once per machine: {trial:.0f} s", highlight=False)

    runner = Runner(device, model, batch, recomputed=args.checkpointing)
    pairs = []
    for contender in contenders(model, args.contenders.split(","), {"attention": args.attention}):
        row = runner.first(contender, None if contender.shared else args.micro)
        pairs.append((contender, row))
        console.print(f"{row.contender}: first update after {time.perf_counter() - begin:.0f} s", highlight=False)
    works = [(contender, row) for contender, row in pairs if row.error is None]
    if works:
        runner.timed(works, args.runs, args.seconds)
        runner.rate(works, ceiling)
    rows = [row for _, row in pairs]
    show(console, case, rows)
    for contender, row in works if args.profile else ():
        console.print(f"{row.contender}, kernels of one update:", highlight=False)
        for kernel in runner.kernels(contender, row.micro_rows)[: args.profile]:
            console.print("  {ms:9.1f} ms {calls:6d} x  {name}".format(**kernel), highlight=False, markup=False)
    result: dict[str, Any] = {"case": case, "settings": _plain(args), "rows": [asdict(row) for row in rows]}
    if len(works) > 1 and len(works[0][1].times) >= 6:
        result["paired"] = dict(paired(works[0][1], works[-1][1]))
        console.print(
            "{0} against {1}, {pairs} pairs: {median:+.2%} time (95% interval {low:+.2%} to {high:+.2%})".format(
                works[-1][1].contender, works[0][1].contender, **result["paired"]
            ),
            highlight=False,
        )
    if args.json:
        _add(args.json, {"device": name, "versions": used, "ceiling_tflops": ceiling, "trial_s": trial}, result)
        if args.plot:
            plot(args.plot, json.loads(args.json.read_text())["cases"], f"{name}, torch {used['torch']}")
    return int(any(_failed(row, shared=args.rollouts > 1) for row in rows))


def _failed(row: Row, *, shared: bool) -> bool:
    expected = row.statistics.get("calls", 0) if shared else 0
    return row.error is not None or row.statistics.get("packed_calls", 0) != expected


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def _add(path: Path, header: dict[str, Any], result: dict[str, Any]) -> None:
    """Put the result beside the others of the file; one of the same case is replaced."""
    cases = json.loads(path.read_text())["cases"] if path.exists() else []
    cases = [case for case in cases if case["case"] != result["case"]]
    path.write_text(json.dumps({**header, "cases": [*cases, result]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
