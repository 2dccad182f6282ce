"""The prefix tree of a batch, as tensors: which grid positions are computed once, and which packed token sees which.

A batch is a grid ``[B, S]`` of rows. Two rows share their first ``n`` columns where all *keys* (token ids, positions,
mask, ...) of both rows agree, bit for bit, in columns ``0 .. n - 1``. Everything a causal model computes there is then
equal too, so one copy is enough. The batch is put in an order in which rows with a common prefix are neighbours (the
rows' tree, depth first, children in the order of their first row), and one number per row says it all:

    ``shared[i]`` = common prefix of the i-th row in this order with the row before it (0 if below ``min_shared``).

The i-th row *owns* its columns ``>= shared[i]``; the columns before belong to earlier rows. The owned positions, by
(rank i, column s), are the ``T`` packed tokens. With ``end`` = the first later rank whose row does not share the token:

    key k is visible to query q  <=>  rank[k] <= rank[q] < end[k]  and  column[k] <= column[q]

Reading the keys costs one device synchronisation (none on the CPU); everything after is built on the keys' device from
tables of a few numbers per row.

Sizes it is made for: B <= 512 rows, S <= 16,384 columns, some 32 bytes of keys per position. Nothing breaks beyond, but
the cost on a device grows with ``B * B * S`` (all pairs of rows are compared). Memory: about 30 bytes per grid position
while building, and a few times ``PAIR_BYTES`` for the comparison on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkv_compile.errors import InputError

PAIR_BYTES = 1 << 24
"""Most bytes of one temporary of the pairwise comparison (at most four of them are alive), for batches that are not so
large that it would take more than some ``PAIR_STEPS`` steps."""

PAIR_STEPS = 64

_COMPARE_ELEMENTS = 1 << 15  # per step of the comparison on the CPU: stays in the cache, and stops early

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class SharedSpan(NamedTuple):
    """A node of the tree that several rows share: they agree in ``[0, stop)``, and ``[start, stop)`` is this node."""

    rows: tuple[int, ...]  # rows of the batch, ascending
    start: int  # first column
    stop: int  # one past the last column


@dataclass(frozen=True, eq=False)
class PlanWindow:
    """The packed tokens of the columns ``[start, stop)``, W = stop - start (see ``PrefixPlan.window``)."""

    index: Tensor  # int64 [Tw] packed indices of the window's tokens, ascending
    inverse: Tensor  # int64 [B, W] position inside `index` of every grid position of the window; -1 where dropped
    column: Tensor  # int64 [Tw] column minus start


@dataclass(frozen=True, eq=False)
class PrefixPlan:
    """A batch ``[B, S]`` as ``T`` packed tokens; treat every tensor as read-only, plans are shared.

    Packed token ``t`` is grid position ``(order[rank[t]], column[t])``; tokens are sorted by (rank, column).
    ``x.flatten(0, 1)[token]`` packs a grid ``[B, S, ...]`` and ``packed[inverse]`` puts it back. Visibility:

        key k is visible to query q  <=>  rank[k] <= rank[q] < end[k]  and  column[k] <= column[q]

    A *node* is a maximal run ``[start, stop)`` of packed tokens of one row with equal ``end``. Its own tokens see each
    other causally; the other queries that see a key of the node are exactly ``[stop, query_stop)``, and they see all of
    its keys.
    """

    rows: int  # B
    columns: int  # S
    tokens: int  # T
    order: tuple[int, ...]  # rank -> row of the batch
    shared: tuple[int, ...]  # rank -> columns owned by earlier ranks, after min_shared
    token: Tensor  # int64 [T] flat grid index row * S + column
    inverse: Tensor  # int64 [B, S] packed index of each grid position; -1 where dropped
    rank: Tensor  # int32 [T]
    column: Tensor  # int32 [T]
    end: Tensor  # int32 [T]
    nodes: Tensor  # int64 [M, 3] on the CPU: start, stop, query_stop; together they cover [0, T) in order
    visible: Tensor | None = None  # int64 [N, 3] on the CPU: `nodes` cut to runs of keys that can be seen, if asked for
    _owned: BoolArray | None = field(default=None, repr=False)  # [B, S] by rank: is a token; None: no position dropped

    @staticmethod
    def from_rows(keys: Tensor | Sequence[Tensor], *, min_shared: int = 64, keep: Tensor | None = None) -> PrefixPlan:
        """The plan of a batch whose rows share a prefix wherever all ``keys`` agree.

        Args:
            keys: one or several tensors ``[B, S, ...]`` of any dtype on one device (B >= 1, S >= 1); trailing
                dimensions are part of the key. Compared by bits: ``-0.0`` is not ``0.0``, a NaN equals the same NaN.
            min_shared: a common prefix of fewer columns is not shared at all; at least 1.
            keep: bool ``[B, S]`` on the same device; positions with False get no token. It counts as one more key: rows
                share a column only where they agree on what is kept.

        Returns:
            The plan, its tensors on the keys' device, none of them an inference tensor. One device synchronisation if
            that device is not the CPU.

        Raises:
            InputError: a shape, dtype, device or value is not as above.
        """
        return _from_rows(keys, min_shared, keep, on_device=None)

    @staticmethod
    def static(
        groups: Sequence[int],
        shared_columns: int,
        columns: int,
        device: torch.device | str = "cpu",
        min_shared: int = 64,
    ) -> PrefixPlan:
        """The plan of repeats known beforehand; reads no data and does not synchronise.

        Args:
            groups: one id per row; rows with equal ids share exactly the columns ``[0, shared_columns)``, other rows
                nothing.
            shared_columns: 0 <= shared_columns <= columns.
            columns: S >= 1.
            device: where the plan's tensors go.
            min_shared: as in ``from_rows``.

        Raises:
            InputError: a value is not as above.
        """
        _check_int("columns", columns, 1)
        _check_int("shared_columns", shared_columns, 0, columns)
        _check_int("min_shared", min_shared, 1)
        members: dict[int, list[int]] = {}
        for row, group in enumerate(groups):
            if isinstance(group, bool) or not isinstance(group, int):
                raise InputError(f"groups[{row}]: expected an int, got {group!r}")
            members.setdefault(group, []).append(row)
        if not members:
            raise InputError("groups: expected at least one row, got none")
        order = [row for rows in members.values() for row in rows]
        lcp = [shared_columns if i else 0 for rows in members.values() for i in range(len(rows))]
        return build_plan(RowOrder(order, lcp), columns, min_shared, torch.device(device))

    @property
    def ratio(self) -> float:
        """Grid positions per packed token, ``B * S / T``; infinite if nothing is kept."""
        return self.rows * self.columns / self.tokens if self.tokens else float("inf")

    def prompts(self) -> list[SharedSpan]:
        """The tree's nodes that at least two rows share, by (rank, column), for reports.

        With ``keep`` a span reaches from the first to the last kept column of the node; nodes without any are left out.
        """
        spans = []
        for rank, end, start, stop in _tree(self.shared, self.columns):
            if end - rank < 2:
                continue
            if self._owned is not None:
                kept = np.flatnonzero(self._owned[rank, start:stop])
                if not kept.size:
                    continue
                start, stop = start + int(kept[0]), start + int(kept[-1]) + 1
            spans.append(SharedSpan(tuple(sorted(self.order[rank:end])), start, stop))
        return spans

    def window(self, start: int, stop: int) -> PlanWindow:
        """The tokens of the columns ``[start, stop)``, ``0 <= start <= stop <= S``; does not synchronise.

        A grid position of the window and its token stand in the same column, so the window's positions find all their
        tokens in it: ``packed[index][inverse]`` is ``grid[:, start:stop]``.

        Raises:
            InputError: the bounds are not as above.
        """
        _check_int("start", start, 0, self.columns)
        _check_int("stop", stop, start, self.columns)
        with torch.inference_mode(False), torch.no_grad():
            # A row's tokens are sorted by column: those of the window are one run, of known place and length.
            lengths = self._tokens_per_rank(start, stop)
            totals = self._tokens_per_rank(0, self.columns)
            first = np.cumsum(totals) - totals + self._tokens_per_rank(0, start)
            shift = first - (np.cumsum(lengths) - lengths)
            count = int(lengths.sum())
            device = self.token.device
            lengths_t, shift_t = _upload(np.stack([lengths, shift]), device)
            rank = torch.repeat_interleave(lengths_t, output_size=count)
            index = torch.arange(count, device=device) + shift_t[rank]
            packed = self.inverse[:, start:stop]
            if self.tokens:
                inverse = packed - shift_t[self.rank[packed.clamp_min(0)]]
                if self._owned is not None:
                    inverse.masked_fill_(packed < 0, -1)
            else:
                inverse = packed.clone()
            return PlanWindow(index, inverse, self.column[index].long() - start)

    def to(self, device: torch.device | str) -> PrefixPlan:
        """The same plan with its tensors on ``device`` (``nodes`` stays on the CPU)."""
        target = torch.device(device)

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(target, non_blocking=target.type != "cpu")  # to the CPU: the caller may read at once

        with torch.inference_mode(False), torch.no_grad():
            return replace(
                self,
                token=move(self.token),
                inverse=move(self.inverse),
                rank=move(self.rank),
                column=move(self.column),
                end=move(self.end),
            )

    def _tokens_per_rank(self, start: int, stop: int) -> IntArray:
        """Packed tokens of each rank in the columns ``[start, stop)``, int64 [B]."""
        if self._owned is not None:
            return np.asarray(np.count_nonzero(self._owned[:, start:stop], axis=1), dtype=np.int64)
        lengths: IntArray = np.maximum(stop - np.maximum(np.asarray(self.shared, dtype=np.int64), start), 0)
        return lengths


class RowOrder(NamedTuple):
    """Rows by rank, and what neighbours have in common (not edited by ``min_shared``)."""

    order: list[int]  # rank -> row
    lcp: list[int]  # rank -> common prefix with the rank before; 0 for rank 0


def check_keys(keys: Tensor | Sequence[Tensor], min_shared: int, keep: Tensor | None) -> list[Tensor]:
    """The keys as a list, ``keep`` last if given; raises InputError if one is not as ``PrefixPlan.from_rows`` asks."""
    _check_int("min_shared", min_shared, 1)
    tensors = [keys] if isinstance(keys, Tensor) else list(keys)
    if not tensors:
        raise InputError("keys: expected at least one tensor, got none")
    names = ["keys"] if isinstance(keys, Tensor) else [f"keys[{i}]" for i in range(len(tensors))]
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise InputError(f"{name}: expected a tensor [B, S, ...], got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise InputError(f"{name}: expected a dense tensor with data, got {tensor.layout}, {tensor.device}")
        if tensor.dim() < 2 or 0 in tensor.shape[:2]:
            raise InputError(f"{name}: expected shape [B, S, ...] with B >= 1 and S >= 1, got {list(tensor.shape)}")
        if tensor.shape[:2] != tensors[0].shape[:2]:
            rows, columns = tensors[0].shape[:2]
            raise InputError(f"{name}: expected shape [{rows}, {columns}, ...] as {names[0]}, got {list(tensor.shape)}")
        if tensor.device != tensors[0].device:
            raise InputError(f"{name}: expected device {tensors[0].device} as {names[0]}, got {tensor.device}")
    if keep is None:
        return tensors
    shape = tensors[0].shape[:2]
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != shape:
        got = f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
        raise InputError(f"keep: expected a tensor torch.bool {list(shape)}, got {got}")
    if keep.device != tensors[0].device:
        raise InputError(f"keep: expected device {tensors[0].device} as {names[0]}, got {keep.device}")
    return [*tensors, keep]


def key_bits(keys: Sequence[Tensor]) -> list[Tensor]:
    """Each key ``[B, S, ...]`` as integers ``[B, S, F]`` with the same bits; a view wherever strides allow."""
    return [_bits(key) for key in keys]


def _bits(key: Tensor) -> Tensor:
    key = key.detach().resolve_conj().resolve_neg()
    if key.is_complex():
        key = torch.view_as_real(key)
    rows, columns = key.shape[:2]
    flat = key.reshape(rows, columns, key[0, 0].numel())
    size = flat.element_size()
    if flat.shape[2] > 1 and flat.shape[2] * size % 8 == 0:  # vectors: fewer and wider comparisons
        flat = flat.contiguous()
        if flat.storage_offset() * size % 8 == 0:
            return flat.view(torch.int64)
    return flat.view(_BITS[size])


def order_rows(bits: Sequence[Tensor]) -> RowOrder:
    """Orders the rows of CPU tensors ``[B, S, F]`` by splitting groups of rows where they first differ.

    Each group is compared with its first row up to the first column where any member differs, then parted by what
    stands there. So every position is read at most once, only shared ones are read at all, and nothing is copied but
    the few rows at hand. Groups of one end; there are fewer than B others.
    """
    arrays: list[npt.NDArray[Any]] = [key.numpy() for key in bits if key.numel()]
    rows, columns = bits[0].shape[:2]
    order: list[int] = []
    lcp: list[int] = []
    todo: list[tuple[IntArray, int, int]] = [(np.arange(rows), 0, 0)]  # members, columns known equal, lcp before them
    while todo:
        group, known, before = todo.pop()
        split = _first_difference(arrays, group, known, columns) if len(group) > 1 else columns
        if split == columns:
            order += group.tolist()
            lcp += [before] + [columns] * (len(group) - 1)
            continue
        found = [np.ascontiguousarray(array[group, split]).view(np.uint8) for array in arrays]
        parts: dict[bytes, list[int]] = {}
        for row, value in zip(group.tolist(), np.concatenate(found, axis=1), strict=True):
            parts.setdefault(value.tobytes(), []).append(row)
        children = [(np.asarray(part), split + 1, split if i else before) for i, part in enumerate(parts.values())]
        todo += reversed(children)
    return RowOrder(order, lcp)


def _first_difference(arrays: Sequence[npt.NDArray[Any]], group: IntArray, start: int, stop: int) -> int:
    """First column in ``[start, stop)`` where not all rows of the group are equal; ``stop`` if there is none."""
    consecutive = group[-1] - group[0] + 1 == len(group)
    rows = slice(group[0], group[-1] + 1) if consecutive else group  # a slice copies nothing
    while start < stop:
        reach = stop
        for array in arrays:
            width = max(_COMPARE_ELEMENTS // (len(group) * array.shape[2]), 1)
            reach = min(reach, start + width)
        differs = False
        for array in arrays:
            block = array[rows, start:reach]
            unequal = (block[1:] != block[0]).any(axis=(0, 2))
            first = int(unequal.argmax())
            if unequal[first]:
                reach, differs = start + first, True
                if not first:
                    return start
        if differs:
            return reach
        start = reach
    return stop


def pairwise_lcp(bits: Sequence[Tensor], limit: int | None = None) -> Tensor:
    """Common prefix of every pair of rows, int32 ``[B, B]`` on the keys' device; only ``[i, j]`` with i <= j is valid.

    Does not synchronise. No temporary is larger than ``limit`` bytes (nor smaller than B * F, one column of a row);
    by default see ``PAIR_BYTES``.
    """
    bits = [key for key in bits if key.numel()] or [bits[0].new_zeros(*bits[0].shape[:2], 1)]
    rows, columns = bits[0].shape[:2]
    feature = max(key.shape[2] for key in bits)
    if limit is None:
        limit = max(PAIR_BYTES, rows * rows * columns * feature // PAIR_STEPS)
    width = min(columns, max(limit // (rows * feature), 1))
    step = max(limit // (rows * feature * width), 1)
    lcp = torch.full((rows, rows), columns, dtype=torch.int32, device=bits[0].device)
    for top in range(0, rows, step):
        for left in range(0, columns, width):
            differs: Tensor | None = None
            for key in bits:
                chunk = key[top:, left : left + width]
                unequal = chunk[:step, None] != chunk[None]
                unequal = unequal.any(-1) if key.shape[2] > 1 else unequal.squeeze(-1)
                differs = unequal if differs is None else differs.logical_or_(unequal)
            assert differs is not None
            first = differs.view(torch.uint8).argmax(-1, keepdim=True)  # the first of equal maxima
            found = differs.gather(-1, first).squeeze(-1)
            target = lcp[top : top + step, top:]
            torch.minimum(target, torch.where(found, first.squeeze(-1) + left, columns), out=target)
    return lcp


def order_pairs(lcp: npt.NDArray[np.int32]) -> RowOrder:
    """The order of ``order_rows`` from the pairwise common prefixes (upper triangle).

    A row goes behind the last of the rows it shares most with. Those stand together (prefixes are an ultrametric), so
    they stay neighbours, and the new row becomes the last child of the node where it branches off.
    """
    rows = len(lcp)
    order = np.zeros(rows, dtype=np.int64)
    for row in range(1, rows):
        near = lcp[order[:row], row]
        place = row - int(near[::-1].argmax())
        order[place + 1 : row + 1] = order[place:row].copy()
        order[place] = row
    before, after = order[:-1], order[1:]
    neighbours = lcp[np.minimum(before, after), np.maximum(before, after)]
    return RowOrder(order.tolist(), [0, *neighbours.tolist()])


class Fetched(NamedTuple):
    """What one synchronisation brings from the device."""

    flags: list[bool]
    lcp: npt.NDArray[np.int32]  # [B, B], see `pairwise_lcp`
    keep: BoolArray | None  # [B, S]
    valid: BoolArray | None  # [B, S]


def fetch(
    bits: Sequence[Tensor], keep: Tensor | None, flags: Sequence[Tensor] = (), valid: Tensor | None = None
) -> Fetched:
    """Compares the rows on their device; brings the result, the bool ``keep`` and ``valid`` ``[B, S]`` and the bool
    scalars ``flags`` in one transfer.
    """
    lcp = pairwise_lcp(bits)
    parts = [lcp.view(torch.uint8), *flags, *(mask for mask in (keep, valid) if mask is not None)]
    flat = [part.reshape(-1).view(torch.uint8) for part in parts]
    pairs, *rest = np.split(torch.cat(flat).cpu().numpy(), np.cumsum([part.numel() for part in flat])[:-1])
    told = [bool(flag[0]) for flag in rest[: len(flags)]]
    masks = iter(rest[len(flags) :])
    kept, seen = (None if x is None else next(masks).astype(np.bool_).reshape(x.shape) for x in (keep, valid))
    return Fetched(told, pairs.view(np.int32).reshape(lcp.shape), kept, seen)


def _from_rows(
    keys: Tensor | Sequence[Tensor], min_shared: int, keep: Tensor | None, on_device: bool | None
) -> PrefixPlan:
    """``PrefixPlan.from_rows``; ``on_device`` True takes the device's way on any device (None: except on the CPU)."""
    tensors = check_keys(keys, min_shared, keep)
    columns, device = tensors[0].shape[1], tensors[0].device
    bits = key_bits(tensors)
    if device.type != "cpu" if on_device is None else on_device:
        fetched = fetch(bits, keep)
        rows, kept = order_pairs(fetched.lcp), fetched.keep
    else:
        rows, kept = order_rows(bits), None if keep is None else keep.numpy()
    return build_plan(rows, columns, min_shared, device, keep, kept, on_device)


