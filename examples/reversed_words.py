"""A toy task whose answers can be checked: write the words of a list in reverse order, after worked examples."""

from __future__ import annotations

import random
from dataclasses import dataclass

WORDS = """apple bird boat book bread chair cloud coat corn cup dog door duck farm fire fish flag fork frog gate glass
grass hand hat hill horse house key lake lamp leaf lemon milk moon mouse nest nose park pen plate pond rain ring road
rock rose sand ship shoe snow sock song spoon star stone sun table tent train tree wall water wind wolf""".split()  # noqa: SIM905
LENGTH = 4


@dataclass(frozen=True)
class Problem:
    """A prompt that ends where the answer begins, and the right answer's words."""

    prompt: str
    answer: tuple[str, ...]


def problem(index: int, examples: int) -> Problem:
    """The problem with this number behind so many worked ``examples``; the same at every call."""
    choice = random.Random(index)
    lists = [choice.sample(WORDS, LENGTH) for _ in range(examples + 1)]
    lines = [f"{' '.join(words)} -> {' '.join(reversed(words))}\n" for words in lists[:-1]]
    prompt = f"Write the words in reverse order.\n{''.join(lines)}{' '.join(lists[-1])} ->"
    return Problem(prompt, tuple(reversed(lists[-1])))


def score(answer: tuple[str, ...], response: str) -> float:
    """Share of the first line's words that stand where they belong; words too many count as wrong ones."""
    line = response.split("\n")[0].split()
    right = sum(given == word for given, word in zip(line, answer, strict=False))
    return right / max(len(line), len(answer))
