"""`verify`: silent on right graphs, and never on wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dualkv_compile
from dualkv_compile import VerificationError, verify
from dualkv_compile.backend import dualkv
from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.kernels.predicate import Expression
from dualkv_compile.kernels.reference import tree_visible
from dualkv_compile.passes import registry
from dualkv_compile.runtime import Dispatcher

aten = torch.ops.aten
ROWS, COLUMNS, PROMPT, PAD, VOCAB, WIDTH, HEADS = 4, 14, 8, 3, 31, 16, 2
EXACT = {"compiler": "eager", "min_shared": 1, "min_saving": 0}


def causal(columns: int, window: int | None = None) -> Tensor:
    place = torch.arange(columns)
    allowed = place[None, :] <= place[:, None]
    return allowed if window is None else allowed & (place[None, :] > place[:, None] - window)


class Tiny(nn.Module):
    """One block of a decoder, written out."""

    def __init__(self, *, window: int | None = None, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.window = window
        self.checkpointed = checkpointed

    def block(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, columns = x.shape[:2]
        parts = self.qkv(x).view(rows, columns, 3, HEADS, WIDTH // HEADS).transpose(1, 3)
        q, k, v = (parts[:, :, number] for number in range(3))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + attended.transpose(1, 2).reshape(rows, columns, WIDTH)
        return x + F.silu(self.up(x))

    def forward(self, ids: Tensor, valid: Tensor, last: int | None = None) -> Tensor:
        row, column = torch.arange(ids.shape[0])[:, None, None, None], torch.arange(ids.shape[1])
        mask = causal(ids.shape[1], self.window) & valid[row, column]  # as transformers writes it
        x = self.embed(ids)
        x = checkpoint(self.block, x, mask, use_reentrant=False) if self.checkpointed else self.block(x, mask)
        logits: Tensor = self.head(x if last is None else x[:, -last:])
        return logits


def batch() -> tuple[Tensor, Tensor]:
    """Left-padded rows with one prompt; the first response tokens differ."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (ROWS, COLUMNS), generator=generator)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    ids[:, PROMPT] = torch.arange(ROWS)
    valid = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    valid[:, :PAD] = False
    return ids, valid


def compiled(target: Any, **options: Any) -> Any:
    return torch.compile(target, backend=dualkv, options={**EXACT, **options})


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dualkv_compile.reset_stats()
    yield
    torch._dynamo.reset()


