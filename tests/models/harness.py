"""Comparing a compiled model with eager: outputs, every gradient, and proof that the packed graph really ran.

``assert_packed_and_exact`` fails when a call falls back, when a reason is recorded, when the number of computed tokens
is not that of a brute-force prefix trie, when the packed graph does more work than its share, and when the comparison
itself is blind: a mutant batch (one prompt token of one row changed) must move the outputs by far more than the
tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, PreTrainedModel, Qwen3Config

import dualkv_compile

MODELS = ("llama", "qwen3", "mistral", "gpt2")
VOCAB = 97


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """A tiny random model. ``initializer_range=0.2``: at 0.02 an off-by-one position would hardly move the logits."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    common.update(overrides)
    torch.manual_seed(0)
    if name == "llama":
        config: Any = LlamaConfig(**common)
    elif name == "qwen3":
        config = Qwen3Config(**{"head_dim": 8, **common})
    elif name == "mistral":
        config = MistralConfig(sliding_window=6, head_dim=8, **common)
    elif name == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB,
            n_positions=64,
            n_embd=common["hidden_size"],
            n_layer=common["num_hidden_layers"],
            n_head=common["num_attention_heads"],
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            initializer_range=0.2,
            bos_token_id=0,
            eos_token_id=0,
        )
    else:
        raise ValueError(name)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    model.train()
    return model


def rollouts(
    prompts: tuple[int, ...] = (12,),
    group: int | tuple[int, ...] = 4,
    response: int = 8,
    *,
    seed: int = 1,
    shuffle: bool = False,
    right_padding: tuple[int, ...] = (),
    system: int = 0,
) -> dict[str, torch.Tensor]:
    """A batch as trainers send it: prompts left-padded to one length, each repeated, each with its own response.

    ``system`` tokens at the start of every prompt are common to all; ``right_padding`` gives pad counts of the first
    rows.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, VOCAB, (count,), generator=generator)

    width = max(prompts)
    common = tokens(system)
    groups = (group,) * len(prompts) if isinstance(group, int) else group
    rows, masks = [], []
    for length, size in zip(prompts, groups, strict=True):
        prompt = torch.cat([torch.zeros(width - length, dtype=torch.long), common, tokens(length - system)])
        for member in range(size):
            tail = tokens(response)
            # Distinct first tokens, so that the number of shared tokens is known.
            tail[0] = 1 + member
            rows.append(torch.cat([prompt, tail]))
            masks.append(torch.cat([torch.zeros(width - length), torch.ones(length + response)]).long())
    ids, mask = torch.stack(rows), torch.stack(masks)
    for row, count in enumerate(right_padding):
        if count:
            ids[row, -count:] = 0
            mask[row, -count:] = 0
    if shuffle:
        order = torch.randperm(len(rows), generator=generator)
        ids, mask = ids[order], mask[order]
    return {"input_ids": ids, "attention_mask": mask}


def trie_size(*keys: torch.Tensor) -> int:
    """The number of distinct (prefix of all keys) in a batch: the size of the prefix trie."""
    seen = set()
    columns = torch.stack([key.long() for key in keys], dim=-1)
    for row in columns.tolist():
        prefix: tuple[Any, ...] = ()
        for column in row:
            prefix = (*prefix, tuple(column))
            seen.add(prefix)
    return len(seen)


@dataclass
class Outcome:
    """What one forward and backward pass gave."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


Step = Callable[[Callable[..., Any], Mapping[str, torch.Tensor]], list[torch.Tensor]]


def run(model: PreTrainedModel, function: Callable[..., Any], step: Step, batch: Mapping[str, torch.Tensor]) -> Outcome:
    """One step: outputs of ``step`` and, where they require it, the gradients of a fixed random functional of them."""
    model.zero_grad(set_to_none=True)
    outputs = step(function, batch)
    total: Any = 0
    generator = torch.Generator().manual_seed(7)
    for output in outputs:
        if output.requires_grad:
            weight = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output.dtype)
            total = total + (output * weight).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Outcome([output.detach().clone() for output in outputs], gradients)


