"""Prefix trees published from outside, for graphs that see hidden states only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

import dualkv_compile
from dualkv_compile.errors import InputError, RecomputationError, VerificationError
from dualkv_compile.published import Publication, copies_agree
from tests.models.harness import EXACT, VOCAB, build, distance, rollouts, trie_size
from zoo_models.flops import counting

Batch = Mapping[str, Tensor]
BATCH = rollouts(prompts=(12, 9), group=3, shuffle=True)
OTHER = rollouts(prompts=(12, 9), group=3, seed=9)
TOKENS = trie_size(*BATCH.values())


def alternating() -> PreTrainedModel:
    """Sliding and full layers in turn, so that one compiled block is given two kinds of masks."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        use_sliding_window=True,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()


def by_block(model: PreTrainedModel, *, checkpointed: bool | None = None, **options: Any) -> PreTrainedModel:
    """The model with each block compiled on its own; ``checkpointed`` says whether by a reentrant checkpoint."""
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    for block in model.model.layers:
        block.compile(backend="dualkv", options={**EXACT, "compiler": "eager", **options})
        if checkpointed is not None:
            block._compiled_call_impl = recomputed(block._compiled_call_impl, checkpointed)
    return model


def recomputed(call: Callable[..., Any], reentrant: bool) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda *tensors: call(*tensors, **kwargs), *args, use_reentrant=reentrant)

    return run


def logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def step(model: nn.Module, batch: Batch = BATCH) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    out = logits(model, batch)
    out.square().sum().backward()
    return [out.detach(), *gradients(model)]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    # Hugging Face computes norms and rotary angles in float32.
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert distance(a, b) <= 1e-6


def assert_packed(calls: int) -> None:
    statistics = dualkv_compile.stats()
    assert statistics["reasons"] == {}
    assert statistics["packed_calls"] == statistics["calls"] == calls
    assert statistics["tokens_computed"] == calls * TOKENS


@pytest.mark.parametrize("make", [lambda: build("llama", torch.float64), alternating], ids=["llama", "alternating"])
def test_blocks_compiled_one_by_one(make: Callable[[], PreTrainedModel]) -> None:
    model = dualkv_compile.attach(by_block(make()))
    assert_equal(step(model), step(make()))
    assert_packed(len(model.model.layers))
    dualkv_compile.reset_stats()
    with torch.no_grad():  # old log-probabilities
        assert distance(logits(model, BATCH), logits(make(), BATCH)) <= 1e-6
    assert_packed(len(model.model.layers))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("recompute", ["nothing", "in the blocks", "around the blocks"])
def test_work_of_blocks_is_that_of_distinct_tokens(recompute: str, compiler: str) -> None:
    """Forward and backward over all blocks; packing and un-packing at each boundary adds no products."""

    def prepared() -> PreTrainedModel:
        model = alternating()
        if recompute != "nothing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    batch = rollouts(prompts=(24, 17), group=4, shuffle=True)
    tokens, given = trie_size(*batch.values()), batch["input_ids"].numel()
    plain = prepared()
    with counting() as expected_work:
        expected = step(plain, batch)
    # Hugging Face checkpoints inside of what a compiled block runs, other trainers around it.
    around = recompute == "around the blocks"
    model = by_block(alternating() if around else prepared(), checkpointed=False if around else None, compiler=compiler)
    dualkv_compile.attach(model)
    with counting() as work:
        assert_equal(step(model, batch), expected)
    statistics = dualkv_compile.stats()
    assert statistics["reasons"] == {}
    assert statistics["packed_calls"] == statistics["calls"] == len(model.model.layers) * (2 if around else 1)
    assert statistics["tokens_computed"] == statistics["calls"] * tokens
    head = 3 * 2 * given * model.config.hidden_size * VOCAB  # not a block: it runs as written, on the grid
    ideal = (expected_work.total - head) * tokens / given
    assert 0.9 * ideal < work.total - head <= 1.15 * ideal


def test_pieces_of_a_model_whose_graph_breaks_behind_the_embedding() -> None:
    """As PEFT with gradient checkpointing: the embedded tokens are made to require grad by a hook."""

    def prepared() -> PreTrainedModel:
        model = build("llama", torch.float64)
        model.model.embed_tokens.weight.requires_grad_(False)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    model, expected = prepared(), step(prepared())
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    model.compile(backend="dualkv", options={**EXACT, "compiler": "eager"})
    assert_equal(step(dualkv_compile.attach(model)), expected)
    assert_packed(1)


