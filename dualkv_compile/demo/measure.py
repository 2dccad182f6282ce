"""One policy-gradient step, run by several ways of executing the model, timed and compared with eager."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dualkv_compile.demo.loss import grpo_loss, token_log_probs
from dualkv_compile.demo.rollouts import Rollouts

REFERENCE = "eager"
BACKEND = "dualkv"
WAYS = (REFERENCE, "inductor", BACKEND)

Forward = Callable[..., Any]
Gradients = dict[str, Tensor]


@dataclass
class Measurement:
    """What one way of running the step took and gave.

    Attributes:
        first: seconds of the first step, compilation included.
        seconds: seconds of every timed step, forward and backward.
        peak_bytes: largest sum of tensor memory that one step held at a time, weights and inputs apart.
        tokens: token positions that the model computed in one step.
        loss: the loss of the first step.
        log_probs: float32 [B, R], of the first step.
        log_prob_difference: largest absolute difference to eager at a generated token.
        gradient_difference: see ``gradient_difference``; against eager.
    """

    way: str
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    tokens: int = 0
    loss: float = 0.0
    log_probs: Tensor = field(default_factory=lambda: torch.empty(0))
    log_prob_difference: float = 0.0
    gradient_difference: float = 0.0

    @property
    def warm(self) -> float:
        """Median seconds of a step after compilation."""
        return statistics.median(self.seconds)

    @property
    def compilation(self) -> float:
        """Seconds that the first step took beyond a warm one."""
        return max(0.0, self.first - self.warm)


def step(model: torch.nn.Module, forward: Forward, batch: Rollouts) -> tuple[float, Tensor]:
    """Forward and backward of the GRPO loss; gives the loss and the log-probabilities [B, R], leaves ``.grad``."""
    length = batch.response_length
    output = forward(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False, logits_to_keep=length + 1
    )
    # The logits at a column are about the next token: the last prompt column speaks of the first response token.
    log_probs = token_log_probs(output.logits[:, :-1], batch.input_ids[:, -length:])
    loss = grpo_loss(log_probs, batch.old_log_probs, batch.advantages, batch.response_mask)
    loss.backward()
    return loss.item(), log_probs.detach()


def measure(
    model: torch.nn.Module,
    batch: Rollouts,
    ways: Sequence[str],
    repeats: int,
    report: Callable[[str], None],
) -> list[Measurement]:
    """Run the step by every way in ``ways``, of which the first is ``REFERENCE``.

    ``report`` is called before each step with a line that says what runs now (``steps`` says how often).
    """
    forwards = {way: _forward(model, way) for way in ways}
    results = {way: Measurement(way, tokens=batch.input_ids.numel()) for way in ways}
    reference: Gradients = {}
    for way, result in results.items():
        report(f"{way}: first step")
        result.first, (result.loss, result.log_probs) = _timed(model, forwards[way], batch)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if way == REFERENCE:
            reference = gradients
        result.gradient_difference = gradient_difference(gradients, reference)
        difference = (result.log_probs - results[REFERENCE].log_probs) * batch.response_mask
        result.log_prob_difference = difference.abs().max().item()
        del gradients
    # Interleaved, so that whatever else the machine does meets all ways alike.
    for number in range(1, repeats + 1):
        for way, result in results.items():
            report(f"{way}: timed step {number} of {repeats}")
            # Watching memory costs about as much as a few small operators, for all ways alike.
            if number == repeats:
                seconds, result.peak_bytes = _watched(model, forwards[way], batch)
            else:
                seconds, _ = _timed(model, forwards[way], batch)
            result.seconds.append(seconds)
    model.zero_grad(set_to_none=True)
    return list(results.values())


def steps(ways: Sequence[str], repeats: int) -> int:
    """How many steps ``measure`` runs."""
    return len(ways) * (1 + repeats)


def gradient_difference(gradients: Gradients, reference: Gradients) -> float:
    """Largest over the parameters of max |g - reference| / max |reference|.

    A parameter whose reference gradient is at most 1e-7 of the largest of all is measured on the scale of the largest:
    it holds nothing but rounding. A missing gradient is an infinite difference.
    """
    if gradients.keys() != reference.keys():
        return float("inf")
    scales = {name: value.abs().max().item() for name, value in reference.items()}
    largest = max(scales.values(), default=0.0)
    worst = 0.0
    for name, value in reference.items():
        scale = scales[name] if scales[name] > 1e-7 * largest else largest
        difference = (gradients[name] - value).abs().max().item()
        if difference != difference:
            return float("inf")
        worst = max(worst, difference / scale if scale > 0 else float(difference > 0))
    return worst


def _forward(model: torch.nn.Module, way: str) -> Forward:
    return model if way == REFERENCE else torch.compile(model, backend=way)


def _timed(model: torch.nn.Module, forward: Forward, batch: Rollouts) -> tuple[float, tuple[float, Tensor]]:
    model.zero_grad(set_to_none=True)
    gc.collect()
    start = time.perf_counter()
    outcome = step(model, forward, batch)
    return time.perf_counter() - start, outcome


def _watched(model: torch.nn.Module, forward: Forward, batch: Rollouts) -> tuple[float, int]:
    """Seconds of one step, and the highest running sum of what torch's allocator gave and took back during it.

    Unlike the resident size of the process this does not depend on what ran before, and it counts every buffer of
    compiled code as well.
    """
    model.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        seconds, _ = _timed(model, forward, batch)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    if results is None:
        raise RuntimeError("torch.profiler gave no memory events")
    events = [event for event in results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return seconds, max(accumulate(changes), default=0)
