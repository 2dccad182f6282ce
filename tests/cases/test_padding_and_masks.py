"""Padding is judged by the mask, never by token ids, and does no harm; what is no attention mask is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases.common import Batch, base, grid, log_probabilities, loss_step, response
from tests.models.harness import assert_packed_and_exact, compiled, distance, masked, trie_size


@pytest.mark.parametrize("columns", [8, 33])
def test_pad_queries_see_no_key_and_nothing_becomes_nan(columns: int) -> None:
    """Case 10: whole rows of the mask are empty."""
    shared = [*range(5, columns)]
    ids = torch.tensor([[0, 0, 0, *shared, 8, 9], [0, 0, 0, *shared, 3, 4]])
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    assert ids.shape[1] == columns
    model = base()
    assert_packed_and_exact(model, batch, loss_step(), tokens=columns + 2)
    model.zero_grad()
    logits = compiled(model)(**batch, use_cache=False).logits
    assert logits.isfinite().all()
    # The whole of it, pads included, goes into the loss: no NaN by a weight of zero times infinity.
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


PAD = 2


def pads_that_look_like_the_end() -> dict[str, torch.Tensor]:
    prompt = [5, PAD, 6, 7]
    # The second row really says the end token twice; the third has no pad.
    return grid([(prompt, [8, PAD]), (prompt, [8, PAD, PAD]), (prompt, [9, 3, 4, PAD])], pad=PAD)


@pytest.mark.parametrize(("padding", "tokens"), [("keep", 4 + 2 + 2 + 2 + 4), ("drop", 4 + 2 + 1 + 4)])
def test_pad_token_is_the_end_token(padding: str, tokens: int) -> None:
    """Case 11: the same id is a prompt token, an end token and a pad."""
    batch = pads_that_look_like_the_end()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert torch.equal(ids[0], ids[1])
    assert not torch.equal(mask[0], mask[1])
    assert_packed_and_exact(base(), batch, loss_step(), tokens=tokens, padding=padding)
    if padding == "keep":
        assert trie_size(ids, mask) == tokens


def test_ids_alone_say_nothing_about_padding() -> None:
    """Case 11 without a mask: pads are tokens like any other."""
    batch = {"input_ids": pads_that_look_like_the_end()["input_ids"]}
    assert_packed_and_exact(base(), batch, loss_step(), tokens=8 + 4, padding="drop")


def test_hole_in_the_loss_mask_is_seen_by_the_loss_alone() -> None:
    """Case 12: tool output inside of a response; in one row the hole even lies in the prompt."""
    model = base()
    batch = grid([([11, 12, 13, 14], response(n, 5)) for n in range(3)])
    loss_mask = torch.tensor([[0] * 4 + [1, 1, 0, 0, 1]] * 3)
    loss_mask[1] = torch.tensor([1, 0, 1, 0, 1, 0, 0, 1, 1])
    assert batch["attention_mask"].all()

    def loss(loss_mask: torch.Tensor, **batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**batch, use_cache=False).logits
        weight = loss_mask[:, 1:]
        return -(log_probabilities(logits, batch["input_ids"]) * weight).sum() / weight.sum(), logits

    def step(function: Callable[..., Any], batch: Batch) -> list[torch.Tensor]:
        return list(function(loss_mask=loss_mask, **batch))

    assert_packed_and_exact(model, batch, step, tokens=4 + 3 * 5, function=loss)
    # The hole matters to the loss, so the comparison above saw it.
    assert not torch.equal(step(loss, batch)[0], loss(torch.ones_like(loss_mask), **batch)[0])


def test_hole_in_the_attention_mask() -> None:
    """The negative twin of case 12: a mask that hides a token inside of the prompt is part of the key."""
    batch = grid([([11, 12, 13, 14], response(n, 5)) for n in range(3)])
    batch["attention_mask"][1, 2] = 0
    # Row 1 parts from the others in column 2.
    tokens = 4 + 3 * 5 + 2
    assert trie_size(*batch.values()) == tokens
    assert_packed_and_exact(base(), batch, loss_step(), tokens=tokens)


def test_content_of_padding_does_not_matter_and_the_comparison_is_not_blind() -> None:
    """A changed pad moves no logits at real tokens, a changed real token does."""
    model = base()
    batch = grid([([11, 12], response(n, 3)) for n in range(2)] + [([11, 12, 13], response(3, 3))])
    mask = batch["attention_mask"]
    function = compiled(model)
    logits = masked(function(**batch, use_cache=False).logits, mask)
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][0, 0] = 50
    assert mask[0, 0] == 0
    assert distance(masked(function(**other, use_cache=False).logits, mask), logits) <= 1e-5
    other["input_ids"][0, 1] = 50
    assert distance(masked(function(**other, use_cache=False).logits, mask), logits) > 1e-2
