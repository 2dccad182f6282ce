"""The table benchmark: its count of the work, how it divides the time, and a whole run at tiny sizes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernel_table
from attention_table import measure
from attention_table.cases import QUICK_CASES, Batch, Case
from attention_table.contenders import Contender, Operands
from dualkv_compile import PrefixPlan


@pytest.mark.parametrize("case", [*QUICK_CASES, Case("alone", (70,), (1,))], ids=lambda case: case.name)
def test_pairs_are_those_of_a_brute_force_count(case: Case) -> None:
    batch = Batch.of(case, torch.device("cpu"))
    # Every prefix of every row is a token, and sees itself and its own prefixes.
    keep = torch.ones_like(batch.ids, dtype=torch.bool) if batch.keep is None else batch.keep
    prefixes: dict[tuple[int, ...], int] = {}
    for row, kept in zip(batch.ids, keep, strict=True):
        ids = row[kept].tolist()
        prefixes.update({tuple(ids[: stop + 1]): stop + 1 for stop in range(len(ids))})
    assert batch.plan.tokens == len(prefixes)
    assert batch.pairs == sum(prefixes.values())
    assert batch.replicated_pairs == sum(column + 1 for row in batch.ids for column in range(len(row)))


def test_time_is_for_the_first_and_nobody_is_left_out() -> None:
    costs = {"ours": 1.0, "baseline": 5.0, "other": 10.0}
    groups = (["ours"], ["baseline"], ["other"])

    def counts(seconds: float) -> list[int]:
        return list(measure.allot(costs, groups, 20, seconds).values())

    assert counts(0) == [1, 1, 1]
    assert counts(21) == [6, 1, 1]
    assert counts(50) == [20, 4, 1]
    assert counts(1e6) == [20, 20, 20]


def test_quick_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(operands: Operands, plan: PrefixPlan) -> Tensor:
        raise RuntimeError("cannot\nrun")

    device, listed = torch.device("cpu"), kernel_table.available
    monkeypatch.setattr(kernel_table, "available", lambda _: (*listed(device), Contender("broken", True, broken)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "table.json"
    assert kernel_table.main(["--quick", "--runs", "2", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["sizes"] == {"heads": 4, "kv_heads": 2, "dim": 64}
    assert found["versions"]["torch"] == torch.__version__
    assert found["ceilings"]["bfloat16"]["matmul_tflops"] > 0
    assert [case["case"] for case in found["cases"]] == [case.name for case in QUICK_CASES]
    for case, batch in zip(found["cases"], (Batch.of(case, device) for case in QUICK_CASES), strict=True):
        assert case["plan_ms"] > 0 and case["mask_ms"] > 0
        sdpa, *ours, failed = case["rows"]
        assert [row["contender"] for row in (sdpa, *ours)] == ["sdpa", "regions", "blocks"]
        assert failed["error"].endswith("RuntimeError: cannot") and failed["forward_ms"] is None
        assert sdpa["times_baseline"] == 1 and sdpa["pairs"] == batch.replicated_pairs
        for row in (sdpa, *ours):
            assert row["error"] is None and row["runs"] == 2
            work = 4 * row["pairs"] * 4 * 64
            assert row["forward_tflops"] == pytest.approx(work / row["forward_ms"] / 1e9)
            assert row["backward_tflops"] == pytest.approx(2.5 * work / row["backward_ms"] / 1e9)
        for row in ours:
            assert row["pairs"] == batch.pairs and row["tokens"] == batch.plan.tokens
            assert row["output_error"] < kernel_table.TOLERANCE
    assert "broken: RuntimeError: cannot" in capsys.readouterr().out


def test_replicated_limit_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["--quick", "--runs", "1", "--cases", "tree", "--contenders", "sdpa,regions", "--replicated-limit", "639"]
    assert kernel_table.main([*options, "--plot", str(tmp_path / "table.png")]) == 0
    assert "sdpa: left out: 640 tokens, --replicated-limit 639" in capsys.readouterr().out
    assert (tmp_path / "table.png").stat().st_size > 0


def test_full_sizes_need_a_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        kernel_table.main([])
    assert "no CUDA device" in capsys.readouterr().err


def test_contender_that_is_not_safe_at_a_size_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = kernel_table.available(torch.device("cpu"))
    small = dataclasses.replace(listed[0], name="small", largest=10)
    monkeypatch.setattr(kernel_table, "available", lambda _: (*listed, small))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["--quick", "--runs", "1", "--cases", "tree", "--contenders", "sdpa,small"]
    assert kernel_table.main(options) == 0
    assert "small: left out: q of" in capsys.readouterr().out
