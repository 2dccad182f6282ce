"""FlexAttention on the packed tokens, as an operator that Inductor sees: one fused kernel, the tree as its mask.

:func:`attend` is plain Python for Dynamo to trace, from a packed graph (the target of a call in it) or from
:mod:`flex_compiled`. It calls ``flex_attention`` once, with grouped heads and the block lists of
:mod:`block_mask`, and a mask made of comparisons of a few ``[T]`` vectors, so one compilation serves all trees and T.

Two kernels stand behind it, by ``kernel_options={"BACKEND": ...}``: "TRITON", Inductor's template, and "FLASH",
flash-attn-4. What follows from their ways (torch 2.11 to 2.13, read in ``torch/_inductor/kernel/flex``):

- not compiled, FlexAttention silently computes every score (1,152 GiB at T = 98,304): here that is an error;
- the mask must be made of what CuteDSL can express, which in 2.11 has no minimum or maximum, and no floor division of
  negative numbers that is known to agree; :mod:`pair_mask` moves nearly all of that out of the kernel;
- FLASH cannot differentiate through the LSE, so nothing here does: the LSE is detached before anything reads it;
- FLASH gives the LSE in natural units, TRITON in powers of two; torch 2.11 rescales both as if they were TRITON's;
- a query without keys gets out 0 and lse -inf, but a NaN in its incoming gradient would reach all keys: where such
  queries are possible, out is selected by the LSE, which stops that gradient;
- whether T is a multiple of a block decides if the Triton kernels check bounds at every load, so q, k and v are filled
  up to one, at the price of one more copy of them;
- layouts other than token-major have been reported wrong on the second, dynamic call: operands are made token-major,
  which for projections is what they are anyway;
- on the CPU there is a forward only, without LSE.
"""

from __future__ import annotations

import importlib.util
import math
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from dualkv_compile.errors import CompilationError, InputError
from dualkv_compile.kernels.block_mask import BLOCK
from dualkv_compile.kernels.pair_mask import pair_form
from dualkv_compile.kernels.predicate import Expression

#: Strategies that are FlexAttention, and the kernel each asks for.
BACKENDS = {"flex": "TRITON", "flex_flash": "FLASH"}

#: Head dimensions at which flash-attn-4 (4.0.0b36, on an H200) passed the tests: at 16 and 80 its gradients were wrong
#: without a word, at 256 it refused the tree's blocks, others were not tried.
FLASH_HEAD_DIMS = (32, 64, 128)

#: The results of ``dualkv::block_mask`` in their order, as BlockMask names them.
_LISTS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def _rescales_flash() -> bool:
    """Whether this torch multiplies every LSE by ln 2, FLASH's natural one included (2.11 does, 2.13 does not)."""
    inner = [code for code in flex_attention.__code__.co_consts if hasattr(code, "co_varnames")]
    return not any("stats_are_log2" in code.co_varnames for code in inner)


_RESCALES_FLASH = _rescales_flash()


