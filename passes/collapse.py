"""Views of views -> one view.

Before:  ``flat = flatten(x[B, H, S, D], 0, 1)``; ``view(flat[B*H, S, D], [B, H, S, D])``
After:   ``reshape(x[B, H, S, D], [B, H, S, D])``

A batched product wants rows and heads in one dimension, which has no packed form; the views around it cancel.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from dualkv_compile.passes.regions import region_between

aten = torch.ops.aten

#: Row-major views: only the sizes of the result matter.
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
}
_WITH_SIZES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}


def collapse_views(module: fx.GraphModule) -> None:
    """Let every view with given sizes read the tensor that a view before it reads, here and in checkpoint bodies."""
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            if node.op != "call_function" or node.target not in _WITH_SIZES:
                continue
            source = node.args[0]
            while isinstance(source, fx.Node) and source.op == "call_function" and source.target in VIEWS:
                if region_between(source, node):  # a view made without gradient must stay one
                    break
                source = source.args[0]
            if source is not node.args[0]:
                node.target = aten.reshape.default
                node.args = (source, *node.args[1:])
        for node in reversed(part.graph.nodes):
            if node.target in VIEWS and not node.users:
                part.graph.erase_node(node)
        part.graph.lint()
