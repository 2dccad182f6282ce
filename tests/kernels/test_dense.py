"""The strategy "dense" on the CPU: everything but the CUDA kernels, which a plain float64 one stands in for."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import dense, fused, reference, regions
from dualkv_compile.kernels import packed_attention as operator
from dualkv_compile.kernels.fused import Gradients, Kernel, Offsets
from dualkv_compile.kernels.packed_attention import packed_attention
from dualkv_compile.kernels.rows import Rows, merge_rows, sum_rows
from dualkv_compile.kernels.tree_cut import Worth
from dualkv_compile.plan_cache import PlanCache
from tests.kernels.helpers import TOLERANCE, TREES, Plan, assert_close, expect, group, make_plan, operands
from tests.models.harness import assert_packed_and_exact, build, logits_step, rollouts, trie_size


class Plain:
    """A kernel of :class:`dualkv_compile.kernels.fused.Kernel` in plain torch, on grouped heads; counts its calls."""

    def __init__(self, worth: Worth | None) -> None:
        self.worth = worth
        self.calls: Counter[str] = Counter()

    @staticmethod
    def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
        scores = q @ k.transpose(-1, -2) * scale
        assert scores.numel()
        assert not causal or q.shape[-2] == k.shape[-2]
        return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf) if causal else scores

    def stacked(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        self.calls["stacked"] += 1
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = self._scores(q, k, causal, scale)
        out = (torch.softmax(scores, -1) @ v).transpose(1, 2).contiguous().transpose(1, 2)
        return out, scores.logsumexp(-1)

    def stacked_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        self.calls["stacked_backward"] += 1
        kv_heads = k.shape[1]
        k, v = (x.repeat_interleave(q.shape[1] // kv_heads, dim=1) for x in (k, v))
        weights = torch.exp(self._scores(q, k, causal, scale) - lse.unsqueeze(-1))
        slopes = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
        by_key = (x.transpose(-1, -2) @ y for x, y in ((slopes, q), (weights, grad)))
        grad_k, grad_v = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in by_key)
        return slopes @ k, grad_k, grad_v

    def ragged(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Offsets, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.calls["ragged"] += 1
        parts = [
            self.stacked(*(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), causal, scale)
            for rows, keys in self._slices(offsets, q, k)
        ]
        out, lse = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(2))
        return out, lse

    def ragged_backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        offsets: Offsets,
        causal: bool,
        scale: float,
    ) -> Gradients:
        self.calls["ragged_backward"] += 1
        parts = []
        for rows, keys in self._slices(offsets, q, k):
            tensors = (grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])
            parts.append(self.stacked_backward(*(x.transpose(0, 1)[None] for x in tensors), causal, scale))
        grad_q, grad_k, grad_v = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
        return grad_q, grad_k, grad_v

    @staticmethod
    def _slices(offsets: Offsets, q: Tensor, k: Tensor) -> list[tuple[slice, slice]]:
        assert offsets.queries.dtype == offsets.keys.dtype == torch.int32
        queries, keys = offsets.queries.tolist(), offsets.keys.tolist()
        assert (queries[0], queries[-1], keys[0], keys[-1]) == (0, q.shape[0], 0, k.shape[0])
        assert max(b - a for a, b in pairwise(queries)) == offsets.longest_queries
        assert max(b - a for a, b in pairwise(keys)) == offsets.longest_keys
        return [
            (slice(*rows), slice(*columns)) for rows, columns in zip(pairwise(queries), pairwise(keys), strict=True)
        ]


WORTHS = {
    "ragged": None,
    "stacks": Worth(share=0, pairs=0, length=1),
    "mixed": Worth(share=0.2, pairs=0, length=4),
}


def run_dense(plan: Plan, tensors: Sequence[Tensor], kernel: Kernel, scale: float) -> list[Tensor]:
    tree = (plan.column, plan.nodes, (), None, scale)
    out, lse = dense.forward(*tensors[:3], *tree, kernel=kernel)
    return [out, lse, *dense.backward(tensors[3], *tensors[:3], out, lse, *tree, kernel=kernel)]


@pytest.mark.parametrize("worth", WORTHS)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("tree", TREES)
def test_every_tree(tree: str, heads: tuple[int, int], worth: str) -> None:
    plan = make_plan(TREES[tree])
    tensors = operands(plan, *heads)
    results = run_dense(plan, tensors, Plain(WORTHS[worth]), 0.4)
    assert_close(results, expect(plan, tensors, scale=0.4), TOLERANCE[torch.float64])
    # What tracing has promised, to the last stride; and nothing of the operands' memory.
    like = regions.token_major(tensors[0], *results[0].shape[1:], torch.float64)
    assert results[0].stride() == results[2].stride() == like.stride()
    assert results[1].is_contiguous()


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=9),
    worth=st.sampled_from(sorted(WORTHS)),
)
def test_random_trees(rows: list[list[int]], worth: str) -> None:
    plan = make_plan(rows)
    tensors = operands(plan)
    assert_close(run_dense(plan, tensors, Plain(WORTHS[worth]), 1.0), expect(plan, tensors, scale=1.0), 1e-11)


def _inside(x: Tensor) -> Tensor:
    wide = torch.full((1, x.shape[1] + 1, x.shape[2] + 7, x.shape[3] + 3), torch.nan, dtype=x.dtype)
    return wide[:, 1:, 5:-2, 2:-1].copy_(x)


def _fused(x: Tensor) -> Tensor:
    """As one part of a fused q, k, v projection: rows that are aligned, and not neighbours in memory."""
    return torch.cat([x, x * torch.nan], dim=1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]


@pytest.mark.parametrize("worth", WORTHS)
def test_any_strides(worth: str) -> None:
    plan = make_plan(TREES["long"] + TREES["multi_level"])
    tensors = operands(plan)
    expected = run_dense(plan, tensors, Plain(WORTHS[worth]), 0.3)
    for layout in (_inside, _fused, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        actual = run_dense(plan, [layout(x) for x in tensors], Plain(WORTHS[worth]), 0.3)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("worth", WORTHS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int, worth: str) -> None:
    nodes = torch.tensor([[0, 1, 1]])[:tokens]
    q = torch.randn(1, 2, tokens, 8, dtype=torch.float64)
    plan = (torch.zeros(tokens, dtype=torch.int32), nodes, (), None, 1.0)
    out, lse = dense.forward(q, q, q, *plan, kernel=Plain(WORTHS[worth]))
    grads = dense.backward(q, q, q, q, out, lse, *plan, kernel=Plain(WORTHS[worth]))
    assert torch.equal(out, q)
    assert lse.shape == (1, 2, tokens)
    assert [grad.shape for grad in grads] == [q.shape] * 3
    torch.testing.assert_close(grads[2], q)


def test_calls() -> None:
    """The paper's benchmark is three stacks; any number of ragged nodes is one call per level."""
    kernel = Plain(WORTHS["stacks"])
    plan = make_plan(group(30, [8] * 6))
    run_dense(plan, operands(plan), kernel, 1.0)
    assert kernel.calls == {"stacked": 3, "stacked_backward": 3}
    plan = make_plan([row for n in range(9) for row in group(7 + n, [3, 5, 1 + n], first_id=100_000 * n)])
    kernel = Plain(None)
    run_dense(plan, operands(plan), kernel, 1.0)
    assert kernel.calls["ragged"] == kernel.calls["ragged_backward"] == 2