def build_plan(
    rows: RowOrder,
    columns: int,
    min_shared: int,
    device: torch.device,
    keep: Tensor | None = None,
    kept: BoolArray | None = None,
    on_device: bool | None = None,
    valid: BoolArray | None = None,
) -> PrefixPlan:
    """The plan's tensors from the order of the rows; does not synchronise.

    Args:
        rows: order and common prefixes of B rows.
        columns: S.
        min_shared: smaller common prefixes count as 0.
        device: where the tensors go.
        keep: bool ``[B, S]`` on that device, or None.
        kept: the same on the host.
        on_device: as in ``_from_rows``.
        valid: bool ``[B, S]`` on the host, the keys that queries may see, equal wherever rows share; for ``visible``.
    """
    # Everything below, `end` included, follows from the edited prefixes: the minimum over a range of ranks commutes
    # with the editing, so this is again a tree.
    shared = np.asarray(rows.lcp, dtype=np.int64)
    shared[shared < min_shared] = 0
    order = np.asarray(rows.order, dtype=np.int64)
    spans = np.asarray(_tree(shared.tolist(), columns), dtype=np.int64)
    owned: BoolArray | None = None
    lengths = spans[:, 3] - spans[:, 2]
    if kept is not None:
        owned = kept[order] & (np.arange(columns) >= shared[:, None])
        lengths = np.asarray([np.count_nonzero(owned[rank, a:b]) for rank, _, a, b in spans], dtype=np.int64)
    stops = np.cumsum(lengths)
    per_rank = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(per_rank, spans[:, 0] + 1, lengths)
    rank_starts = np.cumsum(per_rank)
    nodes = np.stack([stops - lengths, stops, rank_starts[spans[:, 1]]], axis=1)[lengths > 0]
    layout = _Layout(columns, int(lengths.sum()), order, shared, rank_starts[:-1], spans, lengths)
    with torch.inference_mode(False), torch.no_grad():
        if device.type != "cpu" if on_device is None else on_device:
            tensors = _tensors_on_device(layout, keep, device)
        else:
            tensors = _tensors_on_host(layout, owned)
        token, inverse, rank, column, end = tensors
        return PrefixPlan(
            rows=len(order),
            columns=columns,
            tokens=layout.tokens,
            order=tuple(rows.order),
            shared=tuple(shared.tolist()),
            token=token,
            inverse=inverse,
            rank=rank,
            column=column,
            end=end,
            nodes=torch.from_numpy(nodes),
            visible=None if valid is None else torch.from_numpy(_visible(layout, owned, valid)),
            _owned=owned,
        )


