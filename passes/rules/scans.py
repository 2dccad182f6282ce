"""Operators that run along the columns and look only backwards.

Their result at a column is determined by the prefix up to it, but they cannot run on packed tokens, where the
neighbours of a token need not be its neighbours in the row. They run on the grid, and the result is packed again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Dim, Value

aten = torch.ops.aten


def scan(cx: Scope, node: fx.Node, x: Value, dim: int, *args: Any, **kwargs: Any) -> Value:
    """``cumsum`` and its like along the columns."""
    assert x.tags is not None
    return cx.on_grid(node, x.tags, [x], (x, dim, *args), kwargs)


@register(aten.diff.default, family="scans")
def diff(
    cx: Scope, node: fx.Node, x: Value, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None
) -> Value:
    """First difference along the columns with one prepended column, itself made from the row's first column."""
    if x.tags is None or x.tags[dim] is not Dim.COLUMN or n != 1 or append is not None:
        raise Unproven("differences that look ahead or along another dimension")
    frame = x.frame
    assert frame is not None
    if not isinstance(prepend, Value) or prepend.tags != x.tags or prepend.frame is None:
        raise Unproven("it shifts the columns")
    window = prepend.frame.window
    if prepend.frame.parent is not frame or window is None or (window.start, window.stop) != (0, 1):
        raise Unproven("it shifts the columns")
    roots = x.roots | prepend.roots
    result = cx.on_grid(node, x.tags, [x], (x, n, dim, prepend), {})
    result.roots = roots
    return result
