"""FlexAttention on a GPU against float64: values and gradients, all kinds of trees and masks, no recompilation.

Errors are root mean squares over a tensor. They must be within 1.25 times those of torch's own fused attention on the
undivided rows (for keys and values: with the gradients of all copies added in float64), or within two units in the
last place of the largest value; and small in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import dualkv_compile
from dualkv_compile.errors import InputError
from dualkv_compile.kernels import flex, flex_compiled, reference, strategy_trial
from dualkv_compile.kernels.block_mask import block_mask
from dualkv_compile.kernels.predicate import Expression, evaluate, from_text, to_text
from dualkv_compile.kernels.strategy import Workload
from tests.kernels.helpers import NAMES, Plan, group, make_plan, operands
from tests.models.harness import build, rollouts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

needs_flash = pytest.mark.skipif(not flex.flash_available(), reason="needs flash-attn-4")
STRATEGIES = ["flex", pytest.param("flex_flash", marks=needs_flash)]
DTYPES = [torch.bfloat16, torch.float16]
#: Relative errors that rounding does not explain.
TOO_MUCH = {torch.bfloat16: 1e-2, torch.float16: 2e-3}

TREES: dict[str, list[list[int]]] = {
    "prompt_and_ragged_responses": group(300, [131, 60, 5]) + group(77, [200, 1], first_id=100_000),
    "aligned": group(256, [128, 128]),
    "three_levels": [
        [*range(150), *range(1000, 1000 + middle), *range(end, end + 90 + middle % 7)]
        for middle, end in ((40, 5000), (40, 6000), (41, 7000), (133, 8000))
    ],
    "one_row": [list(range(257))],
    "short": group(20, [7, 3]),
    "identical": [list(range(140))] * 3,
}
WINDOW: Expression = ("gt", ("kcol",), ("sub", ("qcol",), ("const", 40)))
MASKS: dict[str, Expression] = {
    "padding": ("k", 0),
    "blind queries": ("q", 0),
    "window": WINDOW,
    "documents": ("eq", ("q", 1), ("k", 1)),
    "all of them": ("and", ("and", WINDOW, ("k", 0)), ("eq", ("q", 1), ("k", 1))),
    "or": ("or", WINDOW, ("lt", ("kcol",), ("const", 8))),
    "distance": ("lt", ("abs", ("sub", ("q", 1), ("k", 1))), ("const", 2)),
}


def on_gpu(plan: Plan) -> list[Tensor]:
    return [plan.rank.cuda(), plan.column.cuda(), plan.end.cuda()]


def computed(
    strategy: str, plan: Plan, tensors: Sequence[Tensor], vectors: Sequence[Tensor] = (), mask: str = ""
) -> list[Tensor]:
    """out, lse, and the gradients of q, k, v."""
    q, k, v = (x.cuda().requires_grad_() for x in tensors[:3])
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse = flex_compiled.run(q, k, v, *on_gpu(plan), vectors, mask, scale=scale, strategy=strategy, with_lse=True)
    assert lse is not None
    grads = torch.autograd.grad(out, (q, k, v), tensors[3].cuda())
    return [out.detach(), lse, *grads]


@pytest.mark.parametrize("scores", ["softcap", "sinks", "softcap+sinks"])
@pytest.mark.parametrize("mask", ["", "window"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bent_scores(scores: str, mask: str, dtype: torch.dtype) -> None:
    """Soft cap and sinks, with gradients, through the Triton kernel."""
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    tensors = operands(plan, dtype=dtype, heads=8, kv_heads=2, dim=64)
    workload = Workload(0, str(dtype).removeprefix("torch."), 8, 2, 64, 64, "any", False, scores)
    given = strategy_trial.bent_scores(workload)
    leaves = {name: x.cuda().requires_grad_() for name, x in zip("qkv", tensors[:3], strict=True)}
    leaves |= {name: x for name, x in given.items() if isinstance(x, Tensor)}
    places, text = on_gpu(plan), to_text(MASKS[mask]) if mask else ""
    out, _ = flex_compiled.run(
        leaves["q"], leaves["k"], leaves["v"], *places, [], text, scale=0.125, strategy="flex", **given
    )
    grads = torch.autograd.grad(out, list(leaves.values()), tensors[3].cuda())
    double = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    everyone = slice(0, plan.tokens)
    extra = evaluate(MASKS[mask], [], places[1], everyone, everyone) if mask else None
    tree = dict(zip(("rank", "column", "end"), places, strict=True))
    right, _ = reference.packed_attention(**{**given, **double}, **tree, scale=0.125, extra=extra)
    expected = torch.autograd.grad(right, list(double.values()), tensors[3].cuda().double())
    for name, x, y in zip(("out", *leaves), (out, *grads), (right, *expected), strict=True):
        assert rms(x.double() - y) <= TOO_MUCH[dtype] * rms(y), name


def exact(plan: Plan, tensors: Sequence[Tensor], extra: Tensor | None) -> list[Tensor]:
    q, k, v = (x.cuda().double().requires_grad_() for x in tensors[:3])
    out, lse = reference.packed_attention(q, k, v, *on_gpu(plan), 1 / math.sqrt(q.shape[-1]), extra)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), tensors[3].cuda().double())]


def replicated(plan: Plan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same through torch's fused attention on the undivided rows; lse is not to be had."""
    inverse, owner = plan.inverse.cuda(), plan.index.cuda()
    grid = [x.cuda()[0][:, inverse.clamp(min=0)].transpose(0, 1).contiguous().requires_grad_() for x in tensors[:3]]
    out = scaled_dot_product_attention(*grid, is_causal=True, enable_gqa=True)
    grad = torch.zeros_like(out).transpose(0, 1).flatten(1, 2)
    grad[:, owner] = tensors[3].cuda()[0]
    grads = torch.autograd.grad(out, grid, grad.view(out.shape[1], *inverse.shape, -1).transpose(0, 1))
    results = [out.detach().transpose(0, 1).flatten(1, 2)[None, :, owner]]
    for x, y in zip(grads, tensors[:3], strict=True):
        total = torch.zeros(y.shape[1:], dtype=torch.float64, device="cuda")
        present = inverse.flatten() >= 0
        total.index_add_(1, inverse.flatten()[present], x.double().transpose(0, 1).flatten(1, 2)[:, present])
        results.append(total[None])
    return results


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def check(
    strategy: str,
    plan: Plan,
    tensors: Sequence[Tensor],
    vectors: Sequence[Tensor] = (),
    mask: str = "",
) -> None:
    dtype = tensors[0].dtype
    everyone = slice(0, plan.tokens)
    extra = None
    if mask:
        extra = evaluate(from_text(mask), vectors, plan.column.cuda(), everyone, everyone)  # type: ignore[arg-type]
    actual, expected = computed(strategy, plan, tensors, vectors, mask), exact(plan, tensors, extra)
    blind = expected[1] == -math.inf
    assert torch.equal(actual[1] == -math.inf, blind)
    assert (actual[1].double() - expected[1])[~blind].abs().max() < 2e-2  # natural logarithm, of rounded scores
    assert (actual[0][blind] == 0).all()
    assert (actual[2][blind] == 0).all()
    usual = [None] * 5 if mask else [(r := replicated(plan, tensors))[0], None, *r[1:]]
    for name, x, y, z in zip(NAMES, actual, expected, usual, strict=True):
        if name == "lse":
            continue
        assert x.dtype == dtype
        assert x.isfinite().all(), name
        error = rms(x.double() - y)
        allowed = 2 * torch.finfo(dtype).eps * float(y.abs().max())
        if z is not None:
            allowed = max(allowed, 1.25 * rms(z.double() - y))
        assert error <= allowed, f"{name}: {error:.2e} > {allowed:.2e}"
        assert error <= TOO_MUCH[dtype] * max(rms(y), 1e-3), f"{name}: {error:.2e} beside {rms(y):.2e}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_trees(tree: str, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES[tree])
    check(strategy, plan, operands(plan, dim=128, dtype=dtype))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dimensions(dim: int, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    tensors = operands(plan, dim=dim, dtype=dtype)
    if strategy == "flex_flash" and dim not in flex.FLASH_HEAD_DIMS:
        with pytest.raises(InputError, match="expected float16 or bfloat16 and D == Dv"):
            computed(strategy, plan, tensors)
        return
    check(strategy, plan, tensors)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (7, 1)])
