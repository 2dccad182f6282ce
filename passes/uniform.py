"""Which dimensions of an as-written value it does not vary along.

Models expand column numbers to ``[B, S]`` (``position_ids.expand(B, -1)``) and compute document ids from them. Such a
value has a row dimension of full size and yet the same content in every row; knowing that, one row of it serves all.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from dualkv_compile.passes.registry import is_functional_pointwise
from dualkv_compile.passes.values import same

aten = torch.ops.aten

CONSTANT_FILL = {
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.new_full.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.scalar_tensor.default,
}
_ELEMENTWISE = {
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.alias.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
    aten.__and__.Tensor,
    aten.__or__.Tensor,
    aten.__xor__.Tensor,
    aten.type_as.default,
    aten.slice.Tensor,
}
_ALONG_ONE_DIM = {aten.cumsum.default: 1, aten.diff.default: 2, aten.cat.default: 1}


def is_uniform(node: fx.Node, dim: int) -> bool:
    """Whether the value of ``node`` is the same at every index of ``dim`` (a sound, incomplete test)."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return False
    if same(val.shape[dim], 1):
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if target in CONSTANT_FILL:
        return True
    operands = [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
    if target is aten.expand.default:
        return _uniform_operand(operands[0], dim, val.ndim)
    if target is aten.unsqueeze.default:
        inserted = int(node.args[1]) % val.ndim  # type: ignore[arg-type]
        return dim == inserted or is_uniform(operands[0], dim - (dim > inserted))
    if target is aten.expand_as.default or target is aten.repeat.default:
        return _uniform_operand(operands[0], dim, val.ndim)
    if target is aten.embedding.default:
        return dim < val.ndim - 1 and is_uniform(node.args[1], dim)  # type: ignore[arg-type]
    if target is aten.index.Tensor:
        return _uniform_look_up(node, dim)
    if target in _ALONG_ONE_DIM:
        position = _ALONG_ONE_DIM[target]
        along = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0 if position == 1 else -1)
        if int(along) % val.ndim == dim:  # type: ignore[arg-type]
            return False
        return all(_uniform_operand(operand, dim, val.ndim) for operand in operands)
    if target in _ELEMENTWISE or (isinstance(target, torch._ops.OpOverload) and is_functional_pointwise(target)):
        return all(_uniform_operand(operand, dim, val.ndim) for operand in operands)
    return False


def _uniform_look_up(node: fx.Node, dim: int) -> bool:
    """``table[ids]``: the same wherever the ids are the same, and along the table's own dimensions."""
    table, indices = node.args[:2]
    given = [(place, item) for place, item in enumerate(indices) if item is not None]  # type: ignore[arg-type]
    if len(given) != 1:
        return False
    place, ids = given[0]
    rank = ids.meta["val"].ndim
    if ids.meta["val"].dtype == torch.bool:
        return False
    if place <= dim < place + rank:
        return is_uniform(ids, dim - place)
    return is_uniform(table, dim if dim < place else dim - rank + 1)  # type: ignore[arg-type]


def _uniform_operand(node: fx.Node, dim: int, rank: int) -> bool:
    """The same question about an operand broadcast on the left to ``rank`` dimensions."""
    own = dim - (rank - node.meta["val"].ndim)
    return own < 0 or is_uniform(node, own)
