"""Scores beyond the scaled product: soft caps, a number per head and key, and attention sinks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import reference
from dualkv_compile.kernels.packed_attention import packed_attention
from tests.kernels.helpers import TREES, make_plan, operands, relative_error

WINDOW = str(("gt", ("kcol",), ("sub", ("qcol",), ("const", 3))))
HOLES = str(("k", 0))

CASES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "bias": {"bias": 4},
    "bias_of_all_heads": {"bias": 1},
    "sinks": {"sinks": True},
    "all": {"softcap": 1.5, "bias": 4, "sinks": True},
}


def arguments(case: str, tokens: int) -> dict[str, Any]:
    given = dict(CASES[case])
    generator = torch.Generator().manual_seed(5)
    if "bias" in given:
        given["bias"] = torch.randn(given["bias"], tokens, generator=generator, dtype=torch.float64)
    if "sinks" in given:
        given["sinks"] = torch.randn(4, generator=generator, dtype=torch.float64)
    return given


def results(function: Callable[..., tuple[Tensor, Tensor]], leaves: dict[str, Tensor], grad: Tensor) -> list[Tensor]:
    """Out, LSE, and the gradients of all leaves."""
    held = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    out, lse = function(**held)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, list(held.values()), grad)]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert x.shape == y.shape
        assert relative_error(x, y) <= 1e-12


@pytest.mark.parametrize("mask", ["", WINDOW, HOLES])
@pytest.mark.parametrize("case", CASES)
def test_against_the_reference(case: str, mask: str) -> None:
    plan = make_plan(TREES["multi_level"])
    *qkv, grad = operands(plan, value_dim=5 if case == "all" else 0)
    given = arguments(case, plan.tokens)
    softcap = given.pop("softcap", 0.0)
    leaves = dict(zip("qkv", qkv, strict=True)) | given
    valid = plan.column % 4 != 0  # tokens of column 0 see nothing
    distance = plan.column[:, None] - plan.column
    extra = {"": None, WINDOW: distance < 3, HOLES: valid.expand(plan.tokens, -1)}[mask]
    tree = {"rank": plan.rank, "column": plan.column, "end": plan.end}

    def ours(**held: Tensor) -> tuple[Tensor, Tensor]:
        return packed_attention(
            **held, **tree, nodes=plan.nodes, vectors=[valid], mask=mask, scale=0.6, softcap=softcap
        )

    def theirs(**held: Tensor) -> tuple[Tensor, Tensor]:
        return reference.packed_attention(**held, **tree, scale=0.6, extra=extra, softcap=softcap)

    expected = results(theirs, leaves, grad)
    assert_close(results(ours, leaves, grad), expected)
    plain = results(
        lambda q, k, v, **_: packed_attention(q, k, v, **tree, nodes=plan.nodes, vectors=[valid], mask=mask, scale=0.6),
        {name: leaves[name] for name in "qkv"},
        grad,
    )
    assert relative_error(plain[0], expected[0]) > 1e-2


@pytest.mark.parametrize("strategy", ["regions", "blocks"])
def test_sinks_with_every_strategy(strategy: str) -> None:
    plan = make_plan(TREES["two_prompts"])
    *qkv, grad = operands(plan)
    leaves = dict(zip("qkv", qkv, strict=True)) | arguments("sinks", plan.tokens)
    tree = {"rank": plan.rank, "column": plan.column, "end": plan.end}
    ours = results(
        lambda **held: packed_attention(**held, **tree, nodes=plan.nodes, scale=0.6, strategy=strategy), leaves, grad
    )
    assert_close(ours, results(lambda **held: reference.packed_attention(**held, **tree, scale=0.6), leaves, grad))


def test_several_tiles() -> None:
    """More tokens than one tile has, so that the running softmax and the sums over tiles matter."""
    plan = make_plan(TREES["long"])
    *qkv, grad = operands(plan, heads=2, kv_heads=1)
    leaves = dict(zip("qkv", qkv, strict=True)) | {"bias": torch.randn(2, plan.tokens, dtype=torch.float64)}
    tree = {"rank": plan.rank, "column": plan.column, "end": plan.end}
    ours = results(lambda **x: packed_attention(**x, **tree, nodes=plan.nodes, scale=0.4, softcap=3.0), leaves, grad)
    theirs = results(lambda **x: reference.packed_attention(**x, **tree, scale=0.4, softcap=3.0), leaves, grad)
    assert_close(ours, theirs)


def test_gradcheck() -> None:
    plan = make_plan(TREES["empty_responses"])
    q, k, v, _ = operands(plan, heads=2, kv_heads=1, dim=3)
    bias, sinks = (torch.randn(*size, dtype=torch.float64) for size in ((2, plan.tokens), (2,)))

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        tree = (plan.rank, plan.column, plan.end, plan.nodes)
        return packed_attention(q, k, v, *tree, scale=0.7, bias=bias, sinks=sinks, softcap=2.0)[0]

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (q, k, v, bias, sinks)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": torch.zeros(3, 5)}, r"bias: expected \[4 or 1, 5\], got \[3, 5\]"),
        ({"sinks": torch.zeros(2)}, r"sinks: expected \[4\], got \[2\]"),
        ({"softcap": -1.0}, r"softcap: expected a finite number.*got -1.0"),
        ({"softcap": 2.0, "strategy": "regions"}, r"regions.*no soft cap, got .*soft cap 2.0"),
    ],
)
def test_wrong_operands(given: dict[str, Any], message: str) -> None:
    plan = make_plan(TREES["identical"])
    q, k, v, _ = operands(plan)
    with pytest.raises(InputError, match=message):
        packed_attention(q, k, v, plan.rank, plan.column, plan.end, plan.nodes, scale=1.0, **given)
