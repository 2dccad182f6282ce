"""The Triton kernels of the merge on the CPU, against the torch code. Run by test_triton_merge.py in its own process.

Needs TRITON_INTERPRET=1 before triton is imported: the kernels are then Python functions on numpy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dualkv_compile.kernels import merge as torch_merge
from dualkv_compile.kernels import rows as torch_rows
from dualkv_compile.kernels import triton_merge
from dualkv_compile.kernels.rows import Rows

INF = math.inf
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def draw(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parts(count: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Partial results with LSEs far apart, and a fifth of the sides empty."""
    outs = [draw(shape, seed, dtype) for seed in range(count)]
    lses = [draw(shape[:-1], 100 + seed) * 5 for seed in range(count)]
    return outs, [lse.masked_fill(draw(lse.shape, 200 + n) > 0.8, -INF) for n, lse in enumerate(lses)]


def differentiate(
    function: Callable[..., tuple[Tensor, Tensor]], outs: Sequence[Tensor], lses: Sequence[Tensor]
) -> list[Tensor]:
    """Results of a merge and their gradients, with gradients of both results."""
    outs, lses = ([x.detach().requires_grad_() for x in group] for group in (outs, lses))
    out, lse = function(outs, lses)
    gradients = draw(out.shape, 7, torch.bfloat16).to(out.dtype), draw(lse.shape, 8).to(lse.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (*outs, *lses), gradients)]


