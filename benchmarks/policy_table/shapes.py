"""Shapes of real models, with random weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True)
class Shape:
    """A published model's configuration: transformers' ``model_type`` and its settings."""

    model_type: str
    settings: dict[str, Any] = field(hash=False)

    def build(self, device: torch.device, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
        """The model with random weights, made on ``device``, in training mode."""
        config = AutoConfig.for_model(self.model_type, **{**self.settings, **changes})
        torch.manual_seed(0)
        with device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.train()
        return model


SHAPES = {
    "qwen3-8b": Shape(
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "tie_word_embeddings": False,
        },
    ),
    "llama-3.2-1b": Shape(
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
        },
    ),
    "tiny": Shape(
        "qwen3",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        },
    ),
}


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that has the same parameters (and so the same gradients), to be compiled in another way."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def decoder(model: PreTrainedModel) -> nn.Module:
    """The model without its language-model head."""
    found: nn.Module = model.get_decoder()
    return found
