"""The demo from its options to its exit status."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import dualkv_compile
from dualkv_compile.demo import report
from dualkv_compile.demo.measure import BACKEND, REFERENCE, WAYS, Measurement, measure, steps
from dualkv_compile.demo.model import Policy, WeightsUnavailableError, load_pretrained, random_policy
from dualkv_compile.demo.problems import load_problems
from dualkv_compile.demo.rollouts import Rollouts, sample


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``dualkv-compile demo``."""
    parser.add_argument("--prompts", type=_positive, default=1, help="how many problems (default 1)")
    parser.add_argument("--rollouts", type=_positive, default=8, help="responses to each problem (default 8)")
    parser.add_argument("--max-new-tokens", type=_positive, default=48, help="longest response (default 48)")
    parser.add_argument("--repeats", type=_positive, default=2, help="timed steps of each way (default 2)")
    parser.add_argument("--threads", type=_positive, help="CPU threads (default: torch's own choice)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default 0)")
    parser.add_argument("--random-model", action="store_true", help="use random weights of the same shape")
    parser.add_argument("--offline", action="store_true", help="never download: the weights must be cached")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to compare; eager always runs (default: all)"
    )


def run(arguments: argparse.Namespace, console: Console | None = None, policy: Policy | None = None) -> int:
    """Run the demo; ``policy`` stands in for the model that the options name. 0 when all ways agree, else 1."""
    console = console or Console()
    started = time.perf_counter()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    problems = load_problems()
    if arguments.prompts > len(problems.problems):
        console.print(f"--prompts: there are only {len(problems.problems)} problems")
        return 2
    ways = [way for way in WAYS if way == REFERENCE or way in arguments.ways]
    surroundings = report.surroundings()
    console.print(", ".join(f"{key} {value}" for key, value in surroundings.items()), markup=False, highlight=False)
    with _progress(console) as progress:
        task = progress.add_task("model", total=2 + steps(ways, arguments.repeats))
        if policy is None:
            policy = _load(arguments, console)
        progress.update(task, advance=1, description="sampling responses")
        batch = sample(
            policy, problems, arguments.prompts, arguments.rollouts, arguments.max_new_tokens, arguments.seed
        )
        policy.model.train()
        dualkv_compile.reset_stats()

        def report_step(now: str) -> None:
            progress.update(task, advance=1, description=now)
            if not console.is_terminal:
                console.print(f"{time.perf_counter() - started:5.0f} s  {now}", highlight=False)
                console.file.flush()

        results = measure(policy.model, batch, ways, arguments.repeats, report_step)
        progress.update(task, completed=2 + steps(ways, arguments.repeats), description="done")
    stats = dualkv_compile.stats()
    for result in results:
        if result.way == BACKEND and stats["calls"]:
            result.tokens = stats["tokens_computed"] // stats["calls"]
    _print_results(console, policy, batch, results)
    if BACKEND in ways:
        report.print_stats(console, stats)
    seconds = time.perf_counter() - started
    failures = report.failures(results, stats)
    if arguments.json:
        record = {
            "model": policy.name,
            "seconds": seconds,
            "surroundings": surroundings,
            "batch": _batch_record(batch),
            "ways": [_record(result, report.best_plain(results)) for result in results],
            "stats": dict(stats),
            "failures": failures,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for failure in failures:
        console.print(f"FAILED {failure}", style="bold red", markup=False)
    verdict = "results differ" if failures else "all ways agree"
    console.print(
        f"{verdict} (loss to {report.LOSS_TOLERANCE:g}, gradients to {report.gradient_tolerance(results):.1e}); "
        f"{seconds:.0f} s in total"
    )
    return 1 if failures else 0


def _load(arguments: argparse.Namespace, console: Console) -> Policy:
    if not arguments.random_model:
        try:
            return load_pretrained(offline=arguments.offline)
        except (WeightsUnavailableError, OSError) as error:
            console.print(f"SmolLM2 CANNOT BE HAD: {error}", style="bold red", markup=False)
    console.print("RANDOM WEIGHTS: same shape as SmolLM2-135M, but the responses mean nothing", style="bold red")
    return random_policy()


def _print_results(console: Console, policy: Policy, batch: Rollouts, results: list[Measurement]) -> None:
    rows, columns = batch.input_ids.shape
    lengths = sorted(set(batch.prompt_lengths))
    console.print(report.rollouts_table(batch))
    if batch.shaped:
        console.print(
            "All responses got the same reward: the advantages come from their lengths instead (alternating signs where"
            " these are equal too), so that there is a gradient to compare.",
            style="yellow",
        )
    console.print(report.ways_table(results, f"{policy.name}: {rows} rows x {columns} tokens, prompts of {lengths}"))
    console.print(
        "speed: against the faster of the plain ways. peak memory: tensors held at a time in one step, weights apart. "
        "gradient diff: max |g - eager| / max |eager|, worst parameter. compile s: may profit from inductor's disk "
        "cache.",
        style="dim",
    )


def _batch_record(batch: Rollouts) -> dict[str, Any]:
    return {
        "rows": batch.input_ids.shape[0],
        "columns": batch.input_ids.shape[1],
        "prompt_lengths": batch.prompt_lengths,
        "response_lengths": batch.response_lengths,
        "rewards": batch.rewards.tolist(),
        "shaped": batch.shaped,
        "texts": list(batch.texts),
    }


def _record(result: Measurement, best: float) -> dict[str, Any]:
    return {
        "way": result.way,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "warm": result.warm,
        "first": result.first,
        "speed": best / result.warm,
        "peak_bytes": result.peak_bytes,
        "loss": result.loss,
        "log_prob_difference": result.log_prob_difference,
        "gradient_difference": result.gradient_difference,
    }


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value