def test_without_a_publication_it_runs_plain_and_says_what_to_do() -> None:
    model = by_block(build("llama", torch.float64))
    assert_equal(step(model), step(build("llama", torch.float64)))
    statistics = dualkv_compile.stats()
    assert statistics["packed_calls"] == 0
    assert all("dualkv_compile.attach(model)" in reason for reason in statistics["reasons"])
    assert len(statistics["reasons"]) == 1
    model = by_block(build("llama", torch.float64), on_unsupported="error")
    with pytest.raises(dualkv_compile.UnsupportedGraphError, match="attach"):
        step(model)


def test_context_that_is_closed_before_the_backward() -> None:
    model, plain = by_block(build("llama", torch.float64), checkpointed=False), build("llama", torch.float64)
    with dualkv_compile.shared_prefixes(**BATCH):
        out = logits(model, BATCH)
    out.square().sum().backward()
    assert_equal([out.detach(), *gradients(model)], step(plain))
    assert dualkv_compile.stats()["packed_calls"] == 4  # two of them recomputations


@pytest.mark.parametrize("order", ["AB", "BA"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_one_batch_while_another_is_open(reentrant: bool, order: str) -> None:
    """Two batches of the same sizes and the same number of tokens: a mix-up would have no other sign."""
    model, plain = by_block(build("llama", torch.float64), checkpointed=reentrant), build("llama", torch.float64)
    losses = {}
    with dualkv_compile.shared_prefixes(**BATCH):
        losses["A"] = logits(model, BATCH).square().sum()
    with dualkv_compile.shared_prefixes(**OTHER):
        losses["B"] = logits(model, OTHER).square().sum()
        for name in order:
            losses[name].backward()
    for batch in (BATCH, OTHER):
        logits(plain, batch).square().sum().backward()
    assert_equal(gradients(model), gradients(plain))
    assert dualkv_compile.stats()["packed_calls"] == 8


def test_recomputation_of_unknown_tensors_raises() -> None:
    """What a checkpoint recomputes from copies (offloaded activations) cannot be told apart."""
    model = by_block(build("llama", torch.float64))
    block = model.model.layers[0]
    call = block._compiled_call_impl

    def copied(hidden: Tensor, **kwargs: Any) -> Any:
        kwargs = {name: tuple(x.clone() for x in value) if isinstance(value, tuple) else value.clone()
                  if isinstance(value, Tensor) else value for name, value in kwargs.items()}  # fmt: skip
        return call(hidden.clone(), **kwargs)

    block._compiled_call_impl = recomputed(copied, True)
    dualkv_compile.attach(model)
    loss = logits(model, BATCH).square().sum()
    with pytest.raises(RecomputationError, match="none of its inputs was seen"):
        loss.backward()


def test_published_rows_that_are_not_those_of_the_inputs() -> None:
    """A mask that the publication does not know: it differs between rows that would share."""
    batch = {name: x.clone() for name, x in BATCH.items()}
    batch["attention_mask"][0, 10:14] = 0
    model, plain = by_block(build("llama", torch.float64)), build("llama", torch.float64)
    with dualkv_compile.shared_prefixes(batch["input_ids"]):
        actual = step(model, batch)
    assert_equal(actual, step(plain, batch))
    statistics = dualkv_compile.stats()
    assert statistics["packed_calls"] == 0
    assert all("differs between rows that share the published prefixes" in text for text in statistics["reasons"])
    with dualkv_compile.shared_prefixes(batch["input_ids"][:4]):
        assert_equal(step(model, batch), step(plain, batch))
    assert any("4 rows of" in text for text in dualkv_compile.stats()["reasons"])


def test_hidden_states_that_differ_between_equal_tokens() -> None:
    """Something besides the tokens is in them: the copies are compared, and the plain graph runs."""
    model, plain = by_block(build("llama", torch.float64)), build("llama", torch.float64)
    shift = torch.randn(6, 1, 32, dtype=torch.float64)
    for one in (model, plain):
        one.model.embed_tokens.register_forward_hook(lambda module, args, output: output + shift)
    assert_equal(step(dualkv_compile.attach(model)), step(plain))
    assert any("differs between rows" in text for text in dualkv_compile.stats()["reasons"])


def test_verify_adds_up_the_gradients_of_copies() -> None:
    model = dualkv_compile.attach(by_block(build("llama", torch.float64), verify="grad"))
    assert_equal(step(model), step(build("llama", torch.float64)))
    assert dualkv_compile.stats()["packed_calls"] == 2


def test_verify_sees_a_gradient_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dualkv_compile.attach(by_block(build("llama", torch.float64), verify="grad"))
    monkeypatch.setattr("dualkv_compile.verify._Check._of_copies", lambda self, index, gradient: gradient)
    with pytest.raises(VerificationError, match="gradient of"):
        step(model)


def test_calls_whose_batch_is_not_known_share_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, plain = dualkv_compile.attach(by_block(build("llama", torch.float64))), build("llama", torch.float64)
    embeds = plain.model.embed_tokens(BATCH["input_ids"]).detach().requires_grad_()
    mask = BATCH["attention_mask"]
    actual, expected = (
        one(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits for one in (model, plain)
    )
    assert distance(actual[mask.bool()], expected[mask.bool()]) <= 1e-6
    assert dualkv_compile.stats()["packed_calls"] == 0
    assert "requires grad: equal rows have gradients of their own" in caplog.text


def test_state_and_arguments_stay_as_they_are() -> None:
    model = build("llama")
    names = list(model.state_dict())
    assert dualkv_compile.attach(model) is model
    assert list(model.state_dict()) == names
    assert distance(model(BATCH["input_ids"], BATCH["attention_mask"]).logits, build("llama")(**BATCH).logits) <= 1e-6
    with pytest.raises(InputError, match="attached already"):
        dualkv_compile.attach(model)
    with pytest.raises(InputError, match="expected a module"):
        dualkv_compile.attach(len)  # type: ignore[arg-type]
    with (
        pytest.raises(InputError, match="same batch"),
        dualkv_compile.shared_prefixes(torch.ones(2, 3), torch.ones(2, 4)),
    ):
        pass
    with pytest.raises(InputError, match="at least one"), dualkv_compile.shared_prefixes():
        pass


def test_copies_agree() -> None:
    plan, _ = Publication([BATCH["input_ids"]]).plan(min_shared=1, valid=None)
    values = torch.randn(plan.tokens, 3)[plan.inverse]
    assert copies_agree(values, plan)
    assert copies_agree(values * (1 + 1e-7), plan)
    shared = plan.inverse.flatten().bincount().argmax()
    row, column = (plan.inverse == shared).nonzero()[-1].tolist()
    for wrong in (1.0, torch.nan):
        changed = values.clone()
        changed[row, column, 1] += wrong
        assert not copies_agree(changed, plan)
    assert copies_agree(torch.full_like(values, torch.nan), plan)
    assert not copies_agree(torch.arange(plan.inverse.numel()).view_as(plan.inverse), plan)


class Half(nn.Module):
    """A block that adds something of each row's own behind its attention, as no model should."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, hidden: Tensor, own: Tensor) -> Tensor:
        rows, columns, width = hidden.shape
        q, k, v = self.project(hidden).view(rows, columns, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return hidden + out.transpose(1, 2).flatten(2) + own


def test_outputs_that_are_not_proven_are_compared() -> None:
    """The second block's input comes from a packed graph, and still differs between equal rows."""
    torch.manual_seed(0)
    table, first, second = nn.Embedding(128, 16, dtype=torch.float64), Half(), Half()
    own = [torch.randn(6, 1, 1, dtype=torch.float64), torch.zeros(6, 1, 1, dtype=torch.float64)]
    ids = BATCH["input_ids"]

    def outcome() -> list[Tensor]:
        out = second(first(table(ids), own[0]), own[1])
        modules = nn.ModuleList([table, first, second])
        modules.zero_grad()
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in modules.parameters())]

    expected = outcome()
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    for block in (first, second):
        block.compile(backend="dualkv", options=EXACT)
    with dualkv_compile.shared_prefixes(ids):
        for a, b in zip(outcome(), expected, strict=True):
            assert distance(a, b) <= 1e-12
    statistics = dualkv_compile.stats()
    assert (statistics["packed_calls"], statistics["plain_calls"]) == (1, 1)
    assert any("differs between rows" in text for text in statistics["reasons"])
