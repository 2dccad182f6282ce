"""dualkv::packed_attention against the float64 reference, without a mask expression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import reference
from dualkv_compile.kernels.packed_attention import _backward, _forward, packed_attention
from tests.kernels.helpers import (
    TOLERANCE,
    TREES,
    assert_close,
    expect,
    group,
    make_plan,
    operands,
    relative_error,
    run,
)

STRATEGIES = ("regions", "blocks")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tree", TREES)
def test_every_tree(tree: str, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES[tree])
    tensors = operands(plan, dtype=dtype)
    assert_close(run(plan, tensors, strategy=strategy), expect(plan, tensors), TOLERANCE[dtype])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 2), (14, 2), (7, 1)])
def test_grouped_heads(heads: tuple[int, int], strategy: str) -> None:
    plan = make_plan(TREES["multi_level"])
    tensors = operands(plan, *heads)
    assert_close(run(plan, tensors, strategy=strategy), expect(plan, tensors), 1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dim", [8, 13, 16, 64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_head_dimensions(dim: int, dtype: torch.dtype, strategy: str) -> None:
    plan = make_plan(TREES["ragged"])
    tensors = operands(plan, dim=dim, dtype=dtype)
    assert_close(run(plan, tensors, strategy=strategy), expect(plan, tensors), TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [1.0, 0.05, -0.3])
def test_scale(scale: float) -> None:
    plan = make_plan(TREES["two_prompts"])
    tensors = operands(plan)
    assert_close(run(plan, tensors, scale=scale), expect(plan, tensors, scale=scale), 1e-12)


def test_value_dimension_of_its_own() -> None:
    plan = make_plan(TREES["ragged"])
    tensors = operands(plan, dim=8, value_dim=5)
    assert_close(run(plan, tensors), expect(plan, tensors), 1e-12)
    with pytest.raises(InputError, match=r"regions.*Dv == D.*D=8, Dv=5"):
        run(plan, tensors, strategy="regions")


def test_packed_is_the_undivided_grid() -> None:
    """Packing, attending and putting back is causal attention on the grid, and so are the gradients."""
    plan = make_plan(TREES["two_prompts"] + TREES["multi_level"] + TREES["identical"])
    rows, width = plan.grid.shape
    valid = plan.inverse >= 0
    tensors = operands(plan)
    grid = [x[0][:, plan.inverse.clamp(min=0)].transpose(0, 1).requires_grad_() for x in tensors[:3]]
    grid_out, _ = reference.grid_attention(*grid, 8**-0.5)
    seed = torch.randn(rows, 4, width, 8, dtype=torch.float64) * valid[:, None, :, None]
    grid_grads = torch.autograd.grad(grid_out, grid, seed)

    def summed(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2)[valid]  # [copies, heads, dim]
        total = torch.zeros(plan.tokens, *flat.shape[1:], dtype=x.dtype).index_add_(0, plan.inverse[valid], flat)
        return total.transpose(0, 1)[None]

    out, _, *grads = run(plan, [*tensors[:3], summed(seed)])
    restored = out[0][:, plan.inverse.clamp(min=0)].transpose(0, 1)
    torch.testing.assert_close(restored.transpose(1, 2)[valid], grid_out.transpose(1, 2)[valid], rtol=0, atol=1e-12)
    for grad, expected in zip(grads, grid_grads, strict=True):
        torch.testing.assert_close(grad, summed(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision_is_as_good_as_one_call(strategy: str, dtype: torch.dtype) -> None:
    """Error at most 1.5 times that of one undivided SDPA call on the same (packed) operands."""
    plan = make_plan(group(300, [60, 60, 60, 60]))
    tensors = operands(plan, heads=8, kv_heads=4, dim=32, dtype=dtype)
    visible = reference.tree_visible(plan.rank, plan.column, plan.end)
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    undivided = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    plain = [undivided.detach(), *torch.autograd.grad(undivided, (q, k, v), tensors[3])]
    out, _, *grads = run(plan, tensors, strategy=strategy)
    expected_out, _, *expected = expect(plan, tensors)
    for ours, theirs, exact in zip([out, *grads], plain, [expected_out, *expected], strict=True):
        assert ours.dtype == dtype
        assert rms_error(ours, exact) <= 1.5 * rms_error(theirs, exact)
        assert relative_error(ours, exact) <= 1.5 * relative_error(theirs, exact)


def rms_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).square().mean().sqrt())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_strides(strategy: str, dtype: torch.dtype) -> None:
    plan = make_plan(TREES["long"])
    tensors = operands(plan, dim=16, dtype=dtype)
    expected = run(plan, tensors, strategy=strategy)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2

    def token_major(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(x: Tensor) -> Tensor:
        wide = torch.full((1, x.shape[1] + 1, x.shape[2] + 7, x.shape[3] + 3), torch.nan, dtype=x.dtype)
        view = wide[:, 1:, 5:-2, 2:-1]
        return view.copy_(x)

    def dim_major(x: Tensor) -> Tensor:
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    for layout in (token_major, inside, dim_major):
        actual = run(plan, [layout(x) for x in tensors], strategy=strategy)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=tolerance)
    ones = torch.ones(1, 1, 1, 1, dtype=dtype).expand_as(tensors[3])
    for x, y in zip(
        run(plan, [*tensors[:3], ones], strategy=strategy),
        run(plan, [*tensors[:3], ones.contiguous()], strategy=strategy),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tokens(strategy: str) -> None:
    q = torch.zeros(1, 2, 0, 8, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int32)
    nodes = torch.zeros(0, 3, dtype=torch.int64)
    for mask in ("", "('and', ('k', 0), ('eq', ('q', 0), ('k', 0)))"):
        out, lse = packed_attention(q, q, q, empty, empty, empty, nodes, [empty], mask, scale=1.0, strategy=strategy)
    assert out.shape == (1, 2, 0, 8)
    assert lse.shape == (1, 2, 0)
    (grad,) = torch.autograd.grad(out.sum(), q)
    assert grad.shape == q.shape


def test_lse_has_no_gradient() -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, _ = operands(plan)
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    out, lse = packed_attention(q.requires_grad_(), k, v, *tree, scale=1.0)
    assert out.requires_grad
    assert not lse.requires_grad


def test_grad_of_a_part_of_the_operands() -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, grad = operands(plan)
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    out, _ = packed_attention(q, k.requires_grad_(), v, *tree, scale=8**-0.5)
    (grad_k,) = torch.autograd.grad(out, k, grad)
    torch.testing.assert_close(grad_k, expect(plan, (q, k, v, grad))[3], rtol=0, atol=1e-12)


def test_autocast_casts_like_sdpa() -> None:
    """Query and key float32 after rotary, value bfloat16; float64 is left alone."""
    plan = make_plan(TREES["one_prompt"])
    q, k, v, _ = operands(plan, dtype=torch.float32)
    q.requires_grad_()
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = packed_attention(q, k, v.bfloat16(), *tree, scale=1.0)
        wide, _ = packed_attention(q.double(), k.double(), v.double(), *tree, scale=1.0)
    direct, _ = packed_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), *tree, scale=1.0)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, direct)
    assert wide.dtype == torch.float64
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert grad.dtype == torch.float32


def test_errors_name_what_was_given() -> None:
    plan = make_plan(TREES["ragged"])
    q, k, v, _ = operands(plan)
    tree = (plan.rank, plan.column, plan.end, plan.nodes)
    with pytest.raises(InputError, match=r"strategy: expected one of.*'nonsense'"):
        packed_attention(q, k, v, *tree, scale=1.0, strategy="nonsense")
    with pytest.raises(InputError, match="multiple of Hk"):
        packed_attention(q[:, :3], k, v, *tree, scale=1.0)
    with pytest.raises(InputError, match="tokens everywhere"):
        packed_attention(q, k[:, :, 1:], v, *tree, scale=1.0)
    with pytest.raises(InputError, match="vector number below 1"):
        packed_attention(q, k, v, *tree, [plan.rank], "('k', 1)", scale=1.0)


@pytest.mark.parametrize("training", [False, True])
def test_flops(training: bool) -> None:
    plan = make_plan(group(20, [7, 7, 7]))
    q, k, v, grad = operands(plan, heads=4, kv_heads=2, dim=8)
    q.requires_grad_(training)
    pairs = 20 * 41 + 3 * 7 * 7
    with FlopCounterMode(display=False) as counter:
        tree = (plan.rank, plan.column, plan.end, plan.nodes)
        out, _ = packed_attention(q, k, v, *tree, scale=1.0)
        if training:
            out.backward(grad)
    assert counter.get_total_flops() == 2 * pairs * 4 * 8 * (2 + 5 * training)


def test_flops_of_a_single_row_are_those_of_sdpa() -> None:
    plan = make_plan([list(range(50))])
    q, k, v, _ = operands(plan, heads=2, kv_heads=2, dtype=torch.float32)
    with FlopCounterMode(display=False) as ours:
        packed_attention(q, k, v, plan.rank, plan.column, plan.end, plan.nodes, scale=1.0)
    assert ours.get_total_flops() == sdpa_flop_count(q.shape, k.shape, v.shape) > 0


class Sizes(TorchDispatchMode):
    """The largest number of elements, and of bytes, that any operator below the custom one returns in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.bytes = 0
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.calls.append(func._schema.name)
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and x.numel():
                self.elements = max(self.elements, x.numel())
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def _measure(plan, tensors, vectors=(), mask="", strategy="auto"):  # type: ignore[no-untyped-def]
    """Run forward and backward implementations below the dispatcher's custom operator, and look at every tensor."""
    q, k, v, grad = tensors
    tail = (plan.rank, plan.column, plan.end, plan.nodes, list(vectors), mask, 1.0, strategy, None, None, 0.0)
    with Sizes() as sizes, torch.no_grad():
        out, lse = _forward(q, k, v, *tail)
        _backward(grad, q, k, v, out, lse, *tail)
    return sizes


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mask", ["", "window", "validity", "document"])
def test_no_allocation_of_all_pairs(strategy: str, mask: str) -> None:
    plan = make_plan(group(1500, [700] * 4))
    tensors = operands(plan, heads=1, kv_heads=1, dim=8, dtype=torch.float32)
    valid = torch.arange(plan.tokens) % 37 != 0
    expressions = {
        "": "",
        "window": "('gt', ('kcol',), ('sub', ('qcol',), ('const', 1000)))",
        "validity": "('k', 0)",
        "document": "('eq', ('q', 1), ('k', 1))",
    }
    sizes = _measure(plan, tensors, [valid, plan.column // 900], expressions[mask], strategy)
    assert 0 < sizes.bytes < plan.tokens**2 / 4


def test_equal_responses_share_a_kernel_call() -> None:
    """One prompt with any number of equally long responses: three calls a direction."""
    for responses in (2, 9):
        plan = make_plan(group(30, [8] * responses))
        calls = _measure(plan, operands(plan)).calls
        assert calls.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 3
        assert calls.count("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == 3
