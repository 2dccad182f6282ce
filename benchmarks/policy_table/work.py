"""Floating-point operations of an update, counted from shapes: what is executed, and what replicated rows would take.

A token of a decoder takes 2 operations per weight it meets forward and 4 backward; a visible query-key pair takes
4 * D per head forward and 10 * D backward (fused kernels compute the scores again). Gradient checkpointing makes the
forward pass of every layer twice. The head runs on the tokens that are scored, forward twice (by chunks) and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from policy_table.batch import Batch


@dataclass(frozen=True)
class Work:
    """Teraflops of one update."""

    decoder: float
    attention: float
    head: float

    @property
    def total(self) -> float:
        return self.decoder + self.attention + self.head


def weights_met(model: PreTrainedModel) -> int:
    """Weights in matrix products that a token meets in all layers; of experts, those it is sent to."""
    layers = model.get_decoder().layers
    total = 0
    for name, parameter in layers.named_parameters():
        if ".experts." in name:
            config = model.config
            total += parameter.numel() * config.num_experts_per_tok // config.num_experts
        elif parameter.dim() == 2:
            total += parameter.numel()
    return total


def pairs(batch: Batch, *, shared: bool, padded: bool) -> int:
    """Query-key pairs, causal halves as halves. ``padded``: padding is computed like tokens."""
    prompt, rows = batch.prompt, batch.rows
    lengths = [batch.columns - prompt] * rows if padded else batch.lengths
    own = sum(prompt * length + length * (length + 1) // 2 for length in lengths)
    prompts = batch.prompts if shared else rows
    return prompts * (prompt * (prompt + 1) // 2) + own


def tokens(batch: Batch, *, shared: bool, padded: bool) -> int:
    """Tokens that go through the layers."""
    responses = batch.rows * (batch.columns - batch.prompt) if padded else batch.scored
    return (batch.prompts if shared else batch.rows) * batch.prompt + responses


def count(model: PreTrainedModel, batch: Batch, *, shared: bool, padded: bool, recomputed: bool) -> Work:
    """What an update takes; see the module."""
    config = model.config
    forwards = 2 if recomputed else 1
    met = weights_met(model)
    each = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    head = config.vocab_size * config.hidden_size
    return Work(
        decoder=2 * met * tokens(batch, shared=shared, padded=padded) * (forwards + 2) / 1e12,
        attention=4 * each * pairs(batch, shared=shared, padded=padded) * (forwards + 2.5) / 1e12,
        head=2 * head * batch.scored * (2 + 2) / 1e12,
    )
