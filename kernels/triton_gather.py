"""Putting tokens back on the grid by Triton kernels, one pass over memory each way.

Importable without triton; :func:`accepts` says whether the kernels can take a tensor. The meaning of both functions is
that of the torch code in :mod:`dualkv_compile.kernels.gather`.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from dualkv_compile.kernels.triton_merge import AVAILABLE

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Numbers that a program handles, and the longest stretch of a row among them.
_TILE, _STRETCH = 4096, 2048


def accepts(x: Tensor) -> bool:
    """Whether the kernels can take ``x``: on CUDA, of DTYPES."""
    return AVAILABLE and x.device.type == "cuda" and x.dtype in DTYPES


def unpack(x: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """``x`` along ``dim`` at every number of ``inverse`` (any shape), 0 where that is negative; contiguous."""
    from dualkv_compile.kernels.gather_kernels import copy_rows

    x, flat = x.contiguous(), inverse.reshape(-1).contiguous()
    result = x.new_empty((*x.shape[:dim], *inverse.shape, *x.shape[dim + 1 :]))
    planes, size = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    programs, blocks = _tiles(planes, flat.shape[0], size)
    if result.numel():
        with _on(x.device):
            copy_rows[(programs,)](x, flat, result, flat.shape[0], x.shape[dim], size, *blocks)
    return result


def unpack_backward(grad: Tensor, inverse: Tensor, dim: int, size: int) -> Tensor:
    """Sum over the copies of each of ``size`` tokens, in float32 (float64) and in the order of the grid.

    ``grad`` is contiguous or made so; ``inverse`` stands in its dimensions from ``dim`` on.
    """
    from dualkv_compile.kernels.gather_kernels import sum_copies

    grad, flat = grad.contiguous(), inverse.reshape(-1)
    after = grad.shape[dim + inverse.dim() :]
    total = grad.new_empty((*grad.shape[:dim], size, *after))
    planes, width = math.prod(grad.shape[:dim]), math.prod(after)
    # A stable sort gives every token's copies in the order of the grid; dropped positions (-1) come first.
    ordered, order = torch.sort(flat, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(size + 1, device=flat.device, dtype=flat.dtype))
    programs, blocks = _tiles(planes, size, width)
    if total.numel():
        wide = grad.dtype == torch.float64
        with _on(grad.device):
            sum_copies[(programs,)](grad, order, starts, total, flat.shape[0], size, width, wide, *blocks)
    return total


def _tiles(planes: int, rows: int, size: int) -> tuple[int, tuple[int, int]]:
    """How many programs cover ``planes`` times ``rows`` rows of ``size`` numbers, and their tiles."""
    stretch = min(_STRETCH, 1 << max(0, size - 1).bit_length())
    tall = max(1, min(32, _TILE // stretch // 2))
    return planes * -(-rows // tall) * -(-size // stretch), (tall, stretch)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
