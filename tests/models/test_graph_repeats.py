"""Repeats written in the graph: known to be equal without looking at any data, and with a gradient if they carry one.

``tokens computed`` proves where the tree came from. A repeat in the graph shares what the graph repeats and nothing
else: rows that happen to agree in their data do not share, as they would if repeats were found by comparing data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dualkv_compile
from dualkv_compile import plan_cache
from dualkv_compile.plan import PrefixPlan
from tests.models.harness import build, compiled, distance, masked, trie_size

N, P, R = 3, 7, 5
DYNAMIC = pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])


@pytest.fixture
def no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if any plan is made by looking at data."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rows were compared")

    monkeypatch.setattr(plan_cache.PlanCache, "get", refuse)
    monkeypatch.setattr(PrefixPlan, "from_rows", refuse)


def tokens_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, 97, shape, generator=torch.Generator().manual_seed(seed))


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Gradients = dict[str, Tensor]


def step(
    function: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    weight: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """Output, and the gradients of a random functional of it for parameters and for every floating-point input."""
    leaves = {
        name: tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in inputs.items()
    }
    output = function(**leaves)
    functional = floats(*output.shape, seed=9)
    if weight is not None:
        functional = functional * weight
    wanted = {name: leaf for name, leaf in {**leaves, **parameters}.items() if leaf.requires_grad}
    found = torch.autograd.grad((output * functional).sum(), list(wanted.values()), allow_unused=True)
    gradients = {name: gradient for name, gradient in zip(wanted, found, strict=True) if gradient is not None}
    return output.detach(), gradients


def assert_shared(
    function: Callable[..., Tensor],
    *calls: Mapping[str, Tensor],
    tokens: Sequence[int],
    parameters: Mapping[str, Tensor] | None = None,
    dynamic: bool | None = None,
    weight: Tensor | None = None,
    **options: Any,
) -> None:
    """Each call is packed into as many tokens, and equals eager in its output and in every gradient."""
    parameters = parameters or {}
    packed = compiled(function, dynamic=dynamic, **options)
    for inputs, expected_tokens in zip(calls, tokens, strict=True):
        output, gradients = step(function, inputs, parameters, weight)
        dualkv_compile.reset_stats()
        found, found_gradients = step(packed, inputs, parameters, weight)
        stats = dualkv_compile.stats()
        assert stats["reasons"] == {}
        assert stats["calls"] == stats["packed_calls"] == 1
        assert stats["tokens_computed"] == expected_tokens
        assert stats["device_syncs"] == 0
        if weight is not None:
            found, output = found * weight, output * weight
        assert distance(found, output) <= 1e-5
        assert found_gradients.keys() == gradients.keys()
        assert gradients or not torch.is_grad_enabled()
        floor = 1e-3 * max((gradient.abs().max().item() for gradient in gradients.values()), default=0.0)
        for name, gradient in gradients.items():
            assert distance(found_gradients[name], gradient, floor) <= 1e-5, name
        for name, tensor in inputs.items():
            assert not tensor.is_floating_point() or gradients[name].abs().max() > 0, name


def language_model(join: Callable[[Tensor, Tensor], Tensor]) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """A tiny Llama that joins prompts and responses itself."""
    model = build("llama")

    def function(prompts: Tensor, responses: Tensor) -> Tensor:
        return model(input_ids=join(prompts, responses), use_cache=False).logits

    return function, dict(model.named_parameters())


def expanded(prompts: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([prompts.expand(responses.shape[0], -1), responses], 1)


def interleaved(prompts: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([prompts.repeat_interleave(responses.shape[0] // prompts.shape[0], 0), responses], 1)


def tiled(prompts: Tensor, responses: Tensor) -> Tensor:
    return torch.cat([prompts.repeat(responses.shape[0] // prompts.shape[0], 1), responses], 1)


# ------------------------------------------------------------------ token ids


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
def test_one_prompt_expanded(dynamic: bool | None) -> None:
    """``cat([prompt.expand(N, -1), responses], 1)``; equal responses are not shared, since nobody compares them."""
    function, parameters = language_model(expanded)
    responses = tokens_of(N, R)
    responses[1] = responses[0]
    inputs = {"prompts": tokens_of(1, P), "responses": responses}
    joined = expanded(**inputs)
    assert trie_size(joined) < P + N * R
    assert_shared(function, inputs, tokens=[P + N * R], parameters=parameters, dynamic=dynamic)


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
@pytest.mark.parametrize("join", [interleaved, tiled])
def test_several_prompts(join: Callable[[Tensor, Tensor], Tensor], dynamic: bool | None) -> None:
    """Two prompts in blocks or in turn. Their content is the same, and yet they are two groups."""
    function, parameters = language_model(join)
    prompts = tokens_of(1, P).repeat(2, 1)
    different = tokens_of(2, P, seed=3)
    calls = [{"prompts": part, "responses": tokens_of(2 * N, R)} for part in (prompts, different)]
    assert trie_size(join(**calls[0])) <= P + 2 * N * R
    assert_shared(function, *calls, tokens=[2 * P + 2 * N * R] * 2, parameters=parameters, dynamic=dynamic)


@pytest.mark.usefixtures("no_comparison")
@pytest.mark.parametrize("join", [interleaved, tiled])
def test_groups_are_the_right_ones(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Three prompts, two rows each: taking blocks for turns, or the other way round, would mix prompts up."""
    function, parameters = language_model(join)
    inputs = {"prompts": tokens_of(3, P), "responses": tokens_of(6, R)}
    assert_shared(function, inputs, tokens=[3 * P + 6 * R], parameters=parameters)


