"""Each tiny model under each way that trainers call it: packed, and equal to eager in outputs and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import dualkv_compile
from tests.models import harness
from tests.models.harness import (
    MODELS,
    VOCAB,
    Outcome,
    assert_packed_and_exact,
    compiled,
    compute_in_float64,
    logits_step,
    masked,
    rollouts,
    run,
    run_alone,
    trie_size,
)


def keys(batch: Mapping[str, torch.Tensor]) -> int:
    return trie_size(*batch.values())


def build(name: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> PreTrainedModel:
    """Two layers of the first model, where values go from packed attention to packed attention, and one of the others.

    Most of the time goes into tracing layers.
    """
    layers = 2 if name == MODELS[0] else 1
    return harness.build(name, dtype, **{"num_hidden_layers": layers, **overrides})


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


LAYOUTS: dict[str, dict[str, Any]] = {
    "left_padding": {"prompts": (9, 12)},
    "right_padding": {"prompts": (12,), "right_padding": (0, 3, 5, 1)},
    "several_prompts_shuffled": {"prompts": (5, 12, 9), "group": (3, 1, 2), "shuffle": True},
    "system_prompt": {"prompts": (12, 12), "group": 2, "system": 6},
    "rows_equal_columns": {"prompts": (3,), "group": 8, "response": 5},
    "rows_equal_heads_and_columns_equal_width": {"prompts": (3,), "group": 4, "response": 5},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(name: str, layout: str) -> None:
    batch = rollouts(**LAYOUTS[layout])
    assert keys(batch) < batch["input_ids"].numel()
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


def test_no_mask(name: str) -> None:
    batch = {"input_ids": rollouts()["input_ids"]}
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


def test_explicit_positions(name: str) -> None:
    batch = rollouts(prompts=(9, 12))
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


def test_positions_without_mask(name: str) -> None:
    batch = {"input_ids": rollouts()["input_ids"]}
    batch["position_ids"] = torch.arange(20).expand(4, -1).contiguous()
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


@pytest.mark.parametrize("keep", [1, 9, 19])
def test_logits_to_keep(name: str, keep: int) -> None:
    batch = rollouts(prompts=(9, 12))
    assert_packed_and_exact(build(name), batch, logits_step(logits_to_keep=keep), tokens=keys(batch))


def test_use_cache(name: str) -> None:
    batch = rollouts(prompts=(9, 12))

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        output = function(**batch, use_cache=True)
        mask = batch["attention_mask"]
        cached = []
        for layer in output.past_key_values.layers:
            for tensor in (layer.keys, layer.values):
                cached.append(tensor * mask[:, None, -tensor.shape[2] :, None])
        return [masked(output.logits, mask), *cached]

    assert_packed_and_exact(build(name), batch, step, tokens=keys(batch))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    batch = rollouts(prompts=(9, 12))
    model = build(name)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    assert_packed_and_exact(model, batch, logits_step(), tokens=keys(batch))


def test_no_grad(name: str) -> None:
    batch = rollouts(prompts=(9, 12))
    with torch.no_grad():
        assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


def test_inference_mode(name: str) -> None:
    with torch.inference_mode():
        batch = {key: tensor.clone() for key, tensor in rollouts(prompts=(9, 12)).items()}
        assert batch["input_ids"].is_inference()
        assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


@pytest.mark.parametrize("layout", ["left_padding", "rows_equal_columns"])
def test_dynamic(name: str, layout: str) -> None:
    batch = rollouts(**LAYOUTS[layout])
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch), dynamic=True)


def test_identical_rows(name: str) -> None:
    batch = rollouts()
    batch = {key: tensor[:1].repeat(4, 1) for key, tensor in batch.items()}
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=20, mutant=False)


def test_branch_in_the_middle_of_responses(name: str) -> None:
    batch = rollouts(group=4)
    ids = batch["input_ids"]
    ids[1, 12:16] = ids[0, 12:16]
    ids[3, 12:15] = ids[2, 12:15]
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=keys(batch))


def test_hf_labels(name: str) -> None:
    batch = rollouts(prompts=(9, 12))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        output = function(**batch, labels=labels, use_cache=False)
        return [output.loss, masked(output.logits, mask)]

    assert_packed_and_exact(build(name), batch, step, tokens=keys(batch))


def test_labels_are_the_input_ids(name: str) -> None:
    batch = {"input_ids": rollouts()["input_ids"]}

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [function(**batch, labels=batch["input_ids"], use_cache=False).loss]

    assert_packed_and_exact(build(name), batch, step, tokens=keys(batch))


def test_grpo_loss_inside(name: str) -> None:
    """Advantages, old log-probabilities and loss masks differ inside the prompt and must not reduce the sharing."""
    batch = rollouts(prompts=(9, 12))
    model = build(name)
    generator = torch.Generator().manual_seed(3)
    rows, columns = batch["input_ids"].shape
    extra = {
        "advantages": torch.randn(rows, generator=generator),
        "old": torch.randn(rows, columns - 1, generator=generator) - 4,
        "loss_mask": torch.randint(0, 2, (rows, columns), generator=generator).float(),
    }

    def loss(input_ids: torch.Tensor, attention_mask: torch.Tensor, **kw: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        logits = logits[:, :-1, :] / 0.9
        logp = torch.log_softmax(logits.float(), -1).gather(-1, input_ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        ratio = torch.exp(torch.clamp(logp - kw["old"], -2, 2))
        weight = kw["loss_mask"][:, 1:] * attention_mask[:, 1:]
        objective = torch.minimum(ratio * kw["advantages"][:, None], ratio.clamp(0.8, 1.2) * kw["advantages"][:, None])
        return -(objective * weight).sum() / weight.sum()

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [function(**batch, **extra)]

    assert_packed_and_exact(model, batch, step, tokens=keys(batch), function=loss)


def test_no_grad_reference_inside(name: str) -> None:
    batch = rollouts(prompts=(9, 12))
    policy, reference = build(name), build(name, initializer_range=0.3)

    def both(**kw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            old = reference(**kw, use_cache=False).logits
        return policy(**kw, use_cache=False).logits, old

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [masked(logits, batch["attention_mask"]) for logits in function(**batch)]

    assert_packed_and_exact(policy, batch, step, tokens=keys(batch), function=both)


def test_autocast_island(name: str) -> None:
    """An autocast region inside the function, itself inside bf16 autocast, with ``enabled=False``."""
    batch = rollouts(prompts=(9, 12))
    model = build(name)

    def island(**kw: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            logits = model(**kw, use_cache=False).logits
        return logits * 2

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [masked(function(**batch), batch["attention_mask"])]

    assert_packed_and_exact(model, batch, step, tokens=keys(batch), function=island)


def test_autocast_bfloat16(name: str) -> None:
    """The error to float64 is at most 1.5 times that of the plain graph under the same autocast."""
    batch = rollouts(prompts=(9, 12))
    model = build(name)
    exact = run_alone(copy.deepcopy(model).double(), logits_step(), batch)
    packed = compiled(model)

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return logits_step()(function, batch)

    plain = run(model, model, step, batch)
    dualkv_compile.reset_stats()
    got = run(model, packed, step, batch)
    assert dualkv_compile.stats()["packed_calls"] == dualkv_compile.stats()["calls"] == 1
    assert dualkv_compile.stats()["reasons"] == {}
    assert dualkv_compile.stats()["tokens_computed"] == keys(batch)

    def errors(outcome: Outcome) -> list[float]:
        pairs = [(outcome.outputs[0], exact.outputs[0])]
        pairs += [(outcome.gradients[n], g) for n, g in exact.gradients.items() if g.abs().max() > 1e-6]
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    ours, theirs = errors(got), errors(plain)
    assert max(theirs) > 1e-4
    assert sum(ours) <= 1.5 * sum(theirs)
    assert max(ours) <= 1.5 * max(theirs)


@pytest.mark.parametrize("options", [{"compiler": "eager"}, {"compiler": "aot_eager"}])
def test_float64(name: str, options: dict[str, Any]) -> None:
    """To 1e-12, where the model itself computes in float64 (its norms, and the tables of rotary positions)."""
    batch = rollouts(prompts=(9, 12))
    model = build(name, torch.float64)
    if name != "gpt2":
        compute_in_float64(model)
    assert_packed_and_exact(model, batch, logits_step(), tokens=keys(batch), tolerance=1e-12, **options)


def test_vocabulary_is_what_the_batches_use() -> None:
    assert int(rollouts()["input_ids"].max()) < VOCAB
