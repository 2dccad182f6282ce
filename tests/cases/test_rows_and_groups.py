"""Rows in any order, groups of any size, trees of any shape: every prompt once, and everything as eager gives it."""

from __future__ import annotations

import pytest
import torch

import dualkv_compile
from dualkv_compile import PrefixPlan
from tests.cases.common import Batch, base, grid, log_probabilities, loss_step, response
from tests.models.harness import (
    EXACT,
    Outcome,
    assert_packed_and_exact,
    compiled,
    distance,
    largest_distance,
    masked,
    run,
    trie_size,
)

A, B = [11, 12, 13, 14, 15], [21, 22, 23]


def test_shuffled_rows_come_back_in_their_own_order() -> None:
    """Case 1: A0 B0 A1 B1 A2, B left-padded."""
    batch = grid([(prompt, response(n, 4)) for n, prompt in enumerate((A, B, A, B, A))])
    # Prompt A, prompt B with its two pads, and five responses.
    assert trie_size(*batch.values()) == 5 + 5 + 5 * 4
    assert_packed_and_exact(base(), batch, loss_step(), tokens=30)


def test_groups_of_three_one_and_two() -> None:
    """Case 2: no divisibility is asked."""
    prompts = [A, A, A, B, [31, 32, 33, 34], [31, 32, 33, 34]]
    batch = grid([(prompt, response(n, 4)) for n, prompt in enumerate(prompts)])
    tokens = trie_size(*batch.values())
    # B and the third prompt share their first pad: prompts of 5 columns, less that one.
    assert tokens == 5 + 5 + 5 - 1 + 6 * 4
    assert_packed_and_exact(base(), batch, loss_step(), tokens=tokens)


def test_token_where_rows_branch_receives_a_gradient_from_every_row() -> None:
    """Case 3: the loss is the first response token of each row, predicted at the last prompt position."""
    model = base()
    batch = grid([(A, response(n, 4)) for n in range(3)])
    weights = torch.tensor([0.5, -1.0, 2.0])

    def first_tokens(function, batch: Batch) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        logits = function(**batch, use_cache=False).logits
        return [log_probabilities(logits, batch["input_ids"])[:, 4]]

    def gradients(function, batch: Batch, weights: torch.Tensor) -> Outcome:  # type: ignore[no-untyped-def]
        model.zero_grad(set_to_none=True)
        (output,) = first_tokens(function, batch)
        (output * weights).sum().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return Outcome([output.detach()], found)

    assert_packed_and_exact(model, batch, first_tokens, tokens=5 + 3 * 4)
    packed = gradients(compiled(model), batch, weights)
    rows = [
        gradients(model, {name: tensor[n : n + 1] for name, tensor in batch.items()}, weights[n : n + 1])
        for n in range(3)
    ]
    summed = Outcome(
        [torch.cat([row.outputs[0] for row in rows])],
        {name: sum((row.gradients[name] for row in rows), torch.zeros(())) for name in packed.gradients},
    )
    assert largest_distance(packed, summed) <= 1e-5
    # Each row has its part in it.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert all(distance(summed.gradients[name] - row.gradients[name], summed.gradients[name]) > 0.05 for row in rows)


def test_shared_system_prompt_is_a_tree_of_two_levels() -> None:
    """Case 4."""
    first, second = [1, 2, 3, 4, 5], [1, 2, 3, 9, 8]
    batch = grid([(prompt, response(n, 4)) for n, prompt in enumerate((first, second, first, second))])
    spans = {
        (span.rows, span.start, span.stop) for span in PrefixPlan.from_rows(batch["input_ids"], min_shared=1).prompts()
    }
    assert spans == {((0, 1, 2, 3), 0, 3), ((0, 2), 3, 5), ((1, 3), 3, 5)}
    assert_packed_and_exact(base(), batch, loss_step(), tokens=3 + 2 + 2 + 4 * 4)


def test_prompt_that_is_a_prefix_of_another_prompt() -> None:
    """Case 5: prompts of 32 and 48 tokens, and rows that end inside of them."""
    long = [*range(1, 49)]
    rows = [(long[:32], response(n, 3 + n)) for n in range(2)] + [(long, response(2 + n, 3 + n)) for n in range(2)]
    ids = [[*prompt, *tail] for prompt, tail in rows] + [long[:20], long[:24]]
    batch = grid([((), row) for row in ids])
    tokens = trie_size(*batch.values())
    # The long prompt once; what follows the prompts and columns 20 and 24, pads included, is each row's own.
    columns = batch["input_ids"].shape[1]
    assert tokens == 48 + 2 * (columns - 32) + 2 * (columns - 48) + (columns - 20) + (columns - 24)
    assert_packed_and_exact(base(), batch, loss_step(), tokens=tokens)


def test_empty_response() -> None:
    """Case 6: one row ends with its prompt."""
    batch = grid([(A, response(0, 4)), (A, []), (A, response(2, 4))])
    assert_packed_and_exact(base(), batch, loss_step(), tokens=5 + 3 * 4)