class _Layout(NamedTuple):
    """What the host knows of a plan: a few numbers per row and per node."""

    columns: int
    tokens: int
    order: IntArray  # [B] rank -> row
    shared: IntArray  # [B]
    rank_starts: IntArray  # [B] first packed token of each rank
    spans: IntArray  # [N, 4] see `_tree`
    lengths: IntArray  # [N] packed tokens of each span


def _visible(layout: _Layout, owned: BoolArray | None, valid: BoolArray) -> IntArray:
    """(start, stop, query_stop) of every run of tokens of one node that are ``valid`` [B, S], in their order."""
    runs: list[tuple[int, int, int]] = []
    stops = np.append(layout.rank_starts, layout.tokens)
    at = 0
    for (first, last, start, stop), length in zip(layout.spans.tolist(), layout.lengths.tolist(), strict=True):
        seen = valid[layout.order[first], start:stop]
        if owned is not None:
            seen = seen[owned[first, start:stop]]
        borders = np.flatnonzero(np.diff(np.concatenate([[False], seen, [False]]).astype(np.int8)))
        runs += [(at + a, at + b, int(stops[last])) for a, b in borders.reshape(-1, 2).tolist()]
        at += length
    return np.asarray(runs, dtype=np.int64).reshape(-1, 3)


_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # token, inverse, rank, column, end


