"""Sampled responses as a trainer hands them to the policy update: left-padded prompts, right-padded responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dualkv_compile.demo.loss import group_advantages
from dualkv_compile.demo.model import Policy
from dualkv_compile.demo.problems import Problem, ProblemSet, reward

# The stand-in for a tokenizer when there is none: prompts of this many random tokens, one fewer for every next prompt.
RANDOM_PROMPT = 384


@dataclass(frozen=True)
class Rollouts:
    """A batch of B = prompts * rollouts rows of P prompt columns and R response columns.

    Attributes:
        input_ids: int64 [B, P + R]; prompts padded on the left, responses on the right.
        attention_mask: int64 [B, P + R]; 0 at padding.
        response_mask: float32 [B, R]; 1 at generated tokens, the end-of-turn token included.
        old_log_probs: float32 [B, R]; what the sampler gave each generated token, 0 at padding.
        rewards: float32 [B]; 1 for a right answer, else 0.
        advantages: float32 [B]; rewards normalised within each prompt's group.
        shaped: whether all rewards of every group were equal, so that length was used in their place.
        texts: the responses.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    old_log_probs: Tensor
    rewards: Tensor
    advantages: Tensor
    shaped: bool
    texts: tuple[str, ...]

    @property
    def response_length(self) -> int:
        """R, the columns of the responses."""
        return self.response_mask.shape[1]

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each row's prompt, padding apart."""
        return self.attention_mask[:, : -self.response_length].sum(1).tolist()

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each row's response, padding apart."""
        return self.response_mask.sum(1).long().tolist()


def sample(policy: Policy, problems: ProblemSet, prompts: int, rollouts: int, new_tokens: int, seed: int) -> Rollouts:
    """Sample ``rollouts`` responses to each of the first ``prompts`` problems, with a KV cache, at temperature 1."""
    chosen = problems.problems[:prompts]
    prompt = _encode(policy, problems, chosen) if policy.pretrained else _random_prompt(policy, prompts, seed)
    width = prompt["input_ids"].shape[1]
    torch.manual_seed(seed)
    policy.model.eval()
    generated = policy.model.generate(
        **prompt,
        num_return_sequences=rollouts,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    sequences, logits = generated.sequences, generated.logits
    response = sequences[:, width:]
    mask = _until_end(response, policy.model.config.eos_token_id)
    scores = policy.model.compute_transition_scores(sequences, logits, normalize_logits=True)
    texts = _decode(policy, response, mask)
    answered = [reward(problem, text) for problem, text in zip(_each(chosen, rollouts), texts, strict=True)]
    rewards = torch.tensor(answered if policy.pretrained else [0.0] * len(texts))
    advantages = group_advantages(rewards, rollouts)
    shaped = not bool(advantages.any())
    if shaped:
        # Without any difference between rewards the gradient would be zero and the comparison empty: prefer brevity.
        advantages = group_advantages(-mask.sum(1) / new_tokens, rollouts)
    if not bool(advantages.any()):
        # Equal lengths as well (random weights never end a response): alternate, as nothing better is known.
        advantages = torch.ones(len(texts)).view(-1, rollouts)
        advantages[:, ::2] = -1.0
        advantages = advantages.view(-1)
    keep = prompt["attention_mask"].repeat_interleave(rollouts, 0)
    return Rollouts(
        input_ids=sequences,
        attention_mask=torch.cat([keep, mask.to(keep.dtype)], dim=1),
        response_mask=mask,
        old_log_probs=torch.where(mask.bool(), scores, 0.0),
        rewards=rewards,
        advantages=advantages,
        shaped=shaped,
        texts=texts,
    )


def _each(problems: Sequence[Problem], rollouts: int) -> list[Problem]:
    return [problem for problem in problems for _ in range(rollouts)]


def _encode(policy: Policy, problems: ProblemSet, chosen: Sequence[Problem]) -> dict[str, Tensor]:
    chats = [
        policy.tokenizer.apply_chat_template(problems.chat(problem), add_generation_prompt=True, tokenize=False)
        for problem in chosen
    ]
    policy.tokenizer.padding_side = "left"
    encoded: Any = policy.tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
    return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def _random_prompt(policy: Policy, prompts: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = min(RANDOM_PROMPT, policy.model.config.max_position_embeddings // 2)
    ids = torch.randint(3, policy.model.config.vocab_size, (prompts, width), generator=generator)
    mask = (torch.arange(width) >= torch.arange(prompts)[:, None]).long()
    return {"input_ids": ids.masked_fill(mask == 0, policy.model.config.pad_token_id), "attention_mask": mask}


def _until_end(response: Tensor, end: int) -> Tensor:
    """Float mask [B, R] of the tokens up to and including the first ``end``; never judged from the padding's id."""
    ended = response == end
    return ((ended.cumsum(1) - ended.long()) == 0).float()


def _decode(policy: Policy, response: Tensor, mask: Tensor) -> tuple[str, ...]:
    rows = [row[: int(length)].tolist() for row, length in zip(response, mask.sum(1), strict=True)]
    if policy.tokenizer is None:
        return tuple(" ".join(map(str, row)) for row in rows)
    return tuple(policy.tokenizer.batch_decode(rows, skip_special_tokens=True))
