"""GRPO's loss from hidden states, with log-probabilities by chunks: the same code behind every contender."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualkv_compile.demo.loss import grpo_loss

#: Tokens whose logits exist at a time.
CHUNK = 4096


def _log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, weight).float()
    return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)


_compiled = torch.compile(_log_probs, dynamic=True)


def log_probs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Float32 [M] log-probabilities of ``targets`` [M] by ``hidden`` [M, H] and the head's ``weight`` [V, H].

    Logits are made 4096 tokens at a time and made again in the backward pass.
    """
    cuts = range(0, hidden.shape[0], CHUNK)
    parts = [
        checkpoint(_compiled, hidden[at : at + CHUNK], weight, targets[at : at + CHUNK], use_reentrant=False)
        for at in cuts
    ]
    return torch.cat(parts)


def policy_loss(new: Tensor, advantages: Tensor) -> Tensor:
    """GRPO's loss, averaged over tokens [M], in the first update after the rollouts, where every ratio is 1."""
    each = new.unsqueeze(1)
    return grpo_loss(each, each.detach(), advantages, torch.ones_like(each))
