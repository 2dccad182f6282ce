"""``padding="drop"``: positions that the mask declares padding cost nothing and come back as zeros; others stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import dualkv_compile
from tests.models.harness import (
    MODELS,
    assert_packed_and_exact,
    build,
    compiled,
    distance,
    logits_step,
    masked,
    rollouts,
    trie_size,
)


def real_trie_size(*keys: Tensor, mask: Tensor) -> int:
    """The number of distinct prefixes (of all keys) that end in a real token."""
    seen = set()
    for row, real in zip(torch.stack([key.long() for key in keys], -1).tolist(), mask.tolist(), strict=True):
        prefix: tuple[Any, ...] = ()
        for column, counts in zip(row, real, strict=True):
            prefix = (*prefix, tuple(column))
            if counts:
                seen.add(prefix)
    return len(seen)


LAYOUTS: dict[str, dict[str, Any]] = {
    "left": {"prompts": (9, 12, 5), "group": (3, 2, 3)},
    "right": {"prompts": (12,), "group": 5, "right_padding": (0, 3, 7, 1, 3)},
    "both_shuffled": {"prompts": (9, 12), "group": 3, "right_padding": (2, 0, 5, 1, 4, 0), "shuffle": True},
    "none": {"prompts": (12,), "group": 4},
}


def keys(batch: Mapping[str, Tensor]) -> int:
    return real_trie_size(*batch.values(), mask=batch["attention_mask"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_real_tokens_are_computed_and_no_others(name: str, layout: str) -> None:
    batch = rollouts(**LAYOUTS[layout])
    tokens = keys(batch)
    padded = layout != "none"
    assert (tokens < trie_size(*batch.values())) == padded
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=tokens, padding="drop")


@pytest.mark.parametrize("name", MODELS)
def test_dropped_positions_are_zero(name: str) -> None:
    batch = rollouts(**LAYOUTS["both_shuffled"])
    mask = batch["attention_mask"].bool()
    model = build(name)
    output = compiled(model, padding="drop")(**batch, use_cache=True)
    assert torch.equal(output.logits[~mask], torch.zeros_like(output.logits[~mask]))
    assert output.logits[mask].abs().amax(-1).min() > 0
    for layer in output.past_key_values.layers:
        for part in (layer.keys, layer.values):
            # The cache of a sliding window holds the last columns only.
            hidden = ~mask[:, -part.shape[2] :]
            assert hidden.any()
            assert part.transpose(1, 2)[hidden].abs().max() == 0
    # By default they are computed as eager does.
    kept = compiled(model)(**batch, use_cache=False).logits
    assert kept[~mask].abs().amax(-1).min() > 0


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_lengths_and_paddings_that_change(dynamic: bool | None) -> None:
    """One function, batches of other shapes and other paddings; the first has none."""
    model = build("llama")
    function = compiled(model, dynamic=dynamic, padding="drop")
    for layout in ("none", "right", "left", "both_shuffled"):
        batch = rollouts(**LAYOUTS[layout])
        mask = batch["attention_mask"]
        dualkv_compile.reset_stats()
        logits = masked(function(**batch, use_cache=False).logits, mask)
        assert distance(logits, masked(model(**batch, use_cache=False).logits, mask)) <= 1e-5
        stats = dualkv_compile.stats()
        assert stats["reasons"] == {}
        assert (stats["packed_calls"], stats["tokens_computed"]) == (1, keys(batch))


@pytest.mark.parametrize("keep", [1, 9, 15])
def test_logits_to_keep(keep: int) -> None:
    """A window of the columns, whose tokens are real in some rows only."""
    batch = rollouts(**LAYOUTS["both_shuffled"])
    step = logits_step(logits_to_keep=keep)
    # A window may hold no trace of the token that a mutant batch changes.
    assert_packed_and_exact(build("llama"), batch, step, tokens=keys(batch), padding="drop", mutant=keep > 9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    batch = rollouts(**LAYOUTS["both_shuffled"])
    model = build("llama")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    assert_packed_and_exact(model, batch, logits_step(), tokens=keys(batch), padding="drop")


def test_explicit_positions() -> None:
    batch = rollouts(**LAYOUTS["both_shuffled"])
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_packed_and_exact(build("llama"), batch, logits_step(), tokens=keys(batch), padding="drop")


def test_loss_over_real_tokens_inside() -> None:
    """The loss un-packs log-probabilities of real tokens and zeros elsewhere, which its own mask leaves out."""
    batch = rollouts(**LAYOUTS["both_shuffled"])
    model = build("llama")

    def loss(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logp = torch.log_softmax(logits.float(), -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        weight = attention_mask[:, 1:] * attention_mask[:, :-1]
        return -(logp * weight).sum() / weight.sum()

    def step(function: Callable[..., Any], batch: Mapping[str, Tensor]) -> list[Tensor]:
        return [function(**batch)]

    assert_packed_and_exact(model, batch, step, tokens=keys(batch), function=loss, padding="drop")


def test_hf_labels() -> None:
    batch = rollouts(**LAYOUTS["both_shuffled"])
    mask = batch["attention_mask"]
    # The first real token of a row is predicted from padding, which has no prediction here.
    first = (mask.cumsum(-1) == 1) & (mask == 1)
    labels = batch["input_ids"].masked_fill((mask == 0) | first, -100)

    def step(function: Callable[..., Any], batch: Mapping[str, Tensor]) -> list[Tensor]:
        return [function(**batch, labels=labels, use_cache=False).loss]

    assert_packed_and_exact(build("llama"), batch, step, tokens=keys(batch), padding="drop")


def test_row_of_nothing_but_padding() -> None:
    batch = rollouts(prompts=(9, 12), group=3)
    batch["attention_mask"][1] = 0
    batch["input_ids"][1] = 0
    tokens = keys(batch)
    assert_packed_and_exact(build("llama"), batch, logits_step(), tokens=tokens, padding="drop")


def test_hole_in_the_mask() -> None:
    """A hidden token inside of a row is padding by the same rule; its place is still counted in positions."""
    batch = rollouts(prompts=(12,), group=4)
    batch["attention_mask"][2, 5] = 0
    batch["attention_mask"][:, 3] = 0
    assert_packed_and_exact(build("llama"), batch, logits_step(), tokens=keys(batch), padding="drop")


@pytest.mark.parametrize("name", MODELS)
def test_model_whose_mask_tells_no_padding(name: str) -> None:
    """Without an attention mask every position is a token, zeros among the ids or not."""
    ids = rollouts(**LAYOUTS["both_shuffled"])["input_ids"]
    assert (ids == 0).any()
    batch = {"input_ids": ids}
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=trie_size(ids), padding="drop")


def test_mask_that_is_no_attention_mask() -> None:
    """A mask that only weighs the loss drops nothing."""
    batch = rollouts(**LAYOUTS["both_shuffled"])
    ids, loss_mask = batch["input_ids"], batch["attention_mask"]
    model = build("llama")

    def loss(input_ids: Tensor) -> Tensor:
        return masked(model(input_ids=input_ids, use_cache=False).logits, loss_mask).square().mean()

    def step(function: Callable[..., Any], batch: Mapping[str, Tensor]) -> list[Tensor]:
        return [function(**batch)]

    assert_packed_and_exact(
        model, {"input_ids": ids}, step, tokens=trie_size(ids), function=loss, padding="drop", mutant=False
    )


def test_drop_is_not_verified_where_nothing_is_promised() -> None:
    """``verify`` compares real positions; zeros at padding are no difference."""
    batch = rollouts(**LAYOUTS["both_shuffled"])
    function = compiled(build("llama"), padding="drop", verify="grad")
    dualkv_compile.reset_stats()
    function(**batch, use_cache=False)
    assert dualkv_compile.stats()["packed_calls"] == 1


def test_mask_that_was_broadcast_before_it_became_a_mask() -> None:
    """``[B, 1, 1, S]`` hides the same keys, but does not say of each grid position whether it is a token."""
    batch = rollouts(**LAYOUTS["both_shuffled"])
    mask = batch["attention_mask"]
    torch.manual_seed(0)
    table, projection = torch.nn.Embedding(128, 16), torch.nn.Linear(16, 48)

    def model(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows, columns = input_ids.shape
        parts = projection(table(input_ids)).view(rows, columns, 3, 2, 8).permute(2, 0, 3, 1, 4)
        place = torch.arange(columns)
        visible = attention_mask[:, None, None, :].bool() & (place[None, :] <= place[:, None])
        out = torch.nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=visible)
        return out.transpose(1, 2).flatten(2)

    function = compiled(model, padding="drop")
    dualkv_compile.reset_stats()
    actual = function(**batch)
    assert distance(masked(actual, mask), masked(model(**batch), mask)) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 1
