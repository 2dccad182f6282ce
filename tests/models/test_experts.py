"""Mixture-of-experts layers: packed and exact where each token chooses its experts, on the grid where it does not.

Routing is discontinuous, so everything here is decided in float64. Hand-written layers stand between two attentions:
what follows them must be packed as well. All forms share one model, and so do all near misses, since tracing takes most
of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
import transformers.integrations.moe as moe
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import dualkv_compile
from dualkv_compile import backend as backend_module
from dualkv_compile.passes.rules import experts as rules
from dualkv_compile.runtime import Dispatcher
from tests.models.harness import (
    EXACT,
    VOCAB,
    assert_packed_and_exact,
    compute_in_float64,
    distance,
    logits_step,
    masked,
    rollouts,
    run,
    trie_size,
)

grouped_mm = torch.ops.transformers.grouped_mm_fallback
E, K, C = 4, 2, 16


def keys(batch: Mapping[str, torch.Tensor]) -> int:
    return trie_size(*batch.values())


# -------------------------------------------------------------------------------------------------------- whole models

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "Qwen3Moe": {"norm_topk_prob": True},
    "Mixtral": {},
    "Glm4Moe": {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "GraniteMoe": {},
    "Olmoe": {},
    "MiniMaxM2": {"rotary_dim": 8},
}


@pytest.fixture(autouse=True)
def one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager takes torch's grouped product where it can, which knows no float64; compiled never does for float64."""
    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *_: False)


def family(name: str, implementation: str = "grouped_mm", **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **FAMILIES[name], **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("e_score_correction_bias"):
            nn.init.normal_(buffer, std=0.2)
    model.set_experts_implementation(implementation)
    compute_in_float64(model)
    model.train()
    return model


# Routers round to float32 (a softmax), so whole models agree to that; a flipped choice would show far above it.
whole = partial(assert_packed_and_exact, tolerance=2e-6)


@pytest.mark.parametrize(
    "name",
    ["Glm4Moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen2Moe", "Olmoe", "MiniMaxM2"))],
)
def test_grouped(name: str) -> None:
    batch = rollouts(prompts=(9, 12))
    whole(family(name), batch, logits_step(), tokens=keys(batch))


def test_batched() -> None:
    batch = rollouts(prompts=(9, 12))
    whole(family("GraniteMoe", "batched_mm"), batch, logits_step(), tokens=keys(batch), mutant=False)


def test_dynamic_checkpointed() -> None:
    batch = rollouts(prompts=(9, 12))
    model = family("Qwen3Moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    whole(model, batch, logits_step(), tokens=keys(batch), dynamic=True, mutant=False)


def test_nested_compilation() -> None:
    """Dynamo takes the packed graph, whose sizes are read from tensors, with any number of tokens."""
    batch = rollouts(prompts=(9, 12))
    model = family("Qwen3Moe", num_hidden_layers=1)
    whole(model, batch, logits_step(), tokens=keys(batch), compiler="aot_eager", mutant=False)


@pytest.mark.slow
def test_inductor() -> None:
    batch = rollouts(prompts=(9, 12))
    model = family("Qwen3Moe", num_hidden_layers=1)
    whole(model, batch, logits_step(), tokens=keys(batch), compiler="inductor")


def test_router_logits_and_balancing_loss() -> None:
    """Logits of the routers come back for the whole grid, and the loss that balances experts is made of all of it."""
    batch = rollouts(prompts=(9, 12))

    def step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        output = function(**batch, use_cache=False, labels=batch["input_ids"], output_router_logits=True)
        assert all(logits.shape == (batch["input_ids"].numel(), 4) for logits in output.router_logits)
        return [masked(output.logits, batch["attention_mask"]), output.loss, output.aux_loss, *output.router_logits]

    whole(family("Mixtral"), batch, step, tokens=keys(batch), mutant=False)


def test_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed graph's products, those of the experts included, shrink with the tokens, and are counted as packed."""
    batch = rollouts()
    made: list[Any] = []
    analyse = backend_module.analyse

    def analysed(*args: Any, **kwargs: Any) -> Any:
        made.append(analyse(*args, **kwargs))
        return made[-1]

    class Recorded(Dispatcher):
        def __call__(self, *args: Any) -> Any:
            made.append((self, args))
            return super().__call__(*args)

    monkeypatch.setattr(backend_module, "analyse", analysed)
    monkeypatch.setattr(backend_module, "Dispatcher", Recorded)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(family("Qwen3Moe"), backend="dualkv", options=EXACT)(**batch, use_cache=False)
    analysis, (dispatcher, args) = made
    assert analysis.share == 1

    def product(rows: Any, weight: Any, *_: Any, **__: Any) -> int:
        return int(2 * rows[0] * rows[1] * weight[2])

    def work(graph: Callable[..., Any], inputs: Any) -> tuple[int, int]:
        with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={grouped_mm: product}) as counter:
            graph(*inputs)
        counts = counter.get_flop_counts()["Global"]
        # Torch has no formula for the plain graph's attention on the CPU, so attention is left out of both.
        return sum(count for op, count in counts.items() if "attention" not in str(op)), counts[grouped_mm]

    packed = work(dispatcher.packed.module, dispatcher.prepare(args, dispatcher.find_plans(args)))
    plain = work(dispatcher.plain_module, args)
    computed, given = keys(batch), batch["input_ids"].numel()
    assert packed[1] * given == plain[1] * computed > 0
    assert packed[0] * given == plain[0] * computed


