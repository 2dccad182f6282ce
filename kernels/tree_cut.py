"""Cutting a tree of packed tokens into few attention calls: the plan of the strategy "dense".

Visible pairs fall into *levels*: level 0 is every node's tokens against themselves, causally; level d + 1 is the nodes
of depth d as keys, each with all later queries that see it, densely. Within a level, no two nodes share a query or a
key. A level becomes

- *stacks*: segments of equal size at equal distances are one batched call on strided views, without a copy. Only what
  holds a good share of the level's work is worth one, so their number per level is bounded;
- one *ragged* call with all the rest.

So the number of calls is bounded by the depth of the tree, whatever the number of nodes. Pure functions on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dualkv_compile.kernels.schedule import Range


@dataclass(frozen=True)
class Worth:
    """Which stacks are worth a call of their own; the others' segments go with the ragged rest.

    ``share``: of the level's pairs of queries and keys, so that a level has at most 1 / share stacks. ``pairs``: in
    absolute number, so that a call is longer than its launch. ``length``: of queries and of keys, as a kernel computes
    whole tiles.
    """

    share: float
    pairs: int
    length: int


@dataclass(frozen=True)
class Segment:
    """Queries that see all of the keys, or, if ``causal``, themselves: [start, stop) each, neither empty."""

    queries: Range
    keys: Range

    @property
    def size(self) -> tuple[int, int]:
        """Number of queries and of keys."""
        return self.queries[1] - self.queries[0], self.keys[1] - self.keys[0]


@dataclass(frozen=True)
class Side:
    """``count`` ranges of ``length`` tokens, the first from ``start``, each ``step`` tokens after the one before."""

    start: int
    length: int
    step: int
    count: int

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges one by one."""
        starts = (self.start + i * self.step for i in range(self.count))
        return tuple((start, start + self.length) for start in starts)


@dataclass(frozen=True)
class Stack:
    """One batched call: segment i is the i-th range of either side."""

    queries: Side
    keys: Side
    causal: bool


@dataclass(frozen=True)
class Ragged:
    """One call with segments of any size."""

    segments: tuple[Segment, ...]
    causal: bool

    @property
    def queries(self) -> tuple[Range, ...]:
        """The segments' queries."""
        return tuple(segment.queries for segment in self.segments)

    @property
    def keys(self) -> tuple[Range, ...]:
        """The segments' keys."""
        return tuple(segment.keys for segment in self.segments)


def cut(nodes: Iterable[Sequence[int]], worth: Worth | None) -> list[Stack | Ragged]:
    """The calls that cover all visible pairs of a tree exactly once.

    Args:
        nodes: (start, stop, query_stop) as in ``PrefixPlan.nodes``, in the order of the tokens.
        worth: what is stacked; None for nothing, so that every level is one ragged call.
    """
    calls: list[Stack | Ragged] = []
    for level, segments in enumerate(_levels(nodes)):
        causal = level == 0
        big = [] if worth is None else _stacks(segments, causal, worth)
        calls += big
        taken = {queries for stack in big for queries in stack.queries.ranges}
        rest = tuple(segment for segment in segments if segment.queries not in taken)
        if rest:
            calls.append(Ragged(rest, causal))
    return calls


def _levels(nodes: Iterable[Sequence[int]]) -> list[list[Segment]]:
    levels: list[list[Segment]] = []

    def add(level: int, segment: Segment) -> None:
        if level == len(levels):
            levels.append([])
        levels[level].append(segment)

    ancestors: list[int] = []  # their query_stop
    for start, stop, query_stop in nodes:
        if start == stop:
            continue
        while ancestors and ancestors[-1] <= start:
            ancestors.pop()
        add(0, Segment((start, stop), (start, stop)))
        if stop < query_stop:
            ancestors.append(query_stop)
            add(len(ancestors), Segment((stop, query_stop), (start, stop)))
    return levels


def _stacks(segments: Sequence[Segment], causal: bool, worth: Worth) -> list[Stack]:
    by_size: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        by_size.setdefault(segment.size, []).append(segment)
    total = sum(queries * keys * len(alike) for (queries, keys), alike in by_size.items())
    least = max(worth.pairs, worth.share * total)
    return [
        stack
        for (queries, keys), alike in by_size.items()
        if min(queries, keys) >= worth.length
        for stack in _progressions(alike, causal)
        if stack.queries.count * queries * keys >= least
    ]


def _progressions(alike: Sequence[Segment], causal: bool) -> Iterator[Stack]:
    """Segments of equal size as runs at equal distances, the longest first run taken greedily."""
    at = 0
    while at < len(alike):
        first = alike[at]
        steps, stop = first.size, at + 1
        if stop < len(alike):
            steps = _distance(first, alike[stop])
            while stop < len(alike) and _distance(alike[stop - 1], alike[stop]) == steps:
                stop += 1
        (queries, keys), count = first.size, stop - at
        yield Stack(
            Side(first.queries[0], queries, steps[0], count), Side(first.keys[0], keys, steps[1], count), causal
        )
        at = stop


def _distance(before: Segment, after: Segment) -> tuple[int, int]:
    return after.queries[0] - before.queries[0], after.keys[0] - before.keys[0]
