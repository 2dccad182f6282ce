"""Small models of transformers' causal decoders: packed or not, exact in any case.

The lists say what is expected of each architecture; ``benchmarks/zoo.py`` runs all of them and writes
``docs/models.md``. Each record holds what this file asserts: logits and every gradient agree with eager, work fell by
the share of distinct tokens, and another prompt token moves the response.
"""

from __future__ import annotations

import functools

import pytest

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
