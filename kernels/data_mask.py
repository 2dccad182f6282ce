"""Attention masks that arrive as data, ``[B or 1, 1, S, S]``, read as two numbers per row and column.

A mask of all pairs costs more than the attention it belongs to, yet what trainers and models put into one is: a query
sees what is not later (causality), not before some column (a window, a chunk, the start of its document), and not
hidden (padding). Then

    mask[b, q, k]  <=>  first[b, q] <= k <= q  and  valid[b, k]

with ``valid`` the diagonal and ``first`` the first key that the query sees (S if none). Whether a mask is of this form
can only be told from its data: :func:`readable` compares all of it.

Masks are boolean (True is seen) or floating point (0 is seen, -inf or a number at the end of the dtype's range is not).
"""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define(
    "dualkv::read_mask", "(Tensor mask, Tensor grid) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,)
)

#: Pairs that are looked at at a time.
_CHUNK = 1 << 26


def read_mask(mask: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """``valid`` bool and ``first`` int64, each of the shape ``[B, S]`` of ``grid``, of a mask ``[B or 1, 1, S, S]``."""
    valid, first = torch.ops.dualkv.read_mask(mask, grid)
    return valid, first


def _read_mask(mask: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    seen = _seen(mask)
    rows, columns = grid.shape
    valid = seen.diagonal(dim1=-2, dim2=-1)
    # argmax gives the first of equal values.
    first = torch.cat([_first(part) for part in seen.split(_lines(seen), dim=1)], dim=1) if columns else seen.sum(-1)
    return valid.expand(rows, columns).contiguous(), first.expand(rows, columns).contiguous()


def _first(seen: Tensor) -> Tensor:
    found = seen.view(torch.uint8).argmax(-1)
    return torch.where(seen.any(-1), found, seen.shape[-1])


def _seen(mask: Tensor) -> Tensor:
    mask = mask.squeeze(1)
    return (mask if mask.dtype == torch.bool else mask == 0).contiguous()


def _lines(seen: Tensor) -> int:
    return max(1, _CHUNK // max(1, seen.shape[0] * seen.shape[-1]))


def readable(mask: Tensor, valid: Tensor, first: Tensor) -> Tensor:
    """Whether ``read_mask`` said all there is to say about a mask: a bool scalar on its device."""
    rows, columns = mask.shape[0], mask.shape[-1]
    valid, first = valid[:rows], first[:rows]
    key = torch.arange(columns, device=mask.device)
    found = torch.ones((), dtype=torch.bool, device=mask.device)
    step = _lines(mask.squeeze(1))
    for start in range(0, columns, step):
        part = mask[:, 0, start : start + step]
        query = key[start : start + step, None]
        expected = (first[:, start : start + step, None] <= key) & (key <= query) & valid[:, None]
        found &= ((part if part.dtype == torch.bool else part == 0) == expected).all()
        if part.dtype != torch.bool:
            # Numbers between are added to scores, which is more than hiding.
            found &= ((part == 0) | (part <= torch.finfo(part.dtype).min / 2)).all()
    return found


def _fake(mask: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    return mask.new_empty(grid.shape, dtype=torch.bool), mask.new_empty(grid.shape, dtype=torch.int64)


torch.library.impl("dualkv::read_mask", "CompositeExplicitAutograd", _read_mask)
torch.library.register_fake("dualkv::read_mask", _fake)
