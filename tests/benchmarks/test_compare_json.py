"""Comparing two results of a benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import compare_json


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"device": "card", "ceiling": 700.0, "cases": [{"case": "a", "rows": rows}]}))
    return str(path)


def test_what_moved_is_named_and_worse_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(
        tmp_path / "old",
        [{"contender": "x", "seconds": 1.0, "times": [1, 1]}, {"contender": "y", "seconds": 2.0, "peak_gb": 5}],
    )
    new = write(
        tmp_path / "new",
        [{"contender": "y", "seconds": 2.5, "peak_gb": 4}, {"contender": "x", "seconds": 1.01, "error": None}],
    )
    assert compare_json.main([old, new]) == 1
    out = capsys.readouterr().out
    assert "cases[a]/rows[y]/seconds: 2 -> 2.5 (+25.0%)  WORSE" in out
    assert "cases[a]/rows[y]/peak_gb: 5 -> 4 (-20.0%)\n" in out
    assert "rows[x]" not in out
    assert "4 numbers compared" in out
    assert compare_json.main([old, new, "--by", "0.3"]) == 0


def test_results_that_only_one_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old", [{"contender": "x", "seconds": 1.0}])
    new = write(tmp_path / "new", [{"contender": "z", "seconds": 1.0}])
    assert compare_json.main([old, new]) == 0
    out = capsys.readouterr().out
    assert "cases[a]/rows[x]/seconds: only in the old file" in out
    assert "cases[a]/rows[z]/seconds: only in the new file" in out


def test_from_nothing_to_something_is_a_change() -> None:
    assert compare_json.relative(0.0, 1.0) == float("inf")
    assert compare_json.relative(2.0, 1.0) == -0.5
