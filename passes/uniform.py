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
    if target in _ALONG_ONE_DIM:
        position = _ALONG_ONE_DIM[target]
        along = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0 if position == 1 else -1)
        if int(along) % val.ndim == dim:  # type: ignore[arg-type]
            return False
        return all(_uniform_operand(operand, dim, val.ndim) for operand in operands)
    if target in _ELEMENTWISE or (isinstance(target, torch._ops.OpOverload) and is_functional_pointwise(target)):
        return all(_uniform_operand(operand, dim, val.ndim) for operand in operands)
    return False


def _uniform_operand(node: fx.Node, dim: int, rank: int) -> bool:
    """The same question about an operand broadcast on the left to ``rank`` dimensions."""
    own = dim - (rank - node.meta["val"].ndim)
    return own < 0 or is_uniform(node, own)
