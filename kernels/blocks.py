"""The strategy "blocks": plain matrix products on tiles, with a running softmax; any device, any dtype, Dv != D.

It alone knows scores beyond the scaled product: a soft cap ``softcap * tanh(score / softcap)``, and after it a number
per head and key that is added (ALiBi, say).

For every block of queries the keys that the tree lets some of them see are found from the nodes, which are on the CPU,
so nothing waits for a device; the exact mask is evaluated per tile. No tile has more than MAX_QUERIES x MAX_KEYS pairs.
All products are computed in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dualkv_compile.kernels.merge import accumulation_dtype
from dualkv_compile.kernels.predicate import Expression, evaluate
from dualkv_compile.kernels.regions import token_major
from dualkv_compile.kernels.schedule import MAX_KEYS, MAX_QUERIES, Range


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention on packed tokens; shapes and results as for ``dualkv::packed_attention``."""
    heads, tokens = q.shape[1], q.shape[2]
    kv_heads, dim = k.shape[1], v.shape[3]
    total = accumulation_dtype(q.dtype)
    out = token_major(q, heads, tokens, dim, q.dtype)
    lse = q.new_empty((1, heads, tokens), dtype=total)
    for queries, key_ranges in _query_blocks(nodes, tokens):
        length = queries[1] - queries[0]
        query = _grouped(q, queries, kv_heads).to(total)
        top = query.new_full((*query.shape[:-1], 1), -torch.inf)
        sum_ = query.new_zeros(top.shape)
        part = query.new_zeros((*query.shape[:-1], dim))
        for keys in key_ranges:
            visible = _visible(queries, keys, rank, column, end, vectors, expression)
            scores = _scores(query, k, keys, visible, scale, softcap, bias)[0]
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            # Where nothing was visible yet the maximum is -inf; subtracting 0 instead keeps exp(-inf) = 0.
            shift = torch.where(new_top == -torch.inf, 0.0, new_top)
            weights = torch.exp(scores - shift)
            fade = torch.exp(top - shift)
            value = v[0, :, keys[0] : keys[1]].to(total)
            part = part * fade + (weights.flatten(1, 2) @ value).view_as(part)
            sum_ = sum_ * fade + weights.sum(-1, keepdim=True)
            top = new_top
        result = part / torch.where(sum_ == 0, 1.0, sum_)
        out[0, :, queries[0] : queries[1]] = result.reshape(heads, length, dim).to(q.dtype)
        lse[0, :, queries[0] : queries[1]] = (top + torch.log(sum_)).reshape(heads, length)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    nodes: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
    scale: float,
    softcap: float = 0.0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, each in the dtype of its operand and ordered by token in memory, and that of bias."""
    tokens, kv_heads = q.shape[2], k.shape[1]
    total = accumulation_dtype(q.dtype)
    grad_bias = None if bias is None else torch.zeros_like(bias, dtype=total)
    grads = [token_major(x, x.shape[1], x.shape[2], x.shape[3], total).zero_() for x in (q, k, v)]
    for queries, key_ranges in _query_blocks(nodes, tokens):
        query = _grouped(q, queries, kv_heads).to(total)
        row_lse = _grouped(lse.unsqueeze(-1), queries, kv_heads)
        unseeing = row_lse == -torch.inf
        row_lse = row_lse.masked_fill(unseeing, torch.inf)
        grad = _grouped(grad_out, queries, kv_heads).to(total).masked_fill(unseeing, 0.0)
        delta = (grad * _grouped(out, queries, kv_heads).to(total)).sum(-1, keepdim=True)
        grad_query = torch.zeros_like(query)
        for keys in key_ranges:
            key, value = k[0, :, keys[0] : keys[1]].to(total), v[0, :, keys[0] : keys[1]].to(total)
            visible = _visible(queries, keys, rank, column, end, vectors, expression)
            scores, slope = _scores(query, k, keys, visible, scale, softcap, bias)
            weights = torch.exp(scores - row_lse)
            flat = weights.flatten(1, 2)
            grads[2][0, :, keys[0] : keys[1]] += flat.transpose(1, 2) @ grad.flatten(1, 2)
            grad_weights = (grad.flatten(1, 2) @ value.transpose(1, 2)).view_as(weights)
            grad_sum = weights * (grad_weights - delta)
            if grad_bias is not None:
                per_head = grad_sum.sum(2).flatten(0, 1)
                grad_bias[:, keys[0] : keys[1]] += per_head.sum_to_size(grad_bias.shape[0], per_head.shape[1])
            grad_scores = (grad_sum * scale if slope is None else grad_sum * slope * scale).flatten(1, 2)
            grad_query += (grad_scores @ key).view_as(query)
            grads[1][0, :, keys[0] : keys[1]] += grad_scores.transpose(1, 2) @ query.flatten(1, 2)
        grads[0][0, :, queries[0] : queries[1]] = grad_query.flatten(0, 1)
    grad_q, grad_k, grad_v = (grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v, None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)


def _query_blocks(nodes: Tensor, tokens: int) -> Iterator[tuple[Range, list[Range]]]:
    """Blocks of queries, each with the ranges of keys that the tree lets at least one of them see."""
    table = nodes.tolist()
    for start in range(0, tokens, MAX_QUERIES):
        stop = min(tokens, start + MAX_QUERIES)
        joined: list[Range] = []
        for begin, end, query_stop in table:
            end = min(end, stop)  # a node's own later tokens are in the future
            if begin >= end or query_stop <= start:
                continue
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        keys = [(at, min(end, at + MAX_KEYS)) for begin, end in joined for at in range(begin, end, MAX_KEYS)]
        yield (start, stop), keys


def _grouped(x: Tensor, span: Range, kv_heads: int) -> Tensor:
    """Rows of ``[1, H, T, D]`` as ``[Hk, H // Hk, rows, D]``."""
    return x[0, :, span[0] : span[1]].unflatten(0, (kv_heads, -1))


def _visible(
    queries: Range,
    keys: Range,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    vectors: Sequence[Tensor],
    expression: Expression | None,
) -> Tensor:
    """Bool ``[rows, keys]`` of one tile."""
    rows, columns = slice(*queries), slice(*keys)
    visible = (rank[columns] <= rank[rows, None]) & (rank[rows, None] < end[columns])
    visible &= column[columns] <= column[rows, None]
    return visible if expression is None else visible & evaluate(expression, vectors, column, rows, columns)


def _scores(
    query: Tensor, k: Tensor, keys: Range, visible: Tensor, scale: float, softcap: float, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores ``[Hk, G, rows, keys]`` of one tile, -inf where the key is not visible; and the slope of the soft cap."""
    key = k[0, :, slice(*keys)].to(query.dtype)
    scores = (query.flatten(1, 2) @ key.transpose(1, 2)).view(*query.shape[:-1], -1) * scale
    slope = None
    if softcap:
        bent = torch.tanh(scores / softcap)
        scores, slope = bent * softcap, 1 - bent * bent
    if bias is not None:
        added = bias[:, slice(*keys)].to(query.dtype).unsqueeze(1)
        scores = scores + (added if bias.shape[0] == 1 else added.unflatten(0, query.shape[:2]))
    return scores.masked_fill(~visible, -torch.inf), slope