@pytest.fixture
def plain_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time verification runs the plain graph."""
    runs: list[int] = []
    original = Dispatcher.run_plain

    def counted(self: Dispatcher, *args: Any) -> Any:
        runs.append(1)
        return original(self, *args)

    monkeypatch.setattr(Dispatcher, "run_plain", counted)
    return runs


def all_packed(calls: int) -> None:
    stats = dualkv_compile.stats()
    assert (stats["packed_calls"], stats["calls"], stats["reasons"]) == (calls, calls, {})


# --------------------------------------------------------------------------------------------------------- right graphs


@pytest.mark.parametrize("level", ["first", True, "grad"])
@pytest.mark.parametrize("padding", ["keep", "drop"])
def test_right_graphs_pass_and_nothing_of_the_user_changes(
    level: bool | str, padding: str, plain_runs: list[int]
) -> None:
    model, (ids, valid) = Tiny(), batch()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    seen: list[int] = []
    model.head.weight.register_hook(lambda gradient: seen.append(1))
    state = torch.get_rng_state()
    function = compiled(model, verify=level, padding=padding)
    for _ in range(2):
        logits = function(ids, valid)
    all_packed(2)
    assert len(plain_runs) == (1 if level == "first" else 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(ids, batch()[0])
    logits[:, PAD:].sum().backward()  # the call's own graph is intact
    assert len(seen) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_outputs_are_compared(mode: Any, plain_runs: list[int]) -> None:
    function = compiled(Tiny(), verify="grad")
    with mode():
        function(*batch())
    all_packed(1)
    assert plain_runs == [1]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_sliding_window_checkpointing_and_a_slice_of_the_columns(checkpointed: bool, plain_runs: list[int]) -> None:
    compiled(Tiny(window=3, checkpointed=checkpointed), verify="grad")(*batch(), last=9)
    all_packed(1)
    assert plain_runs == [1]


def test_an_input_that_is_expanded_keeps_its_strides(plain_runs: list[int]) -> None:
    ids, valid = batch()
    compiled(Tiny(), verify=True)(ids, valid[:1].expand(ROWS, -1))
    all_packed(1)
    assert dualkv_compile.stats()["graphs_compiled"] == 2
    assert verify._copy(valid[:1].expand(ROWS, -1)).stride() == (0, 1)


def test_an_input_that_requires_grad_is_compared_too() -> None:
    model = Tiny()
    scale = torch.full((VOCAB,), 2.0, requires_grad=True)

    def scaled(ids: Tensor, valid: Tensor, scale: Tensor) -> Tensor:
        return model(ids, valid) * scale

    compiled(scaled, verify="grad")(*batch(), scale)
    assert scale.grad is None
    all_packed(1)


# --------------------------------------------------------------------------------------------------------- wrong graphs


def wrong_rule(monkeypatch: pytest.MonkeyPatch, target: Any, emit: Any) -> None:
    """Replace the rule of an element-wise operator by one that emits something else."""

    def rule(cx: Any, node: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return cx.result(node, value.tags, [value], emit(cx, cx.packed(value)))

    monkeypatch.setitem(registry._RULES, target, registry.Entry(rule, "wrong"))


@pytest.mark.parametrize("level", ["first", True, "grad"])
def test_a_wrong_rule_is_found(level: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_rule(monkeypatch, aten.silu.default, lambda cx, x: cx.emit(aten.gelu.default, x))
    with pytest.raises(VerificationError, match=r"output 0: .* differ at \[\d+, \d+, \d+\] \(row \d+, column \d+\)"):
        compiled(Tiny(), verify=level)(*batch())


def test_a_wrong_backward_is_found_by_grad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_rule(
        monkeypatch, aten.silu.default, lambda cx, x: cx.emit(aten.silu.default, cx.emit(aten.detach.default, x))
    )
    compiled(Tiny(), verify=True)(*batch())
    all_packed(1)
    torch._dynamo.reset()
    with pytest.raises(VerificationError, match=r"gradient of .*(up|qkv|embed).*weight.*: .* differ at"):
        compiled(Tiny(), verify="grad")(*batch())


def perturb(monkeypatch: pytest.MonkeyPatch, row: int, column: int, amount: float) -> None:
    """Add ``amount`` to one position of the packed graph's first output."""
    original = CompiledGraph.__call__

    def call(self: CompiledGraph, *args: Any) -> Any:
        result = original(self, *args)
        if self._name != "packed":
            return result
        change = torch.zeros_like(result[0])
        change[row, column] = amount
        return (result[0] + change, *result[1:])

    monkeypatch.setattr(CompiledGraph, "__call__", call)


def test_the_message_names_the_position_and_both_values(monkeypatch: pytest.MonkeyPatch) -> None:
    perturb(monkeypatch, 2, 4, 100.0)
    with pytest.raises(
        VerificationError, match=r"output 0: .*\[2, 4, \d+\] \(row 2, column 9\): .* \(tolerance 0.0001\)"
    ):
        compiled(Tiny(), verify=True)(*batch(), last=9)


@pytest.mark.parametrize("amount", [100.0, float("nan")])
def test_only_positions_whose_query_sees_a_key_are_compared(amount: float, monkeypatch: pytest.MonkeyPatch) -> None:
    perturb(monkeypatch, 1, PAD - 1, amount)
    compiled(Tiny(), verify="grad")(*batch())
    all_packed(1)
    torch._dynamo.reset()
    perturb(monkeypatch, 1, PAD, amount)
    with pytest.raises(VerificationError, match=f"row 1, column {PAD}"):
        compiled(Tiny(), verify=True)(*batch())


