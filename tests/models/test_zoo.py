"""Small models of transformers' causal decoders: packed or not, exact in any case.

The lists say what is expected of each architecture; ``benchmarks/zoo.py`` runs all of them and writes
``docs/models.md``. Each record holds what this file asserts: logits and every gradient agree with eager, work fell by
the share of distinct tokens, and another prompt token moves the response.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import dualkv_compile
from tests.models.harness import VOCAB, compiled, distance, rollouts
from zoo_models.build import architectures
from zoo_models.run import Record, Settings, run

#: Everything runs on packed tokens.
PACKED = (
    "apertus",  # query and key norms, xIELU
    "bert",  # causal by configuration, embeddings of token types
    "biogpt",  # learned positions counted from the mask
    "camembert",  # positions from ids, a table gathered by them
    "codegen",  # fused projections, interleaved rotary
    "cohere2",  # parallel blocks, sliding and full layers
    "diffllama",  # differences of two attentions, group norm
    "falcon",  # multi-query, fused heads picked by constants
    "gemma3_text",
    "glm4",  # partial rotary, interleaved
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "marian",
    "minicpm3",  # latent attention, values narrower than keys
    "mllama",
    "modernbert-decoder",
    "moshi",
    "nanochat",
    "olmo2",
    "opt",
    "persimmon",
    "phi",
    "smollm3",  # layers without rotary positions
    "stablelm",
    "whisper",  # positions looked up in a table
)

#: The plain graph runs; part of the reason.
PLAIN = {
    "lfm2": "conv1d",  # short convolutions along the columns
    "bloom": "autograd_function_apply",
}


@functools.cache
def record(name: str) -> Record:
    return run(name, Settings())


@pytest.mark.parametrize("name", PACKED)
def test_packed(name: str) -> None:
    found = record(name)
    assert (found.status, found.problem, found.graph_breaks) == ("packed", "", 0)
    assert found.calls == found.packed_calls == 1
    assert found.reasons == []
    assert found.tokens_computed == round(found.share * found.tokens_given) < found.tokens_given


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name: str) -> None:
    found = record(name)
    assert (found.status, found.problem) == ("plain", "")
    assert found.packed_calls == 0
    assert any(PLAIN[name] in reason for reason in found.reasons), found.reasons


def test_names_are_registered() -> None:
    assert set(PACKED) | set(PLAIN) <= set(architectures())


def _bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0)
    )


def _bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=VOCAB,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        dropout=0.0,
        max_position_embeddings=64,
    )
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("make", "packed", "reason"),
    [(_bert, 0, "it is not causal"), (_t5, 0, "its mask is data"), (_bart, 1, "it is not causal")],
    ids=["bert", "t5", "bart"],
)
def test_encoders(make: Callable[[], PreTrainedModel], packed: int, reason: str) -> None:
    """Bidirectional layers run as written; of BART the decoder's own attention is shared."""
    torch.manual_seed(0)
    model, batch = make().train(), rollouts(prompts=(9, 12), group=3)
    given = dict(batch) if make is _bert else {**batch, "decoder_input_ids": batch["input_ids"]}
    expected = model(**given).logits
    dualkv_compile.reset_stats()
    actual = compiled(model)(**given).logits
    statistics = dualkv_compile.stats()
    assert distance(actual, expected) <= 1e-5
    assert statistics["packed_calls"] == packed
    assert any(reason in text for text in statistics["reasons"])
