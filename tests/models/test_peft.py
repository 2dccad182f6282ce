"""Adapters of PEFT on a tiny model: packed and exact where copies are equal, plain with a reason where they are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualkv_compile
from tests.models.harness import (
    assert_packed_and_exact,
    build,
    compiled,
    compute_in_float64,
    largest_distance,
    logits_step,
    rollouts,
    run,
    run_alone,
    trie_size,
)

peft = pytest.importorskip("peft")
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(base: nn.Module | None = None, **config: Any) -> Any:
    """A model with a LoRA adapter that changes its outputs (by default PEFT starts at no change)."""
    if base is None:
        base = build("llama", torch.float64, num_hidden_layers=1)
        compute_in_float64(base)
    given = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **config}
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(**given)).double().train()


def batch() -> dict[str, torch.Tensor]:
    return rollouts(prompts=(9, 12), group=2)


def plain_reasons(model: Any, arguments: Mapping[str, Any], *, tolerance: float = 1e-12) -> dict[str, int]:
    """Compiled equals eager, nothing is packed, and something is told; gives what is told."""
    step = logits_step(**arguments)
    torch.manual_seed(1)
    expected = run_alone(model, step, batch())
    dualkv_compile.reset_stats()
    got = run(model, compiled(model), step, batch())
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == 0 < stats["plain_calls"]
    assert stats["reasons"]
    assert largest_distance(got, expected) <= tolerance
    return dict(stats["reasons"])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"use_rslora": True, "target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
        {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["plain", "all_linear", "embedding_and_trained_head"],
)
def test_lora(config: dict[str, Any]) -> None:
    model = adapted(**config)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    found = run_alone(model, logits_step(), batch()).gradients
    assert sorted(found) == sorted(trained)
    assert all("lora" in name or "lm_head" in name for name in trained)
    tokens = trie_size(*batch().values())
    assert_packed_and_exact(model, batch(), logits_step(), tokens=tokens, tolerance=1e-12)


def test_dropout_of_the_adapter_counts_in_training_only() -> None:
    model = adapted(lora_dropout=0.05)
    dualkv_compile.reset_stats()
    run(model, compiled(model), logits_step(), batch())
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == 0
    (reason,) = stats["reasons"]
    assert "dropout with p=0.05 in training" in reason
    assert "lora_A(dropout(x))" in reason
    tokens = trie_size(*batch().values())
    assert_packed_and_exact(model.eval(), batch(), logits_step(), tokens=tokens, tolerance=1e-12)


def test_another_adapter_and_none() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    model.double().set_adapter("other")
    tokens = trie_size(*batch().values())
    assert_packed_and_exact(model, batch(), logits_step(), tokens=tokens, tolerance=1e-12)
    with model.disable_adapter():
        assert_packed_and_exact(model, batch(), logits_step(), tokens=tokens, tolerance=1e-12)


def test_adapters_of_their_own_for_rows() -> None:
    """Rows of one prompt under different adapters have equal tokens and different values."""
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    model.double().eval()
    names = ["default", "other", "other", "default"]
    reasons = plain_reasons(model, {"adapter_names": names})
    assert any("sub_batch" in reason for reason in reasons)
    alone = run_alone(model, logits_step(), batch()).outputs[0]
    mixed = run_alone(model, logits_step(adapter_names=names), batch()).outputs[0]
    assert not torch.allclose(alone, mixed)


def test_checkpointing_starts_from_hidden_states_that_require_a_gradient() -> None:
    """PEFT makes the embedded tokens require one by a hook, which Dynamo runs between two graphs."""
    model = adapted(target_modules=["q_proj"])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    assert any("requires grad" in reason for reason in plain_reasons(model, {}))


class Int8Linear(nn.Linear):
    """Weights kept as int8 with a scale for each output, as weight-only quantisation keeps them."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__(dense.in_features, dense.out_features, bias=False)
        scale = dense.weight.detach().abs().amax(1) / 127
        self.weight = nn.Parameter((dense.weight.detach() / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])


def test_lora_on_int8_weights() -> None:
    base = build("llama", torch.float64, num_hidden_layers=1)
    compute_in_float64(base)
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            base.set_submodule(name, Int8Linear(module))
    model = adapted(base)
    assert sum(p.dtype == torch.int8 for p in model.parameters()) == 7
    tokens = trie_size(*batch().values())
    assert_packed_and_exact(model, batch(), logits_step(), tokens=tokens, tolerance=1e-12)


def test_dora(monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT reads the weights in a way that breaks the graph; where it does not, the norms of weights are as written."""
    config = {"use_dora": True, "target_modules": ["q_proj"]}
    assert any("requires grad" in reason for reason in plain_reasons(adapted(**config), {}))
    monkeypatch.setattr("peft.tuners.lora.dora.dequantize_module_weight", lambda module: module.weight)
    tokens = trie_size(*batch().values())
    assert_packed_and_exact(adapted(**config), batch(), logits_step(), tokens=tokens, tolerance=1e-12)