def test_every_call_is_compared_but_with_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, every = compiled(Tiny(), verify="first"), None
    first(*batch())
    torch._dynamo.reset()
    every = compiled(Tiny(), verify=True)
    every(*batch())
    perturb(monkeypatch, 0, PAD, 1.0)
    with pytest.raises(VerificationError):
        every(*batch())
    torch._dynamo.reset()
    first = compiled(Tiny(), verify="first")
    with pytest.raises(VerificationError):
        first(*batch())
    with pytest.raises(VerificationError):  # a call that failed does not count as verified
        first(*batch())


# ------------------------------------------------------------------------------- outputs computed from un-packed values


def log_probabilities(model: Tiny, ids: Tensor, valid: Tensor) -> Tensor:
    """Per-token values that are gathered on the grid: the layout of the result is not known to the passes."""
    return model(ids, valid).log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)


def opaque(values: Tensor) -> Tensor:
    """Something without a rule that keeps positions apart."""
    return values.flip(0).flip(0)


@pytest.mark.parametrize("level", [True, "grad"])
def test_dropped_padding_in_an_output_of_unknown_layout_is_left_out(level: bool | str) -> None:
    model = Tiny()

    def function(ids: Tensor, valid: Tensor) -> Tensor:
        return opaque(log_probabilities(model, ids, valid))

    compiled(function, verify=level, padding="drop")(*batch())
    assert dualkv_compile.stats()["packed_calls"] == 1


def test_a_wrong_value_in_an_output_of_unknown_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Tiny()
    wrong_rule(monkeypatch, aten.silu.default, lambda cx, x: cx.emit(aten.gelu.default, x))

    def function(ids: Tensor, valid: Tensor) -> Tensor:
        return opaque(log_probabilities(model, ids, valid))

    with pytest.raises(VerificationError, match="output 0"):
        compiled(function, verify=True, padding="drop")(*batch())


def test_a_loss_that_mixes_dropped_padding_in_is_reported_and_one_that_leaves_it_out_is_right() -> None:
    model = Tiny()

    def careless(ids: Tensor, valid: Tensor) -> Tensor:
        return log_probabilities(model, ids, valid).mean()

    def careful(ids: Tensor, valid: Tensor) -> Tensor:
        return (log_probabilities(model, ids, valid) * valid).sum() / valid.sum()

    compiled(careful, verify="grad", padding="drop")(*batch())
    compiled(careless, verify="grad", padding="keep")(*batch())
    with pytest.raises(VerificationError, match=r"output 0: .*padding.*leave them out"):
        compiled(careless, verify=True, padding="drop")(*batch())


# ---------------------------------------------------------------------------------------------------- comparing tensors


def test_compare_counts_nan_and_infinity_as_values() -> None:
    nan, inf = float("nan"), float("inf")
    plain = torch.tensor([1.0, nan, inf, -inf])
    assert verify.compare(plain.clone(), plain, None, 1e-6) is None
    for place, value in enumerate((nan, 1.0, -inf, 0.0)):
        wrong = plain.clone()
        wrong[place] = value
        found = verify.compare(wrong, plain, None, 1e-6)
        assert found is not None
        assert found.index == (place,)


def test_compare_is_relative_to_the_largest_value_that_is_compared() -> None:
    plain = torch.tensor([1.0, 1000.0])
    packed = torch.tensor([1.1, 1000.0])
    assert verify.compare(packed, plain, None, 1e-2) is None
    found = verify.compare(packed, plain, torch.tensor([True, False]), 1e-2)
    assert found is not None
    assert found.relative == pytest.approx(0.1, rel=1e-4)
    assert verify.compare(packed, plain, torch.tensor([True, False]), 1e-2, noise=0.2) is None


