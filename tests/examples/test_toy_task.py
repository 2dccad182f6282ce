"""The toy task of the examples: its answers, its score, and how runs are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import compare_runs
from reversed_words import problem, score


def test_a_problem_holds_its_answer_reversed() -> None:
    task = problem(3, examples=2)
    assert task == problem(3, examples=2) != problem(4, examples=2)
    last = task.prompt.splitlines()[-1].removesuffix(" ->").split()
    assert tuple(reversed(last)) == task.answer
    for line in task.prompt.splitlines()[1:-1]:
        given, answer = line.split(" -> ")
        assert answer.split() == given.split()[::-1]


@pytest.mark.parametrize(
    ("response", "expected"),
    [(" a b c d\nmore", 1.0), (" a b c d e", 0.8), (" a b", 0.5), (" d c b a", 0.0), ("", 0.0), ("\na b c d", 0.0)],
)
def test_score(response: str, expected: float) -> None:
    assert score(("a", "b", "c", "d"), response) == expected


def test_rewards_of_rollouts_used_again_are_those_of_the_step_before() -> None:
    run = {"steps": [{"reward": 0.25, "seconds": 9.0}, {"reward": None, "seconds": 2.0}]}
    assert compare_runs.curve(run, "reward") == [0.25, 0.25]


def test_an_update_is_timed_without_generation_and_compilation() -> None:
    steps = [{"seconds": 100.0}] * 11 + [{"seconds": 2.0}, {"seconds": 50.0}, {"seconds": 4.0}, {"seconds": 50.0}]
    assert compare_runs.update_seconds({"steps": steps}) == 3.0
