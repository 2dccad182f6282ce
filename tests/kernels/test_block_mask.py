"""The block lists against the dense predicate: never wrong, nothing of size T x T, ragged ends, one call per graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import reference
from dualkv_compile.kernels.block_mask import block_mask
from dualkv_compile.kernels.pair_mask import MAX_COLUMN, PairForm, pair_form, pair_vectors
from dualkv_compile.kernels.predicate import Expression, evaluate, from_text, to_text
from dualkv_compile.plan import PrefixPlan
from tests.kernels.helpers import TREES, Plan, group, make_plan
from tests.kernels.test_predicate import CONSTANTS, LEAVES, extend

WINDOW = to_text(("gt", ("kcol",), ("sub", ("qcol",), ("const", 150))))
DOCUMENTS = to_text(("eq", ("q", 0), ("k", 0)))
EXPRESSIONS = st.recursive(st.one_of(LEAVES, CONSTANTS), extend, max_leaves=8)


def some_vectors(tokens: int, seed: int) -> list[Tensor]:
    """What LEAVES read: slowly growing integers, truth values, fractions."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.arange(tokens) // 5 + torch.randint(0, 2, (tokens,), generator=generator),
        torch.rand(tokens, generator=generator) < 0.7,
        torch.randint(-3, 4, (tokens,), generator=generator).double() / 2,
    ]


def visible(plan: Any, vectors: list[Tensor], mask: str) -> Tensor:
    """The dense predicate, bool [T, T]."""
    tree = reference.tree_visible(plan.rank, plan.column, plan.end)
    if not mask:
        return tree
    everyone = slice(0, plan.tokens)
    return tree & evaluate(from_text(mask), vectors, plan.column, everyone, everyone)  # type: ignore[arg-type]


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """The lists as a bool [n, n]; checks what kernels rely on."""
    size = counts.shape[-1]
    assert counts.shape == (1, 1, size)
    assert indices.shape == (1, 1, size, size)
    assert counts.dtype == indices.dtype == torch.int32
    assert counts.is_contiguous()
    assert indices.is_contiguous()
    # Behind the end of a list there are block numbers too: kernels may read one entry ahead.
    assert torch.equal(indices.sort(-1).values, torch.arange(size, dtype=torch.int32).expand_as(indices))
    found = torch.zeros(size, size, dtype=torch.bool)
    for row in range(size):
        entries = indices[0, 0, row, : int(counts[0, 0, row])]
        assert torch.equal(entries, entries.sort().values)
        found[row, entries.long()] = True
    return found


def check(plan: Any, vectors: list[Tensor], mask: str, block: int) -> tuple[Tensor, Tensor]:
    """The lists contradict no pair, and the two directions say the same. Returns (partial, full)."""
    lists = block_mask(plan.rank, plan.column, plan.end, vectors, mask, block)
    partial, full, partial_back, full_back = (listed(*lists[i : i + 2]) for i in range(0, 8, 2))
    assert torch.equal(partial_back, partial.T)
    assert torch.equal(full_back, full.T)
    assert not (partial & full).any()
    seen = visible(plan, vectors, mask)
    for i, rows in enumerate(seen.split(block)):
        for j, part in enumerate(rows.split(block, dim=1)):
            assert part.all() or not full[i, j], f"block {i}, {j} is not full"
            assert full[i, j] or partial[i, j] or not part.any(), f"block {i}, {j} is not empty"
    if plan.tokens % block:
        assert not full[-1].any()
        assert not full[:, -1].any()
    return partial, full


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    expression=st.one_of(st.none(), EXPRESSIONS),
    block=st.sampled_from([1, 2, 3, 5, 128]),
    seed=st.integers(0, 999),
)
def test_random_trees_and_expressions(
    rows: list[list[int]], expression: Expression | None, block: int, seed: int
) -> None:
    plan = make_plan(rows)
    check(plan, some_vectors(plan.tokens, seed), to_text(expression), block)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    expression=EXPRESSIONS,
    more=st.lists(EXPRESSIONS, max_size=2),
    seed=st.integers(0, 999),
)
def test_pair_form_means_the_same(
    rows: list[list[int]], expression: Expression, more: list[Expression], seed: int
) -> None:
    """Terms of one token in rank and end, the rest over the sides: together the undivided predicate."""
    plan = make_plan(rows)
    vectors = some_vectors(plan.tokens, seed)
    for term in more:
        expression = ("and", expression, term)
    mask = to_text(expression)
    rank, end, sides = pair_vectors(plan.rank, plan.column, plan.end, vectors, mask)
    position = torch.arange(plan.tokens)
    seen = (position <= position[:, None]) & (rank[:, None] < end) & (plan.column <= plan.column[:, None])
    pairs = pair_form(mask).pairs
    if pairs is not None:
        everyone = slice(0, plan.tokens)
        seen &= evaluate(pairs, sides, plan.column, everyone, everyone)
    assert torch.equal(seen, visible(plan, vectors, mask))
    assert all(side.dtype in (torch.int32, torch.int64, torch.float64) for side in sides)


