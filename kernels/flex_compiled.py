"""FlexAttention for callers outside of a compiled graph: compiled here, and never run in any other way.

Every (mask, scale, kernel) has a generated function of its own, so their compilations do not count against each other,
and within one, each new kind of call (dtype, heads, head dimension, gradients on or off) is compiled once for all T
beyond a block of 128 tokens, and once or twice more for shorter ones (sizes of 1 are constants to torch, and its Triton
template asks whether T < 128).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dualkv_compile.compiled import CompiledFunction, generated_function
from dualkv_compile.errors import InputError
from dualkv_compile.kernels.block_mask import block_mask
from dualkv_compile.kernels.flex import (
    BACKENDS,
    attend,
    check,
    check_operands,
    check_scores,
    compute_dtype,
    expressible,
    kind_of_scores,
)
from dualkv_compile.kernels.pair_mask import pair_form, pair_vectors
from dualkv_compile.kernels.predicate import Expression
from dualkv_compile.kernels.regions import token_major
from dualkv_compile.options import Options


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    vectors: Sequence[Tensor] = (),
    mask: str = "",
    *,
    scale: float,
    strategy: str,
    with_lse: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attention on packed tokens through FlexAttention.

    q, k, v, the tree, vectors, mask, scale, sinks and softcap are as for ``dualkv::packed_attention``;
    ``strategy`` is "flex" (Inductor's Triton kernel; on the CPU its C++ kernel, forward only) or "flex_flash"
    (flash-attn-4). ``with_lse`` asks for the LSE, which the CPU does not have.

    Returns:
        As :func:`~dualkv_compile.kernels.flex.attend`. On the CPU, and with no token at all, lse is None.

    Raises:
        InputError: the strategy cannot run there, or cannot express mask or scores.
        CompilationError: the call was not compiled, or would need one compilation too many.
    """
    tensors = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    check(strategy, q.device, gradients=gradients)
    scores = kind_of_scores(softcap=bool(softcap), bias=False, sinks=sinks is not None)
    check_scores(strategy, q.device, scores)
    check_operands(strategy, compute_dtype(q), q.shape[3], v.shape[3])
    if not expressible(strategy, mask):
        raise InputError(f"attention {strategy!r}: cannot divide numbers of both tokens, as the mask {mask} asks")
    if not q.shape[2]:
        return token_major(q, q.shape[1], 0, v.shape[3], q.dtype) + 0 * (q.sum() + k.sum() + v.sum()), None
    backend, with_lse = BACKENDS[strategy], with_lse and q.device.type != "cpu"
    if torch.compiler.is_dynamo_compiling():  # the caller compiles: part of that graph
        pairs = pair_form(mask).pairs
        return _trace(q, k, v, rank, column, end, vectors, sinks, mask, pairs, scale, backend, with_lse, softcap)
    for x in (q, k, v):
        torch._dynamo.maybe_mark_dynamic(x, 2)
    for x in (rank, column, end, *vectors):
        torch._dynamo.maybe_mark_dynamic(x, 0)
    compiled = _entry(mask, scale, backend, with_lse, softcap)
    result: tuple[Tensor, Tensor | None] = compiled(q, k, v, rank, column, end, list(vectors), sinks)
    return result


@lru_cache(maxsize=256)
def _entry(mask: str, scale: float, backend: str, with_lse: bool, softcap: float) -> CompiledFunction:
    """The compiled function of one mask; its constants are literals, so that no number of it becomes symbolic."""
    function = generated_function(
        "flex",
        "q, k, v, rank, column, end, vectors, sinks",
        f"trace(q, k, v, rank, column, end, vectors, sinks, {mask!r}, {pair_form(mask).pairs!r}, {scale!r}, "
        f"{backend!r}, {with_lse}, {softcap!r})",
        {"trace": _trace},
    )
    return CompiledFunction(function, Options(), dynamic=False, name="flex")


def _trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    vectors: Sequence[Tensor],
    sinks: Tensor | None,
    mask: str,
    pairs: Expression | None,
    scale: float,
    backend: str,
    with_lse: bool,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """What is compiled; the block lists are made in the graph, where all sizes are known to follow from T."""
    blocks = block_mask(rank, column, end, vectors, mask)
    sides: Sequence[Tensor] = ()
    if mask:
        rank, end, sides = pair_vectors(rank, column, end, vectors, mask)
    tree = (blocks, rank, column, end, sides, pairs, bool(mask))
    return attend(q, k, v, *tree, scale, backend, with_lse, sinks, softcap)
