"""Random trees of rows: what holds for every plan, against the definition ("the same prefix of every key")."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkv_compile import plan as plan_module
from dualkv_compile.kernels.block_classes import EMPTY, FULL, classify_blocks
from dualkv_compile.plan import PrefixPlan

Array = npt.NDArray[np.bool_]


class Rows(NamedTuple):
    """A random batch."""

    keys: list[Tensor]
    keep: Tensor | None
    min_shared: int
    on_device: bool


@st.composite
def row_trees(draw: st.DrawFn, max_rows: int = 8, max_columns: int = 12) -> Rows:
    """Rows that each leave an earlier row at some column (0: a new root; S: a copy), with one or two keys."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    ids = np.zeros((rows, columns), dtype=np.int64)
    for row in range(rows):
        parent, branch = draw(st.integers(0, max(row - 1, 0))), draw(st.integers(0, columns))
        ids[row] = ids[parent]
        # Few values: rows meet by chance too, and agree again after having parted.
        ids[row, branch:] = draw(st.lists(st.integers(0, 2), min_size=columns - branch, max_size=columns - branch))
    keys = [torch.from_numpy(ids)]
    if draw(st.booleans()):
        changed = draw(st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, columns - 1)), max_size=3))
        second = torch.zeros(rows, columns, 3, dtype=torch.bfloat16)
        for row, column in changed:
            second[row, column, draw(st.integers(0, 2))] = -0.0
        keys.append(second)
    keep = None
    if draw(st.booleans()):
        holes = st.lists(st.booleans(), min_size=columns, max_size=columns)
        keep = torch.tensor([draw(holes)]).repeat(rows, 1)
        for row in range(rows):
            if draw(st.booleans()):
                keep[row, draw(st.integers(0, columns - 1)) :] = False
    return Rows(keys, keep, draw(st.integers(1, 5)), draw(st.booleans()))


def make(batch: Rows) -> PrefixPlan:
    return plan_module._from_rows(batch.keys, batch.min_shared, batch.keep, batch.on_device)


def sharing(batch: Rows) -> Array:
    """[B, B, S]: rows a and b share column s."""
    rows, columns = batch.keys[0].shape[:2]
    tensors = [*batch.keys, *([] if batch.keep is None else [batch.keep])]
    equal = np.ones((rows, rows, columns), dtype=bool)
    for tensor in tensors:
        cells = tensor.contiguous().view(torch.uint8).numpy().reshape(rows, columns, -1)
        equal &= (cells[:, None] == cells[None]).all(-1)
    prefix = np.logical_and.accumulate(equal, axis=2)
    prefix &= (prefix.sum(2) >= batch.min_shared)[:, :, None]
    prefix[np.arange(rows), np.arange(rows)] = True
    return prefix


def visible(plan: PrefixPlan) -> Array:
    """[T, T] by the formula: query, key."""
    rank, column, end = (t.numpy() for t in (plan.rank, plan.column, plan.end))
    seen: Array = (rank[None] <= rank[:, None]) & (rank[:, None] < end[None]) & (column[None] <= column[:, None])
    return seen


@settings(deadline=None)
@given(row_trees())
def test_unpacking_the_packed_grid_is_the_identity(batch: Rows) -> None:
    plan = make(batch)
    rows, columns = batch.keys[0].shape[:2]
    # A function of the prefix alone has one value per trie node: number the nodes.
    shared = sharing(batch)
    grid = torch.from_numpy(shared.argmax(0) * columns + np.arange(columns))  # the first row that shares (row, column)
    kept = torch.ones(rows, columns, dtype=torch.bool) if batch.keep is None else batch.keep
    assert plan.tokens == len(set(grid[kept].tolist()))
    packed = grid.view(-1)[plan.token]
    assert torch.equal(plan.inverse != -1, kept)
    assert torch.equal(packed[plan.inverse[kept]], grid[kept])
    assert torch.equal(plan.inverse.view(-1)[plan.token], torch.arange(plan.tokens))


@settings(deadline=None)
@given(row_trees())
def test_visibility_is_the_same_prefix_and_causal(batch: Rows) -> None:
    plan = make(batch)
    columns = batch.keys[0].shape[1]
    row, column = plan.token.numpy() // columns, plan.token.numpy() % columns
    assert (plan.column.numpy() == column).all()
    expected = sharing(batch)[row[:, None], row[None], column[None]] & (column[None] <= column[:, None])
    assert (visible(plan) == expected).all()