# ----------------------------------------------------------------------------------------------- layers written by hand


Mix = Callable[..., torch.Tensor]


class Layer(nn.Module):
    """A router and the weights of E experts; ``mix(self, x[N, C], weights[N, K], ids[N, K])`` is the case."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        self.mix = mix
        self.router = nn.Linear(C, E)
        self.other = nn.Linear(C, E)
        self.up = nn.Parameter(torch.randn(E, C, 24) * 0.3)
        self.bias = nn.Parameter(torch.randn(E, 24))
        self.down = nn.Parameter(torch.randn(E, 24, C) * 0.3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, C)
        weights, ids = self.router(x).softmax(-1).topk(K, dim=-1)
        return hidden + self.mix(self, x, weights, ids).view(hidden.shape)

    def experts(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return grouped_mm(F.silu(grouped_mm(rows, self.up, offsets)), self.down, offsets)


def ends(ids: torch.Tensor) -> torch.Tensor:
    return torch.histc(ids.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)


class Decoder(nn.Module):
    """An attention, expert layers side by side on its result, and behind each of them an attention and a head."""

    def __init__(self, *mixes: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, C)
        self.layers = nn.ModuleList(nn.Linear(C, 3 * C) for _ in range(2))
        self.between = nn.ModuleList(Layer(mix) for mix in mixes)
        self.head = nn.Linear(C, VOCAB)

    def attend(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        x = self.attend(self.layers[0], self.embed(input_ids))
        return [self.head(self.attend(self.layers[1], between(x))) for between in self.between]


def decoder_step(function: Callable[..., Any], batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    return list(function(batch["input_ids"]))


def errors(*mixes: Mix) -> tuple[dict[str, float], list[str]]:
    """The distance of each layer's output and gradients from eager, and the reasons."""
    model = Decoder(*mixes).double()
    batch = {"input_ids": rollouts()["input_ids"]}
    expected = run(model, model, decoder_step, batch)  # type: ignore[arg-type]
    torch._dynamo.reset()
    function = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    got = run(model, function, decoder_step, batch)  # type: ignore[arg-type]
    stats = dualkv_compile.stats()
    assert stats["calls"] == stats["packed_calls"] == 1, stats
    assert stats["tokens_computed"] == keys(batch)
    found = {mix.__name__: distance(a, b) for mix, a, b in zip(mixes, got.outputs, expected.outputs, strict=True)}
    assert got.gradients.keys() == expected.gradients.keys()
    for name, gradient in got.gradients.items():
        parts = name.split(".")
        owner = mixes[int(parts[1])].__name__ if parts[0] == "between" else "common"
        found[owner] = max(found.get(owner, 0), distance(gradient, expected.gradients[name], 1e-3))
    return found, [*stats["reasons"]]