def _tensors_on_host(layout: _Layout, owned: BoolArray | None) -> _Tensors:
    """The plan's tensors on the CPU, span by span: each element is written once."""
    order, columns, tokens = layout.order, layout.columns, layout.tokens
    token, inverse = np.empty(tokens, dtype=np.int64), np.empty((len(order), columns), dtype=np.int64)
    rank, column, end = (np.empty(tokens, dtype=np.int32) for _ in range(3))
    at = 0
    for (first, last, start, stop), length in zip(layout.spans.tolist(), layout.lengths.tolist(), strict=True):
        here = slice(at, at + length)
        if owned is None:
            places, found = np.arange(at, at + length), np.arange(start, stop)
        else:  # keep is one of the keys: all rows of the span drop the same columns
            mine = owned[first, start:stop]
            places, found = np.where(mine, np.cumsum(mine) + (at - 1), -1), np.flatnonzero(mine) + start
        rank[here], end[here], column[here] = first, last, found
        np.add(found, order[first] * columns, out=token[here])
        for row in order[first:last]:
            inverse[row, start:stop] = places
        at += length
    return (
        torch.from_numpy(token),
        torch.from_numpy(inverse),
        torch.from_numpy(rank),
        torch.from_numpy(column),
        torch.from_numpy(end),
    )


