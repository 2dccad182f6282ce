"""Random programs: compiled equals eager, most of them pack, and rules that are broken on purpose are caught.

All comparisons are in float64 with the rewritten graph run eagerly, so an error of any rule stands far above the
rounding (1e-9 of the largest value or gradient of a tensor).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualkv_compile
from dualkv_compile.compiled import CompiledGraph
from dualkv_compile.options import Options
from dualkv_compile.passes import attention as attention_pass
from dualkv_compile.passes import mask as mask_pass
from dualkv_compile.passes import pack as pack_pass
from dualkv_compile.passes import pipeline, registry
from dualkv_compile.passes.pack import Scope
from dualkv_compile.passes.reasons import Unproven
from dualkv_compile.passes.registry import Entry
from dualkv_compile.passes.rules import reductions, scans, views
from dualkv_compile.passes.values import Dim, Value, same
from dualkv_compile.plan import PrefixPlan
from tests.models.harness import EXACT, largest_distance, run, trie_size
from tests.property.programs import (
    COLLIDING,
    DISTINCT,
    FORBIDDEN,
    MASKS,
    ODD_MASKS,
    OPERATORS,
    Batch,
    Network,
    Program,
    Sizes,
    Step,
    generate,
    make_batch,
)

aten = torch.ops.aten
TOLERANCE = 1e-9
SMALL, LARGE = range(12), range(1140, 1176)
#: Expert layers have written programs of their own (tests/models/test_experts.py).
FAMILIES = {entry.family for entry in registry.rules().values()} - {"experts"}

few = settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def programs(draw: st.DrawFn, forbidden: bool = False) -> Program:
    return generate(lambda options: draw(st.sampled_from(list(options))), forbidden=forbidden)


def seeded(seed: int, *, forbidden: bool = False) -> Program:
    return generate(random.Random(seed).choice, forbidden=forbidden)


# ---------------------------------------------------------------------------------------------------------- comparisons


@dataclass
class Comparison:
    """Compiled against eager: the largest distance, the counters, and how many tokens there are to compute."""

    distance: float
    stats: dict[str, Any]
    tokens: int

    @property
    def packed(self) -> bool:
        return bool(self.stats["calls"] == self.stats["packed_calls"] == 1 and not self.stats["reasons"])


def outputs_of(function: Callable[..., Any], batch: Any) -> list[torch.Tensor]:
    result = function(*batch)
    return list(result) if isinstance(result, tuple) else [result]


def compare(program: Program, batch: Batch | None = None, **options: Any) -> Comparison:
    model = Network(program)
    batch = batch or make_batch(program.sizes, program.seed + 1)
    expected = run(model, model, outputs_of, batch)  # type: ignore[arg-type]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT, **options)
    dualkv_compile.reset_stats()
    got = run(model, compiled, outputs_of, batch)  # type: ignore[arg-type]
    return Comparison(largest_distance(got, expected), dualkv_compile.stats(), trie_size(*batch.keys(program)))


def check(program: Program, **options: Any) -> Comparison:
    found = compare(program, **options)
    assert found.distance <= TOLERANCE, (found, program)
    if found.packed:
        assert found.stats["tokens_computed"] == found.tokens, (found, program)
    return found


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewritten graphs run without the second compilation, two thirds of the time of a test."""

    def keep(self: Any, gm: fx.GraphModule, options: Options, *, dynamic: bool, name: str) -> None:
        self.graph, self.compilations = gm, 1

    monkeypatch.setattr(CompiledGraph, "__init__", keep)
    monkeypatch.setattr(CompiledGraph, "__call__", lambda self, *args: self.graph(*args))


@pytest.fixture
def scopes(monkeypatch: pytest.MonkeyPatch) -> list[Scope]:
    """Every graph walk that is finished during the test."""
    found: list[Scope] = []
    finish = Scope.finish

    def remembered(self: Scope) -> Any:
        found.append(self)
        return finish(self)

    monkeypatch.setattr(Scope, "finish", remembered)
    return found


def check_sample(seeds: range, scopes: list[Scope]) -> None:
    """All equal eager; at least 80% pack; every family of rules occurs in a packed graph."""
    unpacked: dict[int, Any] = {}
    families: set[str] = set()
    for seed in seeds:
        scopes.clear()
        found = check(seeded(seed))
        if not found.packed:
            unpacked[seed] = found.stats["reasons"]
            continue
        for scope in scopes:
            entries = [registry.lookup(node.target) for node in scope.records.packed]
            families.update(entry.family for entry in entries if entry is not None)
    assert len(unpacked) <= 0.2 * len(seeds), unpacked
    assert families == FAMILIES


