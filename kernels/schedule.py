"""Which kernel calls a tree of packed tokens needs: the plan of the strategy "regions".

Every node of the tree asks for two rectangles of (query, key) pairs: its own tokens against themselves, causally, and
all later queries that see the node against all of its keys, densely. Without a mask expression these are the calls,
and consecutive nodes of equal length share one stacked causal call. With a mask expression, in this order:

1. Terms of the key alone become a set of visible keys. A node is trimmed to its first and last visible key (padding on
   the left or right costs nothing); holes are covered by an additive bias of one row.
2. Terms of the query alone are left to the caller, as the set of queries that see anything at all.
3. Other terms are bounded on blocks of at most 128 tokens. Rectangles that are visible throughout are called as if
   there were no mask, invisible ones are left out; the rest is cut into tiles whose mask is written out, one at a time.

A short invisible tail of a node that nothing else sees is not cut off: the bias keeps rows of equal length in one
stacked call, and cutting would need a second, dense call for the queries in the tail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dualkv_compile.kernels.predicate import (
    BlockBounds,
    BoolArray,
    Expression,
    conjoin,
    conjuncts,
    depends_on_key,
    depends_on_query,
    evaluate,
)

#: Longest block of tokens that is bounded as a whole.
BLOCK = 128
#: Largest tile whose mask is written out.
MAX_QUERIES, MAX_KEYS = 256, 1024
#: A fully visible run of keys shorter than this joins a neighbouring tile instead of being a call of its own.
_SHORT = 256
#: An invisible tail of a leaf at least this long is worth a call of its own.
_TAIL = 256
#: Pairs of blocks whose bounds are computed at a time.
_PAIRS = 1 << 18

Range = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """One call of an attention kernel: queries and keys are ranges of packed tokens.

    ``stack`` > 1: both ranges are the same and fall into that many rows of equal length, each attending to itself.
    ``bias`` is added to the scores (``[stack or 1, 1, rows or 1, keys]``, 0 or -inf); ``empty`` (bool ``[rows]``) marks
    queries whose bias is -inf throughout. ``first``: no earlier call has touched these queries or these keys.
    """

    queries: Range
    keys: Range
    causal: bool = False
    stack: int = 1
    bias: Tensor | None = None
    empty: Tensor | None = None
    first: bool = False


@dataclass(frozen=True)
class Schedule:
    """The calls that cover all visible pairs exactly once, and what the calls do not know.

    ``complete``: every token is in the queries and keys of exactly one call marked ``first``, and those come before all
    others; otherwise results start from "no keys". ``queries``: bool ``[T]``, False for queries that see nothing
    whatever the calls say; None for no such query.
    """

    calls: Iterator[Call]
    complete: bool
    queries: Tensor | None


def schedule(
    nodes: Tensor, vectors: Sequence[Tensor], column: Tensor, expression: Expression | None, dtype: torch.dtype
) -> Schedule:
    """Plan the kernel calls for packed tokens on the CPU.

    Args:
        nodes: int64 ``[M, 3]``: start, stop, query_stop.
        vectors: what the mask expression reads, ``[T]`` each.
        column: int32 ``[T]``.
        expression: the mask, None for none.
        dtype: of the additive biases, which the kernel wants to be that of the queries.
    """
    table = [(start, stop, query_stop) for start, stop, query_stop in nodes.tolist() if start < stop]
    terms = conjuncts(expression) if table else []
    key_term = conjoin([term for term in terms if not depends_on_query(term)])
    query_term = conjoin([term for term in terms if depends_on_query(term) and not depends_on_key(term)])
    pair_term = conjoin([term for term in terms if depends_on_query(term) and depends_on_key(term)])
    everything, one = slice(0, column.shape[0]), slice(0, 1)

    keys = None if key_term is None else evaluate(key_term, vectors, column, one, everything)[0]
    if keys is None or bool(keys.all()):
        pieces, complete = [_Piece(*node) for node in table], True
    else:
        pieces, complete = _trim(table, keys, dtype), False
    if pair_term is not None:
        # One look at all tokens as a single block: a window longer than every row, one document per row.
        bounds = BlockBounds(pair_term, vectors, column, np.zeros(1, np.int64))
        if bounds.of(pair_term, np.zeros(1, np.int64), np.zeros(1, np.int64))[0].all():
            pair_term = None
    if pair_term is None:
        calls = _plain_calls(pieces, pieces, complete)
    else:
        complete = False
        calls = _masked_calls(pieces, pair_term, vectors, column, dtype)

    queries = None if query_term is None else evaluate(query_term, vectors, column, everything, one)[:, 0]
    return Schedule(calls, complete, None if queries is None or bool(queries.all()) else queries)


@dataclass(frozen=True)
class _Piece:
    """A node, or what is left of it: keys [start, stop), seen causally from inside and densely by [stop, query_stop).

    ``bias``: float [stop - start], -inf at invisible keys, None if there is none. The first key is always visible, so
    no query of the piece is without keys.
    """

    start: int
    stop: int
    query_stop: int
    bias: Tensor | None = None


def _trim(table: Sequence[tuple[int, int, int]], keys: Tensor, dtype: torch.dtype) -> list[_Piece]:
    """Cut the nodes to their visible keys; nodes without any disappear."""
    padded = torch.nn.functional.pad(keys.to(torch.int8), (1, 1)).diff()
    runs = list(
        zip((padded == 1).nonzero().squeeze(1).tolist(), (padded == -1).nonzero().squeeze(1).tolist(), strict=True)
    )
    bias = torch.zeros(keys.shape[0], dtype=dtype).masked_fill_(~keys, -torch.inf)
    pieces, at = [], 0
    for start, stop, query_stop in table:
        while at < len(runs) and runs[at][1] <= start:
            at += 1
        first, last = at, at
        while last < len(runs) and runs[last][0] < stop:
            last += 1
        if first == last:
            continue
        begin, end = max(start, runs[first][0]), min(stop, runs[last - 1][1])
        # Queries behind the last visible key become dense queries. For a leaf they would be the only ones: see the
        # module's last paragraph.
        if query_stop == stop and stop - end < _TAIL:
            end = stop
        whole = last - first == 1 and end <= runs[first][1]
        pieces.append(_Piece(begin, end, query_stop, None if whole else bias[begin:end]))
        at = max(first, last - 1)  # the last run may reach into the next node
    return pieces


def _plain_calls(own: Sequence[_Piece], dense: Sequence[_Piece], first: bool) -> Iterator[Call]:
    """The two calls of pieces without pair terms: causal ones of ``own``, equal neighbours stacked, then dense ones."""
    at = 0
    while at < len(own):
        start, length, stop = own[at].start, own[at].stop - own[at].start, own[at].stop
        last = at + 1
        while last < len(own) and own[last].start == stop and own[last].stop - stop == length:
            stop = own[last].stop
            last += 1
        bias = None
        if any(piece.bias is not None for piece in own[at:last]):
            dtype = next(piece.bias.dtype for piece in own[at:last] if piece.bias is not None)
            rows = [torch.zeros(length, dtype=dtype) if piece.bias is None else piece.bias for piece in own[at:last]]
            bias = torch.stack(rows)[:, None, None, :]
        yield Call((start, stop), (start, stop), causal=True, stack=last - at, bias=bias, first=first)
        at = last
    for piece in dense:
        if piece.stop < piece.query_stop:
            bias = None if piece.bias is None else piece.bias[None, None, None, :]
            yield Call((piece.stop, piece.query_stop), (piece.start, piece.stop), bias=bias)


# ------------------------------------------------------------------------------------------------------- pair terms
def _masked_calls(
    pieces: Sequence[_Piece], term: Expression, vectors: Sequence[Tensor], column: Tensor, dtype: torch.dtype
) -> Iterator[Call]:
    cuts = _cuts(pieces, column.shape[0])
    number = {cut: block for block, cut in enumerate(cuts)}
    bounds = BlockBounds(term, vectors, column, np.array(cuts[:-1]))
    tiles = _Tiles(cuts, term, vectors, column, dtype)
    rectangles = [_Rectangle(piece, number[piece.start], number[piece.stop], None) for piece in pieces]
    rectangles += [
        _Rectangle(piece, number[piece.start], number[piece.stop], number[piece.query_stop])
        for piece in pieces
        if piece.stop < piece.query_stop
    ]
    own, dense = [], []
    for rectangle, always, possibly in _bounded(rectangles, term, bounds):
        if not always.all():
            yield from tiles.cover(rectangle, always, possibly)
        elif rectangle.query_end is None:
            own.append(rectangle.piece)
        else:
            dense.append(rectangle.piece)
    yield from _plain_calls(own, dense, first=False)


def _cuts(pieces: Sequence[_Piece], tokens: int) -> list[int]:
    """Block borders: at every border of a piece, and at most BLOCK tokens apart."""
    borders = sorted({0, tokens}.union(*((piece.start, piece.stop, piece.query_stop) for piece in pieces)))
    return [0, *(min(stop, at + BLOCK) for start, stop in pairwise(borders) for at in range(start, stop, BLOCK))]


@dataclass(frozen=True)
class _Rectangle:
    """Blocks [key_begin, key_end) as keys; queried by themselves (query_end None) or by [key_end, query_end)."""

    piece: _Piece
    key_begin: int
    key_end: int
    query_end: int | None

    @property
    def query_blocks(self) -> Range:
        return (self.key_begin, self.key_end) if self.query_end is None else (self.key_end, self.query_end)


def _bounded(
    rectangles: Sequence[_Rectangle], term: Expression, bounds: BlockBounds
) -> Iterator[tuple[_Rectangle, BoolArray, BoolArray]]:
    """Each rectangle with (always, possibly), [query blocks, key blocks]; many rectangles per evaluation."""
    at = 0
    while at < len(rectangles):
        group, ends, queries, keys = [], [0], [], []
        while at < len(rectangles) and ends[-1] < _PAIRS:
            rectangle = rectangles[at]
            begin, end = rectangle.query_blocks
            own_keys = np.arange(rectangle.key_begin, rectangle.key_end)
            queries.append(np.repeat(np.arange(begin, end), own_keys.size))
            keys.append(np.tile(own_keys, end - begin))
            ends.append(ends[-1] + keys[-1].size)
            group.append(rectangle)
            at += 1
        always, possibly = bounds.of(term, np.concatenate(queries), np.concatenate(keys))
        for rectangle, (start, stop) in zip(group, pairwise(ends), strict=True):
            shape = (-1, rectangle.key_end - rectangle.key_begin)
            yield rectangle, always[start:stop].reshape(shape), possibly[start:stop].reshape(shape)


@dataclass(frozen=True)
class _Tiles:
    """Covers a partly visible rectangle with calls: unmasked where possible, tiles with a written mask elsewhere."""

    cuts: list[int]
    term: Expression
    vectors: Sequence[Tensor]
    column: Tensor
    dtype: torch.dtype

    def cover(self, rectangle: _Rectangle, always: BoolArray, possibly: BoolArray) -> Iterator[Call]:
        """The calls of one rectangle; ``always`` and ``possibly`` are [query blocks, key blocks]."""
        begin, end = rectangle.query_blocks
        own = rectangle.query_end is None
        piece = rectangle.piece
        waiting: dict[Range, Range] = {}  # keys -> queries of unmasked calls that grow while the next rows ask the same
        at = begin
        while at < end:
            stop = at + 1
            while stop < end and self.cuts[stop + 1] - self.cuts[at] <= MAX_QUERIES:
                stop += 1
            queries = (self.cuts[at], self.cuts[stop])
            sure: list[bool] = np.all(always[at - begin : stop - begin], axis=0).tolist()
            maybe: list[bool] = np.any(possibly[at - begin : stop - begin], axis=0).tolist()
            edge = (at if own else rectangle.key_end) - rectangle.key_begin
            clear, masked = self._runs(rectangle.key_begin, sure[:edge], maybe[:edge])
            if own and any(maybe[edge:]):
                if all(sure[edge:]) and _bias(piece, queries) is None:
                    yield Call(queries, queries, causal=True)
                else:
                    masked.append(queries)
            for keys in _joined(masked):
                yield from self._masked(piece, queries, keys)
            growing: dict[Range, Range] = {}
            for keys in clear:
                earlier = waiting.pop(keys, queries)
                growing[keys] = (earlier[0], queries[1])
            for keys, asking in waiting.items():
                yield from _clear(piece, asking, keys)
            waiting = growing
            at = stop
        for keys, asking in waiting.items():
            yield from _clear(piece, asking, keys)

    def _runs(self, first: int, sure: list[bool], maybe: list[bool]) -> tuple[list[Range], list[Range]]:
        """Runs of key blocks from block number ``first`` on: those that need no mask, and those that do."""
        clear, masked = [], []
        for state, run in _equal_runs(list(zip(sure, maybe, strict=True))):
            keys = (self.cuts[first + run[0]], self.cuts[first + run[1]])
            if all(state) and keys[1] - keys[0] >= _SHORT:
                clear.append(keys)
            elif state[1]:
                masked.append(keys)
        return clear, masked

    def _masked(self, piece: _Piece, queries: Range, keys: Range) -> Iterator[Call]:
        """A tile with its mask written out; no call if nothing is visible."""
        rows, columns = slice(*queries), slice(*keys)
        visible = evaluate(self.term, self.vectors, self.column, rows, columns)
        if keys[1] > queries[0]:  # reaches into the queries' own tokens, of the same row
            visible = visible & (self.column[columns] <= self.column[rows, None])
        bias = _bias(piece, keys)
        if bias is not None:
            visible = visible & (bias == 0)
        if bool(visible.all()):
            yield Call(queries, keys)
            return
        seeing = visible.any(1)
        if not bool(seeing.any()):
            return
        tile = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, -torch.inf)
        yield Call(queries, keys, bias=tile[None, None], empty=None if bool(seeing.all()) else ~seeing)


def _bias(piece: _Piece, keys: Range) -> Tensor | None:
    """The piece's bias on some of its keys, None if they are all visible."""
    if piece.bias is None:
        return None
    bias = piece.bias[keys[0] - piece.start : keys[1] - piece.start]
    return bias if bool((bias != 0).any()) else None


def _clear(piece: _Piece, queries: Range, keys: Range) -> Iterator[Call]:
    """A dense call, unless the keys are invisible one and all."""
    bias = _bias(piece, keys)
    if bias is None:
        yield Call(queries, keys)
    elif bool((bias == 0).any()):
        yield Call(queries, keys, bias=bias[None, None, None, :])


def _equal_runs(states: Sequence[tuple[bool, bool]]) -> Iterator[tuple[tuple[bool, bool], Range]]:
    start = 0
    for at in range(1, len(states) + 1):
        if at == len(states) or states[at] != states[start]:
            yield states[start], (start, at)
            start = at


def _joined(runs: Sequence[Range]) -> Iterator[Range]:
    """Join neighbouring runs of keys and cut the result into parts of at most MAX_KEYS."""
    joined: list[Range] = []
    for run in runs:
        if joined and joined[-1][1] == run[0]:
            joined[-1] = (joined[-1][0], run[1])
        else:
            joined.append(run)
    for start, stop in joined:
        for part in range(start, stop, MAX_KEYS):
            yield part, min(stop, part + MAX_KEYS)
