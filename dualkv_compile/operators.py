"""The table of operators with a rule, as the text of ``docs/operators.md``.

``dualkv-compile operators`` prints it for the installed version.
"""

from __future__ import annotations

import inspect
import textwrap
from collections import defaultdict

import torch

import dualkv_compile.passes.rules  # noqa: F401  (registers the rules)
from dualkv_compile.passes import registry
from dualkv_compile.passes.registry import USER, Rule

_HEAD = """\
# Operators

Made by `dualkv-compile operators > docs/operators.md`, from the table of rules.

An operator listed here runs on packed tokens where its rule's conditions hold; the rule's own words are in the last
column. Where they do not hold, and for every operator that is not listed, it runs as written on the grid, which is
exact as well. Rules for operators of your own: [adding an operator](adding_an_operator.md).
"""


_TAGGED = """\
**Any functional operator that torch tags as pointwise** (`torch.Tag.pointwise`: arithmetic, comparisons, activations,
and so on) has the rule "{rule}" and is not listed one by one. Excluded are those that write into an argument, draw
random numbers (`rrelu`), or have several results.
"""


def table() -> str:
    """The text of ``docs/operators.md``; rules that were registered from outside are left out."""
    families: dict[str, dict[Rule, list[str]]] = defaultdict(lambda: defaultdict(list))
    for target, entry in registry.rules().items():
        if target is not torch.Tag.pointwise and entry.family != USER:
            families[entry.family][entry.rule].append(str(target))
    tagged = _TAGGED.format(rule=_summary(registry.rules()[torch.Tag.pointwise].rule))
    lines = [_HEAD, textwrap.fill(tagged, 120), ""]
    for family in sorted(families):
        lines += [f"## {family.capitalize()}", "", "| operators | on packed tokens |", "| --- | --- |"]
        rows = sorted((sorted(names), rule) for rule, names in families[family].items())
        lines += [f"| {', '.join(f'`{name}`' for name in names)} | {_summary(rule)} |" for names, rule in rows]
        lines.append("")
    return "\n".join(lines)


def _summary(rule: Rule) -> str:
    """The first paragraph of the rule's docstring, on one line of a table."""
    text = inspect.getdoc(rule) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