# --------------------------------------------------------------------------------------------------------- what it does


def test_sample(scopes: list[Scope]) -> None:
    check_sample(SMALL, scopes)


@pytest.mark.slow
def test_large_sample(scopes: list[Scope], uncompiled: None) -> None:
    check_sample(LARGE, scopes)


def test_every_operator_is_drawn() -> None:
    """The samples above leave none out, neither a kind of product."""
    steps = [step for seed in (*SMALL, *LARGE) for step in seeded(seed).steps]
    assert {step.name for step in steps} == set(OPERATORS)
    assert {"mm", "addmm", "by_head", "of_features", "from_left"} <= {
        step.args[0] for step in steps if step.name == "product"
    }
    assert {step.args[0] for step in steps if step.name == "attention"} == set(MASKS)


@few
@given(programs())
def test_compiled_equals_eager(uncompiled: None, program: Program) -> None:
    check(program)


@pytest.mark.parametrize("seed", range(200, 202))
def test_symbolic_sizes(seed: int, uncompiled: None) -> None:
    """``dynamic=True`` on a square batch: rows and columns are one symbol."""
    program = replace(seeded(seed), sizes=COLLIDING["rows_columns"])
    found = check(program, dynamic=True)
    assert found.stats["packed_calls"] == 1, found.stats["reasons"]


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_operator(name: str, uncompiled: None) -> None:
    """Between two attentions, with sizes that are all the same."""
    program = Program(
        COLLIDING["all"],
        ("arange",),
        (attended("causal"), Step(name), attended("is_causal")),
        Step("logits"),
    )
    check(program)


@pytest.mark.parametrize("seed", range(300, 308))
def test_forbidden_operator_at_a_random_place(seed: int, uncompiled: None) -> None:
    check(seeded(seed, forbidden=True))


#: Programs that keep the last columns, where rows differ.
WHOLE = [seed for seed in range(400, 420) if "window" not in {step.name for step in seeded(seed).steps}][:4]


@pytest.mark.parametrize("seed", WHOLE)
def test_rows_in_another_order(seed: int) -> None:
    program = seeded(seed)
    if program.end.name == "mean":
        program = replace(program, end=Step("logits"))
    model = Network(program)
    batch = make_batch(program.sizes, seed)
    order = torch.randperm(program.sizes.B, generator=torch.Generator().manual_seed(seed))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="dualkv", options=EXACT)
    dualkv_compile.reset_stats()
    with torch.no_grad():
        before, after = outputs_of(compiled, batch), outputs_of(compiled, batch.select(order))
    assert dualkv_compile.stats()["packed_calls"] == 2
    for a, b in zip(before, after, strict=True):
        # A wrong order would be seen: rows differ.
        assert not torch.allclose(a, b)
        torch.testing.assert_close(b, a[order], rtol=0, atol=TOLERANCE * float(a.abs().max()))


