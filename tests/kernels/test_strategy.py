"""Choosing a strategy: capability, trials, what is remembered, and what happens when nothing works."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import flex, fused, strategy
from dualkv_compile.kernels.strategy import Chooser, Trial, Workload, candidates, try_in_process

WORKLOAD = Workload(0, "bfloat16", 8, 2, 128, 128, mask="none", repeatable=False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with everything installed, as far as the choice looks at it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "card")
    monkeypatch.setattr(flex, "flash_available", lambda: True)
    monkeypatch.setattr(fused, "flash_usable", lambda device, head_dim: head_dim <= 256)


class Trials:
    """Answers from a table, and counts the questions."""

    def __init__(self, **answers: float | str) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, name: str, workload: Workload) -> Trial:
        self.asked.append(name)
        answer = self.answers[name]
        return Trial(failure=answer) if isinstance(answer, str) else Trial(answer)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("flex_flash", "dense", "flex", "blocks")),
        ({"mask": "any"}, ("flex_flash", "flex", "blocks")),
        ({"mask": "keys"}, ("flex_flash", "dense", "flex", "blocks")),
        ({"repeatable": True}, ("dense", "flex", "blocks")),
        ({"mask": "any", "repeatable": True}, ("flex", "blocks")),
        ({"head_dim": 80, "value_dim": 80}, ("dense", "flex", "blocks")),
        ({"value_dim": 64}, ("flex", "blocks")),
        ({"head_dim": 8, "value_dim": 8}, ("dense", "blocks")),
        ({"dtype": "float32"}, ("flex", "blocks")),
        ({"dtype": "float64"}, ("blocks",)),
        ({"scores": "sinks"}, ("dense", "flex", "blocks")),
        ({"scores": "sinks", "mask": "any"}, ("flex", "blocks")),
        ({"scores": "softcap"}, ("flex", "blocks")),
        ({"scores": "softcap+sinks", "repeatable": True}, ("flex", "blocks")),
        ({"scores": "bias"}, ("blocks",)),
        ({"scores": "softcap+bias"}, ("blocks",)),
    ],
)
def test_candidates(changes: dict[str, object], expected: tuple[str, ...]) -> None:
    assert candidates(replace(WORKLOAD, **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("hopper")
def test_mask_that_flash_cannot_express() -> None:
    mask = "('eq', ('floordiv', ('sub', ('qcol',), ('kcol',)), ('const', 4)), ('const', 0))"
    assert candidates(replace(WORKLOAD, mask="any"), mask) == ("flex", "blocks")


@pytest.mark.usefixtures("hopper")
def test_the_fastest_is_chosen_once_and_remembered(tmp_path: Path) -> None:
    store = tmp_path / "deep" / "strategies.json"
    trials = Trials(flex_flash=3.0, dense=2.0, flex=5.0)
    chooser = Chooser(trials, store)
    assert [chooser.choose(WORKLOAD) for _ in range(3)] == ["dense"] * 3
    assert trials.asked == ["flex_flash", "dense", "flex"]
    silent = Trials()
    assert Chooser(silent, store).choose(WORKLOAD) == "dense"
    assert silent.asked == []
    again = Trials(flex_flash=1.0, flex=2.0)
    assert Chooser(again, store).choose(replace(WORKLOAD, mask="any")) == "flex_flash"
    assert again.asked == ["flex_flash", "flex"]


@pytest.mark.usefixtures("hopper")
def test_what_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dualkv_compile.kernels"):
        chooser = Chooser(Trials(flex_flash="its error is 1.0", dense=2.0, flex=5.0), None)
        assert chooser.choose(WORKLOAD) == "dense"
        assert "'flex_flash' is not used" in caplog.text
        assert "its error is 1.0" in caplog.text
        nothing = Chooser(Trials(flex_flash="a", dense="b", flex="c"), None)
        assert nothing.choose(WORKLOAD) == "blocks"
        assert "no fast attention works here" in caplog.text


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("text", ["", "no json", "[]", '{"key": {"milliseconds": "x"}}', '{"key": 3}'])
def test_damaged_store(tmp_path: Path, text: str) -> None:
    store = tmp_path / "strategies.json"
    store.write_text(text)
    trials = Trials(flex_flash=1.0, dense=2.0, flex=5.0)
    assert Chooser(trials, store).choose(WORKLOAD) == "flex_flash"
    assert len(trials.asked) == 3
    assert len(json.loads(store.read_text())) == 3


@pytest.mark.usefixtures("hopper")
def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    chooser = Chooser(Trials(flex_flash=1.0, dense=2.0, flex=5.0), tmp_path / "file" / "strategies.json")
    assert chooser.choose(WORKLOAD) == "flex_flash"


@pytest.mark.usefixtures("hopper")
def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKV_STRATEGY_TRIAL", "0")
    trials = Trials()
    assert Chooser(trials, None).choose(WORKLOAD) == "flex_flash"
    assert trials.asked == []
    monkeypatch.setenv("DUALKV_STRATEGY_CACHE", "0")
    assert strategy.default_store() is None
    monkeypatch.setenv("DUALKV_STRATEGY_CACHE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert strategy.default_store() == Path("/somewhere/dualkv-compile/strategies.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the trial would work")
def test_a_trial_that_dies_is_a_failure() -> None:
    """A real process, on a machine without the card: it answers with its error."""
    result = try_in_process("dense", WORKLOAD)
    assert result.milliseconds == float("inf")
    assert result.failure


def test_forced_strategy_that_is_not_repeatable() -> None:
    strategy.check_repeatable("flex_flash")
    torch.use_deterministic_algorithms(True)
    try:
        strategy.check_repeatable("dense")
        with pytest.raises(InputError, match="not repeatable"):
            strategy.check_repeatable("flex_flash")
    finally:
        torch.use_deterministic_algorithms(False)


def test_forced_flash_at_a_head_dimension_where_it_is_wrong() -> None:
    flex.check_operands("flex", torch.float32, 80, 80)
    flex.check_operands("flex_flash", torch.bfloat16, 64, 64)
    for dtype, head_dim, value_dim in ((torch.bfloat16, 80, 80), (torch.float32, 64, 64), (torch.float16, 64, 128)):
        with pytest.raises(InputError, match="flex_flash"):
            flex.check_operands("flex_flash", dtype, head_dim, value_dim)