def sorted_and_added(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    token = order.div(K, rounding_mode="floor")
    rows = m.experts(x.index_select(0, token), ends(flat)) * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros(x.shape, dtype=x.dtype).index_add(0, token, rows)


def put_back(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ids, order = ids.view(-1).to(torch.int32).sort()
    rows = m.experts(x[order // K], torch.histc(ids.double(), E, 0, E).cumsum(0).to(torch.int32))
    out = torch.empty_like(rows)
    out[order] = rows
    return (out.view(-1, K, C) * weights.unsqueeze(-1)).sum(1)


def inverse_by_sorting(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort()
    repeated = x.repeat_interleave(K, dim=0)
    rows = m.experts(repeated[order], ends(ids))[order.argsort()]
    return (rows.unflatten(0, (-1, K)) * weights.unsqueeze(2)).sum(1)


def inverse_by_scattering(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ordered, order = ids.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel()))
    return (m.experts(x[order // K], ends(ordered))[inverse].view(-1, K, C) * weights[..., None]).sum(1)


def gathered_weights(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = x.unsqueeze(1).expand(-1, K, -1).reshape(-1, 1, C)
    up, down = m.up[ids.view(-1)], m.down[ids.view(-1)]
    out = torch.bmm(F.silu(torch.bmm(rows, up)), down).squeeze(1)
    return (out.view(-1, K, C) * weights[..., None]).sum(1)


def dense_over_experts(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    scores = torch.zeros((x.shape[0], E), dtype=x.dtype).scatter(1, ids, weights)
    rows = x.repeat(E, 1) * scores.transpose(0, 1).reshape(-1, 1)
    out = torch.bmm(F.silu(torch.bmm(rows.view(E, -1, C), m.up)), m.down).view(-1, C)
    return out.reshape(E, -1, C).sum(0)


def limited_to_groups(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Sigmoid scores, a bias for choosing only, and experts of the best group only."""
    scores = m.router(x).sigmoid()
    choice = scores + torch.tensor([0.1, -0.2, 0.3, 0.0], dtype=x.dtype)
    best = choice.view(-1, 2, E // 2).topk(2, dim=-1)[0].sum(-1).topk(1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(choice[:, :2]).scatter_(1, best, 1).unsqueeze(-1).expand(-1, -1, E // 2).reshape(-1, E)
    ids = choice.masked_fill(~mask.bool(), float("-inf")).topk(K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return put_back(m, x, weights, ids)


def with_biases(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A bias for each sorted row, added in place."""
    ordered, order = ids.flatten().sort()
    rows = grouped_mm(x[order // K], m.up, ends(ordered))
    rows.add_(m.bias[ordered])
    out = torch.empty_like(x.repeat_interleave(K, 0)).index_copy(0, order, grouped_mm(rows, m.down, ends(ordered)))
    return (out.view(-1, K, C) * weights[..., None]).sum(1)


def one_expert(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    ids, order = m.router(x).argmax(-1).sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return m.experts(x[order], ends(ids))[inverse] * weights[:, :1]


def counts_as_numbers(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """One number per expert, made of all tokens of the grid, does not stop the packing of what uses it."""
    load = torch.histc(ids.float(), bins=E, min=0, max=E - 1)
    return put_back(m, x, weights * (1 + load.double()[ids] / load.sum()), ids)


def mean_over_tokens(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    balance = m.router(x).softmax(-1).mean(0)
    return put_back(m, x, weights / balance[ids], ids)


FORMS = (
    sorted_and_added,
    put_back,
    inverse_by_sorting,
    inverse_by_scattering,
    gathered_weights,
    dense_over_experts,
    limited_to_groups,
    with_biases,
    one_expert,
    counts_as_numbers,
    mean_over_tokens,
)


def test_forms() -> None:
    found, reasons = errors(*FORMS)
    assert max(found.values()) <= 1e-10, found
    assert reasons == []


def test_torch_product() -> None:
    """The grouped product of torch itself, which compiles for bfloat16 only."""
    batch = {"input_ids": rollouts()["input_ids"]}

    def mix(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ordered, order = ids.flatten().sort()
        rows = F.grouped_mm(x.bfloat16()[order // K], m.up.bfloat16(), offs=ends(ordered))
        rows = F.grouped_mm(rows * weights.bfloat16().view(-1)[order, None], m.down.bfloat16(), offs=ends(ordered))
        return torch.zeros_like(x).index_add(0, order // K, rows.to(x.dtype))

    model = Decoder(mix).double()
    assert_packed_and_exact(model, batch, decoder_step, tokens=keys(batch), mutant=False, tolerance=2e-2)


# ---------------------------------------------------------------------------------------------------------- near misses


def expert_choice(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts choose tokens: whether one is chosen depends on all others."""
    scores = m.router(x).softmax(-1)
    chosen, tokens = scores.topk(8, dim=0)
    rows = torch.bmm(F.silu(torch.bmm(x[tokens.t()], m.up)), m.down) * chosen.t().unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, tokens.t().reshape(-1), rows.reshape(-1, C))


def capacity(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each expert drops all tokens after its first ten."""
    chosen = F.one_hot(ids.flatten(), E)
    kept = ((chosen.cumsum(0) - 1) * chosen).sum(-1) < 10
    return dense_over_experts(m, x, weights * kept.view(-1, K), ids)


def capacity_in_order(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same with places in the sorted order."""
    ordered, order = ids.flatten().sort(stable=True)
    counts = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).long()
    place = torch.arange(order.numel()) - (counts.cumsum(0) - counts)[ordered]
    rows = m.experts(x[order // K], counts.cumsum(0).int()) * (place < 10).unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // K, rows)


def counts_of_other_ids(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    rows = m.experts(x[order // K], ends(m.other(x).topk(K, dim=-1)[1]))
    return torch.zeros_like(x).index_add(0, order // K, rows)


def two_orders(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    other = m.other(x).topk(K, dim=-1)[1].flatten().argsort(stable=True)
    rows = m.experts(x[order // K], ends(ids)) * weights.reshape(-1)[other].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, order // K, rows)


def back_by_another_order(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    other = m.other(x).topk(K, dim=-1)[1].flatten().argsort(stable=True)
    return m.experts(x[order // K], ends(ids))[other.argsort()].view(-1, K, C).sum(1)


def not_all_counted(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Ids of -1 are not counted, so they shift the groups of all others by their number."""
    ordered, order = (ids - 1).flatten().sort(stable=True)
    ends = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0, dtype=torch.int32)
    return torch.zeros_like(x).index_add(0, order // K, m.experts(x[order // K], ends))


def downwards(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True, descending=True)
    return torch.zeros_like(x).index_add(0, order // K, m.experts(x[order // K], ends(ids)))


def wrong_divisor(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    return torch.zeros_like(x).index_add(0, order // K, m.experts(x[order // (2 * K)], ends(ids)))


def positions_as_numbers(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    return put_back(m, x, weights + order.view(-1, K) * 1e-2, ids)


def neighbours_in_order(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)
    rows = m.experts(x[order // K], ends(ids))
    rows = rows + rows.view(-1, 2, C).sum(1, keepdim=True).expand(-1, 2, -1).reshape(-1, C)
    return torch.zeros_like(x).index_add(0, order // K, rows)


def first_in_order(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    order = ids.flatten().argsort(stable=True)[:30]
    return torch.zeros_like(x).index_add(0, order // K, x[order // K])


def assignments_backwards(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(K, dim=0).flip(0).view(-1, K, C).sum(1)


def stacks_backwards(m: Layer, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.repeat(E, 1).flip(0).view(E, -1, C).sum(0)


MISSES = {
    expert_choice: "topk",
    capacity: "cumsum",
    capacity_in_order: "positions or counts",
    counts_of_other_ids: "count other ids",
    two_orders: "different columns",
    back_by_another_order: "other assignments",
    not_all_counted: "outside of the counted range",
    downwards: "not sorted by expert",
    wrong_divisor: "something else",
    positions_as_numbers: "positions or counts",
    neighbours_in_order: "sorted dimension",
    first_in_order: "positions or counts",
    assignments_backwards: "flip",
    stacks_backwards: "flip",
}


def test_near_misses() -> None:
    found, reasons = errors(*MISSES)
    assert max(found.values()) <= 1e-10, found
    for mix, says in MISSES.items():
        own = [reason for reason in reasons if f"in {mix.__name__}:" in reason or "in experts:" in reason]
        assert any(says in reason for reason in own), (mix.__name__, own)


def test_range_of_ids_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believing every id to be counted gives wrong results, so the comparison would show it."""
    monkeypatch.setattr(rules, "bound", lambda _: E)
    assert errors(not_all_counted)[0]["not_all_counted"] > 1e-3


def test_same_ids_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does taking any counts for those of the sorted ids."""
    monkeypatch.setattr(rules, "origin", lambda _: "any")
    monkeypatch.setattr(rules, "bound", lambda _: E)
    assert errors(counts_of_other_ids)[0]["counts_of_other_ids"] > 1e-3
