"""What breaks the proof runs the plain graph, says why and where, and changes nothing for the user.

Each case is a function around a tiny model or a tiny attention network. Values, gradients and the user's own tensors
equal eager in every case, and ``on_unsupported="error"`` raises the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dualkv_compile
from dualkv_compile import UnsupportedGraphError
from tests.models.harness import EXACT, build, distance, rollouts


class Decoder(nn.Module):
    """Two attention layers with a hook between them, where a case puts its operator."""

    def __init__(
        self, between: Callable[[torch.Tensor], torch.Tensor], mask: str = "causal", dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))
        self.head = nn.Linear(16, 97)
        self.between, self.mask, self.dropout = between, mask, dropout

    def attend(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
        causal = self.mask == "causal"
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, dropout_p=self.dropout if self.training else 0.0
        )
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, ids: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids)
        if extra is not None:
            x = x + extra
        x = self.attend(self.layers[0], x)
        x = self.between(x)
        x = self.attend(self.layers[1], x)
        return self.head(x)


@torch.library.custom_op("dualkv_tests::reverse", mutates_args=())
def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).clone()


@reverse.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


reverse.register_autograd(lambda ctx, grad: grad.flip(1))


class Doubled(torch.autograd.Function):
    """Its backward is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


@torch.compiler.allow_in_graph
def kept_from_dynamo(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x)


@torch._dynamo.nonstrict_trace
def traced_loosely(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(x)


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y[:, 1:3].mul_(2.0)
    return y


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    says: str
    line: str


CASES = {
    "flip": Case(lambda: Decoder(lambda x: x + x.flip(1)), "flip", "x.flip(1)"),
    "roll": Case(lambda: Decoder(lambda x: x + x.roll(-1, 1)), "roll", "x.roll(-1, 1)"),
    "mean_over_columns": Case(lambda: Decoder(lambda x: x + x.mean(1, keepdim=True)), "mean", "x.mean(1"),
    "look_ahead": Case(lambda: Decoder(lambda x: x + F.pad(x, (0, 0, 0, 1))[:, 1:]), "pad", "F.pad"),
    "row_number": Case(
        lambda: Decoder(lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None, None]),
        "row to row",
        "torch.arange",
    ),
    "batch_norm": Case(lambda: Decoder(Normalized()), "in place", "self.norm"),
    "custom_op": Case(lambda: Decoder(lambda x: x + reverse(x)), "reverse", "reverse(x)"),
    "autograd_function": Case(lambda: Decoder(Doubled.apply), "autograd_function", ""),
    "allow_in_graph": Case(lambda: Decoder(kept_from_dynamo), "does not look into", ""),
    "nonstrict_trace": Case(lambda: Decoder(traced_loosely), "does not look into", ""),
    "in_place_through_a_view": Case(lambda: Decoder(written_through_a_view), "in place", "mul_(2.0)"),
    "bidirectional": Case(lambda: Decoder(nn.Identity(), mask="none"), "later ones", "scaled_dot_product_attention"),
    "random": Case(lambda: Decoder(lambda x: x + 0 * torch.rand_like(x)), "random", "torch.rand_like"),
}


def step(function: Callable[..., torch.Tensor], model: nn.Module, *args: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    model.zero_grad(set_to_none=True)
    output = function(*args)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * weight).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.detach(), gradients


