"""One process per model, forked from a process that has imported everything: a crash or a hang ends only that model."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

import torch

from zoo_models.run import Record, Settings, run

_FORK = multiprocessing.get_context("fork")


def run_all(names: Sequence[str], settings: Settings, jobs: int, limit: float) -> Iterator[Record]:
    """The record of every model, as they finish; a model that takes longer than ``limit`` seconds is ended."""
    waiting = list(reversed(names))
    running: dict[Connection, tuple[str, multiprocessing.process.BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop()
            receiver, sender = _FORK.Pipe(duplex=False)
            process = _FORK.Process(target=_child, args=(sender, run, name, settings), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process, time.monotonic())
        for receiver in wait(list(running), timeout=1):
            assert isinstance(receiver, Connection)
            name, process, _ = running.pop(receiver)
            try:
                yield receiver.recv()
                process.join()
            except EOFError:
                process.join()
                yield Record(name, status="error", problem=f"the process ended with exit code {process.exitcode}")
        for receiver, (name, process, start) in list(running.items()):
            if time.monotonic() - start > limit:
                running.pop(receiver)
                process.kill()
                process.join()
                yield Record(name, status="timeout", problem=f"took longer than {limit:.0f} s", seconds=limit)


def _child(sender: Connection, function: Callable[[str, Settings], Record], name: str, settings: Settings) -> None:
    torch.set_num_threads(1)
    sender.send(function(name, settings))
    sender.close()
