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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from dualkv_compile.errors import InputError
from dualkv_compile.kernels.flex import BACKENDS, check_operands, check_scores, kind_of_scores
from dualkv_compile.kernels.predicate import to_text
from dualkv_compile.kernels.strategy import Workload, choose
from dualkv_compile.passes import flex, scores
from dualkv_compile.passes.mask import Lifted, lift
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import register
from dualkv_compile.passes.scores import Meaning, meaning_of_sum
from dualkv_compile.passes.values import Dim, Frame, Size, Value, same
from dualkv_compile.passes.written_attention import WRITTEN, Written

aten = torch.ops.aten
_LAYOUT = (Dim.ROW, Dim.FEATURE, Dim.COLUMN, Dim.FEATURE)
_SWAPPED = (Dim.ROW, Dim.FEATURE, Dim.FEATURE, Dim.COLUMN)


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
    parts = _operands(cx, (query, False), (key, False), (value, False))
    frame, _ = cx.join([query, key, value])
    mask_node = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    if scale is None:
        # With dynamic=True the features of the user's own tensors are symbolic as well: a guard makes them a number.
        scale = 1.0 / math.sqrt(int(query.shape[3]))
    if not isinstance(scale, float | int):
        raise Unproven("its scale is not a number")
    heads = query.shape[1]
    if not isinstance(mask_node, fx.Node):
        if not is_causal:
            raise Unproven("it has no mask and is not causal: tokens see later ones")
        meaning = Meaning(Lifted(None, [], [], frozenset(), None), scale)
    elif mask_node.meta["val"].dtype == torch.bool:
        meaning = Meaning(lift(cx, mask_node, frame), scale)
    else:
        meaning = meaning_of_sum(cx, mask_node, frame, heads, scale)
    return _attend(cx, node, parts, meaning)


@register(WRITTEN, family="attention")
def written(cx: Scope, node: fx.Node, chain: Written) -> Value:
    """The same for attention that the model writes out, as :mod:`passes.written_attention` found it.

    Scores and probabilities are computed in the precision of the packed operator, float32 or better, whatever the model
    rounds them to on the way. A query that sees no key gets 0, where a written softmax averages over all keys, later
    ones included.
    """
    query, key, value = (cx.values[part.node] for part in (chain.query, chain.key, chain.value))
    # The product reads keys as [rows, heads, features, columns].
    swapped = (chain.query.swapped, not chain.key.swapped, chain.value.swapped)
    parts = _operands(cx, *zip((query, key, value), swapped, strict=True))
    heads = node.meta["val"].shape[1]
    if not same(parts[0].heads, heads) or not all(same(x.heads, heads) or same(x.heads, 1) for x in parts[1:]):
        raise Unproven("its query has fewer heads than its keys or values")
    frame, _ = cx.join([query, key, value])
    return _attend(cx, node, parts, scores.meaning(cx, chain, frame, parts[0].heads))


@dataclass(frozen=True)
class _Operand:
    """Query, key or value of an attention: the packed ``node [1, heads, T, width]``, and the value it is made from."""

    value: Value
    node: fx.Node
    heads: Size
    width: Size


def _operands(cx: Scope, *given: tuple[Any, bool]) -> tuple[_Operand, _Operand, _Operand]:
    """Query, key and value, each with whether its last two dimensions are to be exchanged."""
    frame: Frame | None = None
    parts = []
    for name, (value, swapped) in zip(("query", "key", "value"), given, strict=True):
        if not isinstance(value, Value) or value.tags != (_SWAPPED if swapped else _LAYOUT):
            raise Unproven(f"its {name} is not known from the tokens as [rows, heads, columns, features]")
        frame = value.frame
        assert frame is not None
        if frame.parent is not None:
            raise Unproven("it runs on a slice of the columns")
        node = cx.packed(value)
        if swapped:
            node = cx.emit(aten.permute.default, node, [0, 1, 3, 2])
        parts.append(_Operand(value, node, value.shape[1], value.shape[2 if swapped else 3]))
    return parts[0], parts[1], parts[2]


def _attend(cx: Scope, node: fx.Node, parts: tuple[_Operand, _Operand, _Operand], meaning: Meaning) -> Value:
    """Emit attention of packed query, key and value; ``node`` is the one that has its result."""
    query, key, value = parts
    sources = [part.value for part in parts]
    frame, roots = cx.join(sources)
    lifted, scale = meaning.mask, float(meaning.scale)
    key_node, value_node, kv_heads = _grouped_alike(cx, key, value, query.heads)
    operands, narrow = _one_dtype(cx, node, sources, (query.node, key_node, value_node))
    text = to_text(lifted.expression)
    hides_keys_only = _hides_keys_only(cx, frame, lifted)
    kind = "none" if not text else "keys" if hides_keys_only else "any"
    strategy = _strategy(cx, node, (query.heads, kv_heads, query.width, value.width), kind, meaning, text)
    cx.records.strategies.add(strategy)
    if strategy in BACKENDS and cx.compiled:
        check_operands(strategy, node.meta["val"].dtype, int(query.width), int(value.width))
        new = flex.emit(cx, frame, operands, meaning, text, strategy)
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
            scale,
            "auto" if strategy in BACKENDS else strategy,
            meaning.bias,
            meaning.sinks,
            float(meaning.softcap),
        )
    out = cx.emit(operator.getitem, new, 0)
    if narrow is not None:
        out = cx.emit(aten.to.dtype, out, narrow)
    result = cx.result(node, _LAYOUT, sources, out)
    result.roots = roots | lifted.roots
    cx.records.attention_masks[node] = text
    cx.records.validity.setdefault(frame, []).append(lifted.validity)
    return result


