"""The base model of the cases, batches written out row by row, and the comparison of all of them with eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.models.harness import Step, build, masked

Batch = Mapping[str, torch.Tensor]


def base(**overrides: Any) -> PreTrainedModel:
    """The model that the cases are stated for."""
    return build("llama", **{"hidden_size": 64, "intermediate_size": 96, **overrides})


def grid(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Rows (prompt, response) as trainers send them: prompts padded on the left, responses on the right."""
    left = max(len(prompt) for prompt, _ in rows)
    right = max(len(response) for _, response in rows)
    ids, mask = [], []
    for prompt, response in rows:
        before, after = left - len(prompt), right - len(response)
        ids.append([pad] * before + [*prompt, *response] + [pad] * after)
        mask.append([0] * before + [1] * (len(prompt) + len(response)) + [0] * after)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def response(seed: int, length: int) -> list[int]:
    """Tokens of a response; responses with different seeds (below 90) differ from their first token on."""
    generator = torch.Generator().manual_seed(seed)
    return [seed + 5, *torch.randint(1, 97, (length - 1,), generator=generator).tolist()][:length]


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``[B, S - 1]``: of each token given those before it."""
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def loss_step(weight: torch.Tensor | None = None, **extra: Any) -> Step:
    """Logits at real tokens, and the mean of -log p over real tokens, weighted by ``weight [B, S]`` if there is one."""

    def step(function: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        logits = function(**{"use_cache": False, **batch, **extra}).logits
        ids = batch["input_ids"]
        mask = batch.get("attention_mask", torch.ones_like(ids))
        counted = (mask if weight is None else mask * weight)[:, 1:].to(logits.dtype)
        loss = -(log_probabilities(logits, ids) * counted).sum() / counted.sum().clamp(min=1)
        return [masked(logits, mask), loss]

    return step
