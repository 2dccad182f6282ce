"""dualkv::packed_attention with mask expressions, against masks written by hand."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkv_compile.kernels import blocks, schedule
from dualkv_compile.kernels.predicate import Expression, conjoin, from_text, to_text
from tests.kernels.helpers import TOLERANCE, TREES, assert_close, expect, group, make_plan, operands, run
from tests.kernels.test_packed_attention import STRATEGIES, _measure

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
DTYPES = (torch.float32, torch.float64)


def window(width: int) -> str:
    return to_text(("gt", ("kcol",), ("sub", ("qcol",), ("const", width))))


def pairs(vector: Tensor) -> tuple[Tensor, Tensor]:
    return vector[:, None].long(), vector[None, :].long()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["left", "right", "both", "holes", "alternating", "none", "all", "first", "last"])
@pytest.mark.parametrize("tree", ["two_prompts", "multi_level", "long", "one_token", "identical"])
def test_key_validity(tree: str, shape: str, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES[tree])
    at, longest = plan.column, int(plan.column.max()) + 1
    valid = {
        "left": at >= longest // 3,
        "right": at < longest - longest // 3,
        "both": (at >= longest // 4) & (at < longest - longest // 4),
        "holes": (at % 7 != 3) & (at % 11 != 5),
        "alternating": at % 2 == 1,
        "none": torch.zeros_like(at, dtype=torch.bool),
        "all": torch.ones_like(at, dtype=torch.bool),
        "first": at == 0,
        "last": torch.arange(plan.tokens) == plan.tokens - 1,
    }[shape]
    tensors = operands(plan, dtype=dtype)
    expected = expect(plan, tensors, valid[None, :])
    twice = "('and', ('k', 0), ('k', 0))"
    for vector, mask in ((valid, "('k', 0)"), (valid.long(), "('bool', ('k', 0))"), (valid, twice)):
        assert_close(run(plan, tensors, [vector], mask, strategy), expected, TOLERANCE[dtype])


def test_padding_costs_no_kernel_calls() -> None:
    """A prompt padded on the left or the right takes as many calls as one without padding."""
    plan = make_plan(group(40, [8] * 5))
    tensors = operands(plan)
    plain = _measure(plan, tensors).calls.count(FORWARD)
    for valid in (plan.column >= 10, (plan.column < 30) | (plan.column >= 40), plan.column < 45):
        assert _measure(plan, tensors, [valid], "('k', 0)").calls.count(FORWARD) == plain == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 64, 150, 10_000])
@pytest.mark.parametrize("tree", ["two_prompts", "multi_level", "long"])
def test_sliding_window(tree: str, width: int, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES[tree])
    query, key = pairs(plan.column)
    tensors = operands(plan, dtype=dtype)
    expected = expect(plan, tensors, key > query - width)
    assert_close(run(plan, tensors, [], window(width), strategy), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 128, 200])
def test_chunks(size: int, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES["long"])
    query, key = pairs(plan.column)
    tensors = operands(plan, dtype=dtype)
    chunk = ("const", size)
    mask = to_text(("eq", ("floordiv", ("qcol",), chunk), ("floordiv", ("kcol",), chunk)))
    assert_close(
        run(plan, tensors, [], mask, strategy), expect(plan, tensors, query // size == key // size), TOLERANCE[dtype]
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["sorted", "shuffled", "float"])
def test_documents(kind: str, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES["long"])
    document = plan.column // 170 if kind == "sorted" else (plan.column * 7919) % 5
    vector = document.float() / 3 if kind == "float" else document
    query, key = pairs(document)
    tensors = operands(plan, dtype=dtype)
    mask = to_text(("eq", ("q", 0), ("k", 0)))
    assert_close(run(plan, tensors, [vector], mask, strategy), expect(plan, tensors, query == key), TOLERANCE[dtype])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("width", [4, 190])
@pytest.mark.parametrize("holes", ["left", "right", "sparse"])
def test_window_with_validity(width: int, holes: str, strategy: str) -> None:
    """As Hugging Face builds it; with holes longer than the window, queries without any key appear in mid-row."""
    plan = make_plan(TREES["long"])
    query, key = pairs(plan.column)
    valid = {"left": plan.column >= 100, "right": plan.column < 260, "sparse": plan.column % 17 == 2}[holes]
    tensors = operands(plan)
    mask = to_text(("and", ("k", 0), ("gt", ("kcol",), ("sub", ("qcol",), ("const", width)))))
    expected = expect(plan, tensors, valid[None, :] & (key > query - width))
    if width == 4 or holes == "left":
        assert expected[1].isinf().any()
    assert_close(run(plan, tensors, [valid], mask, strategy), expected, 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_query_term(strategy: str) -> None:
    plan = make_plan(TREES["two_prompts"])
    tensors = operands(plan)
    valid = plan.column % 3 != 1
    expected = expect(plan, tensors, valid[:, None].expand(plan.tokens, plan.tokens))
    actual = run(plan, tensors, [valid], "('q', 0)", strategy)
    assert_close(actual, expected, 1e-12)
    assert (actual[0][:, :, ~valid] == 0).all()
    assert (actual[2][:, :, ~valid] == 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unseeing_queries_ignore_their_gradient(strategy: str) -> None:
    """Their output is the constant 0: even a NaN in the incoming gradient must not reach the operands."""
    plan = make_plan(TREES["one_prompt"])
    query, key = pairs(plan.column)
    for valid, width in ((plan.column >= 4, 1000), (plan.column % 5 == 4, 3)):
        q, k, v, grad = operands(plan)
        mask = to_text(("and", ("k", 0), ("gt", ("kcol",), ("sub", ("qcol",), ("const", width)))))
        expected = expect(plan, (q, k, v, grad), valid[None, :] & (key > query - width))
        unseeing = expected[1][0, 0].isinf()
        assert 0 < unseeing.sum() < plan.tokens
        grad[:, :, unseeing] = torch.nan
        assert_close(run(plan, (q, k, v, grad), [valid], mask, strategy), expected, 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_window_with_sink(strategy: str) -> None:
    """A prefix that everyone sees, and a window: the prefix is one unmasked call for all queries behind it."""
    plan = make_plan([list(range(1300))])
    query, key = pairs(plan.column)
    tensors = operands(plan, heads=1, kv_heads=1)
    mask: Expression = ("or", ("lt", ("kcol",), ("const", 384)), ("gt", ("kcol",), ("sub", ("qcol",), ("const", 40))))
    expected = expect(plan, tensors, (key < 384) | (key > query - 40))
    assert_close(run(plan, tensors, [], to_text(mask), strategy), expected, 1e-12)
    calls = list(schedule.schedule(plan.nodes, [], plan.column, mask, torch.float64).calls)
    assert [call.queries for call in calls if call.keys == (0, 384) and call.bias is None] == [(512, 1300)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_visible(strategy: str) -> None:
    """The bounds of the vectors overlap, their values never meet: no kernel call, zeros everywhere."""
    plan = make_plan(TREES["two_prompts"])
    even, odd = plan.column % 2 * 2, plan.column % 2 * 2 + 1
    mask: Expression = ("eq", ("q", 0), ("k", 1))
    actual = run(plan, operands(plan), [even, odd], to_text(mask), strategy)
    assert actual[1].eq(-torch.inf).all()
    assert all((x == 0).all() for x in (actual[0], *actual[2:]))
    assert not list(schedule.schedule(plan.nodes, [even, odd], plan.column, mask, torch.float64).calls)


def test_window_skips_what_is_outside() -> None:
    """Work grows with the width of the window, not with the length of the row.

    A window shorter than a tile (256 queries) is one call per tile; in a wider one the diagonal needs no mask and is a
    call of its own, and so may be the keys that all queries of the tile see.
    """
    plan = make_plan([list(range(4000))])
    for width, most in ((100, 16), (300, 32), (1000, 48)):
        calls = list(schedule.schedule(plan.nodes, [], plan.column, from_text(window(width)), torch.float32).calls)
        pairs_ = sum((call.queries[1] - call.queries[0]) * (call.keys[1] - call.keys[0]) for call in calls)
        assert pairs_ <= 4000 * (width + 256 + 128)
        assert len(calls) <= most


TERMS = st.sampled_from(
    [
        ("k", 0),
        ("q", 1),
        ("gt", ("kcol",), ("sub", ("qcol",), ("const", 3))),
        ("le", ("sub", ("qcol",), ("kcol",)), ("const", 5)),
        ("eq", ("q", 2), ("k", 2)),
        ("ne", ("mod", ("kcol",), ("const", 3)), ("const", 1)),
        ("eq", ("floordiv", ("qcol",), ("const", 4)), ("floordiv", ("kcol",), ("const", 4))),
        ("or", ("k", 0), ("lt", ("kcol",), ("const", 2))),
        ("not", ("and", ("q", 1), ("k", 0))),
        ("gt", ("mul", ("q", 2), ("neg", ("k", 2))), ("const", -3)),
        ("lt", ("abs", ("sub", ("q", 3), ("k", 3))), ("const", 0.5)),
        ("ge", ("maximum", ("q", 2), ("k", 2)), ("minimum", ("qcol",), ("const", 2))),
    ]
)
EXPRESSIONS = st.lists(TERMS, min_size=1, max_size=3).map(conjoin)


def by_hand(expression, vectors, column, query: int, key: int):  # type: ignore[no-untyped-def]
    """One pair in plain Python numbers: independent of the tensors' rules."""
    name = expression[0]
    if name in ("q", "k"):
        return vectors[expression[1]][query if name == "q" else key].item()
    if name in ("qcol", "kcol"):
        return column[query if name == "qcol" else key].item()
    if name == "const":
        return expression[1]
    a, *rest = (by_hand(operand, vectors, column, query, key) for operand in expression[1:])
    b = rest[0] if rest else None
    return {
        "and": lambda: bool(a) and bool(b), "or": lambda: bool(a) or bool(b), "not": lambda: not a,
        "bool": lambda: a != 0, "le": lambda: a <= b, "lt": lambda: a < b, "ge": lambda: a >= b, "gt": lambda: a > b,
        "eq": lambda: a == b, "ne": lambda: a != b, "add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b,
        "floordiv": lambda: a // b, "mod": lambda: a % b, "neg": lambda: -a, "abs": lambda: abs(a),
        "minimum": lambda: min(a, b), "maximum": lambda: max(a, b),
    }[name]()  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6),
    expression=st.one_of(st.none(), EXPRESSIONS),
    block=st.sampled_from([1, 2, 3, 128]),
    tile=st.sampled_from([2, 5, 256]),
    seed=st.integers(0, 1000),
)
def test_random_trees_and_masks(rows, expression, block, tile, seed) -> None:  # type: ignore[no-untyped-def]
    """Small blocks and tiles, so that their borders fall everywhere."""
    plan = make_plan(rows)
    tensors = operands(plan, heads=2, kv_heads=1, dim=4)
    generator = torch.Generator().manual_seed(seed)
    vectors = [
        torch.rand(plan.tokens, generator=generator) < 0.6,
        torch.rand(plan.tokens, generator=generator) < 0.8,
        torch.randint(0, 3, (plan.tokens,), generator=generator),
        torch.rand(plan.tokens, generator=generator),
    ]
    extra = None
    if expression is not None:
        everyone = range(plan.tokens)
        extra = torch.tensor(
            [[bool(by_hand(expression, vectors, plan.column, i, j)) for j in everyone] for i in everyone]
        )
    expected = expect(plan, tensors, extra)
    with (
        mock.patch.multiple(schedule, BLOCK=block, MAX_QUERIES=tile, MAX_KEYS=tile + 1, _SHORT=2, _TAIL=2, _PAIRS=4),
        mock.patch.multiple(blocks, MAX_QUERIES=tile, MAX_KEYS=tile + 1),
    ):
        for strategy in STRATEGIES:
            assert_close(run(plan, tensors, vectors, to_text(expression), strategy), expected, 1e-12)