@pytest.mark.usefixtures("no_comparison")
@pytest.mark.parametrize("how", ["unsqueeze_expand", "expand", "repeat", "unsqueeze_repeat_interleave"])
def test_prompt_without_a_row_dimension(how: str) -> None:
    """A prompt ``[P]``: the row dimension is made by the repeat."""
    repeats = {
        "unsqueeze_expand": lambda prompt: prompt[None].expand(N, -1),
        "expand": lambda prompt: prompt.expand(N, -1),
        "repeat": lambda prompt: prompt.repeat(N, 1),
        "unsqueeze_repeat_interleave": lambda prompt: prompt.unsqueeze(0).repeat_interleave(N, dim=0),
    }
    function, parameters = language_model(lambda prompts, responses: torch.cat([repeats[how](prompts), responses], 1))
    inputs = {"prompts": tokens_of(P), "responses": tokens_of(N, R)}
    assert_shared(function, inputs, tokens=[P + N * R], parameters=parameters)


@pytest.mark.usefixtures("no_comparison")
def test_prompt_of_two_parts() -> None:
    """A common system prompt and a prompt, each expanded: one head of the rows."""
    model = build("llama")

    def function(system: Tensor, prompts: Tensor, responses: Tensor) -> Tensor:
        rows = responses.shape[0]
        ids = torch.cat([system.expand(rows, -1), prompts.expand(rows, -1), responses], 1)
        return model(input_ids=ids, use_cache=False).logits

    inputs = {"system": tokens_of(1, 4, seed=1), "prompts": tokens_of(1, P), "responses": tokens_of(N, R)}
    assert_shared(function, inputs, tokens=[4 + P + N * R], parameters=dict(model.named_parameters()))


@pytest.mark.usefixtures("no_comparison")
def test_whole_rows_repeated() -> None:
    """No responses at all: the repeat is the whole of the ids."""
    model = build("llama")

    def function(prompts: Tensor) -> Tensor:
        return model(input_ids=prompts.repeat_interleave(N, 0), use_cache=False).logits

    assert_shared(function, {"prompts": tokens_of(2, P)}, tokens=[2 * P], parameters=dict(model.named_parameters()))


@pytest.mark.usefixtures("no_comparison")
def test_mask_repeated_like_the_prompt() -> None:
    """A left-padded prompt with its mask, both expanded in the graph."""
    model = build("llama")

    def function(prompts: Tensor, responses: Tensor, prompt_mask: Tensor, response_mask: Tensor) -> Tensor:
        ids, mask = expanded(prompts, responses), expanded(prompt_mask, response_mask)
        return masked(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, mask)

    prompt_mask = torch.ones(1, P, dtype=torch.long)
    prompt_mask[:, :2] = 0
    response_mask = torch.ones(N, R, dtype=torch.long)
    response_mask[1, 3:] = 0
    inputs = {
        "prompts": tokens_of(1, P),
        "responses": tokens_of(N, R),
        "prompt_mask": prompt_mask,
        "response_mask": response_mask,
    }
    assert_shared(function, inputs, tokens=[P + N * R], parameters=dict(model.named_parameters()))


