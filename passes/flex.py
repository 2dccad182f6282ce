"""Packed attention as a call of FlexAttention, with what depends on the mask alone made once for all layers.

Before:  ``dualkv.packed_attention(q, k, v, tree, mask terms)`` in every layer
After:   ``blocks = dualkv.block_mask(tree, mask terms)``; ``rank, end, *sides = dualkv.pair_vectors(tree, mask terms)``
         once, and ``attend(q, k, v, blocks, tree, sides, rest of the mask)`` in every layer

A layer inside a checkpoint body takes these as arguments: made inside, they would be made again for each layer and each
recomputation. Only a mask that is itself computed inside a body is handled there. No gradient flows into them, so the
grad-mode region they stand in is of no importance.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from dualkv_compile.kernels.block_mask import BLOCK
from dualkv_compile.kernels.flex import BACKENDS, attend, expressible
from dualkv_compile.kernels.pair_mask import pair_form
from dualkv_compile.passes.mask import bring
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.scores import Meaning
from dualkv_compile.passes.values import Frame


@dataclass(frozen=True)
class _Prepared:
    """The nodes that hold a mask in the form the kernel wants."""

    blocks: list[fx.Node]
    rank: fx.Node
    column: fx.Node
    end: fx.Node
    sides: list[fx.Node]


def emit(
    cx: Scope,
    frame: Frame,
    operands: Sequence[fx.Node],
    meaning: Meaning,
    mask: str,
    strategy: str,
) -> fx.Node:
    """Emit attention of the packed ``operands`` (query, key, value); the node is the tuple ``(out, None)``.

    Raises Unproven if the kernel cannot express the mask.
    """
    if not expressible(strategy, mask):
        raise Unproven(
            "its mask divides numbers of both positions, which flash-attn-4 is not known to do as torch does"
        )
    home, lifted = cx, meaning.mask
    owners = [owner for owner, _ in lifted.origins]
    while home.parent is not None and home not in owners:
        home = home.parent
    vectors = [bring(home, owner, node) for owner, node in lifted.origins]
    made: _Prepared = home.once(("flex", frame, mask, *vectors), lambda: _prepare(home, frame, vectors, mask))
    return cx.emit(
        attend,
        *operands,
        [bring(cx, home, node) for node in made.blocks],
        bring(cx, home, made.rank),
        bring(cx, home, made.column),
        bring(cx, home, made.end),
        [bring(cx, home, node) for node in made.sides],
        pair_form(mask).pairs,
        bool(mask),
        float(meaning.scale),
        BACKENDS[strategy],
        False,
        meaning.sinks,
        float(meaning.softcap),
    )


def _prepare(home: Scope, frame: Frame, vectors: list[fx.Node], mask: str) -> _Prepared:
    rank, column, end = (home.plan(frame, name) for name in ("rank", "column", "end"))
    lists = home.emit(torch.ops.dualkv.block_mask.default, rank, column, end, vectors, mask, BLOCK)
    blocks = [home.emit(operator.getitem, lists, index) for index in range(8)]
    if not mask:
        return _Prepared(blocks, rank, column, end, [])
    made = home.emit(torch.ops.dualkv.pair_vectors.default, rank, column, end, vectors, mask)
    count = len(pair_form(mask).sides)
    new_rank, new_end, *sides = (home.emit(operator.getitem, made, index) for index in range(2 + count))
    return _Prepared(blocks, new_rank, column, new_end, sides)