@lru_cache(maxsize=1)
def flash_available() -> bool:
    """Whether flash-attn-4 is installed (not whether the device can run it)."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        return False


def check(strategy: str, device: torch.device, *, gradients: bool) -> None:
    """Raise InputError, with what to do, if ``strategy`` cannot run on ``device``, or not with gradients."""
    if device.type == "cpu" and strategy == "flex":
        if gradients:
            raise InputError(
                "attention 'flex': FlexAttention has no gradients on the CPU; use 'auto', or torch.no_grad() and "
                "parameters that do not require grad"
            )
    elif device.type != "cuda":
        raise InputError(f"attention {strategy!r}: expected tensors on a CUDA device, got {device}")
    elif strategy == "flex_flash" and not flash_available():
        raise InputError("attention 'flex_flash': flash-attn-4 is not installed (pip install dualkv-compile[fa4])")


def check_scores(strategy: str, device: torch.device, scores: str) -> None:
    """Raise InputError if the kernel of ``strategy`` cannot compute ``scores`` (see :func:`kind_of_scores`)."""
    if scores and (strategy == "flex_flash" or "bias" in scores or ("sinks" in scores and device.type == "cpu")):
        raise InputError(f"attention {strategy!r}: cannot compute scores with {scores} on {device.type}; use 'auto'")


def kind_of_scores(*, softcap: bool, bias: bool, sinks: bool) -> str:
    """What is done to scores beside scaling and masking: "" or some of "softcap+bias+sinks"."""
    given = {"softcap": softcap, "bias": bias, "sinks": sinks}
    return "+".join(name for name, present in given.items() if present)


def check_operands(strategy: str, dtype: torch.dtype, head_dim: int, value_dim: int) -> None:
    """Raise InputError for operands that the kernel of ``strategy`` would refuse or compute wrongly."""
    if strategy == "flex_flash" and (
        dtype not in (torch.float16, torch.bfloat16) or head_dim not in FLASH_HEAD_DIMS or value_dim != head_dim
    ):
        raise InputError(
            f"attention 'flex_flash': expected float16 or bfloat16 and D == Dv in {FLASH_HEAD_DIMS}, got {dtype}, "
            f"D={head_dim}, Dv={value_dim}"
        )


def expressible(strategy: str, mask: str) -> bool:
    """Whether the kernel of ``strategy`` can evaluate the expression with the text form ``mask``."""
    pairs = pair_form(mask).pairs
    return strategy != "flex_flash" or pairs is None or not _divides(pairs)


def _divides(expression: Expression) -> bool:
    if expression[0] in ("q", "k", "qcol", "kcol", "const"):
        return False
    return expression[0] in ("floordiv", "mod") or any(map(_divides, expression[1:]))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Tensor],
    rank: Tensor,
    column: Tensor,
    end: Tensor,
    vectors: Sequence[Tensor],
    pairs: Expression | None,
    blind: bool,
    scale: float,
    backend: str,
    with_lse: bool = False,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """Attention of packed tokens; to be traced by Dynamo, never to be run.

    Args:
        q: ``[1, H, T, D]``, floating point; q, k and v are cast as ``scaled_dot_product_attention`` does by autocast.
        k: ``[1, Hk, T, D]`` with H a multiple of Hk; query head h reads head ``h // (H // Hk)``.
        v: ``[1, Hk, T, Dv]``.
        blocks: the eight results of ``dualkv::block_mask``, for the undivided expression.
        rank: int32 ``[T]`` of tokens sorted by (rank, column), as the plan has it or from ``dualkv::pair_vectors``.
        column: int32 ``[T]``.
        end: int32 ``[T]``, as rank.
        vectors: what ``pairs`` reads, ``[T]`` each: the sides from ``dualkv::pair_vectors``.
        pairs: the rest of the mask expression, in tuples (a text would have to be parsed while tracing).
        blind: whether there may be queries that see no key.
        scale: factor on the scores.
        backend: "TRITON" or "FLASH".
        with_lse: whether to return the LSE.
        sinks: ``[H]``, a score in every query's softmax that has no value, or None. Not for "FLASH" or on the CPU.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask; 0 for none. Not for "FLASH".

    Returns:
        ``out [1, H, T, Dv]`` in the dtype of q, token-major; ``lse [1, H, T]``, natural log, float32, detached, or None
        if not asked for. Queries that see no key have out 0, lse -inf and gradient 0.

    Raises:
        CompilationError: it ran without being traced.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise CompilationError("FlexAttention was about to run without being compiled, which would compute every score")
    q, k, v = (_token_major(x.to(compute_dtype(x))) for x in (q, k, v))
    tokens = given = q.shape[2]
    for x in (rank, column, end, *vectors):
        # Makes one symbol of all sizes, where kernels would otherwise take each as an argument of its own.
        torch._check(x.shape[0] == tokens)
    options: Any = {"BACKEND": backend}
    if backend == "TRITON" and q.device.type == "cuda":
        tokens = (given + BLOCK - 1) // BLOCK * BLOCK
        q, k, v = (pad(x, (0, 0, 0, tokens - given)) for x in (q, k, v))
        # Their end is 0: no query sees a key that is not there.
        rank, column, end, *vectors = (pad(x, (0, tokens - given)) for x in (rank, column, end, *vectors))
        options["fwd_USE_TMA"] = True  # Inductor leaves it off where device or layout does not allow it
    lists: Any = dict(zip(_LISTS, blocks, strict=True))
    visible = _mask_mod(rank, column, end, vectors, pairs)
    mask = BlockMask(seq_lengths=(tokens, tokens), BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible, **lists)
    scores = _score_mod(softcap)
    # The CPU kernel has no LSE. Nor has it gradients, which is what selecting by the LSE is for.
    if not with_lse and sinks is None and (not blind or q.device.type == "cpu"):
        out = flex_attention(q, k, v, scores, mask, scale=scale, enable_gqa=True, kernel_options=options)
        return out[:, :, :given], None
    wanted = AuxRequest(lse=True)
    out, aux = flex_attention(
        q, k, v, scores, mask, scale=scale, enable_gqa=True, kernel_options=options, return_aux=wanted
    )
    assert aux.lse is not None
    out, lse = out[:, :, :given], aux.lse[:, :, :given]
    if sinks is not None:
        # Queries that see no key have out 0 and LSE -inf, whose derivative must not be asked for.
        seen = lse > -math.inf
        sink = sinks.to(lse.dtype)[None, :, None].expand_as(lse)
        finite = torch.where(seen, lse, 0.0)
        out = torch.where(seen.unsqueeze(-1), out * torch.sigmoid(finite - sink).unsqueeze(-1), 0.0).to(out.dtype)
        lse = torch.where(seen, torch.logaddexp(finite, sink), sink).detach()
        return out, lse if with_lse else None
    lse = lse.detach()
    if backend == "FLASH" and _RESCALES_FLASH:
        # ln 2 as a literal: with dynamic=True Dynamo makes a number read from a global an input of the graph, and does
        # not find it again in the next checkpoint body.
        lse = lse / 0.6931471805599453
    if blind:
        out = torch.where(lse.unsqueeze(-1) > -math.inf, out, 0.0)
    return out, lse if with_lse else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention of ``x`` is computed: its own, or the one autocast casts it to."""
    kind = x.device.type
    eligible = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if eligible else x.dtype


def _token_major(x: Tensor) -> Tensor:
    """``[1, heads, T, dim]`` ordered by token in memory; no copy if it is already."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# --------------------------------------------------------------------------------------------------- inside the kernel
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"), "mod": torch.remainder,
    "neg": lambda a: 0 - a, "abs": lambda a: torch.where(a < 0, 0 - a, a),
    "minimum": lambda a, b: torch.where(a < b, a, b), "maximum": lambda a, b: torch.where(a > b, a, b),
}  # fmt: skip