@settings(deadline=None)
@given(row_trees(), st.data())
def test_permuting_rows_renames_tokens(batch: Rows, data: st.DataObject) -> None:
    permutation = data.draw(st.permutations(range(batch.keys[0].shape[0])))
    plan = make(batch)
    keep = None if batch.keep is None else batch.keep[permutation]
    moved = make(batch._replace(keys=[key[permutation] for key in batch.keys], keep=keep))
    assert moved.tokens == plan.tokens
    before, after = plan.inverse[permutation].view(-1), moved.inverse.view(-1)
    assert torch.equal(before < 0, after < 0)
    name = torch.empty(plan.tokens, dtype=torch.int64)
    name[before[before >= 0]] = after[before >= 0]
    assert torch.equal(name[before[before >= 0]], after[before >= 0])  # one new name per token ...
    assert len(set(name.tolist())) == plan.tokens  # ... and one token per name
    assert (visible(plan) == visible(moved)[name.numpy()[:, None], name.numpy()[None]]).all()


@settings(deadline=None)
@given(row_trees())
def test_both_ways_make_the_same_plan(batch: Rows) -> None:
    left, right = (make(batch._replace(on_device=way)) for way in (False, True))
    assert (left.order, left.shared) == (right.order, right.shared)
    for name in ("token", "inverse", "rank", "column", "end", "nodes"):
        a, b = getattr(left, name), getattr(right, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b), name


@settings(deadline=None)
@given(row_trees())
def test_nodes_are_the_visibility_formula(batch: Rows) -> None:
    plan = make(batch)
    seen = np.zeros((plan.tokens, plan.tokens), dtype=bool)
    last = 0
    for start, stop, query_stop in plan.nodes.tolist():
        assert last == start < stop <= query_stop <= plan.tokens
        seen[start:stop, start:stop] = np.tri(stop - start, dtype=bool)
        seen[stop:query_stop, start:stop] = True
        last = stop
    assert last == plan.tokens
    assert (seen == visible(plan)).all()
    assert len(plan.nodes) < 2 * plan.rows


@settings(deadline=None)
@given(row_trees())
def test_prompts_are_the_shared_cells(batch: Rows) -> None:
    plan = make(batch)
    count = np.zeros((plan.rows, plan.columns), dtype=np.int64)
    for rows, start, stop in plan.prompts():
        count[list(rows), start:stop] += len(rows)
    expected = sharing(batch).sum(0)
    expected[expected == 1] = 0
    kept = slice(None) if batch.keep is None else batch.keep.numpy()
    assert (count[kept] == expected[kept]).all()


@settings(deadline=None)
@given(row_trees(), st.data())
def test_windows_hold_their_columns(batch: Rows, data: st.DataObject) -> None:
    plan = make(batch)
    start = data.draw(st.integers(0, plan.columns))
    stop = data.draw(st.integers(start, plan.columns))
    window = plan.window(start, stop)
    inside = (plan.column >= start) & (plan.column < stop)
    assert torch.equal(window.index, inside.nonzero().view(-1))
    assert torch.equal(window.column, plan.column[inside].long() - start)
    expected = plan.inverse[:, start:stop]
    assert torch.equal(window.inverse == -1, expected < 0)
    assert torch.equal(window.index[window.inverse[expected >= 0]], expected[expected >= 0])


@settings(max_examples=200, deadline=None)
@given(row_trees(), st.integers(1, 9))
def test_block_classes_agree_with_the_dense_predicate(batch: Rows, block: int) -> None:
    plan = make(batch)
    classes = classify_blocks(plan, block)
    count = -(-plan.tokens // block)
    assert classes.shape == (count, count)
    assert classes.dtype == torch.int8
    dense = visible(plan)
    for q in range(count):
        for k in range(count):
            tile = dense[q * block : (q + 1) * block, k * block : (k + 1) * block]
            assert (classes[q, k] == FULL) == tile.all()
            assert classes[q, k] != EMPTY or not tile.any()
            assert k <= q or classes[q, k] == EMPTY
            if block == 1:  # nothing is in part visible
                assert (classes[q, k] == EMPTY) == (not tile.any())
