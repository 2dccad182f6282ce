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


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention with an explicit mask, in float64.

    Args:
        q: ``[B, H, Q, D]``.
        k: ``[B, Hk, K, D]`` with H a multiple of Hk.
        v: ``[B, Hk, K, Dv]``.
        visible: bool, broadcastable to ``[B, H, Q, K]``.
        scale: factor on the scores.

    Returns:
        ``out [B, H, Q, Dv]`` and ``lse [B, H, Q]``, both float64; 0 and -inf for queries that see no key.
    """
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.double() @ keys.transpose(-1, -2) * scale).masked_fill(~visible, -torch.inf)
    empty = ~visible.any(-1, keepdim=True).expand((*scores.shape[:-1], 1))
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
) -> tuple[Tensor, Tensor]:
    """Attention on packed tokens, ``q [1, H, T, D]``; ``extra`` is a bool ``[T, T]`` mask on top of the tree."""
    visible = tree_visible(rank, column, end)
    return dense_attention(q, k, v, visible if extra is None else visible & extra, scale)


def grid_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention on the undivided grid, ``q [B, H, S, D]``; ``extra`` is bool, broadcastable to [B, H, S, S]."""
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return dense_attention(q, k, v, causal if extra is None else causal & extra, scale)
