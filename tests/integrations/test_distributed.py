"""Two processes on a CPU (gloo): weights after a step are those of one process run eagerly, whoever shares prompts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.distributed_worker import COLLECTIVES, WAYS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("way", [*WAYS, *COLLECTIVES])
def test_two_ranks(way: str) -> None:
    """Micro-batches with accumulated gradients, clipping, a step, and names in the state dict; or graphs that wait for
    the other rank in their midst.
    """
    worker = "tests.integrations.distributed_worker"
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        worker,
        way,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{way}: passed" in done.stdout