def check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    """The kernels in the operands' dtypes, and the torch code in float64 on the same numbers."""
    actual = differentiate(triton_merge.merge, outs, lses)
    expected = differentiate(torch_merge.merge, [x.double() for x in outs], [x.double() for x in lses])
    tolerance = TOLERANCE[outs[0].dtype]
    dtypes = [outs[0].dtype, torch.float32, *(x.dtype for x in (*outs, *lses))]
    for x, y, dtype in zip(actual, expected, dtypes, strict=True):
        assert x.dtype == dtype
        finite = y[y.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(x.double(), y, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_counts_and_dtypes(count: int, dtype: torch.dtype) -> None:
    check(*parts(count, (3, 11, 24), dtype))


@pytest.mark.parametrize("size", [1, 8, 16, 80, 128, 250, 256])
def test_sizes(size: int) -> None:
    check(*parts(2, (2, 3, 5, size), torch.float32))


@pytest.mark.parametrize("shape", [(8,), (1, 1, 8), (300, 8), (1, 70, 8), (5, 1, 3, 1, 8), (0, 4, 8), (4, 0, 8)])
def test_shapes(shape: tuple[int, ...]) -> None:
    check(*parts(2, shape, torch.float32))


@pytest.mark.parametrize("garbage", [0.0, math.nan, INF])
@pytest.mark.parametrize(
    "sides", [(-INF, -INF), (-INF, 0.5), (0.5, -INF), (INF, 0.5), (0.5, INF), (INF, -INF), (INF, INF), (INF, INF, 0.5)]
)
def test_infinite_sides(sides: tuple[float, ...], garbage: float) -> None:
    """Empty sides may hold anything; ties at +inf share; nothing is NaN in either direction."""
    outs = [torch.full((3, 8), garbage if side == -INF else n + 1.0) for n, side in enumerate(sides)]
    lses = [torch.full((3,), side) for side in sides]
    check(outs, lses)
    assert not any(x.isnan().any() for x in differentiate(triton_merge.merge, outs, lses))


def _token_major(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _inside(x: Tensor) -> Tensor:
    wide = torch.full([size + 3 for size in x.shape], torch.nan, dtype=x.dtype)
    return wide[tuple(slice(1, size + 1) for size in x.shape)].copy_(x)


def _reversed(x: Tensor) -> Tensor:
    """The last dimension is the slowest in memory."""
    order = tuple(range(x.dim()))[::-1]
    return x.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("layout", [_token_major, _inside, _reversed])
def test_strides(layout: Callable[[Tensor], Tensor]) -> None:
    outs, lses = parts(3, (4, 33, 16), torch.float32)
    check([layout(x) for x in outs], [layout(x) for x in lses])
    check([layout(outs[0]), *outs[1:]], [lses[0], layout(lses[1]), lses[2]])


def test_more_dimensions_than_the_kernel_has() -> None:
    outs, lses = parts(2, (2, 3, 2, 3, 2, 8), torch.float32)
    check([_reversed(outs[0]), outs[1]], [_inside(x) for x in lses])


def test_expanded_operands() -> None:
    """Stride 0 in inputs and gradients, never in results."""
    outs, lses = parts(2, (3, 1, 8), torch.float32)
    outs, lses = [x.expand(3, 50, 8) for x in outs], [x.expand(3, 50) for x in lses]
    check(outs, lses)
    leaf = outs[0].clone().requires_grad_()
    out, _ = triton_merge.merge([leaf, outs[1]], lses)
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    (expected,) = torch.autograd.grad(torch_merge.merge([leaf, outs[1]], lses)[0].sum(), leaf)
    torch.testing.assert_close(grad, expected)


def covers(tokens: int, count: int) -> list[Rows]:
    """Ranges, and lists with gaps, in turn; some tokens are in none of them."""
    device = torch.device("cpu")
    result = []
    for n in range(count):
        first = n % 5
        if n % 2:
            result.append(Rows.of([(first, tokens - 7)], device))
        else:
            result.append(Rows.of([(first + 9, first + 12), (first, first + 4), (20, tokens - 1)], device))
    return result


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 2, 5, pytest.param(40, id="three rounds")])
def test_rows(count: int, dtype: torch.dtype) -> None:
    """Against the torch code in float64."""
    tokens, heads, size = 40, 3, 16
    rows = covers(tokens, count)
    outs = [_token_major(draw((x.count, heads, size), n, dtype)) for n, x in enumerate(rows)]
    lses = [draw((heads, x.count), 50 + n).T * 3 for n, x in enumerate(rows)]
    exact, exact_lse = torch_rows.merge_rows([x.double() for x in outs], [x.double() for x in lses], rows, tokens)
    out, lse = triton_merge.merge_rows(outs, lses, rows, tokens)
    assert out.dtype == dtype
    assert out.shape == (tokens, heads, size)
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    assert lse.shape == (heads, tokens)
    torch.testing.assert_close(out.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)
    assert (lse[:, -1] == -INF).all()
    assert (out[-1] == 0).all()
    total = triton_merge.sum_rows(outs, rows, tokens)
    exact = torch_rows.sum_rows([x.double() for x in outs], rows, tokens)
    torch.testing.assert_close(total.double(), exact, rtol=TOLERANCE[dtype], atol=1e-5)


def test_no_tokens() -> None:
    rows = [Rows(0, 0)]
    out, lse = triton_merge.merge_rows([torch.zeros(0, 2, 8)], [torch.zeros(0, 2)], rows, 0)
    assert out.shape == (0, 2, 8)
    assert lse.shape == (2, 0)
    assert triton_merge.sum_rows([torch.zeros(0, 2, 8)], rows, 0).shape == (0, 2, 8)


def test_offsets_beyond_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth row is 2^31 numbers from the first, with strides of 30 bits; what lies in between is never touched."""
    from triton.runtime.interpreter import GridExecutor

    # The interpreter ends by copying whole storages onto themselves, which would touch all of it.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    far = 2**29 + 64

    def apart(x: Tensor) -> Tensor:
        storage = torch.empty(4 * far + x[0].numel(), dtype=x.dtype)
        return storage.as_strided(x.shape, (far, *x.stride()[1:])).copy_(x)

    outs, lses = parts(2, (5, 3, 8), torch.bfloat16)
    expected, expected_lse = torch_merge.merge(outs, lses)
    out, lse = triton_merge.merge([apart(outs[0]), outs[1]], lses)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    out, lse = triton_merge.merge(outs, [apart(lses[0].bfloat16()), lses[1].bfloat16()])
    expected, expected_lse = torch_merge.merge(outs, [x.bfloat16() for x in lses])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    total = triton_merge.sum_rows([apart(outs[0])], [Rows(0, 5)], 5)
    assert torch.equal(total, outs[0])
