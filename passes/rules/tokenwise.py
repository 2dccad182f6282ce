"""The rule of operators that are declared to treat every token alone.

Before:  ``mylib.norm(x[B, S, C], weight[C])``
After:   ``mylib.norm(x[1, T, C], weight[C])``

It is not registered for any operator here: declaring one is up to whoever knows what it computes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import Rule
from dualkv_compile.passes.values import Dim, Frame, Tags, Value, same


def tokenwise_rule(target: torch._ops.OpOverload, weights: frozenset[str], token_dims: tuple[int, ...] | None) -> Rule:
    """A rule for ``target``, whose arguments ``weights`` are the same for all tokens.

    ``token_dims`` says where the row and the column dimension (or the flattened token dimension) of the other tensor
    arguments and of all results are; None for the leading ones.
    """
    names = [argument.name for argument in target._schema.arguments]

    def rule(cx: Scope, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
        """The operator as it is, on packed per-token operands and as-written weights."""
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens = [value for name, arg in given.items() if name not in weights for value in _values(arg)]
        packed = [value for value in tokens if value.is_packed]
        if not packed:
            raise Unproven("only its weights come from the tokens")
        frame, _ = cx.join(packed)
        layout = _layout(packed[0])
        if tuple(layout) != (tuple(range(len(layout))) if token_dims is None else token_dims):
            raise Unproven("its tokens are in other dimensions than declared")

        def form(name: str, arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return [form(name, item) for item in arg]
            if isinstance(arg, fx.Node):
                raise Unproven(f"its argument {name} is a size of the batch")
            if not isinstance(arg, Value):
                return arg
            if name in weights:
                if arg.is_packed:
                    raise Unproven(f"its {name} comes from the tokens")
                return cx.grid(arg)
            return _operand(cx, name, arg, layout, frame)

        new = cx.emit(
            target,
            *(form(name, arg) for name, arg in zip(names, args, strict=False)),
            **{name: form(name, arg) for name, arg in kwargs.items()},
        )
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            return cx.result(node, _result_tags(val, layout, frame), packed, new)
        return tuple(
            cx.result(
                node,
                _result_tags(part, layout, frame),
                packed,
                cx.emit(operator.getitem, new, index),
                position=index,
            )
            for index, part in enumerate(val)
        )

    return rule


def _values(arg: Any) -> list[Value]:
    if isinstance(arg, list | tuple):
        return [value for item in arg for value in _values(item)]
    return [arg] if isinstance(arg, Value) else []


def _layout(value: Value) -> dict[int, Dim]:
    """Which dimensions of a packed value are its tokens."""
    assert value.tags is not None
    return {dim: kind for dim, kind in enumerate(value.tags) if kind is not Dim.FEATURE}


def _tags(layout: dict[int, Dim], rank: int) -> Tags:
    return tuple(layout.get(dim, Dim.FEATURE) for dim in range(rank))


def _operand(cx: Scope, name: str, value: Value, layout: dict[int, Dim], frame: Frame) -> fx.Node:
    if value.ndim == 0:
        return cx.grid(value)  # one number for all tokens
    if value.is_packed:
        if _layout(value) != layout:
            raise Unproven("its operands disagree on which dimensions are rows and columns")
        return cx.packed(value)
    if value.ndim <= max(layout):
        raise Unproven(f"its argument {name} has no token dimensions (is it one of the weights?)")
    return cx.operand(value, _tags(layout, value.ndim), frame)


def _result_tags(val: torch.Tensor, layout: dict[int, Dim], frame: Frame) -> Tags:
    sizes = {Dim.ROW: frame.rows, Dim.COLUMN: frame.columns, Dim.TOKEN: frame.rows * frame.columns}
    if val.ndim <= max(layout) or not all(same(val.shape[dim], sizes[kind]) for dim, kind in layout.items()):
        raise Unproven("its result has other token dimensions than its operands")
    return _tags(layout, val.ndim)
