"""Which blocks of queries and keys of a packed batch see each other: nothing, in part, or in full.

The tree's visibility is a conjunction of comparisons between one number of the query and one of the key, so over a
block of queries and a block of keys it is decided by their extremes; a mask expression is bounded from the extremes of
what it reads. This costs reductions over T and elementwise work on ``ceil(T / block) ** 2`` numbers, never a T x T
tensor, and nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels.intervals import Interval, torch_arrays, truth, widen
from dualkv_compile.kernels.predicate import Expression, vectors_read

if TYPE_CHECKING:
    from dualkv_compile.plan import PrefixPlan

EMPTY, PARTIAL, FULL = 0, 1, 2


class TokenBlocks:
    """T tokens in ``count = ceil(T / size)`` consecutive blocks, on one device; the last may be ragged.

    Pairs of blocks are answered as ``(always, possibly)``, bool tensors that broadcast to ``[count, count]`` with query
    blocks as rows. Only tokens that exist count.
    """

    def __init__(self, tokens: int, size: int, device: torch.device) -> None:
        self.count = -(-tokens // size)
        # The last block is filled up with copies of the last token, which change no extreme.
        index = torch.arange(self.count * size, device=device).clamp_max_(tokens - 1)
        self._index = index.view(self.count, size)
        self._arrays = torch_arrays(device)

    def extremes(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of ``vector [T]`` in every block, ``[count]`` each."""
        low, high = vector[self._index].aminmax(dim=1)
        return low, high

    def tree(self, rank: Tensor, column: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Visibility by the tree alone, from int32 ``[T]`` vectors of tokens sorted by (rank, column)."""
        column_min, column_max = self.extremes(column)
        end_min, end_max = self.extremes(end)
        ranks = rank[self._index]  # sorted: the extremes are the first and the last
        rank_min, rank_max = ranks[:, 0], ranks[:, -1]
        # Tokens are sorted by (rank, column), so "rank[k] <= rank[q]" is "the key's block is not a later one". Within
        # one block the rest keeps "always" exact: two tokens that both had to see the other would stand in one column,
        # in two ranks, and there the first one's end is not behind the second one's rank.
        number = torch.arange(self.count, device=rank.device)
        earlier = number[None] <= number[:, None]
        always = earlier & (rank_max[:, None] < end_min[None]) & (column_max[None] <= column_min[:, None])
        possibly = earlier & (rank_min[:, None] < end_max[None]) & (column_min[None] <= column_max[:, None])
        return always, possibly

    def mask(self, expression: Expression, vectors: Sequence[Tensor], column: Tensor) -> tuple[Tensor, Tensor]:
        """What a mask expression says, from bounds: "always" only if certain, "possibly" unless impossible."""
        columns = self._bounds(column)
        bounds = {n: self._bounds(vectors[n]) for n in vectors_read(expression)}

        def leaf(expression: Expression) -> Interval:
            low, high = bounds[expression[1]] if len(expression) == 2 else columns
            if expression[0] in ("q", "qcol"):
                return low[:, None], high[:, None]
            return low[None], high[None]

        always, possibly = truth(expression, leaf, self._arrays)
        return always, possibly

    def _bounds(self, vector: Tensor) -> Interval:
        """The extremes in float64; infinite for floating-point vectors, which are not bounded."""
        if vector.is_floating_point():
            unknown = torch.full((self.count,), math.inf, dtype=torch.float64, device=vector.device)
            return -unknown, unknown
        low, high = self.extremes(vector.to(torch.uint8) if vector.dtype == torch.bool else vector)
        return widen(self._arrays, low.to(torch.float64), high.to(torch.float64))


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
    device = plan.rank.device
    if not plan.tokens:
        return torch.zeros(0, 0, dtype=torch.int8, device=device)
    full, some = TokenBlocks(plan.tokens, block, device).tree(plan.rank, plan.column, plan.end)
    return some.to(torch.int8) + full.to(torch.int8)
