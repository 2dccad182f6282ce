"""Logging and traces: nothing but warnings by default, every graph on demand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
import torch.nn.functional as F

weight = torch.randn(10, 8)

def causal(ids):
    x = F.embedding(ids, weight)[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)

def bidirectional(ids):
    x = F.embedding(ids, weight)[:, None]
    return F.scaled_dot_product_attention(x, x, x)

from dualkv_compile.backend import dualkv

ids = torch.zeros(3, 6, dtype=torch.long)
ids[:, 5] = torch.arange(3)
for function in (causal, bidirectional):
    for _ in range(2):
        torch.compile(function, backend=dualkv, options={"compiler": "eager", "min_shared": 1})(ids)
"""
REFUSED = "scaled_dot_product_attention: it has no mask and is not causal"


def output(**environment: str) -> str:
    """What PROGRAM writes to standard error; this process's import path is handed on."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_")}
    path = os.pathsep.join(filter(None, sys.path))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr


def test_only_warnings_by_default_and_each_once() -> None:
    text = output()
    assert text.count(REFUSED) == 1
    assert "graph:" not in text
    assert "packed 1 of 1 attentions" not in text


@pytest.mark.parametrize("setting", ["+dualkv_compile", "dualkv_compile"])
def test_torch_logs(setting: str) -> None:
    text = output(TORCH_LOGS=setting)
    assert text.count(REFUSED) == 1
    assert "packed 1 of 1 attentions, 100.0% of the operations" in text
    debug = setting.startswith("+")
    for part in ("normalized graph:", "packed graph:", "torch.ops.dualkv.packed_attention.default"):
        assert (part in text) is debug


def test_torch_trace(tmp_path: Path) -> None:
    output(TORCH_TRACE=str(tmp_path))
    (trace,) = tmp_path.iterdir()
    text = trace.read_text()
    for name in ("dualkv_normalized_graph", "dualkv_packed_graph"):
        assert f'"artifact": {{"name": "{name}", "encoding": "string"}}' in text
    assert "torch.ops.dualkv.packed_attention.default" in text