def test_grouped_heads(heads: tuple[int, int], strategy: str) -> None:
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    check(strategy, plan, operands(plan, *heads, dim=64, dtype=torch.bfloat16))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(name: str, dtype: torch.dtype, strategy: str) -> None:
    """Padding on the left leaves the first tokens of every row without a key."""
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    vectors = [plan.column.cuda() >= 30, plan.column.cuda().long() // 50]
    check(strategy, plan, operands(plan, dim=64, dtype=dtype), vectors, to_text(MASKS[name]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_blind_queries_ignore_their_gradient(strategy: str) -> None:
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    valid = plan.column >= 30
    tensors = operands(plan, dim=64, dtype=torch.bfloat16)
    tensors[3][:, :, ~valid] = torch.nan
    results = computed(strategy, plan, tensors, [valid.cuda()], "('k', 0)")
    assert all(x.isfinite().all() for x in (results[0], *results[2:]))
    assert (results[2][:, :, ~valid.cuda()] == 0).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", ["heads first", "slices of one projection"])
def test_layouts(layout: str, strategy: str) -> None:
    """Also on the second, dynamic call, where errors have been reported."""
    for responses in ([100, 31], [60, 222]):
        plan = make_plan(group(200, responses))
        tensors = list(operands(plan, dim=64, dtype=torch.bfloat16))
        if layout == "slices of one projection":
            fused = torch.cat([x.transpose(1, 2) for x in tensors[:3]], dim=2).cuda()
            tensors[:3] = (x.transpose(1, 2) for x in fused.split([4, 2, 2], dim=2))
        check(strategy, plan, tensors)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["", "all of them"])
def test_ten_lengths_without_recompiling(name: str, strategy: str) -> None:
    mask = to_text(MASKS[name]) if name else ""
    flex_compiled._entry.cache_clear()
    entry = partial(flex_compiled._entry, mask, 1 / math.sqrt(64), flex.BACKENDS[strategy], True)
    for count, response in enumerate([40, 57, 128, 129, 200, 255, 256, 300, 411, 500]):
        plan = make_plan(group(150, [response, response // 2]))
        vectors = [plan.column.cuda() >= 30, plan.column.cuda().long() // 50]
        check(strategy, plan, operands(plan, dim=64, dtype=torch.bfloat16), vectors, mask)
        if count == 1:
            compilations = entry().compilations
    assert entry().compilations == compilations <= 2


def test_block_mask_does_not_wait_for_the_device() -> None:
    plan = make_plan(TREES["prompt_and_ragged_responses"])
    vectors = [plan.column.cuda() >= 30, plan.column.cuda().long() // 50]
    mask = to_text(MASKS["all of them"])
    tree = on_gpu(plan)
    block_mask(*tree, vectors, mask)  # the first use loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        lists = block_mask(*tree, vectors, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = block_mask(plan.rank, plan.column, plan.end, [x.cpu() for x in vectors], mask)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(lists, expected, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_model(checkpointing: bool, strategy: str) -> None:
    """A packed graph with gradients: as close to float64 as the plain graph, one compilation for three batches."""
    sizes = {"hidden_size": 256, "intermediate_size": 256}  # D = 64
    model = build("llama", torch.bfloat16, **sizes).cuda()
    double = build("llama", torch.float64, **sizes).cuda()
    double.load_state_dict(model.state_dict())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    options = {"attention": strategy, "min_shared": 1, "min_saving": 0, "on_unsupported": "error"}
    compiled = torch.compile(model, backend="dualkv", options=options, dynamic=True)

    def gradients(function: torch.nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
        function.zero_grad(set_to_none=True)
        logits = function(**batch, use_cache=False).logits.double()
        target = batch["input_ids"][:, 1:].unsqueeze(-1)
        scores = logits[:, :-1].log_softmax(-1).gather(2, target).squeeze(-1)
        (scores * batch["attention_mask"][:, 1:]).sum().backward()
        valid = batch["attention_mask"].bool()
        owner = function._orig_mod if isinstance(function, torch._dynamo.OptimizedModule) else function
        return [logits.detach()[valid], *(p.grad.double() for p in owner.parameters() if p.grad is not None)]

    for count in (4, 6, 5):
        batch = {name: x.cuda() for name, x in rollouts(group=count, prompts=(70, 41), response=30).items()}
        batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        actual, plain, best = (gradients(f, batch) for f in (compiled, model, double))
        for x, y, z in zip(actual, plain, best, strict=True):
            assert rms(x - z) <= 1.5 * rms(y - z) + 1e-3 * rms(z)
    statistics = dualkv_compile.stats()
    assert statistics["packed_calls"] == 3
    assert not statistics["reasons"]
    assert statistics["graphs_compiled"] == 1