def annotations(program: Program, scopes: list[Scope]) -> list[Any]:
    """Operator, tags and depth of slicing of every value of the graph, and its roots."""
    scopes.clear()

    def backend(gm: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Any]:
        pipeline.analyse(gm, examples)
        return gm.forward

    torch._dynamo.reset()
    model = Network(program)
    with torch.no_grad():
        torch.compile(model, backend=backend)(*make_batch(program.sizes, program.seed))
    (scope,) = scopes

    def described(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [described(item) for item in value]
        if not isinstance(value, Value) or value.frame is None:
            return None
        return value.tags, len(value.frame.slices()), sorted(root.node.name for root in value.roots)

    return [
        (str(node.target), described(scope.values.get(node)))
        for node in scope.module.graph.nodes
        if node.op in ("call_function", "placeholder")
    ]


@pytest.mark.parametrize("name", COLLIDING)
def test_sizes_decide_nothing(name: str, scopes: list[Scope]) -> None:
    """The same program with sizes that are equal by chance and with sizes that all differ."""
    for seed in range(2):
        program = seeded(500 + 10 * list(COLLIDING).index(name) + seed)
        expected = annotations(replace(program, sizes=DISTINCT), scopes)
        assert any(value for _, value in expected)
        got = annotations(replace(program, sizes=COLLIDING[name]), scopes)
        assert got == expected, program


# ---------------------------------------------------------------------------------------- programs that were wrong once


def attended(mask: str = "causal", heads: str = "expand", rotary: str = "plain") -> Step:
    return Step("attention", (mask, heads, rotary, True, "mask" if "valid" in mask else ""))


def short(*steps: Step, start: tuple[str, ...] = (), end: str = "logits", sizes: Sizes = DISTINCT) -> Program:
    return Program(sizes, start, steps, Step(end))


@pytest.mark.parametrize("end", ["logits", "chosen"])
@pytest.mark.parametrize("second", [(None, -1), (0, 4), (-3, None)])
def test_slice_of_a_slice(second: tuple[int | None, int | None], end: str, uncompiled: None) -> None:
    """``x[:, 1:][:, :-1]``: the tokens of the inner slice are places in the outer slice, not in the whole."""
    found = check(short(attended(), Step("window", (1, 1, None)), Step("window", (1, *second)), end=end))
    assert found.packed, found


@pytest.mark.parametrize("kind", ODD_MASKS)
def test_mask_of_bits_and_narrow_numbers(kind: str, uncompiled: None) -> None:
    check(short(attended(kind), attended()))


@pytest.mark.parametrize("sizes", ["columns_width", "all"])
def test_angles_expanded_to_rows(sizes: str, uncompiled: None) -> None:
    """``cat([angles, angles], -1)`` of [B, S, D] with S == D is no prompt followed by responses."""
    found = check(short(attended(rotary="expanded"), sizes=COLLIDING[sizes]))
    assert found.packed, found


# ---------------------------------------------------------------------------------------------- rules broken on purpose


def as_it_is(cx: Scope, node: fx.Node, x: Value, *args: Any, **kwargs: Any) -> Value:
    """A rule without a condition."""
    assert x.tags is not None
    return cx.result(node, x.tags, [x], cx.emit(node.target, cx.packed(x), *args, **kwargs))


def _scan_packed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scans, "scan", as_it_is)


def _diff_packed(patch: pytest.MonkeyPatch) -> None:
    def rule(cx: Scope, node: fx.Node, x: Value, n: int = 1, dim: int = -1, prepend: Any = None) -> Value:
        first = cx.emit(aten.narrow.default, cx.packed(prepend), dim, 0, 1)
        return as_it_is(cx, node, x, n, dim, first)

    patch.setitem(registry._RULES, aten.diff.default, Entry(rule, "scans"))


def _reduce_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        reductions, "_feature_dims", lambda x, dim: [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    )


def _softmax_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(registry._RULES, aten.softmax.int, Entry(as_it_is, "reductions"))


def _gather_anything(patch: pytest.MonkeyPatch) -> None:
    def rule(cx: Scope, node: fx.Node, x: Value, dim: int, index: Value) -> Value:
        return as_it_is(cx, node, x, dim, cx.packed(index))

    patch.setitem(registry._RULES, aten.gather.default, Entry(rule, "indexing"))


def _views_mix(patch: pytest.MonkeyPatch) -> None:
    group = views._group

    def careless(old: list[Any], new: list[Any], tags: list[Dim], rows: Any, columns: Any) -> list[Dim]:
        try:
            return group(old, new, tags, rows, columns)
        except Unproven:
            return [Dim.COLUMN if same(size, columns) else Dim.FEATURE for size in new]

    patch.setattr(views, "_group", careless)


def _wrong_column(patch: pytest.MonkeyPatch) -> None:
    align, plan = Scope._align, Scope.plan
    patch.setattr(
        Scope,
        "_align",
        lambda self, value, tags, frame: align(_Renamed(self, plan), value, tags, frame),  # type: ignore[arg-type]
    )


class _Renamed:
    """A scope whose columns are the numbers of the rows."""

    def __init__(self, scope: Scope, plan: Callable[..., fx.Node]) -> None:
        self._scope, self._plan = scope, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scope, name)

    def plan(self, frame: Any, name: str) -> fx.Node:
        return self._plan(self._scope, frame, "rank" if name == "column" else name)


def _rows_are_alike(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pack_pass, "is_uniform", lambda node, dim: True)