def test_compare_other_dtypes_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(6).reshape(2, 3)
    other = numbers.clone()
    other[1, 2] += 1
    found = verify.compare(other, numbers, None, 0.0)
    assert found is not None
    assert (found.index, found.packed, found.plain) == ((1, 2), 6, 5)
    assert verify.compare(torch.tensor(2.0), torch.tensor(1.0), None, 0.1) is not None
    assert verify.compare(torch.tensor(1 + 2j), torch.tensor(1 + 1j), None, 0.1) is not None
    assert verify.compare(torch.empty(0, 3), torch.empty(0, 3), None, 0.0) is None
    with pytest.raises(VerificationError, match="float32"):
        verify.compare(torch.ones(2), torch.ones(2, dtype=torch.float64), None, 1.0)
    monkeypatch.setattr(verify, "_CHUNK", 2)  # the worst place lies in a later chunk
    found = verify.compare(other, numbers, None, 0.0)
    assert found is not None
    assert found.index == (1, 2)


# ----------------------------------------------------------------------------------------------- which query sees a key


@pytest.mark.parametrize(
    "expression",
    [
        ("k", 0),
        ("and", ("k", 0), ("gt", ("kcol",), ("sub", ("qcol",), ("const", 3)))),
        ("eq", ("q", 1), ("add", ("k", 1), ("const", 1))),
        ("gt", ("kcol",), ("const", 5)),
    ],
)
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_sees_a_key_equals_the_dense_predicate(
    expression: Expression, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, (6, 12), generator=generator)
    plan = dualkv_compile.PrefixPlan.from_rows(ids, min_shared=1)
    vectors = [
        torch.randint(2, (plan.tokens,), generator=generator).bool(),
        torch.randint(9, (plan.tokens,), generator=generator),
    ]
    everything = slice(0, plan.tokens)
    dense = tree_visible(plan.rank, plan.column, plan.end)
    dense = dense & verify.evaluate(expression, vectors, plan.column, everything, everything)
    expected = dense.any(1)
    assert not expected.all()
    found = verify._sees_a_key(expression, vectors, plan.rank, plan.column, plan.end)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_visible_positions_of_a_graph(checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    original = verify.visible_positions

    def spy(*args: Any) -> Any:
        result = original(*args)
        found.extend(result.values())
        return result

    monkeypatch.setattr(verify, "visible_positions", spy)
    ids, valid = batch()
    valid[0, 4:9] = False  # longer than the window: blind queries in the middle of a row
    compiled(Tiny(window=3, checkpointed=checkpointed), verify=True)(ids, valid)
    all_packed(1)
    expected = (causal(COLUMNS, 3) & valid[:, None, :]).any(2)
    assert not expected[0, 6]
    assert torch.equal(found[0], expected)


# ----------------------------------------------------------------------------------------------------------- tolerances


def test_the_tolerance_follows_the_least_precise_dtype_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    original = verify.compare

    def spy(packed: Tensor, plain: Tensor, compared: Any, tolerance: float, **kwargs: Any) -> Any:
        asked.append(tolerance)
        return original(packed, plain, compared, tolerance, **kwargs)

    monkeypatch.setattr(verify, "compare", spy)
    for dtype, ambient in (
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float32, True),
    ):
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
            compiled(Tiny().to(dtype), verify=True)(*batch())
    exact, single, half = (verify.TOLERANCES[dtype] for dtype in (torch.float64, torch.float32, torch.bfloat16))
    assert asked == [exact, single, half, half]
    all_packed(4)


def test_reduced_products_widen_the_tolerance_of_float32() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert verify._tolerance_of(torch.float32) == verify.REDUCED_FLOAT32
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_gradient_that_is_zero_in_theory_is_no_difference() -> None:
    """The gradient of a key's bias is rounding noise: adding a constant to all keys changes no probability."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Tiny()
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.inner.embed(ids)
            key = x + self.bias
            split = (ids.shape[0], ids.shape[1], HEADS, WIDTH // HEADS)
            q, k, v = (y.view(split).transpose(1, 2) for y in (x, key, x))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled(Biased(), verify="grad")(batch()[0])
    all_packed(1)