def _tensors_on_device(layout: _Layout, keep: Tensor | None, device: torch.device) -> _Tensors:
    """The same tensors on a device, by a fixed number of operations and without synchronising."""
    order, columns, tokens, spans = layout.order, layout.columns, layout.tokens, layout.spans
    offsets = spans[:, 2] - (np.cumsum(layout.lengths) - layout.lengths)
    length, first, last, offset = _upload(np.stack([layout.lengths, spans[:, 0], spans[:, 1], offsets]), device)
    row_of, shared, shift, rank_of = _upload(
        np.stack([order, layout.shared, layout.rank_starts - layout.shared, np.argsort(order)]), device
    )
    span = torch.repeat_interleave(length, output_size=tokens)
    rank = first[span]
    # What has an entry for each grid position is half as large in 32 bits.
    narrow = torch.int32 if len(order) * columns < 2**31 else torch.int64
    every_column = torch.arange(columns, dtype=narrow, device=device)
    owned = every_column >= shared[:, None]  # [B, S] by rank, as `place` and `inverse`
    if keep is None:
        column = torch.arange(tokens, device=device) + offset[span]
        place = shift[:, None].to(narrow) + every_column
    else:
        owned &= keep[row_of]
        place = owned.reshape(-1).cumsum(0, dtype=narrow).sub_(1).view_as(owned)
        # Compaction to a known size: what is not owned goes to one slot behind the end.
        slots = torch.where(owned, place, tokens).reshape(-1).long()
        grid = torch.empty(tokens + 1, dtype=narrow, device=device)
        grid.scatter_(0, slots, torch.arange(len(slots), dtype=narrow, device=device))
        column = (grid[:tokens] % columns).long()
        del slots, grid
    # Down a column, places grow with the rank: the owner of a position is the last owner so far.
    inverse = place.masked_fill_(~owned, -1).cummax(0).values[rank_of].long()
    if keep is not None:
        inverse.masked_fill_(~keep, -1)
    return row_of[rank] * columns + column, inverse, rank.int(), column.int(), last.int()[span]