def _score_mod(softcap: float) -> Callable[..., Tensor] | None:
    """What is done to scaled scores before the mask; None if nothing is.

    Numbers by key are not added here: torch 2.13 drops the gradient of such a tensor without a word where it is a view.
    """
    if not softcap:
        return None

    def bent(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return bent


def _mask_mod(
    rank: Tensor, column: Tensor, end: Tensor, vectors: Sequence[Tensor], pairs: Expression | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Tokens are sorted by (rank, column), so this and the comparison of columns say "rank[k] <= rank[q]", for one
        # vector less to read.
        seen = (k <= q) & (_at(rank, q) < _at(end, k)) & (_at(column, k) <= _at(column, q))
        return seen if pairs is None else seen & _truth(pairs, column, vectors, q, k)

    return visible


def _truth(expression: Expression, column: Tensor, vectors: Sequence[Tensor], q: Tensor, k: Tensor) -> Any:
    """The truth value of an expression at one pair: a bool tensor."""
    name = expression[0]
    if name in ("and", "or", "not", "bool"):
        values = [_truth(operand, column, vectors, q, k) for operand in expression[1:]]
        if name == "and":
            return values[0] & values[1]
        if name == "or":
            return values[0] | values[1]
        return torch.logical_not(values[0]) if name == "not" else values[0]
    if name in _COMPARISONS:
        a, b = (_number(operand, column, vectors, q, k) for operand in expression[1:])
        return _COMPARISONS[name](_beside(a, b), _beside(b, a))
    return _number(expression, column, vectors, q, k) != 0


def _number(expression: Expression, column: Tensor, vectors: Sequence[Tensor], q: Tensor, k: Tensor) -> Any:
    """The value of an expression at one pair: an integer (at least 32 bits) or floating tensor, or a Python number."""
    name = expression[0]
    if name == "const":
        return int(expression[1]) if isinstance(expression[1], bool) else expression[1]
    if name in ("q", "k", "qcol", "kcol"):
        vector = column if len(expression) == 1 else vectors[expression[1]]
        value = _at(vector, q if name in ("q", "qcol") else k)
        return value.to(torch.int32) if value.dtype in _NARROW else value
    if name not in _ARITHMETIC:
        return _truth(expression, column, vectors, q, k).to(torch.int32)
    values = [_number(operand, column, vectors, q, k) for operand in expression[1:]]
    # Differences and sums of columns stay in 32 bits; of other integers nothing is known.
    if not (name in ("add", "sub") and all(operand[0] in ("qcol", "kcol") for operand in expression[1:])):
        values = [_exact(value) for value in values]
    if len(values) == 2:
        values = [_beside(values[0], values[1]), _beside(values[1], values[0])]
    return _ARITHMETIC[name](*values)


def _at(vector: Tensor, token: Tensor) -> Tensor:
    if vector.device.type != "cpu":
        return vector[token]
    # The C++ template of torch 2.13 takes a size whose generated name begins like one of its own ("ks15", "ks1") for
    # that one, and does not compile. This way of indexing neither wraps nor checks, and so does not mention the size.
    value: Tensor = torch.ops.aten._unsafe_masked_index.default(vector, token >= 0, [token], 0)
    return value


_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16)


def _exact(value: Any) -> Any:
    integer = isinstance(value, Tensor) and not value.dtype.is_floating_point
    return value.to(torch.int64) if integer else value


def _beside(value: Any, other: Any) -> Any:
    """An integer tensor in a type in which a Python number beside it is not rounded or cut off."""
    if isinstance(value, Tensor) and not value.dtype.is_floating_point and not isinstance(other, Tensor):
        if isinstance(other, float):
            return value.to(torch.float64)
        if not -(2**31) <= other < 2**31:
            return value.to(torch.int64)
    return value
