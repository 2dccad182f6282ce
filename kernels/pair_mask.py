"""Mask expressions inside a kernel: everything that one token decides alone is computed before, once per token.

A kernel evaluates the mask for every pair of a partly visible block, so the pair form of an expression moves out what
reads only the query or only the key::

    k[0] and kcol > qcol - 128 and q[1] // 64 == k[1] // 64
      ->  end = where(k[0], end, 0);  kcol > q[0] and q[1] == k[1]    with q[0] = qcol - 128, q[1] = k[1] = v[1] // 64

Terms of the key alone hide a key by ending it at rank 0; terms of the query alone blind a query by giving it a rank
behind every end. What is left are comparisons of 32-bit numbers, which every kernel generator handles, without the
int64 arithmetic that makes the expressions exact.

The vectors come from the operator ``dualkv::pair_vectors(rank, column, end, vectors, mask) -> [rank, end, *sides]``,
opaque so that they are plain buffers to FlexAttention: int32 ``[T]`` each; a side is int64 where its values may need
it, and has its own dtype where it is floating point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from dualkv_compile.kernels.intervals import NUMPY, Interval, number
from dualkv_compile.kernels.predicate import (
    Expression,
    conjoin,
    conjuncts,
    depends_on_key,
    depends_on_query,
    evaluate,
    evaluate_keys,
    from_text,
)

#: Behind the end of every token: the rank of a query that sees nothing.
BLIND = 2**31 - 1
#: Columns are counted in int32, and no row comes near this many.
MAX_COLUMN = 2**30

torch.library.define(
    "dualkv::pair_vectors",
    "(Tensor rank, Tensor column, Tensor end, Tensor[] vectors, str mask) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@dataclass(frozen=True)
class PairForm:
    """A mask expression, taken apart.

    ``keys`` and ``queries`` are the terms of one token alone (None for none). ``pairs`` reads the columns, and as its
    vectors the values of ``sides``: expressions of the key token (a side is a function of one token, whichever it is).
    """

    keys: Expression | None
    queries: Expression | None
    sides: tuple[Expression, ...]
    pairs: Expression | None


@lru_cache(maxsize=1024)
def pair_form(mask: str) -> PairForm:
    """Take the expression with the text form ``mask`` apart."""
    terms = conjuncts(from_text(mask))
    keys = conjoin([term for term in terms if not depends_on_query(term)])
    queries = conjoin([term for term in terms if depends_on_query(term) and not depends_on_key(term)])
    sides = _Sides()
    pairs = conjoin([sides.replace(term) for term in terms if depends_on_query(term) and depends_on_key(term)])
    return PairForm(keys, queries, tuple(sides.found), pairs)


@dataclass
class _Sides:
    """The one-sided parts met so far."""

    found: list[Expression] = field(default_factory=list)

    def replace(self, expression: Expression, *, truth: bool = True) -> Expression:
        """``expression`` with every largest part that does not read both tokens replaced by a vector.

        Columns stay as they are, and so do constants where they are numbers rather than truth values.
        """
        name = expression[0]
        if name in ("qcol", "kcol") or (name == "const" and not truth):
            return expression
        on_query = depends_on_query(expression)
        if on_query and depends_on_key(expression):
            logic = name in ("and", "or", "not", "bool")
            return (name, *(self.replace(operand, truth=logic) for operand in expression[1:]))
        side = _at_key(expression)
        if side not in self.found:
            self.found.append(side)
        return ("q" if on_query else "k", self.found.index(side))


def _at_key(expression: Expression) -> Expression:
    """An expression of the query token as the same one of the key token."""
    name, *operands = expression
    if name in ("q", "k"):
        return ("k", operands[0])
    if name in ("qcol", "kcol"):
        return ("kcol",)
    return expression if name == "const" else (name, *map(_at_key, operands))


def pair_vectors(
    rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor], mask: str
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Call the operator: the tree's ``rank`` and ``end`` with the terms of one token in them, and the sides."""
    new_rank, new_end, *sides = torch.ops.dualkv.pair_vectors(rank, column, end, list(vectors), mask)
    return new_rank, new_end, sides


def _pair_vectors(rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor], mask: str) -> list[Tensor]:
    form = pair_form(mask)
    every, one = slice(0, column.shape[0]), slice(0, 1)
    # Results are new tensors in every case: an operator must not return its inputs.
    rank, end = rank.clone(), end.clone()
    if form.queries is not None:
        rank.masked_fill_(~evaluate(form.queries, vectors, column, every, one)[:, 0], BLIND)
    if form.keys is not None:
        end.masked_fill_(~evaluate(form.keys, vectors, column, one, every)[0], 0)
    return [rank, end, *(_side(side, vectors, column) for side in form.sides)]


def _side(side: Expression, vectors: Sequence[Tensor], column: Tensor) -> Tensor:
    value = evaluate_keys(side, vectors, column)
    if value.is_floating_point():
        return value.clone()
    dtype = torch.int32 if value.dtype == torch.bool or _fits_int32(side, vectors) else torch.int64
    return value.to(dtype, copy=True)


def _fits_int32(side: Expression, vectors: Sequence[Tensor]) -> bool:
    """Whether the types of the vectors alone keep all values of ``side`` in 32 bits."""

    def leaf(expression: Expression) -> Interval:
        if len(expression) == 1:
            return np.float64(0), np.float64(MAX_COLUMN)
        dtype = vectors[expression[1]].dtype
        if dtype == torch.bool:
            return np.float64(0), np.float64(1)
        if dtype.is_floating_point or dtype == torch.int64:
            return np.float64(-np.inf), np.float64(np.inf)
        limits = torch.iinfo(dtype)
        return np.float64(limits.min), np.float64(limits.max)

    with np.errstate(all="ignore"):
        low, high = number(side, leaf, NUMPY)
    return bool(low >= -(2**31)) and bool(high < 2**31)


torch.library.impl("dualkv::pair_vectors", "CompositeExplicitAutograd", _pair_vectors)
# Nothing above depends on data, so the same code tells the shapes and types of the results.
torch.library.register_fake("dualkv::pair_vectors", _pair_vectors)