@pytest.mark.usefixtures("no_comparison")
def test_other_lengths_with_one_compilation() -> None:
    function, parameters = language_model(expanded)
    sizes = [(3, 7, 5), (4, 9, 6), (5, 6, 3), (2, 12, 8)]
    calls = [{"prompts": tokens_of(1, p), "responses": tokens_of(n, r)} for n, p, r in sizes]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert_shared(function, *calls, tokens=[p + n * r for n, p, r in sizes], parameters=parameters)


def test_shortest_prefix_wanted() -> None:
    function, parameters = language_model(expanded)
    inputs = {"prompts": tokens_of(1, P), "responses": tokens_of(N, R)}
    assert_shared(function, inputs, tokens=[P + N * R], parameters=parameters, min_shared=P)
    assert_shared(function, inputs, tokens=[N * (P + R)], parameters=parameters, min_shared=P + 1)


# ------------------------------------------------------------------ embeddings


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
def test_embedded_prompt_expanded(dynamic: bool | None) -> None:
    """The prompt is embedded once and then expanded: its copies carry gradients to the embedding."""
    model = build("llama")
    embed = model.get_input_embeddings()

    def function(prompts: Tensor, responses: Tensor) -> Tensor:
        x = torch.cat([embed(prompts).expand(responses.shape[0], -1, -1), embed(responses)], 1)
        return model(inputs_embeds=x, use_cache=False).logits

    inputs = {"prompts": tokens_of(1, P), "responses": tokens_of(N, R)}
    assert_shared(function, inputs, tokens=[P + N * R], parameters=dict(model.named_parameters()), dynamic=dynamic)


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
def test_soft_prompt_that_requires_grad(dynamic: bool | None) -> None:
    """Prompt and responses arrive as embeddings: the prompt's gradient is the sum over rows, a response has its own."""
    model = build("llama")

    def function(prompts: Tensor, responses: Tensor) -> Tensor:
        x = torch.cat([prompts.expand(responses.shape[0], -1, -1), responses], 1)
        return model(inputs_embeds=x, use_cache=False).logits

    responses = floats(N, R, 32, seed=2)
    responses[1] = responses[0]
    inputs = {"prompts": floats(1, P, 32), "responses": responses}
    assert_shared(function, inputs, tokens=[P + N * R], parameters=dict(model.named_parameters()), dynamic=dynamic)


@pytest.mark.usefixtures("no_comparison")
def test_learned_prompt_that_is_a_parameter() -> None:
    """Prompt tuning: a parameter ``[P, C]`` in front of embedded rows."""
    model = build("llama")
    embed = model.get_input_embeddings()
    torch.manual_seed(1)
    learned = nn.Parameter(torch.randn(P, 32))

    def function(responses: Tensor) -> Tensor:
        x = torch.cat([learned[None].expand(responses.shape[0], -1, -1), embed(responses)], 1)
        return model(inputs_embeds=x, use_cache=False).logits

    parameters = {**dict(model.named_parameters()), "learned": learned}
    assert_shared(function, {"responses": tokens_of(N, R)}, tokens=[P + N * R], parameters=parameters)


@pytest.mark.parametrize("source", ["prompts", "responses"])
def test_rows_of_their_own_gradient_are_not_shared(source: str) -> None:
    """The negative twin: prompts given per row with a gradient each; equal in value, but not one tensor."""
    model = build("llama")

    def function(prompts: Tensor, responses: Tensor) -> Tensor:
        return model(inputs_embeds=torch.cat([prompts, responses], 1), use_cache=False).logits

    inputs = {"prompts": floats(1, P, 32).repeat(N, 1, 1), "responses": floats(N, R, 32, seed=2)}
    output, gradients = step(function, inputs, {}, None)
    packed = compiled(function)
    dualkv_compile.reset_stats()
    found, found_gradients = step(packed, inputs, {}, None)
    assert distance(found, output) <= 1e-5
    assert distance(found_gradients[source], gradients[source]) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 0
    assert dualkv_compile.stats()["reasons"]


# ------------------------------------------------------------------ attention inputs


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_of_joined(**parts: Tensor) -> Tensor:
    """Queries, keys and values each of one expanded prompt and per-row responses."""
    rows = parts["q_resp"].shape[0]
    joined = [
        torch.cat([parts[f"{name}_prompt"].expand(rows, -1, -1, -1), parts[f"{name}_resp"]], 2)
        for name in ("q", "k", "v")
    ]
    return attend(*joined)


