"""Attention over the grid -> attention over the prefix tree.

Before:  ``scaled_dot_product_attention(q[B,H,S,D], repeat_kv(k)[B,H,S,D], repeat_kv(v), mask[B,1,S,S])``
After:   ``dualkv.packed_attention(q[1,H,T,D], k[1,Hk,T,D], v[1,Hk,T,D], tree, mask terms)``
or:      ``blocks = dualkv.block_mask(tree, mask terms)`` once for all layers, and
         ``flex.attend(q[1,H,T,D], k[1,Hk,T,D], v[1,Hk,T,D], blocks, tree, mask terms)``, which Dynamo traces into
         FlexAttention when the packed graph is compiled.
"""

from __future__ import annotations

import math
import operator

import torch
import torch.fx as fx

from dualkv_compile.kernels.flex import BACKENDS, check_operands
from dualkv_compile.kernels.predicate import to_text
from dualkv_compile.kernels.strategy import Workload, choose
from dualkv_compile.passes import flex
from dualkv_compile.passes.mask import Lifted, lift
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.values import Dim, Frame, Size, Value, same

aten = torch.ops.aten
_LAYOUT = (Dim.ROW, Dim.FEATURE, Dim.COLUMN, Dim.FEATURE)


@register(aten.scaled_dot_product_attention.default, family="attention")
def attention(
    cx: Scope,
    node: fx.Node,
    query: Value,
    key: Value,
    value: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    """Causal attention of packed query, key and value ``[1, H, T, D]``.

    The mask operand is looked at first as a question about its origin, so it does not matter that the mask tensor
    itself has no packed form. Dropout with p > 0 was refused for the whole graph before.
    """
    for name, part in (("query", query), ("key", key), ("value", value)):
        if part.tags != _LAYOUT:
            raise Unproven(f"its {name} is not known from the tokens as [rows, heads, columns, features]")
    frame, roots = cx.join([query, key, value])
    if frame.parent is not None:
        raise Unproven("it runs on a slice of the columns")
    mask_node = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if isinstance(mask_node, fx.Node):
        lifted = lift(cx, mask_node, frame)
    elif is_causal:
        lifted = Lifted(None, [], [], frozenset(), None)
    else:
        raise Unproven("it has no mask and is not causal: tokens see later ones")
    if scale is None:
        width = query.shape[3]
        # With dynamic=True the features of the user's own tensors are symbolic as well: a guard makes them a number.
        scale = 1.0 / math.sqrt(int(width))
    if not isinstance(scale, float | int):
        raise Unproven("its scale is not a number")
    heads = query.shape[1]
    (key_node, kv_heads), (value_node, _) = (_grouped(cx, part, heads) for part in (key, value))
    text = to_text(lifted.expression)
    operands = (cx.packed(query), key_node, value_node)
    hides_keys_only = _hides_keys_only(cx, frame, lifted)
    kind = "none" if not text else "keys" if hides_keys_only else "any"
    strategy = _strategy(cx, node, (heads, kv_heads, query.shape[3], value.shape[3]), kind, text)
    cx.records.strategies.add(strategy)
    if strategy in BACKENDS and cx.compiled:
        check_operands(strategy, node.meta["val"].dtype, int(query.shape[3]), int(value.shape[3]))
        new = flex.emit(cx, frame, operands, lifted, text, float(scale), strategy)
    else:
        nodes = "nodes"
        if strategy == "dense" and kind == "keys":
            assert lifted.validity is not None
            cx.records.visible[frame] = lifted.validity
            strategy, nodes = "dense_visible", "visible"
        tree = [cx.plan(frame, name) for name in ("rank", "column", "end", nodes)]
        new = cx.emit(
            torch.ops.dualkv.packed_attention.default,
            *operands,
            *tree,
            lifted.vectors,
            text,
            float(scale),
            "auto" if strategy in BACKENDS else strategy,
        )
    result = cx.result(node, _LAYOUT, [query, key, value], cx.emit(operator.getitem, new, 0))
    result.roots = roots | lifted.roots
    cx.records.attention_masks[node] = text
    cx.records.validity.setdefault(frame, []).append(lifted.validity)
    return result


def _hides_keys_only(cx: Scope, frame: Frame, lifted: Lifted) -> bool:
    """Whether the mask only hides the same keys from all queries, the same ones in all attentions of the batch."""
    expression, validity = lifted.expression, lifted.validity
    if expression is None or validity is None:
        return False
    leaf = expression[1] if expression[0] == "bool" else expression
    known = cx.records.visible.get(frame, validity)
    return bool(leaf[0] == "k") and known.source is validity.source


def _strategy(cx: Scope, node: fx.Node, sizes: tuple[Size, ...], kind: str, mask: str) -> str:
    """The way to compute this attention; what "auto" means on a GPU is decided here, elsewhere by the operator."""
    val = node.meta["val"]
    # Beside Inductor's code FlexAttention is no choice, and the operator knows what is.
    if cx.strategy != "auto" or val.device.type != "cuda" or not cx.compiled:
        return cx.strategy
    heads, kv_heads, head_dim, value_dim = map(int, sizes)
    return choose(Workload.of(val.device, val.dtype, heads, kv_heads, head_dim, value_dim, kind), mask)


def _grouped(cx: Scope, part: Value, heads: Size) -> tuple[fx.Node, Size]:
    """Keys or values without the repetition of heads (``unsqueeze -> expand -> reshape``): the kernel groups heads
    itself. Also how many heads they then have.
    """
    packed = cx.packed(part)
    if packed.op != "call_function" or packed.target is not aten.reshape.default:
        return packed, part.shape[1]
    expanded = packed.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return packed, part.shape[1]
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or inserted.target is not aten.unsqueeze.default or inserted.args[1] != 2:
        return packed, part.shape[1]
    # [1, Hk, 1, T, D] -> [1, Hk, n, T, D] -> [1, Hk * n, T, D]: head h reads key head h // n.
    original = inserted.args[0]
    sizes = packed.args[1]
    repeated = expanded.args[1]
    assert isinstance(sizes, list | tuple)
    assert isinstance(repeated, list | tuple)
    if (
        len(sizes) != 4
        or not isinstance(repeated[2], int)
        or not isinstance(sizes[1], int)
        or not same(sizes[1], heads)
    ):
        return packed, part.shape[1]
    assert isinstance(original, fx.Node)
    return original, sizes[1] // repeated[2]
