"""The word problems of the demo, the chat that asks them, and the reward of an answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

_ANSWER = re.compile(r"Answer:\s*(-?\d+)(?!\.\d|\d)")

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """A question and the whole number that answers it."""

    question: str
    answer: int


@dataclass(frozen=True)
class ProblemSet:
    """The problems, and the turns that come before each of them: instructions and worked examples."""

    introduction: tuple[Message, ...]
    problems: tuple[Problem, ...]

    def chat(self, problem: Problem) -> list[Message]:
        """The chat messages that ask ``problem``."""
        return [*self.introduction, {"role": "user", "content": problem.question}]


def load_problems() -> ProblemSet:
    """Read the problems that are installed with this package."""
    data = json.loads(resources.files(__package__).joinpath("problems.json").read_text(encoding="utf-8"))
    introduction = [{"role": "system", "content": data["system"]}]
    for example in data["examples"]:
        introduction.append({"role": "user", "content": example["question"]})
        reply = f"{example['working']}\nAnswer: {example['answer']}"
        introduction.append({"role": "assistant", "content": reply})
    problems = tuple(Problem(item["question"], item["answer"]) for item in data["problems"])
    return ProblemSet(tuple(introduction), problems)


def parse_answer(text: str) -> int | None:
    """The number after the last ``Answer:`` of a response, or None where there is none."""
    found = _ANSWER.findall(text)
    return int(found[-1]) if found else None


def reward(problem: Problem, response: str) -> float:
    """1.0 for a right answer, 0.0 for a wrong one or none."""
    return float(parse_answer(response) == problem.answer)
