"""Curves of several runs of `grpo_torch.py` or `grpo_trl.py` on one plot, and how far they lie apart.

python examples/compare_runs.py REFERENCE.json RUN.json [RUN.json ...] [--plot FILE]

Replays of the same rollouts are compared with the first file step by step; "seconds" is the median over the steps that
use a generation a second time, which are nothing but an update.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    runs = [json.loads(Path(file).read_text()) for file in arguments.files]
    reference = runs[0]
    for run in runs:
        settings = run["settings"]
        live = "replay" if settings["replay"] else "live"
        sizes = f"{settings['rollouts']} rollouts of {settings['tokens']} tokens, prompt of {settings['prompt']}"
        ratio = update_seconds(reference) / update_seconds(run)
        rewards = curve(run, "reward")
        print(
            f"{run['script']} {settings['backend']}, {live}, {len(run['steps'])} steps ({sizes}; torch {run['torch']})"
        )
        print(f"  update {update_seconds(run):.2f} s, {ratio:.2f}x the first run's speed")
        print(f"  reward: first ten steps {mean(rewards[:10]):.3f}, last ten {mean(rewards[-10:]):.3f}")
        if run is not reference:
            apart = [
                abs(a - b) / abs(b) for a, b in zip(curve(run, "grad_norm"), curve(reference, "grad_norm"), strict=True)
            ]
            losses = [abs(a - b) for a, b in zip(curve(run, "loss"), curve(reference, "loss"), strict=True)]
            print(f"  gradient norm apart: median {statistics.median(apart):.1e}, largest {max(apart):.1e} (relative)")
            print(f"  loss apart: largest {max(losses):.1e}")
    if arguments.plot:
        plot(runs, arguments.plot)


def curve(run: Run, name: str) -> list[float]:
    """Values by step; what a step did not log (the reward of rollouts used again) is that of the step before."""
    values: list[float] = []
    for step in run["steps"]:
        value = step[name]
        values.append(values[-1] if value is None else value)
    return values


def update_seconds(run: Run) -> float:
    """Median seconds of the steps without a generation, compilation (the first ten steps) apart."""
    return statistics.median(step["seconds"] for step in run["steps"][11::2])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plot(runs: list[Run], file: str) -> None:
    """Reward, loss and gradient norm of every run, written to ``file``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True, layout="constrained")
    for number, run in enumerate(runs):
        settings = run["settings"]
        label = f"{settings['backend']}, {'same rollouts' if settings['replay'] else 'live'}"
        for axis, name in zip(axes, ("reward", "loss", "grad_norm"), strict=True):
            # Curves that lie on each other are seen by their widths and dashes.
            style = {"linewidth": 5 - 1.2 * number, "linestyle": ("-", "-", "--", ":")[number % 4], "alpha": 0.8}
            axis.plot(range(1, len(run["steps"]) + 1), curve(run, name), label=label, **style)
            axis.set_ylabel({"grad_norm": "gradient norm"}.get(name, name))
    axes[0].legend()
    axes[-1].set_xlabel("optimizer step")
    figure.savefig(file, dpi=110)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="what --json wrote; the first one is the reference")
    parser.add_argument("--plot", help="write the curves to this picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
