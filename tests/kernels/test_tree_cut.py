"""The cutting of a tree into calls: every visible pair once, and few calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv_compile.kernels import reference
from dualkv_compile.kernels.tree_cut import Ragged, Segment, Side, Stack, Worth, cut
from tests.kernels.helpers import TREES, group, make_plan

EVERYTHING = Worth(share=0, pairs=0, length=1)

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8)


def segments(call: Stack | Ragged) -> list[Segment]:
    if isinstance(call, Ragged):
        return list(call.segments)
    return [Segment(*ranges) for ranges in zip(call.queries.ranges, call.keys.ranges, strict=True)]


def assert_exact(rows: list[list[int]], worth: Worth | None) -> list[Stack | Ragged]:
    plan = make_plan(rows)
    calls = cut(plan.nodes.tolist(), worth)
    pairs = torch.zeros(plan.tokens, plan.tokens, dtype=torch.int64)
    for call in calls:
        queries: set[int] = set()
        for segment in segments(call):
            (start, stop), (first, last) = segment.queries, segment.keys
            assert start < stop
            assert first < last
            assert not queries & set(range(start, stop)), "one query, two segments of a call"
            queries |= set(range(start, stop))
            tile = torch.ones(stop - start, last - first, dtype=torch.int64)
            if call.causal:
                assert segment.queries == segment.keys
                tile = tile.tril()
            pairs[start:stop, first:last] += tile
    assert torch.equal(pairs, reference.tree_visible(plan.rank, plan.column, plan.end).to(torch.int64))
    return calls


@pytest.mark.parametrize("worth", [None, EVERYTHING, Worth(share=0.1, pairs=20, length=4)])
@pytest.mark.parametrize("tree", TREES)
def test_every_visible_pair_once(tree: str, worth: Worth | None) -> None:
    assert_exact(TREES[tree], worth)


@settings(max_examples=200, deadline=None)
@given(rows=ROWS, share=st.sampled_from([0.0, 0.2, 1.0]), length=st.integers(1, 3))
def test_every_visible_pair_once_in_random_trees(rows: list[list[int]], share: float, length: int) -> None:
    assert_exact(rows, Worth(share, 0, length))
    assert_exact(rows, None)


def test_one_prompt_with_equal_responses_is_three_calls() -> None:
    """Without ragged calls and without copies: the paper's benchmark."""
    calls = assert_exact(group(30, [8] * 5), EVERYTHING)
    assert calls == [
        Stack(Side(0, 30, 30, 1), Side(0, 30, 30, 1), causal=True),
        Stack(Side(30, 8, 8, 5), Side(30, 8, 8, 5), causal=True),
        Stack(Side(30, 40, 40, 1), Side(0, 30, 30, 1), causal=False),
    ]


def test_equal_groups_are_stacked() -> None:
    """Three prompts of one length, each with two equal responses: prompts and their queries are one batch each."""
    rows = [row for n in range(3) for row in group(12, [4, 4], first_id=100_000 * n)]
    calls = assert_exact(rows, EVERYTHING)
    assert Stack(Side(0, 12, 20, 3), Side(0, 12, 20, 3), causal=True) in calls
    assert Stack(Side(12, 8, 20, 3), Side(0, 12, 20, 3), causal=False) in calls
    responses = [call for call in calls if isinstance(call, Stack) and call.queries.length == 4]
    assert [stack.queries.ranges for stack in responses] == [
        ((12, 16), (16, 20)),
        ((32, 36), (36, 40)),
        ((52, 56), (56, 60)),
    ]


@pytest.mark.parametrize("worth", [None, Worth(share=1 / 4, pairs=0, length=1)])
def test_calls_are_bounded_by_the_depth(worth: Worth | None) -> None:
    """Many nodes of different lengths: at most 4 stacks and one ragged call per level."""
    for groups in (1, 5, 20):
        rows = [row for n in range(groups) for row in group(7 + n, [3, 5, 1 + n, 2 * n], first_id=100_000 * n)]
        calls = assert_exact(rows, worth)
        assert len(calls) <= (2 if worth is None else 2 * 5)


def test_what_is_too_little_goes_with_the_rest() -> None:
    rows = group(20, [9, 9, 3])
    assert not any(isinstance(call, Stack) for call in assert_exact(rows, Worth(share=0, pairs=1000, length=1)))
    assert not any(isinstance(call, Stack) for call in assert_exact(rows, Worth(share=0, pairs=0, length=22)))
    longest = [call for call in assert_exact(rows, Worth(share=0.5, pairs=0, length=1)) if isinstance(call, Stack)]
    assert [stack.queries.length for stack in longest] == [20, 21]


def test_nothing() -> None:
    assert cut([], EVERYTHING) == []
    assert cut([(0, 0, 0)], EVERYTHING) == []
