"""Every causal language model that transformers registers, tiny and random: is it packed, and is it exact?

python benchmarks/zoo.py [--only llama,qwen3] [--core | --list FILE] [--attn sdpa|eager|flex_attention]
    [--checkpointing] [--dtype auto|float32|float64|bfloat16] [--compiler eager|aot_eager|inductor] [--jobs 2]
    [--limit 300] [--json FILE [--update]] [--markdown docs/models.md [--beside FILE ...]]

Each model (two or three layers, one of each type that the architecture has) gets a batch of two prompts with three
rollouts each, left-padded, rows shuffled. Logits at real tokens and every gradient are compared with the model run
eagerly; then one prompt token of one row is changed, which must move that row's response. Models run in processes of
their own. The exit status is 1 if any model is wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zoo_models import report
from zoo_models.build import architectures
from zoo_models.run import Record, Settings
from zoo_models.workers import run_all

CORE = Path(__file__).parent / "zoo_models" / "core.txt"


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("dualkv_compile").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings = Settings(arguments.attn, arguments.checkpointing, arguments.dtype, arguments.compiler)
    names = _names(arguments)
    console = Console(file=sys.stderr)
    records: list[Record] = []
    if arguments.update and arguments.json and Path(arguments.json).exists():
        kept = json.loads(Path(arguments.json).read_text())["models"]
        records = [Record.from_dict(item) for item in kept if item["name"] not in names]
    core = CORE.read_text().split()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("models", total=len(names))
        for record in run_all(names, settings, arguments.jobs, arguments.limit):
            records.append(record)
            progress.console.print(report.line(record), highlight=False, markup=False, soft_wrap=True)
            progress.update(task, advance=1, description=f"{record.name:20.20}")
            _save(arguments, settings, records)  # after each model, so that an interrupted run is not lost
    known = architectures()
    records.sort(key=lambda record: known.index(record.name))
    _save(arguments, settings, records)
    if arguments.markdown:
        others = [json.loads(Path(file).read_text()) for file in arguments.beside]
        Path(arguments.markdown).write_text(report.markdown(records, settings, core, others))
    print(report.summary(records, core))
    return int(any(record.status == "wrong" for record in records))


def _save(arguments: argparse.Namespace, settings: Settings, records: list[Record]) -> None:
    if arguments.json:
        described = {"versions": report.versions(), "settings": vars(settings)}
        models = [record.to_dict() for record in records]
        Path(arguments.json).write_text(json.dumps({**described, "models": models}, indent=1) + "\n")


def _names(arguments: argparse.Namespace) -> list[str]:
    known = architectures()
    if arguments.only is not None:
        chosen = arguments.only.split(",") if arguments.only else []
    elif arguments.list or arguments.core:
        chosen = Path(arguments.list or CORE).read_text().split()
    else:
        chosen = known
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise SystemExit(f"not registered for causal language modelling: {', '.join(unknown)}")
    return list(dict.fromkeys(chosen))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--core", action="store_true", help="the architectures that are expected to be packed")
    parser.add_argument("--list", help="a file of model types")
    parser.add_argument("--attn", default="sdpa", choices=("eager", "sdpa", "flex_attention"))
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "float64", "bfloat16", "float16"))
    parser.add_argument("--compiler", default="eager", choices=("eager", "aot_eager", "inductor"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300, help="seconds per model")
    parser.add_argument("--json", help="write all records to this file")
    parser.add_argument("--update", action="store_true", help="keep the other models that the file of --json holds")
    parser.add_argument("--markdown", help="write the table to this file")
    parser.add_argument("--beside", nargs="*", default=[], help="files of --json of other runs, to be counted there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
