"""The benchmark of the policy update: its counts against brute force, its statistics, and a whole run at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import policy_update
from policy_table.batch import Batch
from policy_table.loss import log_probs
from policy_table.measure import Row, paired
from policy_table.shapes import SHAPES, decoder
from policy_table.work import count, pairs, tokens, weights_met

CPU = torch.device("cpu")


def batch_of(*, ragged: bool, prompts: int = 2) -> Batch:
    return Batch.of(prompts, 3, 11, 150, 50, CPU, ragged=ragged)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("prompts", [1, 2])
def test_tokens_and_pairs_are_those_of_a_prefix_trie(ragged: bool, prompts: int) -> None:
    batch = batch_of(ragged=ragged, prompts=prompts)
    rows = [ids[: int(mask.sum())].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    trie = {tuple(row[: stop + 1]) for row in rows for stop in range(len(row))}
    assert tokens(batch, shared=True, padded=False) == len(trie)
    assert pairs(batch, shared=True, padded=False) == sum(map(len, trie))
    assert tokens(batch, shared=False, padded=False) == sum(map(len, rows))
    assert pairs(batch, shared=False, padded=False) == sum(len(row) * (len(row) + 1) // 2 for row in rows)
    assert tokens(batch, shared=False, padded=True) == batch.ids.numel()
    assert (tokens(batch, shared=True, padded=True) == len(trie)) is not ragged


@pytest.mark.parametrize("ragged", [False, True])
def test_scored_tokens_are_predicted_one_column_before(ragged: bool) -> None:
    batch = batch_of(ragged=ragged)
    expected = [
        (row, column) for row in range(batch.rows) for column in range(batch.prompt, batch.prompt + batch.lengths[row])
    ]
    found = [divmod(int(place) + 1, batch.columns) for place in batch.predicting()]
    assert found == expected
    assert batch.targets().tolist() == [int(batch.ids[place]) for place in expected]
    assert batch.advantage_of_each().tolist() == [float(batch.advantages[row]) for row, _ in expected]


def test_micro_batches_hold_every_row_once() -> None:
    batch = batch_of(ragged=True)
    parts = batch.split(2)
    assert torch.equal(torch.cat([part.ids for part in parts]), batch.ids)
    assert sum(part.scored for part in parts) == batch.scored
    assert [part.prompts for part in parts] == [1, 2, 1]


def test_work_of_the_layers_is_what_torch_counts() -> None:
    model = SHAPES["tiny"].build(CPU, torch.float32)
    batch = batch_of(ragged=False)
    with FlopCounterMode(display=False) as counter:
        hidden = decoder(model)(input_ids=batch.ids, use_cache=False).last_hidden_state
        hidden.square().sum().backward()
    counted = counter.get_flop_counts()["Global"]
    linear = sum(flops for operator, flops in counted.items() if "attention" not in str(operator)) / 1e12
    work = count(model, batch, shared=False, padded=True, recomputed=False)
    assert work.decoder == pytest.approx(linear, rel=1e-6)
    assert weights_met(model) == sum(p.numel() for p in decoder(model).layers.parameters() if p.dim() == 2)


def test_experts_count_as_often_as_tokens_are_sent_to_them() -> None:
    settings = {"num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 50}
    model = SHAPES["qwen3-30b-a3b"].build(CPU, torch.float32, **settings)
    attention = 64 * 128 * (32 + 4 + 4 + 32)
    assert weights_met(model) == attention + 128 * 64 + 8 * 3 * 64 * 32


def test_log_probabilities_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy_table.loss.CHUNK", 7)
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    targets = torch.randint(30, (20,))
    got = log_probs(hidden, weight, targets)
    right = torch.log_softmax(hidden @ weight.T, -1)[torch.arange(20), targets]
    assert (got - right).abs().max() < 1e-5
    scale = torch.randn(20)
    for x, y in zip(
        torch.autograd.grad((got * scale).sum(), (hidden, weight)),
        torch.autograd.grad((right * scale).sum(), (hidden, weight)),
        strict=True,
    ):
        assert (x - y).abs().max() < 1e-5


def test_the_interval_of_a_median() -> None:
    first = Row("a", times=[1.0] * 30)
    second = Row("b", times=[1.0 + number / 100 for number in range(30)])
    found = paired(first, second)
    assert found["median"] == pytest.approx(0.145)
    # Order statistics 10 and 21 of 30 hold the median with 95.7%.
    assert (found["low"], found["high"]) == (pytest.approx(0.09), pytest.approx(0.20))


@pytest.mark.slow
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "update.json"
    sizes = ["--shape", "tiny", "--prompt", "150", "--response", "20", "--rollouts", "3", "--dtype", "float32"]
    names = "inductor,dualkv,dualkv_layers"
    assert policy_update.main([*sizes, "--init", "0.2", "--contenders", names, "--runs", "1", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    rows = {row["contender"]: row for row in result["cases"][0]["rows"]}
    assert rows["dualkv"]["gradient_difference"] < 1e-4
    assert rows["dualkv_layers"]["gradient_difference"] < 1e-4
    assert rows["dualkv"]["statistics"]["tokens_computed"] * 510 == rows["dualkv"]["statistics"]["tokens_given"] * 210
    assert "FLOP ratio" in capsys.readouterr().out
    # A case measured again replaces itself.
    assert (
        policy_update.main([*sizes, "--init", "0.2", "--contenders", "dualkv", "--runs", "1", "--json", str(file)]) == 0
    )
    assert len(json.loads(file.read_text())["cases"]) == 1


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit):
        policy_update.parse(["--contenders", "dualkv,nobody"])
