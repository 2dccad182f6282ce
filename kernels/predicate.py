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

Expression = tuple[Any, ...]
TokenIndex = slice | Tensor

#: Operators and their number of operands.
ARITY: dict[str, int] = {
    "and": 2, "or": 2, "not": 1, "bool": 1,
    "le": 2, "lt": 2, "ge": 2, "gt": 2, "eq": 2, "ne": 2,
    "add": 2, "sub": 2, "mul": 2, "floordiv": 2, "mod": 2, "neg": 1, "abs": 1, "minimum": 2, "maximum": 2,
}  # fmt: skip

#: Largest magnitude that float64 cannot have been rounded to from another integer: bounds beyond it are given up.
_EXACT = float(2**53 - 1)


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


def _vectors_read(expression: Expression) -> set[int]:
    if expression[0] in ("q", "k"):
        return {expression[1]}
    if expression[0] in ("qcol", "kcol", "const"):
        return set()
    return set().union(*(_vectors_read(operand) for operand in expression[1:]))


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
# ------------------------------------------------------------------------------------------------------------- bounds
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Interval = tuple[FloatArray, FloatArray]


class BlockBounds:
    """Bounds of mask expressions on blocks of consecutive tokens, on the CPU.

    Args:
        expression: the expressions asked about later read no other vectors than this one.
        vectors, column: as for :func:`evaluate`, ``[T]``.
        starts: int ``[blocks]``, the first token of each block, strictly increasing from 0.

    Only integers are bounded (exactly, in float64); whatever involves a floating-point vector or a fractional constant
    is "possibly", because rounding at the comparison is not worth modelling. The arrays are small and many, which NumPy
    handles in a fraction of the time.
    """

    def __init__(self, expression: Expression, vectors: Sequence[Tensor], column: Tensor, starts: IntArray) -> None:
        self._column = _block_range(column, starts)
        self._vectors = {n: _block_range(vectors[n], starts) for n in _vectors_read(expression)}

    def of(self, expression: Expression, query_block: IntArray, key_block: IntArray) -> tuple[BoolArray, BoolArray]:
        """Arrays ``(always, possibly)`` for the pairs of blocks, in the common shape of the two index arrays."""
        with np.errstate(all="ignore"):
            low, high = _truth_interval(*self._interval(expression, query_block, key_block))
        shape = np.broadcast_shapes(query_block.shape, key_block.shape)
        return np.broadcast_to(low > 0, shape), np.broadcast_to(high > 0, shape)

    def _interval(self, expression: Expression, query_block: IntArray, key_block: IntArray) -> Interval:
        name = expression[0]
        if name in ("q", "k", "qcol", "kcol"):
            low, high = self._vectors[expression[1]] if len(expression) == 2 else self._column
            at = query_block if name in ("q", "qcol") else key_block
            return low[at], high[at]
        if name == "const":
            value = float(expression[1])
            exact = value.is_integer() and abs(value) <= _EXACT
            return (np.float64(value),) * 2 if exact else (np.float64(-math.inf), np.float64(math.inf))  # type: ignore[return-value]
        operands = [self._interval(operand, query_block, key_block) for operand in expression[1:]]
        if name in _BOOLEAN:
            return _RULES[name](*(_truth_interval(*operand) for operand in operands))
        return _widen(*_RULES[name](*operands))


def _block_range(vector: Tensor, starts: IntArray) -> Interval:
    """The smallest and the largest value in every block."""
    if vector.is_floating_point():
        unknown = np.full(starts.shape, math.inf)
        return -unknown, unknown
    values = vector.numpy()
    low, high = (function.reduceat(values, starts).astype(np.float64) for function in (np.minimum, np.maximum))
    return _widen(low, high)


def _widen(low: FloatArray, high: FloatArray) -> Interval:
    """Give up bounds that float64 may have rounded, and undefined ones (``inf - inf``, ``0 * inf``)."""
    exact = (np.abs(low) <= _EXACT) & (np.abs(high) <= _EXACT)
    return np.where(exact, low, -math.inf), np.where(exact, high, math.inf)


def _truth_interval(low: FloatArray, high: FloatArray) -> Interval:
    return _from_bools((low > 0) | (high < 0), (low != 0) | (high != 0))


def _from_bools(always: BoolArray, possibly: BoolArray) -> Interval:
    return np.asarray(always, np.float64), np.asarray(possibly, np.float64)


def _eq(a: Interval, b: Interval) -> Interval:
    points = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return _from_bools(points, (a[0] <= b[1]) & (b[0] <= a[1]))


def _not(a: Interval) -> Interval:
    return 1 - a[1], 1 - a[0]


def _corners(function: Callable[[FloatArray, FloatArray], FloatArray], a: Interval, b: Interval) -> Interval:
    values = np.stack(np.broadcast_arrays(*(function(x, y) for x in a for y in b)))
    return values.min(0), values.max(0)


def _floordiv(a: Interval, b: Interval) -> Interval:
    low, high = _corners(np.floor_divide, a, b)
    zero = (b[0] <= 0) & (b[1] >= 0)
    return np.where(zero, -math.inf, low), np.where(zero, math.inf, high)


def _mod(a: Interval, b: Interval) -> Interval:
    one_period = np.floor_divide(a[0], b[0]) == np.floor_divide(a[1], b[0])
    low = np.where(one_period, np.remainder(a[0], b[0]), 0.0)
    high = np.where(one_period, np.remainder(a[1], b[0]), b[0] - 1)
    # An unknown dividend may be a fraction: its remainder then is not at most b - 1.
    unknown = (b[0] != b[1]) | (b[0] <= 0) | np.isinf(a[0])
    return np.where(unknown, -math.inf, low), np.where(unknown, math.inf, high)


def _abs(a: Interval) -> Interval:
    ends = np.abs(a[0]), np.abs(a[1])
    return np.where((a[0] <= 0) & (a[1] >= 0), 0.0, np.minimum(*ends)), np.maximum(*ends)


def _minimum(a: Interval, b: Interval) -> Interval:
    return np.minimum(a[0], b[0]), np.minimum(a[1], b[1])


def _maximum(a: Interval, b: Interval) -> Interval:
    return np.maximum(a[0], b[0]), np.maximum(a[1], b[1])


_RULES: dict[str, Callable[..., Interval]] = {
    "and": _minimum,
    "or": _maximum,
    "not": _not,
    "bool": lambda a: a,
    "le": lambda a, b: _from_bools(a[1] <= b[0], a[0] <= b[1]),
    "lt": lambda a, b: _from_bools(a[1] < b[0], a[0] < b[1]),
    "ge": lambda a, b: _from_bools(a[0] >= b[1], a[1] >= b[0]),
    "gt": lambda a, b: _from_bools(a[0] > b[1], a[1] > b[0]),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": lambda a, b: _corners(np.multiply, a, b),
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _abs,
    "minimum": _minimum,
    "maximum": _maximum,
}
