"""The table of rules: which operators may run on packed tokens, and under which conditions.

A rule is a function ``rule(cx, node, *args, **kwargs)`` called for an operator that has at least one packed operand.
Tensor operands arrive as `Value`, everything else as written. It returns the operator's result as a `Value` (or a
tuple of them), or raises `Unproven` with the condition that failed; then the operator runs as written on un-packed
operands. A missing rule means the same, so correctness never depends on a rule being there.

The idea of one small rule per operator overload, in one file per family, is that of ``torch/distributed/tensor/_ops``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Entry:
    """A registered rule and the family it belongs to."""

    rule: Rule
    family: str


_RULES: dict[object, Entry] = {}
_NUMBERING_RULES: dict[object, Entry] = {}


def register(*targets: object, family: str, numbering: bool = False) -> Callable[[Rule], Rule]:
    """Register the decorated rule for the operator overloads ``targets``.

    A target may be the name of an operator of another library (``"transformers::grouped_mm_fallback"``), which need not
    be imported. With ``numbering``, the rule serves calls that have a numbering (`Numbering`) among their operands;
    other rules never see one.
    """
    table = _NUMBERING_RULES if numbering else _RULES

    def decorate(rule: Rule) -> Rule:
        for target in targets:
            if target in table:
                raise AssertionError(f"{target} has two rules")
            table[target] = Entry(rule, family)
        return rule

    return decorate


def lookup(target: object, *, numbering: bool = False) -> Entry | None:
    """The rule of ``target``: an explicit one, else the pointwise rule where torch tags the operator as pointwise."""
    table = _NUMBERING_RULES if numbering else _RULES
    entry = table.get(target)
    if entry is None and isinstance(target, torch._ops.OpOverload):
        entry = table.get(target._schema.name)
    if entry is not None or numbering:
        return entry
    if isinstance(target, torch._ops.OpOverload) and is_functional_pointwise(target):
        return _RULES.get(torch.Tag.pointwise)
    return None


def is_functional_pointwise(target: torch._ops.OpOverload) -> bool:
    """Tagged pointwise by torch, without mutation, without randomness, and with one tensor as the result.

    Both tags matter: ``rrelu`` carries the pointwise tag and draws random numbers.
    """
    schema = target._schema
    return (
        torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not schema.is_mutable
        and len(schema.returns) == 1
        and str(schema.returns[0].type) == "Tensor"
    )


def rules() -> dict[object, Entry]:
    """All explicit rules, for documentation and tests."""
    return {**_NUMBERING_RULES, **_RULES}


#: The family of rules that were registered from outside of this package.
USER = "user"


def put(target: object, rule: Rule, family: str) -> None:
    """Make ``rule`` the rule of ``target``, whatever it was before."""
    _RULES[target] = Entry(rule, family)
