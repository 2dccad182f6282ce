"""FlexAttention on the CPU, where it has a forward: values, one compilation for all T, and never its dense form."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import dualkv_compile
from dualkv_compile.compiled import CompiledFunction, generated_function
from dualkv_compile.errors import CompilationError, InputError, OptionError
from dualkv_compile.kernels import flex, flex_compiled, reference
from dualkv_compile.kernels.block_mask import block_mask
from dualkv_compile.kernels.flex import attend
from dualkv_compile.kernels.pair_mask import pair_form
from dualkv_compile.kernels.predicate import Expression, evaluate, from_text, to_text
from dualkv_compile.options import Options
from tests.kernels.helpers import TREES, Plan, assert_close, expect, group, make_plan, operands
from tests.models.harness import build, rollouts

WINDOW: Expression = ("gt", ("kcol",), ("sub", ("qcol",), ("const", 40)))
#: One term of every kind that is left in a kernel, and what the others were moved out to.
EVERYTHING = to_text(
    ("and", ("and", ("and", ("k", 0), ("q", 3)), ("or", WINDOW, ("not", ("ne", ("q", 1), ("k", 1))))),
     ("and", ("lt", ("abs", ("sub", ("q", 2), ("k", 2))), ("const", 90.5)),
      ("and", ("le", ("minimum", ("qcol",), ("kcol",)), ("const", 150)),
       ("ne", ("mod", ("sub", ("qcol",), ("kcol",)), ("const", 7)), ("const", 3)))))
)  # fmt: skip
LONG_TREES = {
    "wide": group(128, [64] * 4),
    "prompts": group(70, [41, 60, 1]) + group(33, [100, 7], first_id=100_000),
}


def vectors_for(plan: Plan) -> list[Tensor]:
    return [plan.column > 5, plan.column.long() // 33, plan.column.float() * 1.5, plan.column % 11 != 4]


def forward(plan: Plan, dtype: torch.dtype = torch.float32, mask: str = "", **sizes: int) -> tuple[Tensor, Tensor]:
    """The compiled kernel and the float64 reference, without gradients."""
    tensors = operands(plan, dtype=dtype, **({"heads": 4, "kv_heads": 2, "dim": 16} | sizes))
    vectors = vectors_for(plan)
    everyone = slice(0, plan.tokens)
    extra = evaluate(from_text(mask), vectors, plan.column, everyone, everyone) if mask else None  # type: ignore[arg-type]
    q, k, v = tensors[:3]
    out, lse = flex_compiled.run(q, k, v, plan.rank, plan.column, plan.end, vectors, mask, scale=0.25, strategy="flex")
    assert lse is None
    assert out.dtype == dtype
    return out, expect(plan, tensors, extra, 0.25)[0]


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["", EVERYTHING])
def test_one_compilation_serves_all_trees(mask: str) -> None:
    """Ragged and several levels, rows that see no key; up to one block of tokens, and from there on."""
    flex_compiled._entry.cache_clear()
    blind = 0
    for compilations, names in ((1, ["ragged", "two_prompts", "multi_level"]), (2, ["long", "wide", "prompts"])):
        for name in names:
            plan = make_plan(LONG_TREES[name] if name in LONG_TREES else TREES[name])
            assert (plan.tokens > 128) == (compilations == 2)
            out, expected = forward(plan, mask=mask)
            blind += int((expected == 0).all(-1).sum())
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
            assert out.stride(-2) == out.shape[1] * out.shape[-1]  # ordered by token
            assert flex_compiled._entry(mask, 0.25, "TRITON", False, 0.0).compilations == compilations
    assert (blind > 0) == bool(mask)


@pytest.mark.slow
def test_packed_graph_makes_the_block_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with two layers: exact, one call of each mask operator in the graph, one compilation for three T."""
    model = build("mistral").eval().requires_grad_(False)
    graphs: list[torch.fx.GraphModule] = []
    from dualkv_compile import runtime

    original = runtime.CompiledGraph

    def spy(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs.append(gm)
        return original(gm, *args, **kwargs)

    monkeypatch.setattr(runtime, "CompiledGraph", spy)
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    options = {"attention": "flex", "min_shared": 1, "min_saving": 0}
    compiled = torch.compile(model, backend="dualkv", options=options, dynamic=True)
    with torch.no_grad():
        for count in (4, 6, 5):
            batch = rollouts(group=count, prompts=(12, 7))
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
            valid = batch["attention_mask"].bool()
            actual = compiled(**batch, use_cache=False).logits[valid]
            torch.testing.assert_close(actual, model(**batch, use_cache=False).logits[valid], rtol=0, atol=2e-5)
    statistics = dualkv_compile.stats()
    assert statistics["packed_calls"] == 3
    assert not statistics["reasons"]
    assert statistics["graphs_compiled"] == 1
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert targets.count(attend) == 2
    assert targets.count(torch.ops.dualkv.block_mask.default) == 1
    assert targets.count(torch.ops.dualkv.pair_vectors.default) == 1


@pytest.mark.parametrize("backend", ["TRITON", "FLASH"])
def test_gradients_by_the_dense_form(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graph says, gradients too: FlexAttention's own meaning of it, which is dense, at few tokens.

    FLASH refuses a gradient of the LSE; and a NaN in the gradient of a query that sees no key must not spread.
    """
    torch._dynamo.reset()
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # "no backward on CPU"
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    plan = make_plan(TREES["ragged"])
    mask = to_text(("and", ("k", 0), WINDOW))
    valid = plan.column >= 4
    q, k, v, grad = operands(plan, dim=16)
    everyone = slice(0, plan.tokens)
    extra = evaluate(from_text(mask), [valid], plan.column, everyone, everyone)  # type: ignore[arg-type]
    expected = expect(plan, (q, k, v, grad), extra, 0.25)
    assert 0 < (expected[1] == -torch.inf).sum() < expected[1].numel()
    grad[:, :, ~valid] = torch.nan
    pairs = pair_form(mask).pairs

    def traced(*x: Tensor) -> Any:
        return flex_compiled._trace(*x[:6], [x[6]], None, mask, pairs, 0.25, backend, True, 0.0)

    compiled = torch.compile(
        traced, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep), fullgraph=True, dynamic=True
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = compiled(*leaves, plan.rank, plan.column, plan.end, valid)
    actual = [out.detach(), lse if backend == "TRITON" else expected[1], *torch.autograd.grad(out, leaves, grad)]
    assert_close(actual, expected, 1e-6)
    assert not lse.requires_grad
    (backward,) = [node for node in graphs[-1].graph.nodes if "flex_attention_backward" in str(node.target)]
    assert backward.args[6] is None  # the gradient of the LSE


BENT: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "both": {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("case", BENT)
def test_gradients_of_bent_scores_by_the_dense_form(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft cap and sinks with their gradients, where some queries see no key."""
    torch._dynamo.reset()
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    plan = make_plan(TREES["ragged"])
    mask = to_text(("and", ("k", 0), WINDOW))
    valid = plan.column >= 4
    q, k, v, grad = operands(plan, dim=16)
    given = BENT[case]
    everyone = slice(0, plan.tokens)
    extra = evaluate(from_text(mask), [valid], plan.column, everyone, everyone)  # type: ignore[arg-type]
    tensors = {"q": q, "k": k, "v": v, **{name: x for name, x in given.items() if isinstance(x, Tensor)}}
    exact = {name: x.double().requires_grad_() for name, x in tensors.items()}
    tree = (plan.rank, plan.column, plan.end)
    places = dict(zip(("rank", "column", "end"), tree, strict=True))
    right, _ = reference.packed_attention(**{**given, **exact}, **places, scale=0.25, extra=extra)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    q_, k_, v_ = (leaves[name] for name in "qkv")
    softcap, pairs = given.get("softcap", 0.0), pair_form(mask).pairs

    # As in a packed graph, the numbers are literals: others become inputs under dynamic=True.
    traced = generated_function(
        "bent",
        "q, k, v, rank, column, end, valid, sinks",
        f"trace(q, k, v, rank, column, end, [valid], sinks, {mask!r}, {pairs!r}, 0.25, 'TRITON', True, {softcap!r})",
        {"trace": flex_compiled._trace},
    )
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=True)
    out, lse = compiled(q_, k_, v_, *tree, valid, leaves.get("sinks"))
    seen = (extra & reference.tree_visible(*tree)).any(-1)
    assert not seen.all()
    assert (out[:, :, ~seen] == 0).all()
    least = given.get("sinks", torch.tensor([-torch.inf]))
    assert (lse[:, :, ~seen] == least[None, :, None]).all()
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    expected = torch.autograd.grad(right, list(exact.values()), grad.double())
    for name, x, y in zip(("out", *leaves), (out, *found), (right, *expected), strict=True):
        assert (x.double() - y).abs().max() <= 1e-5 * y.abs().max(), name


def test_a_soft_cap_in_the_compiled_kernel() -> None:
    plan = make_plan(LONG_TREES["prompts"])
    tensors = operands(plan, dtype=torch.float32, heads=4, kv_heads=2, dim=16)
    tree = (plan.rank, plan.column, plan.end)
    with torch.no_grad():
        out, _ = flex_compiled.run(*tensors[:3], *tree, scale=0.25, strategy="flex", softcap=3.0)
        right, _ = reference.packed_attention(*(x.double() for x in tensors[:3]), *tree, 0.25, softcap=3.0)
        plain, _ = reference.packed_attention(*(x.double() for x in tensors[:3]), *tree, 0.25)
    torch.testing.assert_close(out.double(), right, rtol=0, atol=1e-5)
    assert (right - plain).abs().max() > 1e-3


def test_scores_that_a_kernel_cannot_bend() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    flex.check_scores("flex", cuda, "softcap+sinks")
    flex.check_scores("flex_flash", cuda, "")
    with pytest.raises(InputError, match="'flex_flash': cannot compute scores with softcap on cuda"):
        flex.check_scores("flex_flash", cuda, "softcap")
    with pytest.raises(InputError, match="scores with bias on cuda"):
        flex.check_scores("flex", cuda, "bias")
    with pytest.raises(InputError, match="sinks on cpu"):
        flex.check_scores("flex", cpu, "sinks")


def test_dense_form_is_an_error() -> None:
    """Whatever keeps Dynamo from compiling: nothing is computed."""
    plan = make_plan(TREES["ragged"])
    q, k, v, _ = operands(plan, dtype=torch.float32)
    tree = (plan.rank, plan.column, plan.end)
    with pytest.raises(CompilationError, match="without being compiled"):
        attend(q, k, v, block_mask(*tree), *tree, [], None, False, 1.0, "TRITON")
    with (
        mock.patch("dualkv_compile.kernels.flex.flex_attention") as dense,
        torch.compiler.set_stance("force_eager"),
        pytest.raises(CompilationError, match="without being compiled"),
    ):
        flex_compiled.run(q, k, v, *tree, scale=1.0, strategy="flex")
    assert not dense.called


def test_too_many_compilations_are_an_error() -> None:
    """The limit is reached: an error of ours rather than the function run as it is."""
    torch._dynamo.reset()
    ran = []

    def body(x: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            ran.append(x.shape)
        return x + 1

    function = generated_function("limited", "x", "body(x)", {"body": body})
    limited = CompiledFunction(function, Options(compiler="eager"), dynamic=False, name="limited", limit=2)
    for dtype in (torch.float32, torch.float64):
        limited(torch.zeros(3, dtype=dtype))
    with pytest.raises(CompilationError, match="limited graph was compiled 2 times"):
        limited(torch.zeros(3, dtype=torch.int32))
    assert not ran


def test_refusals() -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, _ = operands(plan, dtype=torch.float32)
    tree = (plan.rank, plan.column, plan.end)
    leaf = q.clone().requires_grad_()
    with pytest.raises(InputError, match="'flex': FlexAttention has no gradients on the CPU"):
        flex_compiled.run(leaf, k, v, *tree, scale=1.0, strategy="flex")
    with pytest.raises(InputError, match="'flex_flash': expected tensors on a CUDA device, got cpu"):
        flex_compiled.run(q, k, v, *tree, scale=1.0, strategy="flex_flash")
    with (
        mock.patch.object(flex, "flash_available", return_value=False),
        pytest.raises(InputError, match="flash-attn-4 is not installed"),
    ):
        flex.check("flex_flash", torch.device("cuda"), gradients=True)
    for compiler in ("eager", "aot_eager"):
        with pytest.raises(OptionError, match="'flex' needs compiler='inductor'"):
            Options.parse({"attention": "flex", "compiler": compiler})


def test_what_flash_cannot_express() -> None:
    chunk = to_text(("eq", ("floordiv", ("qcol",), ("const", 64)), ("floordiv", ("kcol",), ("const", 64))))
    distance = to_text(("eq", ("mod", ("sub", ("qcol",), ("kcol",)), ("const", 4)), ("const", 0)))
    assert flex.expressible("flex_flash", chunk)  # one division per token, made before
    assert not flex.expressible("flex_flash", distance)
    assert flex.expressible("flex", distance)
    assert flex.expressible("flex_flash", "")


def test_gradients_on_the_cpu_are_refused_by_the_backend() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(build("llama"), backend="dualkv", options={"attention": "flex", "min_shared": 1})
    batch = rollouts(group=4)
    with pytest.raises(InputError, match="no gradients on the CPU"):
        compiled(input_ids=batch["input_ids"], use_cache=False)


def test_no_tokens() -> None:
    empty = torch.zeros(1, 4, 0, 16)
    nothing = torch.zeros(0, dtype=torch.int32)
    out, _ = flex_compiled.run(empty, empty, empty, nothing, nothing, nothing, scale=1.0, strategy="flex")
    assert out.shape == (1, 4, 0, 16)


@pytest.mark.slow
def test_public_function_and_autocast() -> None:
    plan = make_plan(group(90, [45, 20]))
    q, k, v, grad = operands(plan, heads=3, kv_heads=1, dim=16, dtype=torch.float32)
    expected = expect(plan, (q, k, v, grad))[0]
    prefix = dualkv_compile.PrefixPlan.from_rows(plan.grid, min_shared=1, keep=plan.grid >= 0)
    assert torch.equal(prefix.column, plan.column)
    out = dualkv_compile.packed_attention(q, k, v, prefix, attention="flex")
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = dualkv_compile.packed_attention(q, k, v, prefix, attention="flex")
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0, atol=0.03)
