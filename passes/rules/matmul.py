"""Products with weights, and table look-ups.

A product contracts features only, so each token's result depends on that token alone; the weight is as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Dim, Tags, Value

aten = torch.ops.aten


def _weight(cx: Scope, value: Value | None, name: str) -> fx.Node | None:
    if value is None:
        return None
    if value.is_packed:
        raise Unproven(f"its {name} comes from the tokens")
    return cx.grid(value)


def _features_last(x: Value) -> Tags:
    if x.tags is None or x.tags[-1] is not Dim.FEATURE:
        raise Unproven("it contracts rows or columns")
    return x.tags


@register(aten.linear.default, family="matmul")
def linear(cx: Scope, node: fx.Node, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """``x @ weight.T + bias`` over the last dimension."""
    tags = _features_last(x)
    held = _weight(cx, weight, "weight")
    new = cx.emit(node.target, cx.packed(x), held, _weight(cx, bias, "bias"))
    return cx.result(node, tags if weight.ndim == 2 else tags[:-1], [x], new)


@register(aten.addmm.default, family="matmul")
def addmm(cx: Scope, node: fx.Node, bias: Value, x: Value, weight: Value, **scales: Any) -> Value:
    """``bias + x @ weight`` over flattened tokens (GPT-2)."""
    tags = _features_last(x)
    if bias.ndim != 1:
        raise Unproven("the added matrix is not one row")
    new = cx.emit(node.target, _weight(cx, bias, "bias"), cx.packed(x), _weight(cx, weight, "weight"), **scales)
    return cx.result(node, tags, [x], new)


@register(aten.mm.default, family="matmul")
def mm(cx: Scope, node: fx.Node, x: Value, weight: Value) -> Value:
    """``x @ weight`` over flattened tokens."""
    tags = _features_last(x)
    return cx.result(node, tags, [x], cx.emit(node.target, cx.packed(x), _weight(cx, weight, "weight")))


@register(aten.matmul.default, aten.bmm.default, family="matmul")
def matmul(cx: Scope, node: fx.Node, a: Value, b: Value) -> Value:
    """``a[..., i, k] @ b[..., k, j]``: k must be features on both sides, batch dimensions are broadcast.

    Rows may be the tokens themselves: ``[experts, tokens, C] @ weights[experts, C, F]``.
    """
    if not b.is_packed and b.ndim <= 2:
        tags = _features_last(a)
        new = cx.emit(node.target, cx.packed(a), cx.grid(b))
        return cx.result(node, tags if b.ndim == 2 else tags[:-1], [a], new)
    if a.ndim < 2 or b.ndim < 2:
        raise Unproven("a product of a matrix and a vector of tokens")
    frame, _ = cx.join([a, b])
    rank = max(a.ndim, b.ndim)
    for value, contracted in ((a, -1), (b, -2)):
        if value.tags is not None and value.tags[contracted] is not Dim.FEATURE:
            raise Unproven("it contracts rows or columns")
    batch = _batch_tags(cx, a, b, rank)
    left = a.tags[-2] if a.tags is not None else Dim.FEATURE
    right = b.tags[-1] if b.tags is not None else Dim.FEATURE
    tags = (*batch, left, right)
    new = cx.emit(
        node.target,
        cx.operand(a, (*batch, left, Dim.FEATURE), frame),
        cx.operand(b, (*batch, Dim.FEATURE, right), frame),
    )
    return cx.result(node, tags, [a, b], new)


def _batch_tags(cx: Scope, a: Value, b: Value, rank: int) -> Tags:
    """The common tags of the batch dimensions; both operands must agree where both are packed."""
    packed = []
    for value in (a, b):
        if value.tags is not None:
            padded = (Dim.FEATURE,) * (rank - value.ndim) + value.tags
            packed.append(padded[:-2])
    if any(tags != packed[0] for tags in packed):
        raise Unproven("operands disagree on which dimensions are rows and columns")
    return packed[0]


@register(aten.einsum.default, family="matmul")
def einsum(cx: Scope, node: fx.Node, equation: str, operands: Sequence[Value], **kwargs: Any) -> Value:
    """Any product of tensors that sums over features only: a subscript means the same dimension in every operand."""
    if "." in equation or "->" not in equation:
        raise Unproven("its subscripts are not all written out")
    left, result = equation.replace(" ", "").split("->")
    subscripts = left.split(",")
    frame, _ = cx.join(operands)
    known: dict[str, Dim] = {}
    for letters, value in zip(subscripts, operands, strict=True):
        for letter, kind in zip(letters, value.tags or (), strict=False):
            if known.setdefault(letter, kind) is not kind:
                raise Unproven("operands disagree on which dimensions are rows and columns")
    if any(kind is not Dim.FEATURE and letter not in result for letter, kind in known.items()):
        raise Unproven("it sums over rows or columns")
    held = []
    for letters, value in zip(subscripts, operands, strict=True):
        if len(set(letters)) != len(letters):
            raise Unproven("it reads a diagonal")
        held.append(cx.operand(value, tuple(known.get(letter, Dim.FEATURE) for letter in letters), frame))
    tags = tuple(known.get(letter, Dim.FEATURE) for letter in result)
    return cx.result(node, tags, list(operands), cx.emit(node.target, equation, held, **kwargs))


@register(aten.embedding.default, family="matmul")
def embedding(
    cx: Scope,
    node: fx.Node,
    weight: Value,
    indices: Value,
    padding_idx: Any = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    """One table row per token."""
    if scale_grad_by_freq:
        raise Unproven("its gradient counts how often a token occurs in the batch")
    if indices.tags is None:
        raise Unproven("its table comes from the tokens")
    held = _weight(cx, weight, "table")
    new = cx.emit(node.target, held, cx.packed(indices), padding_idx, scale_grad_by_freq, sparse)
    return cx.result(node, (*indices.tags, Dim.FEATURE), [indices], new)