def test_pair_form_of_common_masks() -> None:
    """What a kernel is left with: comparisons of vectors."""
    window = pair_form(to_text(("and", ("k", 0), ("gt", ("kcol",), ("sub", ("qcol",), ("const", 128))))))
    assert window == PairForm(("k", 0), None, (("sub", ("kcol",), ("const", 128)),), ("gt", ("kcol",), ("q", 0)))
    chunk = ("eq", ("floordiv", ("qcol",), ("const", 64)), ("floordiv", ("kcol",), ("const", 64)))
    assert pair_form(to_text(chunk)).sides == (("floordiv", ("kcol",), ("const", 64)),)
    assert pair_form(to_text(chunk)).pairs == ("eq", ("q", 0), ("k", 0))
    assert pair_form("('q', 3)") == PairForm(None, ("q", 3), (), None)
    assert pair_form("") == PairForm(None, None, (), None)


def test_sides_take_64_bits_only_where_needed() -> None:
    plan = make_plan(TREES["ragged"])
    ids, narrow = plan.column.long() + 2**40, plan.column.to(torch.int16)
    shift = ("add", ("k", 1), ("const", 2**31))
    for term, vector, dtype in (
        (("eq", ("q", 0), ("k", 0)), ids, torch.int64),
        (("eq", ("q", 1), ("k", 1)), narrow, torch.int32),
        (("gt", ("qcol",), shift), narrow.int() + 2**30, torch.int64),
        (("gt", ("kcol",), ("sub", ("qcol",), ("const", MAX_COLUMN))), narrow, torch.int32),
        (("gt", ("kcol",), ("add", ("qcol",), ("const", MAX_COLUMN))), narrow, torch.int64),
    ):
        _, _, (side,) = pair_vectors(plan.rank, plan.column, plan.end, [ids, vector], to_text(term))
        assert side.dtype == dtype, term


@pytest.mark.parametrize("mask", ["", WINDOW, DOCUMENTS, "('k', 0)", "('q', 0)"])
@pytest.mark.parametrize("tokens", [1, 2, 100, 127, 128, 129, 256, 500])
def test_ragged_ends(tokens: int, mask: str) -> None:
    plan = make_plan([list(range(tokens))])
    partial, full = check(plan, [plan.column // 200], mask, 128)
    assert partial.shape == (-(-tokens // 128),) * 2
    if not mask:
        assert int(full.sum()) == {500: 3, 256: 1}.get(tokens, 0)  # 500: the last block of queries sees none in full
    if tokens == 100:
        assert partial.item() == (mask != "('q', 0)" and mask != "('k', 0)")


def test_common_masks_are_tight() -> None:
    """A window is a band, documents and padding cut whole blocks off, and what is full need not be evaluated."""
    plan = make_plan(group(512, [256, 256]))
    window, documents, padding = (
        sum(map(torch.sum, check(plan, [vector], mask, 128))).item()  # type: ignore[arg-type]
        for mask, vector in ((WINDOW, plan.column), (DOCUMENTS, plan.column // 256), ("('k', 0)", plan.column >= 256))
    )
    all_blocks = sum(map(torch.sum, check(plan, [], "", 128))).item()  # type: ignore[arg-type]
    assert (all_blocks, window, documents, padding) == (32, 8 * 3 - 3, 12, 17)
    _, full = check(plan, [plan.column // 256], DOCUMENTS, 128)
    assert full.sum() == 4


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in bytes and in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        assert func not in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
        assert func is not torch.ops.aten.nonzero.default
        return result


@pytest.mark.parametrize("mask", ["", to_text(("and", from_text(WINDOW), ("and", ("k", 0), from_text(DOCUMENTS))))])
def test_nothing_is_quadratic_in_tokens(mask: str) -> None:
    """At most (T / 128) ** 2 numbers, or T of them rounded up to a block; nothing reads a value on the host."""
    plan = PrefixPlan.static([0] * 4, 9000, 10_000)
    vectors = [plan.column // 3000]
    blocks = -(-plan.tokens // 128)
    with _Largest() as largest:
        block_mask(plan.rank, plan.column, plan.end, vectors, mask)
    assert 0 < largest.elements <= max(blocks * blocks, 128 * blocks)


@pytest.mark.parametrize("mask", ["", WINDOW, DOCUMENTS])
def test_opcheck(mask: str) -> None:
    plan = make_plan(TREES["long"])
    arguments = (plan.rank, plan.column, plan.end, [plan.column // 100])
    torch.library.opcheck(torch.ops.dualkv.block_mask, (*arguments, mask, 128))
    torch.library.opcheck(torch.ops.dualkv.pair_vectors, (*arguments, mask))


def test_no_tokens() -> None:
    nothing = torch.zeros(0, dtype=torch.int32)
    lists = block_mask(nothing, nothing, nothing)
    assert [tuple(x.shape) for x in lists] == [(1, 1, 0), (1, 1, 0, 0)] * 4


def test_wrong_masks_are_refused() -> None:
    plan: Plan = make_plan(TREES["ragged"])
    with pytest.raises(InputError, match="below 1"):
        block_mask(plan.rank, plan.column, plan.end, [plan.column], "('k', 1)")
    with pytest.raises(InputError, match="unknown operator"):
        block_mask(plan.rank, plan.column, plan.end, [], "('xor', ('k', 0), ('q', 0))")
