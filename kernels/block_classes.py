"""Which blocks of queries and keys of a packed batch see each other: nothing, in part, or in full.

The tree's visibility is a conjunction of comparisons between one number of the query and one of the key, so over a
block of queries and a block of keys it is decided by their extremes. This costs reductions over T and elementwise work
on ``ceil(T / block) ** 2`` numbers, never a T x T tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.plan import PrefixPlan

EMPTY, PARTIAL, FULL = 0, 1, 2


def classify_blocks(plan: PrefixPlan, block: int) -> Tensor:
    """Classes of all pairs (block of queries, block of keys), by the tree alone (no mask expression).

    Args:
        plan: T packed tokens; the result is on the device of its tensors. Does not synchronise.
        block: tokens per block, at least 1.

    Returns:
        int8 ``[n, n]``, n = ceil(T / block), rows are query blocks: ``FULL`` (2) exactly if every query of the block
        sees every key, ``EMPTY`` (0) only if no query sees any key, else ``PARTIAL`` (1). The last block may be ragged;
        only tokens that exist count, so a kernel that rounds T up has to bound it itself.

    Raises:
        InputError: ``block`` is not an int >= 1.
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise InputError(f"block: expected an int >= 1, got {block!r}")
    count = -(-plan.tokens // block)
    device = plan.rank.device
    if not count:
        return torch.zeros(0, 0, dtype=torch.int8, device=device)
    # The last block is filled up with copies of the last token, which change no extreme.
    index = torch.arange(count * block, device=device).clamp_max_(plan.tokens - 1).view(count, block)
    column_min, column_max = plan.column[index].aminmax(dim=1)
    end_min, end_max = plan.end[index].aminmax(dim=1)
    rank = plan.rank[index]  # sorted, as tokens are: the extremes are the first and the last
    rank_min, rank_max = rank[:, 0], rank[:, -1]
    # Tokens are sorted by (rank, column), so "rank[k] <= rank[q]" is "the key's block is not a later one". Within one
    # block the rest keeps FULL exact: two tokens that both had to see the other would stand in one column, in two
    # ranks, and there the first one's end is not behind the second one's rank.
    number = torch.arange(count, device=device)
    earlier = number[None] <= number[:, None]
    full = earlier & (rank_max[:, None] < end_min[None]) & (column_max[None] <= column_min[:, None])
    some = earlier & (rank_min[:, None] < end_max[None]) & (column_min[None] <= column_max[:, None])
    return some.to(torch.int8) + full.to(torch.int8)
