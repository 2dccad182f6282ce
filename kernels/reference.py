"""The oracle of the tests: attention written out in full, in float64, with nothing but plain differentiable code.

It allocates every [queries, keys] matrix and is meant for small inputs only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tree_visible(rank: Tensor, column: Tensor, end: Tensor) -> Tensor:
    """Bool ``[T, T]`` (query, key): the key's row prefix is the query's too, and the key is not in its future."""
    same_prefix = (rank[None, :] <= rank[:, None]) & (rank[:, None] < end[None, :])
    return same_prefix & (column[None, :] <= column[:, None])


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention with an explicit mask, in float64.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, Hk, K, D]`` with H a multiple of Hk.
        v: ``[B, Hk, K, Dv]``.
        visible: bool, broadcastable to ``[B, H, Q, K]``.
        scale: factor on the scores.
        bias: added to the scores (after the soft cap), broadcastable to ``[B, H, Q, K]``.
        sinks: ``[H]``, one more score of every query, which has no value.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 for none.

    Returns:
        ``out [B, H, Q, Dv]`` and ``lse [B, H, Q]``, both float64; 0 and -inf for queries that see neither key nor sink.
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q.double() @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
        values = torch.cat([values, values.new_zeros(*values.shape[:2], 1, values.shape[3])], 2)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    # Empty rows go through the softmax with finite scores, so that no NaN reaches the gradients.
    probabilities = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return probabilities @ values, lse


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    scale: float,
    extra: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention on packed tokens, ``q [1, H, T, D]``; ``extra`` is a bool ``[T, T]`` mask on top of the tree, ``bias``
    ``[H or 1, T]``, by key.
    """
    visible = tree_visible(rank, column, end)
    visible = visible if extra is None else visible & extra
    return dense_attention(q, k, v, visible, scale, None if bias is None else bias[:, None], sinks, softcap)


def grid_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention on the undivided grid, ``q [B, H, S, D]``; ``extra`` is bool, broadcastable to [B, H, S, S]."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return dense_attention(q, k, v, causal if extra is None else causal & extra, scale)