def run_alone(model: PreTrainedModel, step: Step, batch: Mapping[str, torch.Tensor]) -> Outcome:
    """One step of the model as it is."""
    return run(model, model, step, batch)


def compute_in_float64(model: PreTrainedModel) -> None:
    """Replace the parts of a float64 Hugging Face model that round to float32: RMS norms and rotary tables."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = partial(_rotary, module.inv_freq.double())


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def _rotary(
    frequencies: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].double() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def distance(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute value (of the reference ``b``)."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert bool(torch.isfinite(a).all()) == bool(torch.isfinite(b).all())
    scale = max(b.abs().max().item() if b.numel() else 0.0, floor, 1e-30)
    return (a.double() - b.double()).abs().max().item() / scale if a.numel() else 0.0


def largest_distance(got: Outcome, expected: Outcome) -> float:
    """The worst output or gradient; a gradient far below the largest one is measured against that."""
    assert len(got.outputs) == len(expected.outputs)
    assert got.gradients.keys() == expected.gradients.keys()
    worst = max(distance(a, b) for a, b in zip(got.outputs, expected.outputs, strict=True))
    if expected.gradients:
        floor = 1e-3 * max(g.abs().max().item() for g in expected.gradients.values())
        worst = max(worst, *(distance(got.gradients[n], g, floor) for n, g in expected.gradients.items()))
    return worst


def masked(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits at real tokens, zero elsewhere."""
    return logits * mask[:, -logits.shape[1] :, None].to(logits.dtype)


def logits_step(**extra: Any) -> Step:
    """Call the model and return its logits at real tokens."""

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        arguments: dict[str, Any] = {"use_cache": False, **batch, **extra}
        logits = function(**arguments).logits
        mask = batch.get("attention_mask")
        return [logits if mask is None else masked(logits, mask)]

    return step


EXACT: dict[str, Any] = {"min_shared": 1, "min_saving": 0, "compiler": "eager"}


def compiled(model: Callable[..., Any], *, dynamic: bool | None = None, **options: Any) -> Callable[..., Any]:
    """The function compiled by the backend with everything packed that can be."""
    torch._dynamo.reset()
    return torch.compile(model, backend="dualkv", dynamic=dynamic, options={**EXACT, **options})


def assert_packed_and_exact(
    model: PreTrainedModel,
    batch: Mapping[str, torch.Tensor],
    step: Step,
    *,
    tokens: int,
    function: Callable[..., Any] | None = None,
    tolerance: float = 1e-5,
    calls: int = 1,
    mutant: bool = True,
    dynamic: bool | None = None,
    given: int | None = None,
    **options: Any,
) -> None:
    """The packed graph ran, computed ``tokens`` tokens, and agrees with eager in outputs and gradients."""
    eager = model if function is None else function
    expected = run(model, eager, step, batch)
    packed = compiled(eager, dynamic=dynamic, **options)
    dualkv_compile.reset_stats()
    got = run(model, packed, step, batch)
    stats = dualkv_compile.stats()
    assert stats["reasons"] == {}
    assert stats["calls"] == stats["packed_calls"] == calls
    assert stats["tokens_computed"] == tokens * calls
    error = largest_distance(got, expected)
    assert error <= tolerance, error
    if mutant:
        changed = {name: tensor.clone() for name, tensor in batch.items()}
        ids = changed["input_ids"]
        # The last token that row 0 shares with another row: within reach of a sliding window, and inside the prompt.
        column = int((ids[1:] != ids[0]).long().argmax(1).max()) - 1
        ids[0, column] = ids[0, column] % (VOCAB - 1) + 1
        other = run(model, packed, step, changed)
        assert largest_distance(other, got) > 100 * tolerance
        assert largest_distance(other, run(model, eager, step, changed)) <= tolerance
