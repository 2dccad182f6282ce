"""Rules and declarations for operators of the user: packed, exact in values and gradients, and never silently wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dualkv_compile
from dualkv_compile import RuleError, VerificationError, register_rule, rules, tokenwise
from dualkv_compile.rules import Dim, Scope, Unproven, Value
from tests.models.harness import EXACT, distance, rollouts, trie_size

_numbers = itertools.count()
WIDTH, HEADS = 16, 2


def define(forward: Callable[..., Any], backward: Callable[..., Any], schema: str) -> Any:
    """A custom operator of its own name: rules are kept for the life of the process."""
    operator = torch.library.custom_op(
        f"dualkv_rules::op_{next(_numbers)}", lambda *args: forward(*args), mutates_args=(), schema=schema
    )
    operator.register_fake(lambda *args: forward(*args))
    operator.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return operator


def scaled(forward: Callable[..., Any] | None = None, backward: Callable[..., Any] | None = None) -> Any:
    """``x * weight`` along the last dimension, or a variant."""

    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).flatten(0, -2).sum(0)

    return define(forward or (lambda x, w: x * w), backward or gradients, "(Tensor x, Tensor weight) -> Tensor")


class Decoder(nn.Module):
    """Two attention layers with the operator under test between them, on ``[B, S, C]``."""

    def __init__(self, between: Callable[..., torch.Tensor], checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(97, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.head = nn.Linear(WIDTH, 97)
        self.between, self.checkpointed = between, checkpointed
        self.double()

    def block(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.between(x + out, self.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(self.block, x, layer, use_reentrant=False) if self.checkpointed else self.block(x, layer)
        return self.head(x)


def step(model: nn.Module, function: Callable[..., torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output and every gradient."""
    model.zero_grad(set_to_none=True)
    output = function(ids)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    (output * weight).sum().backward()
    return {"output": output.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def compare(model: nn.Module, *, packs: bool = True, ids: torch.Tensor | None = None) -> Mapping[str, Any]:
    """Compiled equals eager in the output and every gradient; gives the counters."""
    ids = rollouts()["input_ids"] if ids is None else ids
    expected = step(model, model, ids)
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    got = step(model, torch.compile(model, backend="dualkv", options=EXACT), ids)
    stats = dualkv_compile.stats()
    assert got.keys() == expected.keys()
    assert all(distance(got[name], value, 1e-3) <= 1e-12 for name, value in expected.items())
    if packs:
        assert stats["reasons"] == {}
        assert stats["packed_calls"] == stats["calls"] == 1
        assert stats["tokens_computed"] == trie_size(ids) < ids.numel()
    return stats


def reason(model: nn.Module) -> str:
    """The reasons that packing the model gives; what it computes is right all the same."""
    return "; ".join(compare(model, packs=False)["reasons"])


def tokenwise_scaled(**declared: Any) -> Any:
    operator = scaled()
    tokenwise(operator, weights=["weight"], **declared)
    return operator


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_tokenwise(checkpointed: bool) -> None:
    compare(Decoder(tokenwise_scaled(), checkpointed))


def test_without_declaration_the_operator_keeps_its_part_on_the_grid() -> None:
    operator = scaled()
    assert "no rule is known" in reason(Decoder(operator))


@pytest.mark.parametrize(
    ("declared", "layout"),
    [
        ({}, "flat"),
        ({"token_dims": (0,)}, "flat"),
        ({"token_dims": (0, 2)}, "heads"),
    ],
)
def test_token_dimensions(declared: dict[str, Any], layout: str) -> None:
    operator = scaled()
    tokenwise(operator, weights="weight", **declared)

    def flat(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operator(x.flatten(0, 1), weight).view_as(x)

    def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        apart = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return operator(apart, weight[: WIDTH // HEADS]).transpose(1, 2).flatten(2)

    compare(Decoder(flat if layout == "flat" else heads))


def test_tokens_in_other_dimensions_than_declared() -> None:
    """``[B, H, S, D]`` given to an operator that was only declared for leading tokens: it might mix dimension 2."""
    operator = tokenwise_scaled()

    def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        apart = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return operator(apart, weight[: WIDTH // HEADS]).transpose(1, 2).flatten(2)

    assert "other dimensions than declared" in reason(Decoder(heads))


def test_several_results() -> None:
    def gradients(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return first * weight + second.unsqueeze(-1), (first * x).flatten(0, -2).sum(0)

    operator = define(lambda x, w: (x * w, x.sum(-1)), gradients, "(Tensor x, Tensor weight) -> (Tensor, Tensor)")
    tokenwise(operator, weights=["weight"])

    def between(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product, total = operator(x, weight)
        return product + total.tanh().unsqueeze(-1)

    compare(Decoder(between))
    compare(Decoder(between, checkpointed=True))


def test_position_table_is_read_at_each_tokens_column() -> None:
    def gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.saved_tensors[1], None

    operator = define(lambda x, table: x * table, gradients, "(Tensor x, Tensor table) -> Tensor")
    tokenwise(operator)

    def between(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        table = torch.arange(x.shape[1], dtype=x.dtype).cos()[None, :, None]
        return operator(x, table)

    # As many tokens as columns: a table that were passed on as it is would fit, and be wrong.
    ids = rollouts(prompts=(3,), group=2, response=2)["input_ids"][:, :5]
    ids = torch.stack([ids[0], ids[0]])
    assert trie_size(ids) == ids.shape[1]
    compare(Decoder(between), ids=ids)
    compare(Decoder(between))


def test_a_weight_that_is_not_declared_and_a_weight_made_of_tokens() -> None:
    operator = scaled()
    tokenwise(operator)
    assert "is it one of the weights" in reason(Decoder(operator))
    declared = define(
        lambda x, w: x * w,
        lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
        "(Tensor x, Tensor weight) -> Tensor",
    )
    tokenwise(declared, weights=["weight"])
    assert "its weight comes from the tokens" in reason(Decoder(lambda x, weight: declared(x, x.tanh())))


def test_per_row_operand_is_no_token() -> None:
    """An as-written operand that differs from row to row is not the same for copies of a token."""
    operator = define(
        lambda x, y: x * y, lambda ctx, grad: (grad * ctx.saved_tensors[1], None), "(Tensor x, Tensor y) -> Tensor"
    )
    tokenwise(operator)

    def between(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operator(x, torch.arange(x.shape[0], dtype=x.dtype)[:, None, None] + 1)

    assert "differs from row to row" in reason(Decoder(between))


def test_verify_catches_a_false_declaration() -> None:
    mixes = scaled(
        forward=lambda x, w: x.flip(1) * w,
        backward=lambda ctx, grad: (
            (grad * ctx.saved_tensors[1]).flip(1),
            (grad * ctx.saved_tensors[0].flip(1)).sum((0, 1)),
        ),
    )
    mixes_gradients = scaled(backward=lambda ctx, grad: (grad.flip(1), grad.sum((0, 1))))
    for operator, verify in ((mixes, "first"), (mixes_gradients, "grad")):
        tokenwise(operator, weights=["weight"])
        torch._dynamo.reset()
        model = Decoder(operator)
        compiled = torch.compile(model, backend="dualkv", options={**EXACT, "verify": verify})
        with pytest.raises(VerificationError):
            step(model, compiled, rollouts()["input_ids"])


def test_a_rule_of_ones_own() -> None:
    operator = scaled()

    @register_rule(operator)
    def rule(cx: Scope, node: torch.fx.Node, x: Value, weight: Value) -> Value:
        if x.tags is None or x.tags[-1] is not Dim.FEATURE or weight.is_packed:
            raise Unproven("it scales rows or columns")
        return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), cx.grid(weight)))

    compare(Decoder(operator))
    compare(Decoder(operator, checkpointed=True))

    def along_columns(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return operator(x.transpose(1, 2), weight.repeat(2)[: x.shape[1]]).transpose(1, 2)

    assert "it scales rows or columns" in reason(Decoder(along_columns))


def test_a_graph_keeps_the_rules_it_was_compiled_with() -> None:
    operator = scaled()
    model = Decoder(operator)
    ids = rollouts()["input_ids"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    compiled(ids)
    tokenwise(operator, weights=["weight"])
    dualkv_compile.reset_stats()
    compiled(ids)
    assert any("no rule is known" in text for text in dualkv_compile.stats()["reasons"])
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    assert distance(compiled(ids), model(ids)) <= 1e-12
    assert dualkv_compile.stats()["reasons"] == {}
    assert dualkv_compile.stats()["packed_calls"] == 1


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (lambda cx, node, x: None, "must return a Value"),
        (lambda cx, node, x: cx.packed(x), "must return a Value"),
        (lambda cx, node, x: (cx.result(node, x.tags, [x], cx.packed(x)),), "must return a Value"),
        (lambda cx, node, x: cx.result(node, (*x.tags, Dim.FEATURE), [x], cx.packed(x)), "4 dimensions"),
        (
            lambda cx, node, x: cx.result(node, (Dim.ROW, Dim.FEATURE, Dim.COLUMN), [x], cx.packed(x)),
            "calls dimension 2 of the result its COLUMN",
        ),
    ],
)
def test_what_a_rule_returns_is_checked(returns: Callable[..., Any], says: str) -> None:
    operator = scaled()
    register_rule(operator)(lambda cx, node, x, weight: returns(cx, node, x))
    text = reason(Decoder(operator))
    assert "RuleError" in text
    assert says in text


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


@pytest.mark.parametrize(
    ("operator", "says"),
    [
        (3, "expected an operator"),
        ("mylib::norm", "expected an operator"),
        (F.silu, "Python code"),
        (nn.Linear, "Python code"),
        (nn.Linear(2, 2), "Python code"),
        (Cubed, "custom_op with register_autograd"),
        (torch.ops.aten.add, "several overloads"),
        (torch.ops.aten.silu.default, "family pointwise"),
        (torch.ops.aten.linear.default, "family matmul"),
        (torch.ops.aten.add_.Tensor, "changes its arguments"),
        (torch.ops.aten.rand.default, "random"),
    ],
)
def test_what_is_no_operator_or_can_have_no_rule(operator: Any, says: str) -> None:
    before = rules.registry.rules()
    for register in (register_rule, tokenwise):
        with pytest.raises(RuleError, match=says):
            register(operator)
    assert rules.registry.rules() == before


def test_impossible_declarations() -> None:
    operator = scaled()
    lists = define(lambda x: [x], lambda ctx, grads: grads[0], "(Tensor x) -> Tensor[]")
    for declared, says in (
        ({"weights": ["bias"]}, "expected some of its tensor arguments"),
        ({"weights": ["x", "weight"]}, "none of its arguments"),
        ({"token_dims": (1, 0)}, "row, column"),
        ({"token_dims": (-1,)}, "row, column"),
        ({"token_dims": ()}, "row, column"),
    ):
        with pytest.raises(RuleError, match=says):
            tokenwise(operator, **declared)
    with pytest.raises(RuleError, match="expected results that are tensors"):
        tokenwise(lists)
    for nothing in (register_rule, tokenwise):
        with pytest.raises(RuleError, match="at least one"):
            nothing()
    with pytest.raises(RuleError, match="expected a function"):
        register_rule(operator)(3)  # type: ignore[arg-type]
    tokenwise(operator, weights=["weight"])
    with pytest.raises(RuleError, match="family user"):
        tokenwise(operator, weights=["weight"])
    tokenwise(operator, weights=["weight"], replace=True)


def test_the_documented_surface_exists() -> None:
    for name in ("packed", "grid", "operand", "join", "emit", "result", "on_grid"):
        assert f"cx.{name}(" in (rules.__doc__ or "")
        assert callable(getattr(Scope, name))
    for name in ("tags", "is_packed", "shape", "ndim"):
        assert f"{name}``" in (rules.__doc__ or "")
