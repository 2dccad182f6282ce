"""Partial results that exist for some of the tokens only, brought together in one pass over memory.

A partial result is ``[rows, H, D]``; :class:`Rows` says which of the T tokens each row belongs to. Tokens without a row
take no part: nothing is filled up with zeros. On CUDA (with triton) one kernel reads every row once and writes every
token once; elsewhere, plain torch code does the same and serves as its specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dualkv_compile.kernels import triton_merge
from dualkv_compile.kernels.merge import accumulation_dtype, merge_
from dualkv_compile.kernels.schedule import Range


@dataclass(frozen=True, eq=False)
class Rows:
    """Tokens of the rows of a partial result: a range, or a list inside a range.

    ``token is None``: row r belongs to token ``start + r``, for tokens [start, stop). Otherwise ``token`` (int64
    [rows], no token twice) names it, and ``row`` (int32 [stop - start]) is the inverse: the row of token ``start + i``,
    -1 if it has none.
    """

    start: int
    stop: int
    token: Tensor | None = None
    row: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.stop - self.start if self.token is None else self.token.shape[0]

    @staticmethod
    def of(ranges: Sequence[Range], device: torch.device) -> Rows:
        """Rows that are the tokens of the given disjoint, non-empty ranges, one after the other.

        Copies a few numbers per range to the device, without synchronising.
        """
        start, stop = min(first for first, _ in ranges), max(last for _, last in ranges)
        if all(a[1] == b[0] for a, b in pairwise(ranges)):
            return Rows(start, stop)
        lengths = [last - first for first, last in ranges]
        begins = [0, *accumulate(lengths)]
        shifts = [first - begin for (first, _), begin in zip(ranges, begins, strict=False)]
        table = torch.tensor([shifts, lengths]).to(device, non_blocking=True)
        count = begins[-1]
        shift = torch.repeat_interleave(table[0], table[1], output_size=count)
        number = torch.arange(count, device=device)
        token = number + shift
        row = torch.full((stop - start,), -1, dtype=torch.int32, device=device)
        return Rows(start, stop, token, row.index_copy_(0, token - start, number.to(torch.int32)))

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """These tokens of ``x``, whose dimension ``dim`` is T: a view for a range, otherwise a copy."""
        if self.token is None:
            return x.narrow(dim, self.start, self.stop - self.start)
        return x.index_select(dim, self.token)


def merge_rows(
    outs: Sequence[Tensor], lses: Sequence[Tensor], rows: Sequence[Rows], tokens: int
) -> tuple[Tensor, Tensor]:
    """Merge partial attention results; see :mod:`dualkv_compile.kernels.merge`. Without autograd.

    Args:
        outs: n >= 1 tensors ``[rows, H, D]`` of one dtype and device, any strides; finite.
        lses: n tensors ``[rows, H]``, natural log, any strides.
        rows: whose rows they are.
        tokens: T.

    Returns:
        ``out [T, H, D]`` in the dtype of ``outs``, and ``lse [H, T]`` in float32 (float64 for float64), both
        contiguous; 0 and -inf for tokens without rows. May share memory with a partial result that is alone.
    """
    if len(outs) == 1 and _everything(rows[0], tokens):
        return outs[0].contiguous(), lses[0].T.contiguous()
    if triton_merge.accepts(outs, lses):
        return triton_merge.merge_rows(outs, lses, rows, tokens)
    total = accumulation_dtype(outs[0].dtype)
    out = outs[0].new_zeros((tokens, *outs[0].shape[1:]), dtype=total)
    lse = outs[0].new_full((outs[0].shape[1], tokens), -torch.inf, dtype=total)
    for part, part_lse, which in zip(outs, lses, rows, strict=True):
        into, into_lse = which.take(out), which.take(lse.T)
        merge_(into, into_lse, part, part_lse.to(total))
        if which.token is not None:
            out.index_copy_(0, which.token, into)
            lse.T.index_copy_(0, which.token, into_lse)
    return out.to(outs[0].dtype), lse


def sum_rows(parts: Sequence[Tensor], rows: Sequence[Rows], tokens: int) -> Tensor:
    """Add partial results in float32 (float64 for float64).

    Args:
        parts: n >= 1 tensors ``[rows, H, D]`` of one dtype and device, any strides.
        rows: whose rows they are.
        tokens: T.

    Returns:
        ``[T, H, D]`` in the dtype of ``parts``, contiguous; 0 for tokens without rows. May share memory with a partial
        result that is alone.
    """
    if len(parts) == 1 and _everything(rows[0], tokens):
        return parts[0].contiguous()
    if triton_merge.accepts(parts, ()):
        return triton_merge.sum_rows(parts, rows, tokens)
    total = parts[0].new_zeros((tokens, *parts[0].shape[1:]), dtype=accumulation_dtype(parts[0].dtype))
    for part, which in zip(parts, rows, strict=True):
        if which.token is None:
            which.take(total).add_(part)
        else:
            total.index_add_(0, which.token, part.to(total.dtype))
    return total.to(parts[0].dtype)


def _everything(rows: Rows, tokens: int) -> bool:
    return rows.token is None and (rows.start, rows.stop) == (0, tokens)
