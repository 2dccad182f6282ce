"""Mask expressions: text form, validation, evaluation, block bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualkv_compile.errors import InputError
from dualkv_compile.kernels.predicate import (
    ARITY,
    BlockBounds,
    Expression,
    conjoin,
    conjuncts,
    depends_on_key,
    depends_on_query,
    evaluate,
    from_text,
    to_text,
    validate,
)
from tests.kernels.test_masks import by_hand

WINDOW: Expression = ("gt", ("kcol",), ("sub", ("qcol",), ("const", 3)))


def test_text_form() -> None:
    assert to_text(None) == ""
    assert from_text("") is None
    assert from_text(to_text(WINDOW)) == WINDOW
    assert from_text(to_text(WINDOW)) is from_text(to_text(WINDOW))  # cached


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("le", "expected a tuple"),
        ((), "expected a tuple"),
        (("xor", ("qcol",), ("kcol",)), "unknown operator 'xor'"),
        (("le", ("qcol",)), "'le' expects 2 operands"),
        (("not", ("qcol",), ("qcol",)), "'not' expects 1 operands"),
        (("q",), "'q' expects one vector number"),
        (("k", -1), "'k' expects one vector number"),
        (("k", True), "'k' expects one vector number"),
        (("qcol", 1), "'qcol' expects no operands"),
        (("const", "1"), "'const' expects one finite number"),
        (("const", float("nan")), "'const' expects one finite number"),
        (("and", ("qcol",), ("const", float("inf"))), "'const' expects one finite number"),
    ],
)
def test_malformed_expressions(expression: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate(expression)


def test_malformed_text() -> None:
    for text in ("(", "__import__('os')", "[1]"):
        with pytest.raises(InputError):
            from_text(text)


def test_vector_numbers_are_checked_when_known() -> None:
    validate(("and", ("k", 1), ("q", 0)), 2)
    with pytest.raises(InputError, match="below 1"):
        validate(("and", ("k", 1), ("q", 0)), 1)


def test_structure() -> None:
    a, b, c = ("k", 0), ("q", 0), WINDOW
    assert conjuncts(("and", ("and", a, b), c)) == [a, b, c]
    assert conjuncts(None) == []
    assert conjuncts(("or", a, b)) == [("or", a, b)]
    assert conjoin([]) is None
    assert conjoin([a]) == a
    assert conjuncts(conjoin([a, b, c])) == [a, b, c]
    assert [(depends_on_query(x), depends_on_key(x)) for x in (a, b, c, ("const", 1))] == [
        (False, True), (True, False), (True, True), (False, False),
    ]  # fmt: skip


def test_small_integers_do_not_wrap() -> None:
    mask = torch.tensor([0, 1, 255], dtype=torch.uint8)
    below = ("lt", ("sub", ("q", 0), ("k", 0)), ("const", 0))
    expected = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])
    assert torch.equal(evaluate(below, [mask], torch.arange(3), slice(0, 3), slice(0, 3)), expected)
    both = ("eq", ("add", ("q", 0), ("k", 0)), ("const", 2))
    assert evaluate(both, [mask > 0], torch.arange(3), slice(1, 3), slice(1, 3)).all()


def test_index_tensors_and_constant_expressions() -> None:
    column = torch.arange(9)
    picked = evaluate(WINDOW, [], column, torch.tensor([5, 0]), torch.tensor([2, 3, 8]))
    assert picked.tolist() == [[False, True, True], [True, True, True]]
    assert (
        evaluate(("lt", ("const", 1), ("const", 2)), [], column, slice(0, 2), slice(0, 3)).tolist() == [[True] * 3] * 2
    )


LEAVES = st.sampled_from([("q", 0), ("k", 0), ("q", 1), ("k", 1), ("q", 2), ("k", 2), ("qcol",), ("kcol",)])
CONSTANTS = st.one_of(st.integers(-4, 4), st.sampled_from([0.5, 2.0])).map(lambda value: ("const", value))


def extend(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    unary = st.sampled_from([name for name, arity in ARITY.items() if arity == 1])
    binary = st.sampled_from([name for name, arity in ARITY.items() if arity == 2 and name not in ("floordiv", "mod")])
    # Python and torch alike refuse to divide by zero: divisors are constants.
    divisor = st.sampled_from([1, 2, 3, -2, 7]).map(lambda value: ("const", value))
    return st.one_of(
        st.tuples(unary, children),
        st.tuples(binary, children, children),
        st.tuples(st.sampled_from(["floordiv", "mod"]), children, divisor),
    )


@settings(max_examples=300, deadline=None)
@given(
    expression=st.recursive(st.one_of(LEAVES, CONSTANTS), extend, max_leaves=8),
    cuts=st.lists(st.integers(1, 11), max_size=4, unique=True),
    spread=st.sampled_from([0, 1, 6]),
    seed=st.integers(0, 999),
)
def test_evaluation_and_bounds(expression: Expression, cuts: list[int], spread: int, seed: int) -> None:
    """Tiles agree with plain Python numbers on every pair, and bounds never claim what a pair contradicts."""
    tokens = 12
    generator = torch.Generator().manual_seed(seed)
    base = torch.arange(tokens) // 5
    vectors = [
        base + torch.randint(-spread, spread + 1, (tokens,), generator=generator),
        torch.rand(tokens, generator=generator) < 0.7,
        torch.randint(-3, 4, (tokens,), generator=generator).double() / 2,
    ]
    column = torch.arange(tokens, dtype=torch.int32) % 8
    tile = evaluate(expression, vectors, column, slice(0, tokens), slice(0, tokens))
    pairs = [[bool(by_hand(expression, vectors, column, i, j)) for j in range(tokens)] for i in range(tokens)]
    assert tile.tolist() == pairs
    borders = [0, *sorted(cuts), tokens]
    count = len(borders) - 1
    bounds = BlockBounds(expression, vectors, column, np.array(borders[:-1]))
    always, possibly = bounds.of(expression, np.arange(count)[:, None], np.arange(count)[None, :])
    for i in range(count):
        for j in range(count):
            part = tile[borders[i] : borders[i + 1], borders[j] : borders[j + 1]]
            assert not always[i, j] or part.all()
            assert possibly[i, j] or not part.any()
            if count == tokens and not _uses_floats(expression):
                assert always[i, j] == part.all()
                assert possibly[i, j] == part.any()


def _uses_floats(expression: Expression) -> bool:
    if expression[0] in ("q", "k"):
        return expression[1] == 2
    if expression[0] == "const":
        return isinstance(expression[1], float)
    return any(_uses_floats(operand) for operand in expression[1:])


CHUNK: Expression = ("eq", ("floordiv", ("qcol",), ("const", 3)), ("floordiv", ("kcol",), ("const", 3)))


@pytest.mark.parametrize(
    ("expression", "always", "possibly"),
    [
        # Keys of the second block are no further back than 3: causality is another term.
        (WINDOW, [[1, 1], [0, 1]], [[1, 1], [1, 1]]),
        (("le", ("kcol",), ("qcol",)), [[0, 0], [1, 0]], [[1, 0], [1, 1]]),
        (CHUNK, [[1, 0], [0, 1]], [[1, 0], [0, 1]]),
        (("eq", ("q", 0), ("k", 0)), [[0, 0], [0, 1]], [[1, 1], [1, 1]]),
        (("bool", ("k", 0)), [[0, 1], [0, 1]], [[1, 1], [1, 1]]),
    ],
)
def test_bounds_are_tight_for_common_masks(
    expression: Expression, always: list[list[int]], possibly: list[list[int]]
) -> None:
    """Two blocks of three: columns 0..2 and 3..5; a document vector that changes inside the first."""
    vectors, column = [torch.tensor([0, 0, 1, 1, 1, 1])], torch.arange(6)
    bounds = BlockBounds(expression, vectors, column, np.array([0, 3]))
    sure, maybe = bounds.of(expression, np.arange(2)[:, None], np.arange(2)[None, :])
    assert sure.tolist() == always
    assert maybe.tolist() == possibly


def test_bounds_of_huge_integers_are_given_up() -> None:
    """2^53 and 2^53 + 1 are one number in float64: no claim may rest on it."""
    vectors = [torch.tensor([2**53, 2**53 + 1])]
    same = ("eq", ("q", 0), ("k", 0))
    bounds = BlockBounds(same, vectors, torch.arange(2), np.array([0, 1]))
    always, possibly = bounds.of(same, np.array([0]), np.array([1]))
    assert not always.any()
    assert possibly.all()