def parts(rows: int = N, prompt: int = P, response: int = R, prompts: int = 1, heads: int = 2) -> dict[str, Tensor]:
    inputs = {}
    for seed, name in enumerate(("q", "k", "v")):
        inputs[f"{name}_prompt"] = floats(prompts, heads, prompt, 8, seed=seed)
        inputs[f"{name}_resp"] = floats(rows, heads, response, 8, seed=10 + seed)
    return inputs


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
def test_attention_inputs(dynamic: bool | None) -> None:
    inputs = parts()
    # Two equal rows stay two: the response's gradient is each row's own.
    for name in ("q", "k", "v"):
        inputs[f"{name}_resp"][1] = inputs[f"{name}_resp"][0]
    assert_shared(attention_of_joined, inputs, tokens=[P + N * R], dynamic=dynamic)


@pytest.mark.usefixtures("no_comparison")
@pytest.mark.parametrize("sizes", [{"rows": 2, "heads": 2}, {"prompt": 3, "response": 5}, {"rows": 8, "prompt": 3}])
def test_attention_inputs_of_colliding_sizes(sizes: dict[str, int]) -> None:
    """B == H, S == D, B == S: sizes tell nothing about meaning."""
    inputs = parts(**sizes)
    rows, prompt, response = (sizes.get("rows", N), sizes.get("prompt", P), sizes.get("response", R))
    assert_shared(attention_of_joined, inputs, tokens=[prompt + rows * response])


@DYNAMIC
@pytest.mark.usefixtures("no_comparison")
@pytest.mark.parametrize("interleave", [True, False])
def test_attention_inputs_of_several_prompts(interleave: bool, dynamic: bool | None) -> None:
    def function(**parts: Tensor) -> Tensor:
        joined = []
        for name in ("q", "k", "v"):
            prompt, response = parts[f"{name}_prompt"], parts[f"{name}_resp"]
            repeats = response.shape[0] // prompt.shape[0]
            many = prompt.repeat_interleave(repeats, 0) if interleave else prompt.repeat(repeats, 1, 1, 1)
            joined.append(torch.cat([many, response], 2))
        return attend(*joined)

    assert_shared(function, parts(rows=6, prompts=2), tokens=[2 * P + 6 * R], dynamic=dynamic)


@pytest.mark.usefixtures("no_comparison")
def test_attention_inputs_with_grouped_heads() -> None:
    def function(**parts: Tensor) -> Tensor:
        rows = parts["q_resp"].shape[0]
        q, k, v = (
            torch.cat([parts[f"{name}_prompt"].expand(rows, -1, -1, -1), parts[f"{name}_resp"]], 2)
            for name in ("q", "k", "v")
        )
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return attend(q, k, v)

    inputs = parts()
    inputs.update({f"q_{part}": torch.cat([inputs[f"q_{part}"]] * 2, 1) * 0.5 for part in ("prompt", "resp")})
    assert_shared(function, inputs, tokens=[P + N * R])


def test_bidirectional_attention_of_joined_inputs_runs_plain() -> None:
    """The negative twin: without causality prompt tokens see the responses of their row."""

    def function(**parts: Tensor) -> Tensor:
        rows = parts["q_resp"].shape[0]
        joined = [
            torch.cat([parts[f"{name}_prompt"].expand(rows, -1, -1, -1), parts[f"{name}_resp"]], 2)
            for name in ("q", "k", "v")
        ]
        return F.scaled_dot_product_attention(*joined)

    output, gradients = step(function, parts(), {}, None)
    dualkv_compile.reset_stats()
    found, found_gradients = step(compiled(function), parts(), {}, None)
    assert distance(found, output) <= 1e-5
    assert all(distance(found_gradients[name], gradient) <= 1e-5 for name, gradient in gradients.items())
    assert dualkv_compile.stats()["packed_calls"] == 0
    assert any("later ones" in reason for reason in dualkv_compile.stats()["reasons"])


def test_keys_that_are_repeated_otherwise_than_queries() -> None:
    """Queries in blocks, keys and values in turn: no row shares both, and nothing may be shared."""

    def function(**parts: Tensor) -> Tensor:
        joined = []
        for name in ("q", "k", "v"):
            prompt, response = parts[f"{name}_prompt"], parts[f"{name}_resp"]
            many = prompt.repeat_interleave(2, 0) if name == "q" else prompt.repeat(2, 1, 1, 1)
            joined.append(torch.cat([many, response], 2))
        return attend(*joined)

    inputs = parts(rows=4, prompts=2)
    output, gradients = step(function, inputs, {}, None)
    dualkv_compile.reset_stats()
    found, found_gradients = step(compiled(function), inputs, {}, None)
    assert distance(found, output) <= 1e-5
    assert all(distance(found_gradients[name], gradient) <= 1e-5 for name, gradient in gradients.items())
    assert dualkv_compile.stats()["tokens_computed"] == 4 * (P + R)


