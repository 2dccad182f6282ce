"""The GRPO objective: group-normalised advantages and the clipped ratio of new to old probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, rollouts: int) -> Tensor:
    """Rewards [B] normalised within each group of ``rollouts`` consecutive rows; 0 in a group of equal rewards."""
    groups = rewards.view(-1, rollouts)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, correction=0, keepdim=True) + 1e-6)).view(-1)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [B, R] of ``tokens`` [B, R] under ``logits`` [B, R, V]."""
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def grpo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: float = 0.2) -> Tensor:
    """Clipped policy-gradient loss, averaged over the tokens that ``mask`` [B, R] marks as generated.

    Source: Shao et al. 2024, "DeepSeekMath" (arXiv:2402.03300), without the KL term.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    gain = advantages.unsqueeze(1)
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(objective * mask).sum() / mask.sum()
