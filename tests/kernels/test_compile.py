"""The operators inside torch.compile: one compilation for all T, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dualkv_compile.kernels.gather import pack, unpack
from dualkv_compile.kernels.packed_attention import packed_attention
from dualkv_compile.kernels.predicate import to_text
from tests.kernels.helpers import TREES, Plan, assert_close, expect, group, make_plan, operands

WINDOW = to_text(("and", ("k", 0), ("gt", ("kcol",), ("sub", ("qcol",), ("const", 6)))))
PLANS = ["one_prompt", "ragged", "multi_level", "prompt_in_prompt", "identical"]


def attention(mask: str, *tensors: Tensor) -> Tensor:
    q, k, v, rank, column, end, nodes, valid = tensors
    out, _ = packed_attention(q * 1.0, k, v + 0.0, rank, column, end, nodes, [valid], mask, scale=8**-0.5)
    return out * 2.0


def dynamic(plan: Plan, tensors: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Operands that require grad and the plan's tensors, with T and the number of nodes marked dynamic."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    # An empty node changes nothing; a single node would be specialised, as every dimension of size 1 is.
    nodes = torch.cat([plan.nodes, torch.zeros(1, 3, dtype=torch.int64)])
    tree = [plan.rank.clone(), plan.column.clone(), plan.end.clone(), nodes, plan.column % 4 != 1]
    for x in leaves:
        torch._dynamo.mark_dynamic(x, 2)
    for x in tree:
        torch._dynamo.mark_dynamic(x, 0)
    return leaves, tree


@pytest.mark.parametrize("mask", ["", WINDOW])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compilation_serves_all_trees(backend: str, mask: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *x: attention(mask, *x), backend=counter, fullgraph=True)
    for name in PLANS:
        plan = make_plan(TREES[name])
        q, k, v, grad = operands(plan)
        leaves, tree = dynamic(plan, (q, k, v))
        out = compiled(*leaves, *tree)
        grads = torch.autograd.grad(out, leaves, grad.transpose(1, 2).contiguous().transpose(1, 2))
        extra = None
        if mask:
            extra = (tree[4] != 0)[None, :] & (plan.column[None, :] > plan.column[:, None] - 6)
        expected_out, lse, *expected = expect(plan, (q, k, v, grad * 2.0), extra)
        assert_close([out.detach(), lse, *grads], [expected_out * 2.0, lse, *expected], 1e-12)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_without_gradients(backend: str, mode: Any) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(lambda *x: attention("", *x), backend=counter, fullgraph=True)
    for name in PLANS:
        plan = make_plan(TREES[name])
        tensors = operands(plan)
        expected = expect(plan, tensors)[0] * 2.0
        with mode():
            leaves, tree = dynamic(plan, tensors)
            for function in (compiled, lambda *x: attention("", *x)):
                torch.testing.assert_close(function(*leaves, *tree), expected, rtol=0, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_layer_on_the_grid(backend: str) -> None:
    """Pack, project, attend, put back: gradients of the input and of the weight, one compilation for three batches."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def layer(hidden: Tensor, weight: Tensor, index: Tensor, inverse: Tensor, *tree: Tensor) -> Tensor:
        packed = pack(hidden.flatten(0, 1), index, 0)
        q, k, v = (packed @ weight).view(1, -1, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out, _ = packed_attention(q, k, v, *tree, scale=8**-0.5)  # type: ignore[misc]
        return unpack(out.transpose(1, 2).flatten(2), inverse, 1)[0].sin()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    weight = torch.randn(16, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for responses in ([4, 4, 4], [3, 6], [2, 9, 1, 1]):
        plan = make_plan(group(11, responses))
        rows, width = plan.grid.shape
        hidden = torch.randn(rows, width, 16, dtype=torch.float64).requires_grad_()
        tree = [plan.rank.clone(), plan.column.clone(), plan.end.clone(), plan.nodes.clone()]
        index, inverse = plan.index.clone(), plan.inverse.clone()
        for x in (index, *tree):
            torch._dynamo.mark_dynamic(x, 0)
        for x in (inverse, hidden):
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 1)
        expected = layer(hidden, weight, index, inverse, *tree)
        actual = compiled(hidden, weight, index, inverse, *tree)
        seed = torch.randn_like(expected)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        for a, b in zip(
            torch.autograd.grad(actual, (hidden, weight), seed),
            torch.autograd.grad(expected, (hidden, weight), seed),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_autocast(backend: str) -> None:
    torch._dynamo.reset()
    plan = make_plan(TREES["one_prompt"])
    tensors = operands(plan, dtype=torch.float32)

    def call(*x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return packed_attention(*x, scale=0.3)[0]  # type: ignore[misc]

    results = []
    for function in (call, torch.compile(call, backend=backend, fullgraph=True)):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = function(*leaves, plan.rank, plan.column, plan.end, plan.nodes)
        assert out.dtype == torch.bfloat16
        results.append([out.detach(), *torch.autograd.grad(out, leaves, tensors[3].bfloat16())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["regions", "blocks"])
@pytest.mark.parametrize("mask", ["", WINDOW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(strategy: str, mask: str, dtype: torch.dtype) -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, grad = operands(plan, dtype=dtype)
    valid = plan.column % 4 != 1
    more: tuple[object, ...] = (None, None, 0.0)
    if strategy == "blocks" and mask:
        more = (torch.randn(1, plan.tokens), torch.randn(4), 2.0)
    tail = (plan.rank, plan.column, plan.end, plan.nodes, [valid], mask, 0.3, strategy, *more)
    torch.library.opcheck(torch.ops.dualkv.packed_attention, (q, k, v, *tail))
    layout = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    learned = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in more]
    torch.library.opcheck(torch.ops.dualkv.packed_attention, (*layout, *tail[:-3], *learned))
    out, lse = torch.ops.dualkv.packed_attention(q, k, v, *tail)
    torch.library.opcheck(torch.ops.dualkv.packed_attention_backward, (grad, q, k, v, out, lse, *tail))


def test_flops_while_tracing_are_the_upper_bound() -> None:
    plan = make_plan(TREES["ragged"])
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter:
        fake = [torch.empty(x.shape, dtype=x.dtype) for x in (*operands(plan)[:3], plan.rank, plan.column, plan.end)]
        packed_attention(*fake, torch.empty(plan.nodes.shape, dtype=torch.int64), scale=1.0)
    assert counter.get_total_flops() == 2 * 4 * plan.tokens**2 * 16