def test_heads_of_different_lengths() -> None:
    """Keys repeat fewer columns than queries do: only those that both repeat are shared."""

    def function(**parts: Tensor) -> Tensor:
        rows = parts["q_resp"].shape[0]
        q, k, v = (
            torch.cat([parts[f"{name}_prompt"].expand(rows, -1, -1, -1), parts[f"{name}_resp"]], 2)
            for name in ("q", "k", "v")
        )
        return attend(q, k, v)

    inputs = parts()
    for name in ("k", "v"):
        inputs[f"{name}_prompt"] = floats(1, 2, P - 2, 8, seed=5)
        inputs[f"{name}_resp"] = floats(N, 2, R + 2, 8, seed=6)
    assert_shared(function, inputs, tokens=[P - 2 + N * (R + 2)])


# ------------------------------------------------------------------ repeats in the graph and data together


def mixed(model: nn.Module) -> Callable[..., Tensor]:
    def function(prompts: Tensor, responses: Tensor, attention_mask: Tensor) -> Tensor:
        ids = expanded(prompts, responses)
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
        return masked(logits, attention_mask)

    return function


@DYNAMIC
def test_mask_that_differs_inside_of_a_repeated_prompt(dynamic: bool | None) -> None:
    """The graph says that rows share P columns, the mask that they share fewer: sharing shrinks, row by row."""
    model = build("llama")
    inputs = {"prompts": tokens_of(1, P), "responses": tokens_of(4, R)}
    mask = torch.ones(4, P + R, dtype=torch.long)
    other = mask.clone()
    other[1, 3] = 0
    other[3, 5] = 0
    whole = P + 4 * R
    # Rows 0 and 2 share all of the prompt; row 1 leaves them at column 3, row 3 at column 5.
    part = P + 2 * R + (P - 3 + R) + (P - 5 + R)
    own = expanded(torch.zeros(1, P, dtype=torch.long), torch.arange(1, 5)[:, None].expand(-1, R))
    assert trie_size(own, other) == part
    assert_shared(
        mixed(model),
        {**inputs, "attention_mask": mask},
        {**inputs, "attention_mask": other},
        tokens=[whole, part],
        parameters=dict(model.named_parameters()),
        dynamic=dynamic,
    )


def test_equal_responses_stay_apart_beside_a_compared_mask() -> None:
    """Data is compared for the mask alone: responses that are equal still belong to one row each."""
    model = build("llama")
    responses = tokens_of(1, R).repeat(N, 1)
    inputs = {"prompts": tokens_of(1, P), "responses": responses, "attention_mask": torch.ones(N, P + R).long()}
    assert trie_size(expanded(inputs["prompts"], responses), inputs["attention_mask"]) == P + R
    assert_shared(mixed(model), inputs, tokens=[P + N * R], parameters=dict(model.named_parameters()))


def test_padding_dropped_from_a_repeated_prompt() -> None:
    """``padding="drop"`` with ids from the graph and a mask from data."""
    model = build("llama")
    mask = torch.ones(N, P + R, dtype=torch.long)
    mask[:, :2] = 0
    mask[1, -2:] = 0
    inputs = {"prompts": tokens_of(1, P), "responses": tokens_of(N, R), "attention_mask": mask}
    assert_shared(
        mixed(model),
        inputs,
        tokens=[P - 2 + N * R - 2],
        parameters=dict(model.named_parameters()),
        padding="drop",
    )


def test_soft_prompt_beside_token_ids() -> None:
    """An adapter, the same for all rows, is added to embedded ids whose rows are compared by data."""
    model = build("llama")
    embed = model.get_input_embeddings()

    def function(ids: Tensor, shift: Tensor) -> Tensor:
        rows, columns = ids.shape
        added = F.pad(shift, (0, 0, 0, columns - shift.shape[1])).expand(rows, -1, -1)
        return model(inputs_embeds=embed(ids) + added, use_cache=False).logits

    ids = expanded(tokens_of(1, P), tokens_of(N, R))
    inputs = {"ids": ids, "shift": floats(1, P, 32)}
    assert_shared(function, inputs, tokens=[trie_size(ids)], parameters=dict(model.named_parameters()))