def _tree(shared: Iterable[int], columns: int) -> list[tuple[int, int, int, int]]:
    """The tree's nodes as rectangles (rank, end, start, stop): ranks [rank, end) share columns [start, stop) of `rank`.

    They part the grid, are sorted by (rank, start), and are fewer than 2 B.
    """
    closed: list[tuple[int, int, int, int]] = []
    path: list[tuple[int, int, int]] = []  # owner, start, stop: the columns of the current rank, by who owns them
    ranks = 0
    for rank, depth in enumerate(shared):
        ranks += 1
        while path and path[-1][2] > depth:
            owner, start, stop = path.pop()
            closed.append((owner, rank, max(start, depth), stop))
            if start < depth:
                path.append((owner, start, depth))
        if depth < columns:
            path.append((rank, depth, columns))
    closed += [(owner, ranks, start, stop) for owner, start, stop in path]
    return sorted(closed, key=lambda span: (span[0], span[2]))


def _upload(table: IntArray, device: torch.device) -> tuple[Tensor, ...]:
    """The table's rows as tensors on the device, in one asynchronous copy (a few KiB; the source may go at once)."""
    return torch.from_numpy(table).to(device, non_blocking=True).unbind()


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f">= {low}" if high is None else f"in {low} .. {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InputError(f"{name}: expected an int {allowed}, got {value!r}")
