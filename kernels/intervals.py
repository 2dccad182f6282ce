"""Interval arithmetic of mask expressions: what holds for all pairs of two blocks of tokens, and what for none.

Each value is a pair of arrays with one entry per pair of blocks. Truth values are ``(always, possibly)``, bool: the
expression holds for every pair of tokens, or for at least one as far as the bounds tell. Numbers are ``(low, high)``,
float64, and infinite where nothing is known. The rules are written once, for NumPy (many small arrays on the CPU, where
torch's cost per operation would dominate) and for torch (large arrays on a device, without reading any of them).

Only integers are bounded, exactly; whatever involves a floating-point vector or a fractional constant is "possibly",
because rounding at a comparison is not worth modelling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

#: Two arrays of one library: (always, possibly) or (low, high).
Interval = tuple[Any, Any]
#: The bounds ``(low, high)`` of a leaf (``q``, ``k``, ``qcol``, ``kcol``) of a mask expression.
Leaf = Callable[[tuple[Any, ...]], Interval]

#: Largest magnitude that float64 cannot have been rounded to from another integer: bounds beyond it are given up.
EXACT = float(2**53 - 1)


@dataclass(frozen=True)
class Arrays:
    """A library of arrays: its functions, which NumPy and torch name alike, and the two they spell apart."""

    of: Any  # the module: where, minimum, maximum, floor_divide, remainder, isinf
    float64: Callable[[Any], Any]  # numbers from truth values or integers
    constant: Callable[[float], Any]  # one number, broadcast against all others


NUMPY = Arrays(np, lambda x: np.asarray(x, np.float64), np.float64)


@lru_cache(maxsize=16)
def torch_arrays(device: torch.device) -> Arrays:
    """Torch on ``device``; no operation copies from the host or waits for the device."""

    def constant(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float64, device=device)

    return Arrays(torch, lambda x: x.to(torch.float64), constant)


def truth(expression: tuple[Any, ...], leaf: Leaf, arrays: Arrays) -> Interval:
    """``(always, possibly)`` of an expression read as a truth value."""
    name, *operands = expression
    if name in _LOGIC:
        return _LOGIC[name](*(truth(operand, leaf, arrays) for operand in operands))
    if name in _COMPARISONS:
        always, possibly = _COMPARISONS[name](*(number(operand, leaf, arrays) for operand in operands))
        return always, possibly
    low, high = number(expression, leaf, arrays)
    return (low > 0) | (high < 0), (low != 0) | (high != 0)


def number(expression: tuple[Any, ...], leaf: Leaf, arrays: Arrays) -> Interval:
    """``(low, high)`` of an expression read as a number; truth values count as 0 and 1."""
    name, *operands = expression
    if name in ("q", "k", "qcol", "kcol"):
        return leaf(expression)
    if name == "const":
        value = float(operands[0])
        exact = value.is_integer() and abs(value) <= EXACT
        return arrays.constant(value if exact else -math.inf), arrays.constant(value if exact else math.inf)
    if name in _LOGIC or name in _COMPARISONS:
        always, possibly = truth(expression, leaf, arrays)
        return arrays.float64(always), arrays.float64(possibly)
    bounds = _ARITHMETIC[name](arrays.of, *(number(operand, leaf, arrays) for operand in operands))
    return widen(arrays, *bounds)


def widen(arrays: Arrays, low: Any, high: Any) -> Interval:
    """Give up bounds that float64 may have rounded, and undefined ones (``inf - inf``, ``0 * inf``)."""
    exact = (abs(low) <= EXACT) & (abs(high) <= EXACT)
    return arrays.of.where(exact, low, -math.inf), arrays.of.where(exact, high, math.inf)


# --------------------------------------------------------------------------------------------------------------- rules
def _eq(a: Interval, b: Interval) -> Interval:
    points = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return points, (a[0] <= b[1]) & (b[0] <= a[1])


def _not(a: Interval) -> Interval:
    return ~a[1], ~a[0]


def _corners(of: Any, function: Callable[[Any, Any], Any], a: Interval, b: Interval) -> Interval:
    """Bounds of a function that is monotone in each operand while the other one is fixed."""
    first, second, third, fourth = (function(x, y) for x in a for y in b)
    return (
        of.minimum(of.minimum(first, second), of.minimum(third, fourth)),
        of.maximum(of.maximum(first, second), of.maximum(third, fourth)),
    )


def _floordiv(of: Any, a: Interval, b: Interval) -> Interval:
    low, high = _corners(of, of.floor_divide, a, b)
    zero = (b[0] <= 0) & (b[1] >= 0)
    return of.where(zero, -math.inf, low), of.where(zero, math.inf, high)


def _mod(of: Any, a: Interval, b: Interval) -> Interval:
    one_period = of.floor_divide(a[0], b[0]) == of.floor_divide(a[1], b[0])
    low = of.where(one_period, of.remainder(a[0], b[0]), 0.0)
    high = of.where(one_period, of.remainder(a[1], b[0]), b[0] - 1)
    # An unknown dividend may be a fraction: its remainder then is not at most b - 1.
    unknown = (b[0] != b[1]) | (b[0] <= 0) | of.isinf(a[0])
    return of.where(unknown, -math.inf, low), of.where(unknown, math.inf, high)


def _abs(of: Any, a: Interval) -> Interval:
    ends = abs(a[0]), abs(a[1])
    return of.where((a[0] <= 0) & (a[1] >= 0), 0.0, of.minimum(*ends)), of.maximum(*ends)


_LOGIC: dict[str, Callable[..., Interval]] = {
    "and": lambda a, b: (a[0] & b[0], a[1] & b[1]),
    "or": lambda a, b: (a[0] | b[0], a[1] | b[1]),
    "not": _not,
    "bool": lambda a: a,
}
_COMPARISONS: dict[str, Callable[..., Interval]] = {
    "le": lambda a, b: (a[1] <= b[0], a[0] <= b[1]),
    "lt": lambda a, b: (a[1] < b[0], a[0] < b[1]),
    "ge": lambda a, b: (a[0] >= b[1], a[1] >= b[0]),
    "gt": lambda a, b: (a[0] > b[1], a[1] > b[0]),
    "eq": _eq,
    "ne": lambda a, b: _not(_eq(a, b)),
}
_ARITHMETIC: dict[str, Callable[..., Interval]] = {
    "add": lambda of, a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda of, a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": lambda of, a, b: _corners(of, lambda x, y: x * y, a, b),
    "floordiv": _floordiv,
    "mod": _mod,
    "neg": lambda of, a: (-a[1], -a[0]),
    "abs": _abs,
    "minimum": lambda of, a, b: (of.minimum(a[0], b[0]), of.minimum(a[1], b[1])),
    "maximum": lambda of, a, b: (of.maximum(a[0], b[0]), of.maximum(a[1], b[1])),
}