def test_no_label_counts() -> None:
    """Case 6: HF's mean over no label is NaN with gradients of zero, in eager and packed."""
    model = base()
    batch = grid([(A, response(n, 4)) for n in range(3)])
    labels = torch.full_like(batch["input_ids"], -100)
    function = compiled(model)
    dualkv_compile.reset_stats()
    results = []
    for call in (model, function):
        model.zero_grad(set_to_none=True)
        output = call(**batch, labels=labels, use_cache=False)
        output.loss.backward()
        results.append((output, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    (eager, expected), (packed, found) = results
    assert eager.loss.isnan()
    assert packed.loss.isnan()
    assert distance(packed.logits.detach(), eager.logits.detach()) <= 1e-5
    assert len(found) == len(expected) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    stats = dualkv_compile.stats()
    assert (stats["calls"], stats["packed_calls"], stats["tokens_computed"]) == (1, 1, 17)
    assert stats["reasons"] == {}


def test_one_row() -> None:
    """Case 6: a batch of one row has nothing to share: plain, and right."""
    model = base()
    batch = grid([(A, response(0, 4))])
    function = compiled(model)
    dualkv_compile.reset_stats()
    assert largest_distance(run(model, function, loss_step(), batch), run(model, model, loss_step(), batch)) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 0


def test_one_row_of_each_prompt() -> None:
    """Case 6: with N = 1 for all prompts, packing computes every token, and is exact if it is insisted on."""
    model = base()
    batch = grid([(A, response(0, 4)), (B, response(1, 4))])
    assert_packed_and_exact(model, batch, loss_step(), tokens=18)
    # By default it is not worth it.
    function = compiled(model, min_saving=1.1)
    dualkv_compile.reset_stats()
    assert largest_distance(run(model, function, loss_step(), batch), run(model, model, loss_step(), batch)) <= 1e-5
    assert dualkv_compile.stats()["plain_calls"] == 1
    assert dualkv_compile.stats()["tokens_computed"] == 18


def test_row_that_the_user_packed_passes_unharmed() -> None:
    """Case 7: one row of two documents, told apart by positions that start again."""
    model = base()
    ids = torch.randint(1, 97, (1, 14), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "position_ids": torch.arange(7).repeat(2)[None]}
    function = compiled(model)
    dualkv_compile.reset_stats()
    found = run(model, function, loss_step(), batch)
    assert largest_distance(found, run(model, model, loss_step(), batch)) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 0
    # The second document does not see the first: the case is what it says.
    ids = ids.clone()
    ids[0, 0] = ids[0, 0] % 96 + 1
    other = run(model, function, loss_step(), {**batch, "input_ids": ids}).outputs[0]
    assert torch.equal(other[:, 7:], found.outputs[0][:, 7:])
    assert not torch.equal(other[:, 0], found.outputs[0][:, 0])


def test_rows_that_the_user_packed_share_what_they_have_in_common() -> None:
    """Case 7 with several such rows, whose first documents are equal."""
    first, second = response(1, 7), response(2, 7)
    ids = torch.tensor([[*first, *second], [*first, *response(3, 7)], [*first, *second[:4], 1, 2, 3]])
    batch = {"input_ids": ids, "position_ids": torch.arange(7).repeat(3, 2)}
    tokens = trie_size(*batch.values())
    assert tokens == 7 + 7 + 7 + 3
    assert_packed_and_exact(base(), batch, loss_step(), tokens=tokens)


def test_no_mask_and_then_a_mask_of_ones() -> None:
    """Case 8: both share, one function after the other."""
    model = base()
    ids = grid([(A, response(n, 4)) for n in range(3)])["input_ids"]
    batches = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    function = compiled(model)
    dualkv_compile.reset_stats()
    for batch in batches:
        found = run(model, function, loss_step(), batch)
        assert largest_distance(found, run(model, model, loss_step(), batch)) <= 1e-5
    stats = dualkv_compile.stats()
    assert stats["calls"] == stats["packed_calls"] == 2
    assert stats["tokens_computed"] == 2 * 17
    assert stats["reasons"] == {}


def test_positions_with_one_at_padding() -> None:
    """Case 9: as some trainers send them."""
    rows = 3
    batch = {
        "input_ids": torch.tensor([[0, 0, 31, 32, 40 + n, 50 + n] for n in range(rows)]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]] * rows),
        "position_ids": torch.tensor([[1, 1, 0, 1, 2, 3]] * rows),
    }
    assert_packed_and_exact(base(), batch, loss_step(), tokens=4 + rows * 2)


@pytest.mark.parametrize("min_shared", [5, 6])
def test_prefixes_shorter_than_the_shortest_wanted_are_not_shared(min_shared: int) -> None:
    model = base()
    batch = grid([(A, response(n, 4)) for n in range(3)])
    options = {key: value for key, value in EXACT.items() if key != "min_shared"}
    function = compiled(model, min_shared=min_shared, **options)
    dualkv_compile.reset_stats()
    logits = function(**batch, use_cache=False).logits
    mask = batch["attention_mask"]
    assert distance(masked(logits, mask), masked(model(**batch, use_cache=False).logits, mask)) <= 1e-5
    assert dualkv_compile.stats()["tokens_computed"] == (17 if min_shared == 5 else 27)
