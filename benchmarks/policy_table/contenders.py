"""Ways to compute the hidden states of a batch, all with the same parameters.

replicated
    ``inductor``         transformers' model, each layer compiled, SDPA through cuDNN. The mask is made outside of the
                         compiled layers, where transformers sees that causal attention needs none.
    ``inductor_whole``   the whole decoder compiled; a mask [B, 1, S, S] is then part of the graph.
    ``varlen``           rows without padding, one behind the other, through torch's own FlashAttention for rows of
                         different lengths; each layer compiled.
shared
    ``dualkv``           ``model.compile(backend="dualkv")``, nothing else.
    ``dualkv_drop``      the same with ``padding="drop"``.
    ``dualkv_layers``    each layer compiled with ``backend="dualkv"``, and ``dualkv_compile.attach(model)``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

import dualkv_compile
from policy_table.batch import Batch
from policy_table.shapes import decoder, twin


@dataclass(frozen=True)
class Contender:
    """``hidden``: batch -> hidden states [scored, H] that predict its response tokens."""

    name: str
    hidden: Callable[[Batch], Tensor]
    shared: bool
    padded: bool


def contenders(model: PreTrainedModel, names: list[str], options: dict[str, Any]) -> list[Contender]:
    """Those named, each on a copy of ``model`` that has its parameters."""
    return [MAKERS[name](twin(model), options) for name in names]


def _inductor(model: PreTrainedModel, _: dict[str, Any]) -> Contender:
    core = decoder(model)
    _compile_layers(core, backend="inductor")
    return Contender("inductor", _replicated(core, masked=False), shared=False, padded=True)


def _inductor_whole(model: PreTrainedModel, _: dict[str, Any]) -> Contender:
    core = decoder(model)
    core.compile()
    return Contender("inductor_whole", _replicated(core, masked=True), shared=False, padded=True)


def _dualkv(model: PreTrainedModel, options: dict[str, Any]) -> Contender:
    core = decoder(model)
    core.compile(backend="dualkv", options=options)
    return Contender("dualkv", _grid(core), shared=True, padded=True)


def _dualkv_drop(model: PreTrainedModel, options: dict[str, Any]) -> Contender:
    core = decoder(model)
    core.compile(backend="dualkv", options={**options, "padding": "drop"})
    return Contender("dualkv_drop", _grid(core), shared=True, padded=False)


def _dualkv_layers(model: PreTrainedModel, options: dict[str, Any]) -> Contender:
    core = decoder(model)
    _compile_layers(core, backend="dualkv", options=options)
    dualkv_compile.attach(core)
    return Contender("dualkv_layers", _grid(core), shared=True, padded=True)


def _varlen(model: PreTrainedModel, _: dict[str, Any]) -> Contender:
    AttentionInterface.register("varlen", _varlen_attention)
    core = decoder(model)
    core.config._attn_implementation = "varlen"
    _compile_layers(core, backend="inductor")

    def hidden(batch: Batch) -> Tensor:
        real = batch.mask.bool()
        lengths = batch.mask.sum(1)
        starts = torch.zeros(batch.rows + 1, dtype=torch.int32, device=lengths.device)
        starts[1:] = lengths.cumsum(0)
        position = (batch.mask.cumsum(1) - 1)[real].unsqueeze(0)
        rows = {"cu_seq_lens_q": starts, "max_length_q": batch.columns}
        out = core(input_ids=batch.ids[real].unsqueeze(0), position_ids=position, use_cache=False, **rows)
        packed = real.flatten().cumsum(0) - 1
        return out.last_hidden_state[0].index_select(0, packed[batch.predicting()])

    return Contender("varlen", hidden, shared=False, padded=False)


MAKERS: dict[str, Callable[[PreTrainedModel, dict[str, Any]], Contender]] = {
    "inductor": _inductor,
    "inductor_whole": _inductor_whole,
    "varlen": _varlen,
    "dualkv": _dualkv,
    "dualkv_drop": _dualkv_drop,
    "dualkv_layers": _dualkv_layers,
}


def _compile_layers(core: nn.Module, **how: Any) -> None:
    for layer in core.layers:
        layer.compile(**how)


def _grid(core: nn.Module) -> Callable[[Batch], Tensor]:
    def hidden(batch: Batch) -> Tensor:
        out = core(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
        return out.last_hidden_state.flatten(0, 1).index_select(0, batch.predicting())

    return hidden


def _replicated(core: nn.Module, *, masked: bool) -> Callable[[Batch], Tensor]:
    """``masked``: hand the mask to the model. Padding on the right needs none: no token sees what is behind it."""

    def hidden(batch: Batch) -> Tensor:
        with fastest_sdpa():
            mask = batch.mask if masked else None
            out = core(input_ids=batch.ids, attention_mask=mask, use_cache=False)
            return out.last_hidden_state.flatten(0, 1).index_select(0, batch.predicting())

    return hidden


@contextlib.contextmanager
def fastest_sdpa() -> Iterator[None]:
    """SDPA through cuDNN where it can, as it is fastest there."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def _varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """What transformers calls for "varlen": q [1, H, T, D], k, v [1, Hk, T, D] of rows one behind the other."""
    starts, longest = given["cu_seq_lens_q"], given["max_length_q"]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # torch 2.11 takes grouped heads without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    causal = (-1, 0)
    out = varlen_attn(q, k, v, starts, starts, longest, longest, scale=given["scaling"], window_size=causal, **grouped)
    return out.unsqueeze(0), None
