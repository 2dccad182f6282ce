"""The operator ``dualkv::block_mask``: which blocks of keys FlexAttention visits for a block of queries, and back.

    block_mask(rank, column, end, vectors, mask, block) -> (kv_num_blocks, kv_indices,
        full_kv_num_blocks, full_kv_indices, q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)

The arguments are those of ``dualkv::packed_attention``; ``block`` is the number of tokens per block. With
``n = ceil(T / block)`` the counts are int32 ``[1, 1, n]`` and the indices int32 ``[1, 1, n, n]``, on the device of
``rank``: row i of ``kv_indices`` lists first, in ascending order, the ``kv_num_blocks[i]`` blocks of keys that block i
of queries sees in part, then the others (FlexAttention leaves those undefined; here they are valid block numbers, so
that a prefetch behind the end stays inside). ``full_*`` lists the blocks that are visible throughout, where the mask
need not be evaluated. ``q_*`` are the same two relations seen from the keys, which the backward walks.

A block is "full" only if certain and left out only if impossible (see :mod:`block_classes`). Where T is no multiple of
``block``, the last block of either side is never full: kernels disagree on what bounds a full block (public reports of
NaN and of wrong gradients), while in a partial one the mask itself does.

Cost: see :mod:`block_classes`; at T = 110,000 and block 128 the results take 12 MB. The operator is opaque to tracing,
so one compilation serves all trees, and all layers of a graph share one call for each mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dualkv_compile.kernels.block_classes import TokenBlocks
from dualkv_compile.kernels.predicate import from_text, validate

#: Tokens per block: what FlexAttention's kernels, both of them, are tuned for.
BLOCK = 128

torch.library.define(
    "dualkv::block_mask",
    "(Tensor rank, Tensor column, Tensor end, Tensor[] vectors, str mask, int block)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def block_mask(
    rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor] = (), mask: str = "", block: int = BLOCK
) -> tuple[Tensor, ...]:
    """Call the operator; see the module for arguments and results.

    Raises:
        InputError: ``mask`` is not well formed or names a vector that is not given.
    """
    result: tuple[Tensor, ...] = torch.ops.dualkv.block_mask(rank, column, end, list(vectors), mask, block)
    return result


def _block_mask(
    rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor], mask: str, block: int
) -> tuple[Tensor, ...]:
    expression = from_text(mask)
    if expression is not None:
        validate(expression, len(vectors))
    tokens = rank.shape[0]
    if not tokens:
        return _fake(rank, column, end, vectors, mask, block)
    blocks = TokenBlocks(tokens, block, rank.device)
    full, some = blocks.tree(rank, column, end)
    if expression is not None:
        always, possibly = blocks.mask(expression, vectors, column)
        full, some = full & always, some & possibly
    if tokens % block:
        full[-1, :] = False
        full[:, -1] = False
    partial = some & ~full
    return (*_lists(partial), *_lists(full), *_lists(partial.T), *_lists(full.T))


def _lists(present: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of a bool ``[n, n]`` as the number of its True entries, and their places before all others."""
    count = present.sum(dim=1, dtype=torch.int32)
    # Sorting keeps strides, and kernels read a row's entries one behind the other.
    order = torch.argsort(present.to(torch.uint8).contiguous(), dim=1, descending=True, stable=True)
    return count[None, None], order.to(torch.int32)[None, None]


def _fake(
    rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor], mask: str, block: int
) -> tuple[Tensor, ...]:
    count = (rank.shape[0] + block - 1) // block
    shapes = ((1, 1, count), (1, 1, count, count)) * 4
    return tuple(rank.new_empty(shape, dtype=torch.int32) for shape in shapes)


torch.library.impl("dualkv::block_mask", "CompositeExplicitAutograd", _block_mask)
torch.library.register_fake("dualkv::block_mask", _fake)
