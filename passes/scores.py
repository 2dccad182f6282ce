"""What scores mean: from the operand of a softmax back to product, soft cap, bias and mask.

Before:   ``masked_fill(tanh(q @ k.T * 0.25 / 30) * 30 + alibi[B, H, 1, S], ~visible[B, 1, S, S], -inf)``
After:    scale 0.25, soft cap 30, ``alibi`` as a packed ``[H, T]``, and the mask ``visible`` as a predicate

The value of the scores is asked for at a symbolic position, as masks are (:mod:`passes.mask`); the answer is an
expression in the product ``("score",)``, numbers per head and key ``("bias", n)``, and conditions. It is taken apart
here. What hides a key is minus infinity, or the lowest number of a type, in the place of the score or added to it; any
other number, ``-1e4`` included, is a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.kernels.merge import accumulation_dtype
from dualkv_compile.passes.mask import (
    Expr,
    Lifted,
    Question,
    Scores,
    at,
    bring,
    is_minus_infinity,
    position,
    product_position,
    understood,
)
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.values import Frame, Size, same
from dualkv_compile.passes.written_attention import Written

aten = torch.ops.aten
_EMITTED = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "div": aten.div.Tensor}


@dataclass(frozen=True)
class Meaning:
    """``softcap * tanh(scale * product / softcap) + bias`` where the mask holds; softcap 0: ``scale * product + bias``.

    ``bias [H or 1, T]`` and ``sinks [H]`` are nodes of the packed graph, or None.
    """

    mask: Lifted
    scale: float
    softcap: float = 0.0
    bias: fx.Node | None = None
    sinks: fx.Node | None = None


def meaning(cx: Scope, written: Written, frame: Frame, heads: Size) -> Meaning:
    """The scores of attention that is written out. Raises Unproven with what is not understood about them."""
    if not all(same(size, frame.columns) for size in written.scores.meta["val"].shape[-2:]):
        raise Unproven("its scores do not cover every query and key column")
    question = Question(frame, Scores(written.products[0], heads))
    parts = _split(at(question, cx, written.scores, product_position(written.scores, heads)))
    sinks = None if written.sinks is None else _sinks(cx, question, written.sinks, heads)
    return _result(cx, question, parts, sinks, heads)


def meaning_of_sum(cx: Scope, added: fx.Node, frame: Frame, heads: Size, scale: float) -> Meaning:
    """Scaled scores to which numbers ``[B or 1, H or 1, S, S]`` are added: a mask, a bias or both."""
    question = Question(frame, Scores(None, heads))
    parts = _Parts(scale)
    parts.add(at(question, cx, added, position(added, frame)))
    return _result(cx, question, parts, None, heads)


@dataclass
class _Parts:
    """Scores while they are put together: ``outer * tanh(scale * product)`` (outer 0: no tanh) plus biases."""

    scale: float
    outer: float = 0.0
    conditions: list[Expr] = field(default_factory=list)
    biases: list[Expr] = field(default_factory=list)

    def times(self, factor: float) -> None:
        """Scale everything."""
        if self.conditions and factor != 1:
            # The lowest number of a type, scaled down, may be no minus infinity any more.
            raise Unproven("its scores are scaled after they are masked")
        if self.outer:
            self.outer *= factor
        else:
            self.scale *= factor
        self.biases = [("mul", bias, ("const", factor)) for bias in self.biases]

    def add(self, term: Expr) -> None:
        """Add a term without a product: minus infinity where a condition fails, and a bias."""
        name, *operands = term
        if name == "where":
            condition, yes, no = operands
            if is_minus_infinity(no):
                self.conditions.append(condition)
                self.add(yes)
            elif is_minus_infinity(yes):
                self.conditions.append(("not", condition))
                self.add(no)
            else:
                raise Unproven("its mask is added to the scores and is more than 0 and minus infinity")
        elif name == "add":
            for operand in operands:
                self.add(operand)
        elif term != ("const", 0):
            self.biases.append(term)


def _holds_score(expression: Expr) -> bool:
    return expression[0] == "score" or any(isinstance(part, tuple) and _holds_score(part) for part in expression[1:])


def _split(expression: Expr) -> _Parts:
    """Take scores apart."""
    name, *operands = expression
    if name == "score":
        return _Parts(1.0)
    if name == "where":
        condition, yes, no = operands
        if _holds_score(yes) and is_minus_infinity(no):
            return _where(condition, yes)
        if _holds_score(no) and is_minus_infinity(yes):
            return _where(("not", condition), no)
        raise Unproven("its scores are replaced by numbers other than minus infinity")
    inside = [operand for operand in operands if _holds_score(operand)]
    if len(inside) == 1 and not _holds_score(operands[-1] if len(operands) > 1 else ("const", 0)):
        (first, *rest) = operands
    elif len(inside) == 1 and name in ("add", "mul", "maximum"):
        rest, first = operands[:-1], operands[-1]
    else:
        raise Unproven(f"its scores go through {name} in a way that is not understood")
    parts = _split(first)
    other: Any = rest[0] if rest else None
    number = other[1] if other is not None and other[0] == "const" else None
    if name == "add":
        parts.add(other)
    elif name == "sub":
        parts.add(("const", -number) if number is not None else ("sub", ("const", 0), other))
    elif name == "mul" and number is not None:
        parts.times(number)
    elif name == "div" and number:
        parts.times(1 / number)
    elif name == "tanh" and not (parts.outer or parts.biases or parts.conditions):
        parts.outer = 1.0
    elif not (name == "maximum" and is_minus_infinity(other)):
        raise Unproven(f"its scores go through {name} in a way that is not understood")
    return parts


def _where(condition: Expr, scores: Expr) -> _Parts:
    parts = _split(scores)
    parts.conditions.append(condition)
    return parts


def _result(cx: Scope, question: Question, parts: _Parts, sinks: fx.Node | None, heads: Size) -> Meaning:
    expression: Expr = ("const", True)
    for condition in parts.conditions:
        expression = ("and", expression, condition)
    bias: fx.Node | None = None
    if parts.biases:
        total = parts.biases[0]
        for more in parts.biases[1:]:
            total = ("add", total, more)
        bias = _emit_bias(cx, question, total, heads)
    mask = understood(question, cx, expression)
    if parts.outer < 0:
        raise Unproven("its soft cap is negative")
    return Meaning(mask, parts.scale * (parts.outer or 1.0), parts.outer, bias, sinks)


def _emit_bias(cx: Scope, question: Question, expression: Expr, heads: Size) -> fx.Node:
    """The bias ``[H or 1, T]`` on packed tokens."""
    leaves = [question.biases[n] for n in _leaves(expression)]
    if not any(leaf.per_key for leaf in leaves):
        raise Unproven("its scores are shifted by numbers that do not depend on the key")
    node = _emit(cx, question, expression)
    if all(leaf.per_key for leaf in leaves):
        return node
    # A number per head alone is [H]: not the last dimension, but the first.
    raise Unproven("its bias is made of numbers per head and numbers per key")


def _leaves(expression: Expr) -> list[int]:
    """The numbers of the biases in an expression that has nothing else but constants and arithmetic."""
    name, *operands = expression
    if name == "bias":
        return [operands[0]]
    if name == "const":
        return []
    if name not in _EMITTED and name != "neg":
        raise Unproven("its scores have a bias that is not known from head and key alone")
    return [leaf for operand in operands for leaf in _leaves(operand)]


def _emit(cx: Scope, question: Question, expression: Expr) -> Any:
    name, *operands = expression
    if name == "const":
        return operands[0]
    if name == "bias":
        leaf = question.biases[operands[0]]
        node = bring(cx, leaf.owner, leaf.node)
        # Scores are summed in float32 at least, so what is done to a bias on the way to them is not rounded to less.
        total = accumulation_dtype(leaf.dtype)
        return node if leaf.dtype == total else cx.emit(aten.to.dtype, node, total)
    values = [_emit(cx, question, operand) for operand in operands]
    if name == "neg":
        return cx.emit(aten.neg.default, *values)
    if not isinstance(values[0], fx.Node):
        if name == "sub":
            return cx.emit(aten.rsub.Scalar, values[1], values[0])
        if name not in ("add", "mul"):
            raise Unproven("its scores have a bias that divides by what depends on the key")
        values.reverse()
    return cx.emit(_EMITTED[name], *values)


def _sinks(cx: Scope, question: Question, sinks: fx.Node, heads: Size) -> fx.Node:
    """The score ``[H]`` of the last column, which has no value."""
    shape = sinks.meta["val"].shape
    if len(shape) != 4 or not same(shape[1], heads) or same(heads, 1):
        raise Unproven("its last column of scores is not one number per head")
    names = (("row",), ("head",), ("qcol",), ("const", 0))
    asked = tuple(("const", 0) if same(size, 1) else item for size, item in zip(shape, names, strict=True))
    found = at(question, cx, sinks, asked)
    if found[0] != "bias" or question.biases[found[1]].per_key:
        raise Unproven("its last column of scores is not one number per head")
    leaf = question.biases[found[1]]
    return bring(cx, leaf.owner, leaf.node)
