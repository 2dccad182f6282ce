"""The fused attention kernels that torch ships for CUDA, behind one interface.

Both return an LSE and take any LSE in the backward, which is what lets a region's backward run with the *merged* output
and LSE (see :mod:`dualkv_compile.kernels.dense`). Facts they rest on, from torch's sources (``native/cudnn/MHA.cpp``,
``native/transformers/cuda/{attention,attention_backward,sdp_utils}``, torch 2.11 to 2.13):

======================  ======================================  ==========================================
..                      cuDNN                                   flash (FlashAttention 2)
======================  ======================================  ==========================================
batch                   dense ``[B, H, S, D]``, any strides     ragged ``[tokens, H, D]`` + int32 offsets
LSE, natural log        ``[B, H, S, 1]``                        ``[H, tokens]``, contiguous
compute capability      9.0 and later (earlier: slower)         8.0 and later
head dimension          multiple of 8, <= 128                   multiple of 8, <= 256; backward on 8.6, 8.9
                                                                and 12.x not from 193 to 224
keys per query          at least 2                              at least 1
grouped heads           yes                                     yes
repeatable backward     no                                      with ``use_deterministic_algorithms``
======================  ======================================  ==========================================

cuDNN's ragged form (``_cudnn_attention_forward`` with offsets) is not used: it builds its graph anew at every call, and
its backward takes ``query.size(2)``, the head dimension of ragged queries, for their longest length.

Neither checks alignment: rows have to start at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dualkv_compile.kernels.tree_cut import Worth

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_flash = torch.ops.aten._flash_attention_forward.default
_flash_backward = torch.ops.aten._flash_attention_backward.default

Gradients = tuple[Tensor, Tensor, Tensor]

#: What is worth a call of cuDNN: some tens of microseconds of work at 32 heads, and tiles that are not mostly empty.
_STACKS = Worth(share=1 / 32, pairs=1 << 20, length=64)


@dataclass(frozen=True)
class Offsets:
    """Where the segments of a ragged batch lie in its queries and keys.

    ``queries``, ``keys``: int32 ``[segments + 1]``, contiguous, on the device of the operands. ``longest_*``: upper
    bounds of the lengths.
    """

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


class Kernel(Protocol):
    """Attention on a batch of equal or of ragged segments; ``causal`` only where queries and keys are the same tokens.

    ``stacked``: q ``[B, H, Q, D]``, k and v ``[B, Hk, K, D]``, out like q, lse float ``[B, H, Q]``, natural log.
    ``ragged``: q ``[tokens, H, D]``, k and v ``[tokens', Hk, D]``, out like q, lse float ``[tokens, H]``.
    The backwards take any out and lse, so that ``exp(scores - lse)`` are the probabilities, and return dq, dk, dv.
    """

    worth: Worth | None
    """For which stacks ``stacked`` may be called and is the faster way; None for none."""

    def stacked(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Equal segments."""
        ...

    def stacked_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """Gradients of ``stacked``."""
        ...

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Segments of any size, none empty."""
        ...

    def ragged_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offsets: Offsets,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Gradients of ``ragged``."""
        ...


class FusedCuda:
    """cuDNN for stacks where it can, flash for everything else."""

    def __init__(self, device: torch.device, head_dim: int) -> None:
        self.worth = _STACKS if _cudnn_usable(device, head_dim) else None

    def stacked(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        out, lse = _cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        _expect("cuDNN attention's LSE", lse, (*q.shape[:3], 1))
        return out, lse.squeeze(-1)

    def stacked_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """See :class:`Kernel`."""
        lse = lse.contiguous().unsqueeze(-1)
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout that does not happen
        # The three None are undefined tensors: no bias, and not ragged.
        result: Gradients = _cudnn_backward(
            grad, q, k, v, out, lse, seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
        )
        return result

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Kernel`."""
        out, lse = _flash(q, k, v, *_varlen(offsets), 0.0, causal, False, scale=scale)[:2]
        _expect("flash attention's LSE", lse, (q.shape[1], q.shape[0]))
        return out, lse.T

    def ragged_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offsets: Offsets,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """See :class:`Kernel`."""
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that does not happen
        unused = torch.empty(0, device=q.device)
        result: Gradients = _flash_backward(
            grad, q, k, v, out, lse.T.contiguous(), *_varlen(offsets), 0.0, causal, seed, unused, scale=scale
        )
        return result


def flash_usable(device: torch.device, head_dim: int) -> bool:
    """Whether flash runs on a device at a head dimension, in both directions."""
    if device.type != "cuda" or torch.version.hip or not torch.backends.cuda.is_flash_attention_available():
        return False
    capability = torch.cuda.get_device_capability(device)
    small = capability[0] == 12 or (8, 6) <= capability <= (8, 9)  # little shared memory per multiprocessor
    return capability >= (8, 0) and head_dim % 8 == 0 and head_dim <= 256 and not (small and 192 < head_dim <= 224)


def _cudnn_usable(device: torch.device, head_dim: int) -> bool:
    return (
        torch.cuda.get_device_capability(device) >= (9, 0)
        and head_dim % 8 == 0
        and head_dim <= 128
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.backends.cudnn.is_available()
        # Before 9.5.1 the gradient had to have the strides of the output.
        and (torch.backends.cudnn.version() or 0) >= 90501
        and not torch.are_deterministic_algorithms_enabled()
    )


def _varlen(offsets: Offsets) -> tuple[Tensor, Tensor, int, int]:
    # A longest length of 1 would make flash swap queries for heads, as in decoding; it is only an upper bound.
    return offsets.queries, offsets.keys, max(2, offsets.longest_queries), max(2, offsets.longest_keys)


def _expect(what: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype != torch.float32:
        raise RuntimeError(
            f"{what}: expected float32 {shape}, got {x.dtype} {tuple(x.shape)} from torch {torch.__version__}; "
            "strategy 'dense' does not know this version"
        )
