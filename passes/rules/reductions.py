"""Reductions, normalisations and scans over features of each token."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Dim, Tags, Value

aten = torch.ops.aten


def _feature_dims(x: Value, dim: Any) -> list[int]:
    """The reduced dimensions as non-negative numbers; all of them must be features."""
    assert x.tags is not None
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        raise Unproven("it reduces over rows and columns")
    dims = [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    if any(x.tags[d] is not Dim.FEATURE for d in dims):
        raise Unproven("it reduces over rows or columns")
    return dims


def _reduced(tags: Tags, dims: Sequence[int], keepdim: bool) -> Tags:
    return tags if keepdim else tuple(tag for d, tag in enumerate(tags) if d not in dims)


def _same_rank(node: fx.Node, x: Value, position: int | None = None) -> bool:
    val = node.meta["val"]
    return bool((val if position is None else val[position]).ndim == x.ndim)


@register(
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.amin.default,
    aten.var.dim,
    aten.var.correction,
    aten.std.dim,
    aten.std.correction,
    aten.logsumexp.default,
    aten.prod.dim_int,
    aten.argmax.default,
    aten.argmin.default,
    aten.all.dim,
    aten.any.dim,
    family="reductions",
)
def reduction(cx: Scope, node: fx.Node, x: Value, dim: Any = None, *args: Any, **kwargs: Any) -> Value:
    """``op(x, dim, ...)`` over features; whether dimensions are kept is read off the result."""
    dims = _feature_dims(x, dim)
    assert x.tags is not None
    new = cx.emit(node.target, cx.packed(x), dim, *args, **kwargs)
    return cx.result(node, _reduced(x.tags, dims, _same_rank(node, x)), [x], new)


@register(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim, family="reductions")
def vector_norm(
    cx: Scope, node: fx.Node, x: Value, order: Any = 2, dim: Any = None, *args: Any, **kwargs: Any
) -> Value:
    """A norm over features."""
    dims = _feature_dims(x, dim)
    assert x.tags is not None
    new = cx.emit(node.target, cx.packed(x), order, dim, *args, **kwargs)
    return cx.result(node, _reduced(x.tags, dims, _same_rank(node, x)), [x], new)


@register(
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.glu.default,
    aten.flip.default,
    family="reductions",
)
def along_features(cx: Scope, node: fx.Node, x: Value, dim: Any = -1, *args: Any, **kwargs: Any) -> Value:
    """Operators along feature dimensions that keep the rank."""
    from dualkv_compile.passes.rules.scans import scan

    assert x.tags is not None
    if node.target in (aten.cumsum.default, aten.cumprod.default) and x.tags[dim] is Dim.COLUMN:
        return scan(cx, node, x, dim, *args, **kwargs)
    _feature_dims(x, dim)
    return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), dim, *args, **kwargs))


@register(
    aten.max.dim,
    aten.min.dim,
    aten.sort.default,
    aten.sort.stable,
    aten.cummax.default,
    aten.cummin.default,
    family="reductions",
)
def pair(cx: Scope, node: fx.Node, x: Value, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
    """Operators with values and indices along a feature dimension; a sort may also order the tokens' assignments."""
    from dualkv_compile.passes.rules.experts import is_assignments, sort_assignments

    if node.target in (aten.sort.default, aten.sort.stable) and is_assignments(x):
        return sort_assignments(cx, node, x, dim, *args, **kwargs)
    if node.target is aten.sort.stable:  # all but the tensor are keywords
        return _several(cx, node, x, dim, (), {**kwargs, "dim": dim})
    return _several(cx, node, x, dim, (dim, *args), kwargs)


@register(aten.topk.default, family="reductions")
def topk(cx: Scope, node: fx.Node, x: Value, k: Any, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
    """The largest k features of each token.

    Which of equal entries is taken is decided within one row of features, so equal rows are decided alike.
    """
    return _several(cx, node, x, dim, (k, dim, *args), kwargs)


def _several(
    cx: Scope, node: fx.Node, x: Value, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Value, ...]:
    """An operator with several results of the same layout (values and indices)."""
    dims = _feature_dims(x, dim)
    assert x.tags is not None
    new = cx.emit(node.target, cx.packed(x), *args, **kwargs)
    return tuple(
        cx.result(
            node,
            _reduced(x.tags, dims, _same_rank(node, x, index)),
            [x],
            cx.emit(operator.getitem, new, index),
            position=index,
        )
        for index in range(len(node.meta["val"]))
    )


@register(aten.layer_norm.default, aten.rms_norm.default, family="reductions")
def norm(
    cx: Scope,
    node: fx.Node,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    *args: Any,
    **kwargs: Any,
) -> Value:
    """Normalisation over the last dimensions with as-written weights."""
    _feature_dims(x, list(range(-len(normalized_shape), 0)))
    assert x.tags is not None
    rest = [weight, *args, *kwargs.values()]
    if any(isinstance(value, Value) and value.is_packed for value in rest):
        raise Unproven("its weight comes from the tokens")
    new = cx.emit(node.target, cx.packed(x), list(normalized_shape), *cx.to_grid((weight, *args)), **cx.to_grid(kwargs))
    return cx.result(node, x.tags, [x], new)


@register(aten.group_norm.default, family="reductions")
def group_norm(
    cx: Scope,
    node: fx.Node,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    *args: Any,
    **kwargs: Any,
) -> Value:
    """Normalisation of groups of features of flattened tokens ``[B*S, C, ...]``."""
    _feature_dims(x, list(range(1, x.ndim)))
    assert x.tags is not None
    if any(value is not None and value.is_packed for value in (weight, bias)):
        raise Unproven("its weight comes from the tokens")
    held = cx.to_grid((weight, bias))
    return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), groups, *held, *args, **kwargs))
