"""Sums of exponentials, odd sizes, head ratios, precisions and dropout: where attention usually goes wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM

import dualkv_compile
from dualkv_compile import PrefixPlan, packed_attention
from dualkv_compile.kernels import packed_attention as operator
from dualkv_compile.kernels import reference
from dualkv_compile.kernels.block_classes import EMPTY, FULL, classify_blocks
from dualkv_compile.kernels.merge import merge
from tests.cases.common import base, grid, loss_step, response
from tests.models.harness import (
    Outcome,
    Step,
    assert_packed_and_exact,
    build,
    compiled,
    largest_distance,
    logits_step,
    rollouts,
    run,
    trie_size,
)

INF = math.inf
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


# ------------------------------------------------------------------ merging


def test_opposite_values_of_prefix_and_suffix_cancel() -> None:
    """Case 13: logits {0} and {0}, values +1 and -1."""
    out, lse = merge([torch.ones(1, 1), -torch.ones(1, 1)], [torch.zeros(1), torch.zeros(1)])
    assert out.item() == 0.0
    assert lse.item() == pytest.approx(math.log(2), rel=1e-7)
    # Two keys against one: an LSE in base 2 would weigh them otherwise.
    out, _ = merge([torch.ones(1, 1), -torch.ones(1, 1)], [torch.full((1,), math.log(2)), torch.zeros(1)])
    assert out.item() == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize("strategy", ["regions", "blocks"])
def test_opposite_values_of_prompt_and_response_cancel(strategy: str) -> None:
    """Case 13 through the whole kernel: one prompt token with v = 1, one response token a row with v = -1."""
    plan = PrefixPlan.from_rows(torch.tensor([[1, 2], [1, 3], [1, 4]]), min_shared=1)
    assert plan.tokens == 4
    q = torch.zeros(1, 1, 4, 8)
    v = torch.where(plan.column == 0, 1.0, -1.0)[None, None, :, None].expand(1, 1, 4, 8)
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    out, lse = operator.packed_attention(q, q, v.contiguous(), *tree, scale=1.0, strategy=strategy)
    assert torch.equal(out[0, 0, :, 0], torch.where(plan.column == 0, 1.0, 0.0))
    assert torch.allclose(lse[0, 0], torch.log(plan.column + 1.0))


@pytest.mark.parametrize("sides", [(-INF, -INF), (-INF, 0.5), (0.5, -INF), (INF, 0.5), (INF, INF), (INF, -INF)])
def test_merge_of_empty_and_infinite_states(sides: tuple[float, float]) -> None:
    """Case 14: no NaN, forward and backward; an empty side has no part in it."""
    outs = [torch.full((1,), 0.0 if side == -INF else n + 1.0).requires_grad_() for n, side in enumerate(sides)]
    lses = [torch.tensor(side).requires_grad_() for side in sides]
    out, lse = merge(outs, lses)
    top = [n + 1.0 for n, side in enumerate(sides) if side == max(sides) != -INF]
    assert out.item() == (sum(top) / len(top) if top else 0.0)
    assert lse.item() == max(sides)
    out.sum().backward()
    for tensor, side in zip([*outs, *lses], [*sides, *sides], strict=True):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
        assert side != -INF or tensor.grad.abs().sum() == 0.0


# ------------------------------------------------------------------ sizes


SIZES = {1025: {"prompts": (513,), "group": 4, "response": 128}, 100: {"prompts": (20,), "group": 4, "response": 20}}


@pytest.mark.parametrize("strategy", ["regions", "blocks"])
@pytest.mark.parametrize("tokens", SIZES)
def test_soft_cap_and_a_number_of_tokens_that_fits_no_block(tokens: int, strategy: str) -> None:
    """Case 15: 1025 tokens, and 100 tokens where blocks have 128; logits are capped."""
    batch = rollouts(**SIZES[tokens])  # type: ignore[arg-type]
    model = build("llama")

    def capped(**batch: Tensor) -> Tensor:
        return 4.0 * torch.tanh(model(**batch, use_cache=False).logits / 4.0)

    assert 3.0 < capped(**batch).abs().max() <= 4.0
    step: Step = lambda function, batch: [function(**batch)]  # noqa: E731
    assert_packed_and_exact(model, batch, step, tokens=tokens, function=capped, attention=strategy)


def test_soft_cap_inside_of_attention_is_kept() -> None:
    """Case 15: Gemma 2 writes its attention out in products with a cap between them, which packed attention applies."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=40,
        initializer_range=0.2,
        attn_logit_softcapping=2.0,
    )
    model = Gemma2ForCausalLM._from_config(config, attn_implementation="eager").train()
    batch = rollouts(**SIZES[100])  # type: ignore[arg-type]
    function = compiled(model)
    dualkv_compile.reset_stats()
    found = run(model, function, logits_step(), batch)
    assert largest_distance(found, run(model, model, logits_step(), batch)) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 1
    assert dualkv_compile.stats()["reasons"] == {}
    # The cap is at work.
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert largest_distance(found, run(model, model, logits_step(), batch)) > 1e-3


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("tokens", [100, 1025])
def test_block_classes_of_a_last_block_that_is_not_full(tokens: int, block: int) -> None:
    """Case 15: they agree with the dense mask, and tokens that do not exist count for nothing."""
    ids = rollouts(**SIZES[tokens])["input_ids"]  # type: ignore[arg-type]
    plan = PrefixPlan.from_rows(ids, min_shared=1)
    visible = reference.tree_visible(plan.rank, plan.column, plan.end)
    count = -(-tokens // block)
    expected = [
        [1 + int(part.all()) if part.any() else EMPTY for part in queries.split(block, 1)]
        for queries in visible.split(block)
    ]
    assert classify_blocks(plan, block).tolist() == expected
    assert len(expected) == count
    assert tokens < block or any(FULL in row for row in expected) == (tokens == 1025)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (14, 2)])