def compare(model: nn.Module, *args: torch.Tensor, packs: bool = False) -> dict[str, Any]:
    """Compiled equals eager, in values, gradients and buffers; returns the counters."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected, gradients = step(model, model, *args)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    held = [arg.clone() for arg in args]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    got, found = step(compiled, model, *args)
    stats = dualkv_compile.stats()
    assert distance(got, expected) <= 1e-5
    assert found.keys() == gradients.keys()
    assert all(distance(found[name], grad, 1e-3) <= 1e-5 for name, grad in gradients.items())
    assert all(torch.equal(value, after[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(arg, before) for arg, before in zip(args, held, strict=True))
    assert (stats["packed_calls"] > 0) == packs, stats
    return stats


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    case = CASES[name]
    ids = rollouts()["input_ids"]
    # One attention stands before the operator, so part of the graph may still be packed; the reason is told all the
    # same.
    model = case.build()
    whole = name in ("autograd_function", "in_place_through_a_view", "bidirectional", "random", "batch_norm")
    whole |= name in ("allow_in_graph", "nonstrict_trace")
    stats = compare(model, ids, packs=not whole)
    told = [reason for reason in stats["reasons"] if case.says in reason]
    assert told, stats["reasons"]
    assert any(case.line in reason for reason in told), told


@pytest.mark.parametrize("name", CASES)
def test_refused_loudly(name: str) -> None:
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.build(), backend="dualkv", options={**EXACT, "on_unsupported": "error"})
    with pytest.raises(UnsupportedGraphError, match=case.says):
        compiled(rollouts()["input_ids"])


def test_nothing_to_refuse() -> None:
    """The negative twin: the same network with a harmless operator is packed, without a reason."""
    stats = compare(Decoder(lambda x: x + x.tanh()), rollouts()["input_ids"], packs=True)
    assert stats["reasons"] == {}
    assert stats["tokens_computed"] == 44


def test_attention_dropout_in_training_and_not_in_evaluation() -> None:
    model = Decoder(nn.Identity(), dropout=0.1)
    ids = rollouts()["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    compiled(ids)
    (reason,) = dualkv_compile.stats()["reasons"]
    assert "dropout" in reason
    assert dualkv_compile.stats()["packed_calls"] == 0
    model.eval()
    dualkv_compile.reset_stats()
    assert distance(compiled(ids), model(ids)) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 1
    assert dualkv_compile.stats()["reasons"] == {}


def test_per_row_input_that_requires_grad() -> None:
    """Its rows differ in gradient though they agree in value: the owner of a shared prefix must not get all of it."""
    model = Decoder(nn.Identity())
    ids = rollouts()["input_ids"]
    adapter = torch.ones(4, 1, 16)
    grads = []
    for function in (model, torch.compile(model, backend="dualkv", options=EXACT)):
        torch._dynamo.reset()
        own = adapter.clone().requires_grad_()
        model.zero_grad()
        function(ids, own)[:, :, 0].sum().backward()
        grads.append(own.grad)
    assert distance(grads[1], grads[0]) <= 1e-5


def test_input_embeddings_that_require_grad() -> None:
    model = build("llama")
    batch = rollouts()
    grads, outputs = [], []
    for compile_it in (False, True):
        torch._dynamo.reset()
        function = torch.compile(model, backend="dualkv", options=EXACT) if compile_it else model
        embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
        dualkv_compile.reset_stats()
        logits = function(inputs_embeds=embeds, attention_mask=batch["attention_mask"], use_cache=False).logits
        logits.square().sum().backward()
        outputs.append(logits.detach())
        grads.append(embeds.grad)
    assert dualkv_compile.stats()["packed_calls"] == 0
    assert dualkv_compile.stats()["reasons"]
    assert distance(outputs[1], outputs[0]) <= 1e-5
    assert distance(grads[1], grads[0]) <= 1e-5


def test_input_embeddings_without_grad_are_packed() -> None:
    model = build("llama")
    batch = rollouts()
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    arguments = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"], "use_cache": False}
    assert distance(compiled(**arguments).logits, model(**arguments).logits) <= 1e-5
    assert dualkv_compile.stats()["packed_calls"] == 1


@pytest.mark.parametrize("bad", [False, True])
def test_users_own_mask(bad: bool) -> None:
    """A 4-d mask arrives as data; with one look-ahead entry or without, the numbers are the plain graph's."""
    model = build("llama")
    ids = rollouts()["input_ids"]
    mask = torch.full((20, 20), float("-inf")).triu(1).expand(4, 1, 20, 20).clone()
    if bad:
        mask[2, 0, 3, 5] = 0.0
    arguments = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    assert distance(compiled(**arguments).logits, model(**arguments).logits) <= 1e-5
    assert any("mask" in reason for reason in dualkv_compile.stats()["reasons"])


def test_input_mutation() -> None:
    model = Decoder(nn.Identity())

    def function(ids: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return model(ids)

    ids, counter = rollouts()["input_ids"], torch.zeros(3)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    assert distance(compiled(ids, counter), model(ids)) <= 1e-5
    assert torch.equal(counter, torch.ones(3))
    assert any("input of the graph in place" in reason for reason in dualkv_compile.stats()["reasons"])


def test_single_row_and_nothing_in_common_run_plain() -> None:
    model = Decoder(nn.Identity())
    for ids in (rollouts()["input_ids"][:1], torch.arange(80).reshape(4, 20)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="dualkv", options={**EXACT, "min_saving": 1.1})
        dualkv_compile.reset_stats()
        assert distance(compiled(ids), model(ids)) <= 1e-5
        assert dualkv_compile.stats()["packed_calls"] == 0
