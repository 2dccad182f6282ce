"""The packed graph compiled by Inductor is as near to eager as the plain graph compiled by Inductor."""

from __future__ import annotations

import pytest
import torch

import dualkv_compile
from tests.models.harness import EXACT, build, largest_distance, logits_step, rollouts, run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_further_from_eager_than_twice_plain_inductor(name: str) -> None:
    """In float64; Hugging Face rounds norms and rotary angles to float32, which Inductor reorders."""
    model = build(name, torch.float64, num_hidden_layers=1)
    batch = rollouts(prompts=(9, 12), group=3, shuffle=True, right_padding=(2, 0, 3))
    expected = run(model, model, logits_step(), batch)
    torch._dynamo.reset()
    plain = run(model, torch.compile(model, backend="inductor"), logits_step(), batch)
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    options = {**EXACT, "compiler": "inductor"}
    packed = run(model, torch.compile(model, backend="dualkv", options=options), logits_step(), batch)
    stats = dualkv_compile.stats()
    assert stats["packed_calls"] == stats["calls"] == 1
    assert stats["reasons"] == {}
    reordering = largest_distance(plain, expected)
    print(f"{name}: plain inductor {reordering:.2e}, packed inductor {largest_distance(packed, expected):.2e}")
    assert largest_distance(packed, expected) <= 2 * reordering + 1e-12