def test_grouped_heads_in_ratios_that_are_no_power_of_two(heads: int, kv_heads: int) -> None:
    """Case 16."""
    model = build("llama", hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    batch = rollouts(prompts=(9, 12))
    assert_packed_and_exact(model, batch, loss_step(), tokens=trie_size(*batch.values()))


# ------------------------------------------------------------------ precision


def error_of(found: Outcome, exact: Outcome) -> dict[str, float]:
    """Relative errors (2-norm) of outputs and of all gradients together."""

    def norm(tensors: list[Tensor]) -> float:
        return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))

    errors = {
        f"output {n}": norm([a.double() - b]) / norm([b])
        for n, (a, b) in enumerate(zip(found.outputs, exact.outputs, strict=True))
    }
    differences = [found.gradients[name].double() - gradient for name, gradient in exact.gradients.items()]
    errors["gradients"] = norm(differences) / norm(list(exact.gradients.values()))
    return errors


def test_autocast_with_queries_and_keys_in_float32_and_values_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 17: QK-norm and rotary embedding leave q and k in float32."""
    model = build("qwen3")
    batch = rollouts(prompts=(9, 12))
    exact = run(double := copy.deepcopy(model).double(), double, loss_step(), batch)
    seen: list[tuple[torch.dtype, ...]] = []
    attention = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.dtype, k.dtype, v.dtype))
        return attention(q, k, v, *args, **kwargs)

    with torch.autocast("cpu", torch.bfloat16):
        with monkeypatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", spy)
            plain = run(model, model, loss_step(), batch)
        function = compiled(model)
        dualkv_compile.reset_stats()
        packed = run(model, function, loss_step(), batch)
    assert set(seen) == {(torch.float32, torch.float32, torch.bfloat16)}
    stats = dualkv_compile.stats()
    assert (stats["calls"], stats["packed_calls"], stats["reasons"]) == (1, 1, {})
    assert stats["tokens_computed"] == trie_size(*batch.values())
    assert [output.dtype for output in packed.outputs] == [output.dtype for output in plain.outputs]
    allowed = error_of(plain, exact)
    assert all(error <= 1.5 * allowed[name] for name, error in error_of(packed, exact).items()), allowed
    assert max(allowed.values()) > 1e-4  # it really ran in bfloat16


CLASSES = [(256, torch.bfloat16, 2e-2), (128, torch.float32, 1e-5), (64, torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "dtype", "tolerance"), CLASSES[:2])
def test_backward_of_large_head_dimensions(dim: int, dtype: torch.dtype, tolerance: float, device: str) -> None:
    """Case 19: on whatever way fits."""
    check_attention(dim, dtype, tolerance, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_head_dimension_64_on_a_gpu() -> None:
    """Case 20: a way of computing attention is right here before it is trusted."""
    check_attention(*CLASSES[2], "cuda")


def check_attention(dim: int, dtype: torch.dtype, tolerance: float, device: str) -> None:
    """Public ``packed_attention`` against float64, forward and backward, two prompts with ragged responses."""
    ids = rollouts(prompts=(70, 150), group=(3, 2), response=40)["input_ids"].to(device)
    plan = PrefixPlan.from_rows(ids, min_shared=1)
    generator = torch.Generator().manual_seed(dim)
    q, k, v, grad = (
        torch.randn(1, heads, plan.tokens, dim, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = packed_attention(*leaves, plan)
    found = [out, *torch.autograd.grad(out, leaves, grad)]
    exact = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    tree = (plan.rank.cpu(), plan.column.cpu(), plan.end.cpu())
    reference_out, _ = reference.packed_attention(*exact, *tree, dim**-0.5)
    expected = [reference_out, *torch.autograd.grad(reference_out, exact, grad.cpu().double())]
    for name, a, b in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert a.dtype == dtype
        error = ((a.detach().cpu().double() - b).abs().max() / b.abs().max()).item()
        assert error <= tolerance, (name, error)


# ------------------------------------------------------------------ dropout


def test_attention_dropout_runs_plain_in_training_and_says_why() -> None:
    """Case 18: and shares in evaluation."""
    model = base(attention_dropout=0.1)
    batch = grid([([11, 12, 13, 14], response(n, 4)) for n in range(3)])
    function = compiled(model)
    dualkv_compile.reset_stats()
    results = []
    for call in (model, function):
        torch.manual_seed(3)
        results.append(run(model, call, loss_step(), batch))
    # The same random numbers, so the plain graph it was.
    assert largest_distance(results[1], results[0]) <= 1e-6
    stats = dualkv_compile.stats()
    assert (stats["packed_calls"], stats["plain_calls"]) == (0, 1)
    (reason,) = stats["reasons"]
    assert "dropout with p=0.1" in reason
    assert "scaled_dot_product_attention" in reason
    assert "dropout with p=0.1" in str(dualkv_compile.explain(model, **batch, use_cache=False))
    assert_packed_and_exact(model.eval(), batch, loss_step(), tokens=4 + 3 * 4)


def test_hidden_dropout_runs_plain_in_training() -> None:
    """Case 18 with the other dropouts of GPT-2."""
    model = build("gpt2")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2
    batch = rollouts()
    function = compiled(model)
    dualkv_compile.reset_stats()
    torch.manual_seed(3)
    expected = model(**batch, use_cache=False).logits
    torch.manual_seed(3)
    assert torch.allclose(function(**batch, use_cache=False).logits, expected, rtol=1e-6, atol=1e-6)
    assert any("dropout with p=0.2" in reason for reason in dualkv_compile.stats()["reasons"])
    assert dualkv_compile.stats()["packed_calls"] == 0
    assert_packed_and_exact(model.eval(), batch, logits_step(), tokens=12 + 4 * 8)
