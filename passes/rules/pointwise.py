"""Operators that work on each element alone, and casts and copies.

They run on packed tokens as they are: the result at a token depends on the operands at that token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Tags, Value, align

aten = torch.ops.aten

_CASTS_AND_COPIES = (
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.dropout.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
)


def broadcast(cx: Scope, values: list[Value]) -> Tags:
    """The tags of the broadcast of ``values`` (packed operands must agree)."""
    rank = max(value.ndim for value in values)
    packed = [align(value.tags, rank) for value in values if value.tags is not None]
    if any(tags != packed[0] for tags in packed):
        raise Unproven("operands disagree on which dimensions are rows and columns")
    return packed[0]


@register(torch.Tag.pointwise, *_CASTS_AND_COPIES, family="pointwise")
def pointwise(cx: Scope, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """Same operator, packed operands; as-written operands are aligned by broadcasting."""
    values = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Value)]
    if any(isinstance(arg, list | tuple) and any(isinstance(item, Value) for item in arg) for arg in args):
        raise Unproven("takes a list of tensors")
    frame, _ = cx.join(values)
    tags = broadcast(cx, values)

    def operand(arg: Any) -> Any:
        return cx.operand(arg, tags, frame) if isinstance(arg, Value) else arg

    new = cx.emit(node.target, *map(operand, args), **{key: operand(arg) for key, arg in kwargs.items()})
    return cx.result(node, tags, values, new)


_LOGICAL = (aten.__and__.Tensor, aten.__or__.Tensor, aten.__xor__.Tensor, aten.where.ScalarSelf, aten.where.ScalarOther)
register(*_LOGICAL, aten.where.Scalar, family="pointwise")(pointwise)
register(
    aten.polar.default,
    aten.complex.default,
    aten.conj.default,
    aten.resolve_conj.default,
    aten.real.default,
    aten.imag.default,
    aten.rsub.Tensor,
    aten.masked_fill.Tensor,
    aten.log_sigmoid.default,
    family="pointwise",
)(pointwise)


@register(aten.type_as.default, aten.to.other, family="pointwise")
def cast_like(cx: Scope, node: fx.Node, x: Value, other: Value, *args: Any, **kwargs: Any) -> Value:
    """A cast to another tensor's dtype: the other's content does not matter, so any form of it will do."""
    if x.tags is None:
        like = cx.packed(other)
        new = cx.emit(node.target, cx.grid(x), like, *args, **kwargs)
        return Value(node, grid=new)
    like = cx.packed(other) if other.is_packed else cx.grid(other)
    new = cx.emit(node.target, cx.packed(x), like, *args, **kwargs)
    return cx.result(node, x.tags, [x], new)


@register(
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.new_empty.default,
    family="pointwise",
)
def new_like(cx: Scope, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """``x.new_zeros(size)``: only the dtype and device of ``x`` matter, and the result is as written."""
    if not x.is_packed:
        raise Unproven("it is filled with a value that comes from the tokens")
    new = cx.emit(node.target, cx.packed(x), *cx.to_grid(args), **cx.to_grid(kwargs))
    return Value(node, grid=new)