def _forgotten_root(patch: pytest.MonkeyPatch) -> None:
    on_grid = Scope.on_grid

    def forgetful(self: Scope, *args: Any) -> Value:
        value = on_grid(self, *args)
        value.roots = frozenset()
        return value

    patch.setattr(Scope, "on_grid", forgetful)


def _window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    window = PrefixPlan.window

    def shifted(self: PrefixPlan, start: int, stop: int) -> Any:
        found = window(self, start, stop)
        return replace(found, inverse=(found.inverse + 1).clamp(max=len(found.index) - 1))

    patch.setattr(PrefixPlan, "window", shifted)


def _implied_too(patch: pytest.MonkeyPatch, name: str) -> None:
    implied = mask_pass._implied
    patch.setattr(
        mask_pass, "_implied", lambda term: implied(term) or name in (term[0], term[1][0] if term[0] == "bool" else "")
    )


def _greater_or_equal(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(mask_pass._BINARY, aten.gt.Tensor, "ge")


def _tiles_are_groups(patch: pytest.MonkeyPatch) -> None:
    def grouped(part: attention_pass._Operand, heads: Any) -> tuple[fx.Node, Any]:
        packed = part.node
        return (packed.args[0] if packed.target is aten.repeat.default else packed), part.heads  # type: ignore[return-value]

    patch.setattr(attention_pass, "_grouped", grouped)


def _any_causal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mask_pass, "_is_causal", lambda term: term[0] in ("le", "lt", "ge", "gt"))


@dataclass(frozen=True)
class Mutation:
    """A broken rule and a program that meets it; ``same_ids`` takes rows that differ in their mask alone."""

    apply: Callable[[pytest.MonkeyPatch], None]
    program: Program
    same_ids: bool = False


MUTATIONS = {
    "cumsum of packed tokens": Mutation(_scan_packed, short(attended(), Step("scan", (1, "cumsum")))),
    "difference of packed tokens": Mutation(_diff_packed, short(attended(), Step("scan", (1, "diff")))),
    "reduction over columns": Mutation(_reduce_anything, short(attended(), Step("mean_over_columns"))),
    "softmax over columns": Mutation(_softmax_anything, short(attended(), Step("softmax_columns"))),
    "gather along columns": Mutation(_gather_anything, short(attended(), Step("gather_columns"))),
    "view that mixes": Mutation(_views_mix, short(attended(), Step("mixing_view"))),
    "entry of a wrong column": Mutation(_wrong_column, short(Step("column_numbers", (1, "plain")), attended())),
    "row taken for another": Mutation(_rows_are_alike, short(attended(), Step("row_numbers"))),
    "forgotten root": Mutation(_forgotten_root, short(attended(), start=("mask_positions",)), same_ids=True),
    "slice off by one": Mutation(_window_off_by_one, short(attended(), Step("window", (1, 1, None)))),
    "window term dropped": Mutation(lambda patch: _implied_too(patch, "gt"), short(attended("window"))),
    "greater taken as greater or equal": Mutation(_greater_or_equal, short(attended("window"))),
    "key validity ignored": Mutation(lambda patch: _implied_too(patch, "k"), short(attended("valid"))),
    "document term dropped": Mutation(lambda patch: _implied_too(patch, "eq"), short(attended("document"))),
    "tiled heads taken as groups": Mutation(_tiles_are_groups, short(attended(heads="tile"))),
    "look-ahead taken as causal": Mutation(_any_causal, short(attended(), Step("look_ahead_mask"))),
}


def batch_of(mutation: Mutation) -> Batch:
    batch = make_batch(mutation.program.sizes, 5)
    if not mutation.same_ids:
        return batch
    mask = torch.ones_like(batch.mask)
    for row in range(len(mask)):
        mask[row, : row % 3] = 0
    return batch._replace(ids=batch.ids[:1].expand_as(batch.ids).contiguous(), mask=mask)


@pytest.fixture
def fresh_annotations() -> Iterator[None]:
    """Nothing compiled with a broken rule outlives the test."""
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_annotations", "uncompiled")
@pytest.mark.parametrize("name", MUTATIONS)
def test_broken_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = MUTATIONS[name]
    batch = batch_of(mutation)
    assert compare(mutation.program, batch).distance <= TOLERANCE
    mutation.apply(monkeypatch)
    broken = compare(mutation.program, batch)
    assert broken.stats["packed_calls"] == 1, broken.stats
    assert broken.distance > 1000 * TOLERANCE
