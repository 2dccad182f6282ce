"""What moved between two runs of a benchmark, by the files that its ``--json`` wrote.

    python benchmarks/compare_json.py OLD.json NEW.json [--by 0.03]

Numbers are found by the names around them (case, contender, ...), so that the order and the number of results may
differ. Those that moved by more than ``--by`` (relative) are printed, then those that only one file has. The exit
status is 1 if a number that is better when small (its name ends in ``_ms``, ``_s``, ``_gb``, or is ``seconds``) grew by
more than that.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COSTS = ("_ms", "_s", "_gb", "seconds")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--by", type=float, default=0.03, help="relative change that counts")
    args = parser.parse_args(arguments)
    old, new = (dict(numbers(json.loads(path.read_text()))) for path in (args.old, args.new))
    worse = False
    for name in [name for name in old if name in new]:
        change = relative(old[name], new[name])
        if abs(change) > args.by:
            grew = change > 0 and name.endswith(COSTS)
            worse |= grew
            print(f"{name}: {old[name]:.6g} -> {new[name]:.6g} ({change:+.1%}){'  WORSE' if grew else ''}")
    for label, one, other in (("only in the old file", old, new), ("only in the new file", new, old)):
        for name in [name for name in one if name not in other]:
            print(f"{name}: {label}")
    shared = sum(name in new for name in old)
    print(f"{shared} numbers compared, those within {args.by:.0%} are not shown")
    return int(worse)


def relative(old: float, new: float) -> float:
    """The change as a share of the old value."""
    if old == new:
        return 0.0
    return (new - old) / abs(old) if old else float("inf")


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number with its name: keys joined by "/", items of a list named by the texts in them."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{name}/{key}" if name else key)
    elif isinstance(value, list):
        for item in value:
            # Lists of bare numbers are single runs; their median stands beside them.
            if isinstance(item, dict):
                label = " ".join(text for text in item.values() if isinstance(text, str))
                yield from numbers(item, f"{name}[{label}]")


if __name__ == "__main__":
    sys.exit(main())
