"""Mask expressions: a boolean function of one query token and one key token, as a nested tuple.

Leaves are ``("q", n)`` and ``("k", n)`` (the n-th vector at the query or key token), ``("qcol",)`` and ``("kcol",)``
(the token's column in its row) and ``("const", number)``. Inner nodes are listed in :data:`ARITY`. Examples::

    ("k", 0)                                                        # key validity
    ("gt", ("kcol",), ("sub", ("qcol",), ("const", 128)))           # sliding window
    ("eq", ("q", 0), ("k", 0))                                      # same document

The whole expression is read as a truth value (``!= 0``). Integers and booleans count as int64 in comparisons and
arithmetic, so ``uint8`` masks cannot wrap around. An expression is evaluated exactly on a tile (:func:`evaluate`), or
bounded on whole blocks of tokens at once (:class:`BlockBounds`): interval arithmetic then says, without looking at a
pair, that a block of queries sees all, none, or possibly some of a block of keys.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels.intervals import NUMPY, Interval, truth, widen

Expression = tuple[Any, ...]
TokenIndex = slice | Tensor

#: Operators and their number of operands.
ARITY: dict[str, int] = {
    "and": 2, "or": 2, "not": 1, "bool": 1,
    "le": 2, "lt": 2, "ge": 2, "gt": 2, "eq": 2, "ne": 2,
    "add": 2, "sub": 2, "mul": 2, "floordiv": 2, "mod": 2, "neg": 1, "abs": 1, "minimum": 2, "maximum": 2,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- text
def validate(expression: object, vectors: int | None = None) -> None:
    """Check that ``expression`` is well formed; with ``vectors``, that it names only vectors ``0 <= n < vectors``.

    Raises:
        InputError: naming the part that is wrong.
    """
    if not isinstance(expression, tuple) or not expression or not isinstance(expression[0], str):
        raise InputError(f"mask expression: expected a tuple that starts with an operator's name, got {expression!r}")
    name, operands = expression[0], expression[1:]
    if name in ("q", "k"):
        ok = len(operands) == 1 and type(operands[0]) is int and operands[0] >= 0
        if not ok or (vectors is not None and operands[0] >= vectors):
            limit = "" if vectors is None else f" below {vectors}"
            raise InputError(f"mask expression: {name!r} expects one vector number{limit}, got {operands!r}")
    elif name in ("qcol", "kcol"):
        if operands:
            raise InputError(f"mask expression: {name!r} expects no operands, got {operands!r}")
    elif name == "const":
        if len(operands) != 1 or not isinstance(operands[0], (bool, int, float)) or not math.isfinite(operands[0]):
            raise InputError(f"mask expression: 'const' expects one finite number, got {operands!r}")
    elif name in ARITY:
        if len(operands) != ARITY[name]:
            raise InputError(f"mask expression: {name!r} expects {ARITY[name]} operands, got {operands!r}")
        for operand in operands:
            validate(operand, vectors)
    else:
        raise InputError(f"mask expression: unknown operator {name!r}, expected one of {sorted(ARITY)} or a leaf")


def to_text(expression: Expression | None) -> str:
    """Return the text form of an expression, the form that travels in a graph; ``""`` for None (no extra term)."""
    if expression is None:
        return ""
    validate(expression)
    return repr(expression)


@lru_cache(maxsize=1024)
def from_text(text: str) -> Expression | None:
    """Return the expression whose text form is ``text``, or None for ``""``.

    Raises:
        InputError: if the text is no literal, or the expression is not well formed.
    """
    if not text:
        return None
    try:
        expression = ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise InputError(f"mask expression: expected the repr of nested tuples, got {text!r}") from error
    validate(expression)
    assert isinstance(expression, tuple)
    return expression


# ----------------------------------------------------------------------------------------------------------- structure
def conjuncts(expression: Expression | None) -> list[Expression]:
    """Split at the outermost ``and`` operators; ``[]`` for None."""
    if expression is None:
        return []
    if expression[0] == "and":
        return conjuncts(expression[1]) + conjuncts(expression[2])
    return [expression]


def conjoin(terms: Sequence[Expression]) -> Expression | None:
    """Join terms with ``and``; None for no terms."""
    result: Expression | None = None
    for term in terms:
        result = term if result is None else ("and", result, term)
    return result


def depends_on_query(expression: Expression) -> bool:
    """Whether the expression reads the query token."""
    return _reads(expression, ("q", "qcol"))


def depends_on_key(expression: Expression) -> bool:
    """Whether the expression reads the key token."""
    return _reads(expression, ("k", "kcol"))


def _reads(expression: Expression, names: tuple[str, ...]) -> bool:
    if expression[0] in ("q", "k", "qcol", "kcol", "const"):
        return expression[0] in names
    return any(_reads(operand, names) for operand in expression[1:])


def vectors_read(expression: Expression) -> set[int]:
    """The numbers of the vectors that the expression reads, at either token."""
    if expression[0] in ("q", "k"):
        return {expression[1]}
    if expression[0] in ("qcol", "kcol", "const"):
        return set()
    return set().union(*(vectors_read(operand) for operand in expression[1:]))


# ---------------------------------------------------------------------------------------------------------- evaluation
def _number(value: Tensor) -> Tensor:
    return value if value.is_floating_point() else value.to(torch.int64)


def _truth(value: Tensor) -> Tensor:
    return value if value.dtype == torch.bool else value != 0


_BOOLEAN: dict[str, Callable[..., Tensor]] = {
    "and": torch.logical_and, "or": torch.logical_or, "not": torch.logical_not, "bool": lambda value: value,
}  # fmt: skip
_NUMERIC: dict[str, Callable[..., Tensor]] = {
    "le": torch.le, "lt": torch.lt, "ge": torch.ge, "gt": torch.gt, "eq": torch.eq, "ne": torch.ne,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "mod": torch.remainder,
    "neg": torch.neg, "abs": torch.abs, "minimum": torch.minimum, "maximum": torch.maximum,
}  # fmt: skip


def evaluate(
    expression: Expression, vectors: Sequence[Tensor], column: Tensor, queries: TokenIndex, keys: TokenIndex
) -> Tensor:
    """Evaluate on a tile: bool ``[number of queries, number of keys]`` (it may be an expanded view: do not write).

    ``vectors`` and ``column`` are ``[T]``; ``queries`` and ``keys`` are slices of, or index tensors into, the T tokens.
    """
    shape = (column[queries].shape[0], column[keys].shape[0])
    return _truth(_value(expression, vectors, column, queries, keys)).expand(shape)


def evaluate_keys(expression: Expression, vectors: Sequence[Tensor], column: Tensor) -> Tensor:
    """The value, a truth value (bool) or a number, at each of the T tokens of an expression that reads only the key."""
    tokens = slice(0, column.shape[0])
    return _value(expression, vectors, column, slice(0, 0), tokens).expand(1, column.shape[0])[0]


def _value(
    expression: Expression, vectors: Sequence[Tensor], column: Tensor, queries: TokenIndex, keys: TokenIndex
) -> Tensor:
    """The value as a tensor that broadcasts to [queries, keys]: terms of one side only stay one row or one column."""
    name = expression[0]
    if name == "q":
        return vectors[expression[1]][queries].unsqueeze(1)
    if name == "k":
        return vectors[expression[1]][keys].unsqueeze(0)
    if name == "qcol":
        return column[queries].unsqueeze(1)
    if name == "kcol":
        return column[keys].unsqueeze(0)
    if name == "const":
        value = expression[1]
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        return torch.full((1, 1), value, dtype=dtype, device=column.device).squeeze()
    operands = [_value(operand, vectors, column, queries, keys) for operand in expression[1:]]
    if name in _BOOLEAN:
        return _BOOLEAN[name](*map(_truth, operands))
    return _NUMERIC[name](*map(_number, operands))


# -------------------------------------------------------------------------------------------------------- block bounds
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class BlockBounds:
    """Bounds of mask expressions on blocks of consecutive tokens, on the CPU (see :mod:`intervals`).

    Args:
        expression: the expressions asked about later read no other vectors than this one.
        vectors, column: as for :func:`evaluate`, ``[T]``.
        starts: int ``[blocks]``, the first token of each block, strictly increasing from 0.

    The arrays are small and many, which NumPy handles in a fraction of torch's time.
    """

    def __init__(self, expression: Expression, vectors: Sequence[Tensor], column: Tensor, starts: IntArray) -> None:
        self._column = _block_range(column, starts)
        self._vectors = {n: _block_range(vectors[n], starts) for n in vectors_read(expression)}

    def of(self, expression: Expression, query_block: IntArray, key_block: IntArray) -> tuple[BoolArray, BoolArray]:
        """Arrays ``(always, possibly)`` for the pairs of blocks, in the common shape of the two index arrays."""

        def leaf(expression: Expression) -> Interval:
            low, high = self._vectors[expression[1]] if len(expression) == 2 else self._column
            at = query_block if expression[0] in ("q", "qcol") else key_block
            return low[at], high[at]

        with np.errstate(all="ignore"):
            always, possibly = truth(expression, leaf, NUMPY)
        shape = np.broadcast_shapes(query_block.shape, key_block.shape)
        return np.broadcast_to(always, shape), np.broadcast_to(possibly, shape)


def _block_range(vector: Tensor, starts: IntArray) -> Interval:
    """The smallest and the largest value in every block."""
    if vector.is_floating_point():
        unknown = np.full(starts.shape, math.inf)
        return -unknown, unknown
    values = vector.numpy()
    low, high = (function.reduceat(values, starts).astype(np.float64) for function in (np.minimum, np.maximum))
    return widen(NUMPY, low, high)