def test_equal_trees_are_planned_once() -> None:
    plan = make_plan(TREES["ragged"])
    first, again = (dense._calls(nodes, torch.device("cpu"), None) for nodes in (plan.nodes, plan.nodes.clone()))
    assert first is again
    other = make_plan(TREES["multi_level"])
    assert dense._calls(other.nodes, torch.device("cpu"), None) is not first


def test_gradients_are_summed_in_float32() -> None:
    """256 + 1 + 1 in bfloat16: a running sum would stay at 256."""
    rows = [Rows(0, 1)] * 3
    parts = [torch.full((1, 1, 8), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert torch.equal(sum_rows(parts, rows, 1), torch.full((1, 1, 8), 258.0, dtype=torch.bfloat16))


def test_tokens_without_rows() -> None:
    rows = [Rows.of([(2, 3), (0, 1)], torch.device("cpu"))]
    part = torch.arange(2.0).add(1).reshape(2, 1, 1)
    out, lse = merge_rows([part], [part[..., 0]], rows, 4)
    assert out.flatten().tolist() == [2.0, 0.0, 1.0, 0.0]
    assert lse.flatten().tolist() == [2.0, -torch.inf, 1.0, -torch.inf]
    assert sum_rows([part], rows, 4).flatten().tolist() == [2.0, 0.0, 1.0, 0.0]


def test_refusals() -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, _ = operands(plan, dtype=torch.bfloat16)
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    with pytest.raises(InputError, match=r"'dense' expected CUDA tensors.*got torch.bfloat16.*on cpu with D=8"):
        packed_attention(q, k, v, *tree, scale=1.0, strategy="dense")
    with pytest.raises(InputError, match="no mask expression"):
        dense.forward(q, k, v, plan.column, plan.nodes, (), ("k", 0), 1.0, kernel=Plain(None))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 24),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 5]),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_hidden_keys_are_left_out_of_the_nodes(
    rows: int, columns: int, ids: int, hidden: int, stacks: bool, seed: int
) -> None:
    """Any tokens may be hidden, in the middle of rows too; hidden ones still query. One in ``hidden`` ids is."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.randint(0, ids, (rows, columns), generator=generator)
    valid = grid % hidden != 0
    plan, _ = PlanCache().get(grid, 1, None, valid)
    assert plan.visible is not None
    seen = valid.flatten()[plan.token]
    covered = torch.zeros(plan.tokens, dtype=torch.bool)
    for start, stop, _ in plan.visible.tolist():
        covered[start:stop] = True
    assert torch.equal(covered, seen)
    q, k, v, grad = (
        torch.randn(1, heads, plan.tokens, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference.packed_attention(
        q, k, v, plan.rank, plan.column, plan.end, 0.4, seen.unsqueeze(0)
    )
    expected_grads = torch.autograd.grad(expected, leaves, grad) if expected.requires_grad else ()
    kernel = Plain(Worth(0.0, 0, 1) if stacks else None)
    tree = (plan.column, plan.visible, (), None, 0.4, kernel)
    q, k, v = (x.detach() for x in leaves)
    out, lse = dense.forward(q, k, v, *tree)
    grads = dense.backward(grad, q, k, v, out, lse, *tree)
    assert_close([out, lse, *grads], [expected.detach(), expected_lse.detach(), *expected_grads], 1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_model_through_the_nodes_that_can_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph takes the plan's visible nodes instead of a mask; as it would on a GPU, but for the kernels."""
    used: list[str] = []
    choose = operator.choose

    def noted(*args: Any) -> str:
        used.append(inspect.signature(choose).bind(*args).arguments["strategy"])
        return choose(*args)

    monkeypatch.setattr(dense, "supported", lambda *_: True)
    monkeypatch.setattr(fused, "FusedCuda", lambda device, head_dim: Plain(None))
    monkeypatch.setattr(operator, "choose", noted)
    batch = rollouts(prompts=(9, 12), group=3, shuffle=True, right_padding=(2, 0, 3))
    tokens = trie_size(batch["input_ids"], batch["attention_mask"])
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=tokens, attention="dense")
    assert set(used) == {"dense_visible"}
    batch["attention_mask"][0] = 0
    tokens = trie_size(batch["input_ids"], batch["attention_mask"])
    assert_packed_and_exact(build(name), batch, logits_step(), tokens=tokens, attention="dense", mutant=False)