def _one_dtype(
    cx: Scope, node: fx.Node, sources: Sequence[Value], operands: tuple[fx.Node, ...]
) -> tuple[tuple[fx.Node, ...], torch.dtype | None]:
    """The operands in one dtype, and the dtype that the result must then be given (None: it has it).

    Models that write attention out may compute scores in float32 and multiply half-precision values.
    """
    dtypes = [source.meta.dtype for source in sources]
    if node.target is aten.scaled_dot_product_attention.default or len(set(dtypes)) == 1:
        return operands, None
    if cx.in_autocast_region():
        raise Unproven("its query, key and value differ in dtype inside an autocast region")
    common = torch.promote_types(torch.promote_types(dtypes[0], dtypes[1]), dtypes[2])
    cast = tuple(
        operand if dtype == common else cx.emit(aten.to.dtype, operand, common)
        for operand, dtype in zip(operands, dtypes, strict=True)
    )
    result = node.meta["val"].dtype
    return cast, None if result == common else result


def _hides_keys_only(cx: Scope, frame: Frame, lifted: Lifted) -> bool:
    """Whether the mask only hides the same keys from all queries, the same ones in all attentions of the batch."""
    expression, validity = lifted.expression, lifted.validity
    if expression is None or validity is None:
        return False
    leaf = expression[1] if expression[0] == "bool" else expression
    known = cx.records.visible.get(frame, validity)
    return bool(leaf[0] == "k") and known.source is validity.source


def _strategy(cx: Scope, node: fx.Node, sizes: tuple[Size, ...], kind: str, meaning: Meaning, mask: str) -> str:
    """The way to compute this attention; what "auto" means on a GPU is decided here, elsewhere by the operator."""
    val = node.meta["val"]
    bias, sinks = meaning.bias is not None, meaning.sinks is not None
    scores = kind_of_scores(softcap=bool(meaning.softcap), bias=bias, sinks=sinks)
    if (bias or meaning.softcap) and cx.strategy in ("regions", "dense"):
        raise Unproven(f"attention {cx.strategy!r} computes scores without soft cap and bias only")
    if cx.strategy in BACKENDS:
        try:
            check_scores(cx.strategy, val.device, scores)
        except InputError as error:
            raise Unproven(str(error)) from error
    # Beside Inductor's code FlexAttention is no choice, and the operator knows what is.
    if cx.strategy != "auto" or val.device.type != "cuda" or not cx.compiled:
        return cx.strategy
    heads, kv_heads, head_dim, value_dim = map(int, sizes)
    return choose(Workload.of(val.device, val.dtype, heads, kv_heads, head_dim, value_dim, kind, scores), mask)


def _grouped_alike(cx: Scope, key: _Operand, value: _Operand, heads: Size) -> tuple[fx.Node, fx.Node, Size]:
    """Keys and values with the same number of heads, as few as possible, and that number."""
    (key_node, key_heads), (value_node, value_heads) = (_grouped(part, heads) for part in (key, value))
    if same(key_heads, value_heads):
        return key_node, value_node, key_heads
    key_node, value_node = (
        part.node if same(part.heads, heads) else cx.emit(aten.expand.default, part.node, [-1, int(heads), -1, -1])
        for part in (key, value)
    )
    return key_node, value_node, heads


def _grouped(part: _Operand, heads: Size) -> tuple[fx.Node, Size]:
    """Keys or values without the repetition of heads (``unsqueeze -> expand -> reshape``, ``repeat_interleave``): the
    kernel groups heads itself. Also how many heads they then have.
    """
    packed = part.node
    if packed.op != "call_function" or not same(part.heads, heads):
        return packed, part.heads
    if packed.target is aten.repeat_interleave.self_int:
        original, times = packed.args[:2]
        place = packed.args[2] if len(packed.args) > 2 else packed.kwargs.get("dim")
        if place in (1, -3) and isinstance(times, int) and isinstance(heads, int) and isinstance(original, fx.Node):
            return original, heads // times
        return packed, part.heads
    if packed.target is not aten.reshape.default:
        return packed, part.heads
    expanded = packed.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not aten.expand.default:
        return packed, part.heads
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or inserted.target is not aten.unsqueeze.default or inserted.args[1] != 2:
        return packed, part.heads
    # [1, Hk, 1, T, D] -> [1, Hk, n, T, D] -> [1, Hk * n, T, D]: head h reads key head h // n.
    original = inserted.args[0]
    sizes = packed.args[1]
    repeated = expanded.args[1]
    assert isinstance(sizes, list | tuple)
    assert isinstance(repeated, list | tuple)
    if len(sizes) != 4 or not isinstance(repeated[2], int) or not isinstance(sizes[1], int):
        return packed, part.heads
    assert isinstance(original, fx.Node)
    return original, sizes[1] // repeated[2]
