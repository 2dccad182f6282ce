"""What is compared: our ways over packed tokens, and torch's and flash-attn-4's kernels over replicated prompts."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attention_table.cases import Batch
from dualkv_compile import PrefixPlan, packed_attention


@dataclass(frozen=True)
class Sizes:
    """Numbers of heads, and elements per head."""

    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Operands:
    """q, k, v with gradients and the incoming gradient: ``[rows, heads, tokens, D]``, ordered by token in memory."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.grad))


def packed_operands(batch: Batch, sizes: Sizes, dtype: torch.dtype) -> Operands:
    """Normal random numbers for the packed tokens, one row."""
    torch.manual_seed(0)

    def values(heads: int) -> Tensor:
        x = torch.randn(1, batch.plan.tokens, heads, sizes.dim, dtype=dtype, device=batch.ids.device)
        return x.transpose(1, 2)

    q, k, v = (values(heads).requires_grad_() for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    return Operands(q, k, v, values(sizes.heads))


def replicated_operands(packed: Operands, plan: PrefixPlan) -> Operands:
    """The same numbers for every row; padding repeats some token."""

    def spread(x: Tensor) -> Tensor:
        rows = x.detach()[0].transpose(0, 1).index_select(0, plan.inverse.flatten().clamp(min=0))
        return rows.unflatten(0, plan.inverse.shape).transpose(1, 2)

    q, k, v = (spread(x).requires_grad_() for x in (packed.q, packed.k, packed.v))
    return Operands(q, k, v, spread(packed.grad))


def owned(out: Tensor, plan: PrefixPlan) -> Tensor:
    """The packed tokens of a replicated result ``[B, H, S, D]`` as ``[1, H, T, D]``."""
    return out.detach().transpose(1, 2).flatten(0, 1)[plan.token].transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class Contender:
    """``attend`` takes the operands of its kind (packed or replicated) and returns attention in the layout of q.

    ``largest``: the most numbers q may hold.
    """

    name: str
    packed: bool
    attend: Callable[[Operands, PrefixPlan], Tensor]
    largest: int | None = None


def _ours(strategy: str) -> Contender:
    def attend(operands: Operands, plan: PrefixPlan) -> Tensor:
        return packed_attention(operands.q, operands.k, operands.v, plan, attention=strategy)

    return Contender(strategy, True, attend)


def _sdpa(backend: SDPBackend | None, operands: Operands, plan: PrefixPlan) -> Tensor:
    run = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    if backend is None:
        return run(operands.q, operands.k, operands.v)
    with sdpa_kernel(backend):
        return run(operands.q, operands.k, operands.v)


def _flash4(operands: Operands, plan: PrefixPlan) -> Tensor:
    function = importlib.import_module("flash_attn.cute").flash_attn_func
    out = function(*(x.transpose(1, 2) for x in (operands.q, operands.k, operands.v)), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


#: FA2 or flash-attn-4, one of them, made an illegal memory access beyond (torch 2.11, flash-attn-4 4.0.0b36).
_LARGEST = 2**31

#: The first replicated one is what all others are compared with, in time and in values.
CUDA = (
    Contender("cudnn", False, partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    *map(_ours, ("dense", "flex", "flex_flash")),
    Contender("fa2", False, partial(_sdpa, SDPBackend.FLASH_ATTENTION), _LARGEST),
    Contender("fa4", False, _flash4, _LARGEST),
)
CPU = (Contender("sdpa", False, partial(_sdpa, None)), *map(_ours, ("regions", "blocks")))


def available(device: torch.device) -> tuple[Contender, ...]:
    """Those meant for a kind of device; whether each runs there is seen when it runs."""
    return CUDA if device.type == "cuda" else CPU
