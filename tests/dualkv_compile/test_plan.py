"""The plan against a brute-force trie: tokens, representatives, visibility, nodes, windows; host and device alike."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dualkv_compile import plan as plan_module
from dualkv_compile.errors import InputError
from dualkv_compile.kernels.block_classes import classify_blocks
from dualkv_compile.plan import PrefixPlan, SharedSpan

Keys = Tensor | Sequence[Tensor]
TENSORS = ("token", "inverse", "rank", "column", "end", "nodes")


def common_prefixes(keys: Keys) -> list[list[int]]:
    """Common prefix of all pairs of rows, byte by byte."""
    tensors = [keys] if isinstance(keys, Tensor) else list(keys)
    rows, columns = tensors[0].shape[:2]
    cells = [
        [
            b"|".join(
                tensor[row, column].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors
            )
            for column in range(columns)
        ]
        for row in range(rows)
    ]
    return [[next((s for s in range(columns) if left[s] != right[s]), columns) for right in cells] for left in cells]


def check(plan: PrefixPlan, keys: Keys, min_shared: int = 1, keep: Tensor | None = None) -> None:
    """Everything a plan promises, from the definition: tokens are shared where rows agree in all columns so far."""
    tensors = [keys] if isinstance(keys, Tensor) else list(keys)
    rows, columns = tensors[0].shape[:2]
    common = common_prefixes([t.detach() for t in tensors] + ([] if keep is None else [keep]))
    kept = [[True] * columns] * rows if keep is None else keep.tolist()

    def same(a: int, b: int, column: int) -> bool:
        return a == b or (common[a][b] > column and common[a][b] >= min_shared)

    assert (plan.rows, plan.columns) == (rows, columns)
    assert sorted(plan.order) == list(range(rows))
    classes = {
        (min(a for a in range(rows) if same(a, row, s)), s)
        for row in range(rows)
        for s in range(columns)
        if kept[row][s]
    }
    assert plan.tokens == len(classes) == len(plan.token)

    token, inverse = plan.token.tolist(), plan.inverse.tolist()
    rank, column, end = plan.rank.tolist(), plan.column.tolist(), plan.end.tolist()
    packed = list(zip(rank, column, strict=True))
    assert packed == sorted(set(packed))
    assert token == [plan.order[r] * columns + s for r, s in packed]
    for row in range(rows):
        for s in range(columns):
            place = inverse[row][s]
            if not kept[row][s]:
                assert place == -1
            else:
                assert column[place] == s
                assert same(token[place] // columns, row, s)

    seen = [
        [rank[k] <= rank[q] < end[k] and column[k] <= column[q] for k in range(plan.tokens)] for q in range(plan.tokens)
    ]
    expected = [
        [
            column[k] <= column[q] and same(token[k] // columns, token[q] // columns, column[k])
            for k in range(plan.tokens)
        ]
        for q in range(plan.tokens)
    ]
    assert seen == expected

    nodes = plan.nodes.tolist()
    assert [start for start, _, _ in nodes] == [0, *(stop for _, stop, _ in nodes)][: len(nodes)]
    assert (nodes[-1][1] if nodes else 0) == plan.tokens
    runs = [(rank[start], end[start]) for start, _, _ in nodes]
    assert all(left != right for left, right in itertools.pairwise(runs))  # maximal
    for start, stop, query_stop in nodes:
        assert stop > start
        assert {(rank[t], end[t]) for t in range(start, stop)} == {(rank[start], end[start])}
        for k in range(start, stop):
            assert [q for q in range(plan.tokens) if seen[q][k]] == list(range(k, query_stop))


@pytest.fixture(params=["host", "device way"])
def build(request: pytest.FixtureRequest) -> Any:
    """``PrefixPlan.from_rows`` by each of the two ways, checked against the trie and against the other way."""

    def make(keys: Keys, min_shared: int = 1, keep: Tensor | None = None) -> PrefixPlan:
        on_device = request.param != "host"
        plan = plan_module._from_rows(keys, min_shared, keep, on_device)
        other = plan_module._from_rows(keys, min_shared, keep, not on_device)
        assert (plan.order, plan.shared) == (other.order, other.shared)
        for name in TENSORS:
            left, right = getattr(plan, name), getattr(other, name)
            assert left.dtype == right.dtype
            assert torch.equal(left, right), name
        check(plan, keys, min_shared, keep)
        return plan

    return make


def left_padded(prompt: Sequence[int], width: int, response: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ids and mask of one row."""
    pad = width - len(prompt)
    return [0] * pad + [*prompt, *response], [0] * pad + [1] * (len(prompt) + len(response))


def batch(*rows: tuple[list[int], list[int]]) -> list[Tensor]:
    """Ids, mask and positions (padding at 1, as some trainers send it) of a batch."""
    ids, mask = (torch.tensor([row[i] for row in rows]) for i in (0, 1))
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    return [ids, mask, positions]


def shuffled() -> list[Tensor]:
    a, b = [11, 12, 13, 14, 15], [21, 22, 23]
    prompts = [a, b, a, b, a]
    return batch(*(left_padded(p, 5, [30 + 4 * i + j for j in range(4)]) for i, p in enumerate(prompts)))


# Public reports as small inputs


def test_shuffled_rows_of_two_prompts(build: Any) -> None:
    keys = shuffled()
    plan = build(keys)
    assert plan.tokens == 5 + 3 * 4 + 5 + 2 * 4  # B's padding is computed too
    assert plan.order == (0, 2, 4, 1, 3)
    assert plan.prompts() == [SharedSpan((0, 2, 4), 0, 5), SharedSpan((1, 3), 0, 5)]
    dropped = build(keys, keep=keys[1].bool())
    assert dropped.tokens == 5 + 3 * 4 + 3 + 2 * 4
    assert dropped.prompts() == [SharedSpan((0, 2, 4), 0, 5), SharedSpan((1, 3), 2, 5)]


def test_groups_of_three_one_and_two(build: Any) -> None:
    prompts = [[1, 2, 3]] * 3 + [[4, 5, 6]] + [[7, 8, 9]] * 2
    plan = build(batch(*(left_padded(p, 3, [50 + i, 60 + i]) for i, p in enumerate(prompts))))
    assert plan.tokens == 3 * 3 + 6 * 2
    assert plan.shared == (0, 3, 3, 0, 0, 3)
    assert plan.ratio == 30 / 21


def test_system_prompt_makes_two_levels(build: Any) -> None:
    a, b = [1, 2, 3, 4, 5], [1, 2, 3, 9, 8]
    plan = build(batch(*(left_padded(p, 5, [40 + i, 50]) for i, p in enumerate([a, b, b, a]))))
    assert plan.order == (0, 3, 1, 2)
    assert plan.shared == (0, 5, 3, 5)
    assert plan.tokens == 3 + 2 + 2 + 4 * 2
    assert plan.prompts() == [SharedSpan((0, 1, 2, 3), 0, 3), SharedSpan((0, 3), 3, 5), SharedSpan((1, 2), 3, 5)]


def test_prompt_that_is_a_prefix_of_another_prompt(build: Any) -> None:
    b = list(range(100, 148))
    a = b[:32]
    rows = [([*a, *range(200, 220)], 52), ([*b, *range(300, 324)], 72), ([*a, *range(400, 420)], 52)]
    ids = torch.tensor([row + [0] * (72 - length) for row, length in rows])
    mask = torch.tensor([[1] * length + [0] * (72 - length) for _, length in rows])
    plan = build([ids, mask])
    assert plan.shared == (0, 32, 32)
    assert plan.tokens == 32 + 3 * 40
    assert build([ids, mask], keep=mask.bool()).tokens == 32 + 20 + 40 + 20


def test_empty_response_and_single_row_group(build: Any) -> None:
    prompt = [5, 6, 7]
    ids = torch.tensor([[*prompt, 8, 9], [*prompt, 0, 0], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert build([ids, mask]).tokens == 3 + 2 + 2 + 5
    assert build([ids, mask], keep=mask.bool()).tokens == 3 + 2 + 0 + 5


def test_mask_of_ones_shares_as_no_mask(build: Any) -> None:
    ids = shuffled()[0]
    without, ones = build([ids]), build([ids, torch.ones_like(ids)])
    for name in TENSORS:
        assert torch.equal(getattr(without, name), getattr(ones, name))


def test_positions_set_to_one_on_padding(build: Any) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7, 8], [0, 0, 5, 6, 9, 9]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]]).expand(2, -1)
    positions = torch.tensor([[1, 1, 0, 1, 2, 3]]).expand(2, -1)
    assert build([ids, mask, positions]).shared == (0, 4)
    shifted = positions.clone()
    shifted[1, 2:] += 1
    assert build([ids, mask, shifted]).shared == (0, 2)  # equal ids at other positions are other tokens


@pytest.mark.parametrize("columns", [8, 33])
def test_left_padding(build: Any, columns: int) -> None:
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9], [0, 0, 0, 5, 6, 7, 3, 4]])
    ids = torch.cat([ids, torch.arange(2 * (columns - 8)).view(2, -1)], dim=1)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    assert build([ids, mask]).tokens == 2 * columns - 6
    plan = build([ids, mask], keep=mask.bool())
    assert plan.tokens == 2 * columns - 6 - 3
    assert plan.inverse[:, :3].eq(-1).all()


# min_shared, keep


def test_min_shared_edits_ranks_and_ends(build: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7, 7, 7], [1, 2, 7, 7, 8]])
    assert build(ids, 2).shared == (0, 4, 2, 4)
    plan = build(ids, 3)
    assert plan.shared == (0, 4, 0, 4)
    # from the unedited prefixes the first two columns would reach to rank 4
    assert plan.end[plan.rank == 0].tolist() == [2, 2, 2, 2, 1]
    assert plan.nodes.tolist() == [[0, 4, 6], [4, 5, 5], [5, 6, 6], [6, 10, 12], [10, 11, 11], [11, 12, 12]]
    assert build(ids, 5).tokens == 20


def test_keep_is_one_of_the_keys(build: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    keep = torch.tensor([[True, False, True, True], [True, True, True, True]])
    plan = build(ids, keep=keep)
    assert plan.shared == (0, 1)
    assert plan.token.tolist() == [0, 2, 3, 5, 6, 7]


def test_keep_with_holes_and_with_nothing(build: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [1, 2, 8, 9, 9]])
    keep = torch.tensor([[True, False, True, False, True]]).expand(3, -1)
    plan = build(ids, keep=keep)
    # rows 0 and 1 share columns 0..2, of which 0 and 2 are kept; row 2 leaves after column 1
    assert plan.nodes.tolist() == [[0, 1, 6], [1, 2, 4], [2, 3, 3], [3, 4, 4], [4, 6, 6]]
    assert plan.prompts() == [SharedSpan((0, 1, 2), 0, 1), SharedSpan((0, 1), 2, 3)]
    nothing = build(ids, keep=torch.zeros(3, 5, dtype=torch.bool))
    assert nothing.tokens == 0
    assert nothing.ratio == float("inf")
    assert nothing.nodes.shape == (0, 3)
    assert nothing.prompts() == []
    assert nothing.window(1, 4).inverse.tolist() == [[-1] * 3] * 3


# Keys


def test_floats_are_compared_by_bits(build: Any) -> None:
    nan = float("nan")
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32).item()
    assert build(torch.tensor([[1.0, 0.0, 2.0], [1.0, -0.0, 2.0]])).shared == (0, 1)
    assert build(torch.tensor([[1.0, nan, 2.0], [1.0, nan, 3.0]])).shared == (0, 2)
    bits = torch.tensor([[1.0, nan, 2.0], [1.0, other_nan, 2.0]])
    bits.view(torch.int32)[1, 1] = 0x7FC00001
    assert build(bits).shared == (0, 1)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.bfloat16, torch.float16, torch.int32, torch.float64],
)
def test_dtypes(build: Any, dtype: torch.dtype) -> None:
    keys = torch.tensor([[1, 0, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 1, 1, 0]]).to(dtype)
    assert build(keys).shared == (0, 3, 0)


def test_wide_integers_differ_in_their_high_bits(build: Any) -> None:
    keys = torch.tensor([[1, 2, 3], [1, 2 + (1 << 40), 3]])
    assert build(keys).shared == (0, 1)


def test_zero_bytes_at_the_end_of_a_row(build: Any) -> None:
    assert build(torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 256]])).shared == (0, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("feature", [3, 4])
def test_trailing_dimensions_are_part_of_the_key(build: Any, dtype: torch.dtype, feature: int) -> None:
    keys = torch.arange(6 * feature).view(1, 6, feature).to(dtype).repeat(3, 1, 1)
    keys[1, 4, feature - 1] = -1
    keys[2, 2, 0] = -1
    assert build(keys.view(3, 6, feature, 1)).shared == (0, 4, 2)
    offset = torch.cat([keys.new_zeros(1), keys.reshape(-1)])[1:].view(3, 6, feature)  # not aligned to 8 bytes
    assert build(offset).shared == (0, 4, 2)


def test_conjugate_views_hold_other_values_than_their_memory(build: Any) -> None:
    keys = torch.complex(torch.ones(2, 3), torch.tensor([[1.0, 2, 3], [1, 2, 4]]))
    check(plan_module._from_rows(keys.conj(), 1, None, None), keys)


def test_empty_trailing_dimension_tells_nothing_apart(build: Any) -> None:
    assert build([torch.ones(2, 3, 0)]).shared == (0, 3)
    assert build([torch.ones(2, 3, 0), torch.tensor([[1, 2, 3], [1, 3, 3]])]).shared == (0, 1)


def test_several_keys_share_where_all_agree(build: Any) -> None:
    first = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    second = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 2], [0, 5, 0, 1]], dtype=torch.uint8)
    third = torch.tensor([[1.0, 1, 1, 1], [1, 1, -1, 1], [1, 1, 1, 1]])
    assert build([first, second]).shared == (0, 3, 1)
    assert build([first, second, third]).shared == (0, 2, 1)


def test_identical_distinct_single_row_single_column(build: Any) -> None:
    identical = build(torch.arange(6).expand(4, -1))
    assert (identical.tokens, identical.order) == (6, (0, 1, 2, 3))
    assert identical.prompts() == [SharedSpan((0, 1, 2, 3), 0, 6)]
    distinct = build(torch.arange(12).view(3, 4))
    assert (distinct.tokens, distinct.prompts()) == (12, [])
    assert build(torch.arange(5).view(1, 5)).nodes.tolist() == [[0, 5, 5]]
    assert build(torch.tensor([[1], [2], [1]])).tokens == 2
    assert build(torch.tensor([[1]])).tokens == 1


def test_a_permuted_batch_has_the_permuted_tree(build: Any) -> None:
    keys = shuffled()
    permutation = torch.tensor([3, 0, 4, 1, 2])
    plan, moved = build(keys), build([key[permutation] for key in keys])
    # Packed indices are renamed, one to one.
    pairs = {
        (a, b)
        for a, b in zip(plan.inverse[permutation].view(-1).tolist(), moved.inverse.view(-1).tolist(), strict=True)
    }
    assert len(pairs) == plan.tokens == moved.tokens


def test_unusual_strides_and_inference_tensors(build: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6, 6, 6]])
    column_major = ids.t().contiguous().t()
    padded = torch.full((3, 9), -1)
    padded[:, 1:9:2] = ids
    for keys in (column_major, padded[:, 1:9:2], ids[:, :, None].expand(3, 4, 2)):
        assert build(keys).shared == (0, 3, 1)
    assert build([ids, torch.arange(4).expand(3, 4)]).shared == (0, 3, 1)
    with torch.inference_mode():
        plan = build(ids.clone(), keep=ids.clone() > 1)
        window = plan.window(1, 3)
        moved = plan.to("cpu")
    values = [getattr(plan, name) for name in TENSORS] + [window.index, window.inverse, window.column, moved.token]
    assert not any(value.is_inference() for value in values)
    # so that they can be saved for a later backward
    x = torch.randn(plan.tokens, requires_grad=True)
    (x[window.index] ** 2).sum().backward()
    floats = ids.float().requires_grad_()
    assert not build(floats).token.requires_grad


@pytest.mark.parametrize("on_device", [False, True])
def test_default_device_is_not_used(on_device: bool) -> None:
    ids = shuffled()[0]
    with torch.device("meta"):
        assert plan_module._from_rows(ids, 1, None, on_device).window(0, 3).index.device.type == "cpu"
        assert PrefixPlan.static([0, 0], 3, 5, "cpu", 1).token.device.type == "cpu"


def test_comparison_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways give the same whatever their chunk sizes, and the device way keeps its bound."""
    generator = torch.Generator().manual_seed(1)
    keys = [torch.randint(0, 2, (9, 40), generator=generator), torch.zeros(9, 40, 3)]
    keys[0][3:, :30] = keys[0][3, :30]
    keys[0][6] = keys[0][4]
    keys[1][8, 20, 2] = 1
    bits = plan_module.key_bits(keys)
    common = np.triu(np.array(common_prefixes(keys)))
    for limit in (1, 9 * 3, 500, 9 * 40 * 3, 5000, 1 << 20):
        assert (np.triu(plan_module.pairwise_lcp(bits, limit).numpy()) == common).all()
    expected = plan_module.order_rows(bits)
    assert plan_module.order_pairs(common.astype(np.int32)) == expected
    for elements in (1, 7, 64):
        monkeypatch.setattr(plan_module, "_COMPARE_ELEMENTS", elements)
        assert plan_module.order_rows(bits) == expected


def test_nothing_behind_the_branch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host way stops at the branch: what follows is never read."""
    read = []
    original = plan_module._first_difference

    def record(arrays: Any, group: Any, start: int, stop: int) -> int:
        split = original(arrays, group, start, stop)
        read.append((len(group), start, split))
        return split

    monkeypatch.setattr(plan_module, "_first_difference", record)
    ids = torch.arange(50).repeat(4, 1)
    ids[:, 20:] += torch.arange(4)[:, None] * 100
    assert PrefixPlan.from_rows(ids, min_shared=1).shared == (0, 20, 20, 20)
    assert read == [(4, 0, 20)]
    read.clear()
    ids[::2, 5:] += 7  # two groups, one in the rows of the other
    ids[:, 20:] = torch.arange(4)[:, None]
    assert PrefixPlan.from_rows(ids, min_shared=1).order == (0, 2, 1, 3)
    assert read == [(4, 0, 5), (2, 6, 20), (2, 6, 20)]


# Windows, static plans, moves


@pytest.mark.parametrize("keep_all", [True, False])
def test_windows(build: Any, keep_all: bool) -> None:
    keys = shuffled()
    plan = build(keys, keep=None if keep_all else keys[1].bool())
    grid = torch.arange(5 * 9).view(5, 9)
    packed = grid.view(-1)[plan.token]
    for start in range(10):
        for stop in range(start, 10):
            window = plan.window(start, stop)
            inside = (plan.column >= start) & (plan.column < stop)
            assert torch.equal(window.index, inside.nonzero().view(-1))
            assert torch.equal(window.column, plan.column[inside].long() - start)
            expected = plan.inverse[:, start:stop]
            assert window.inverse.shape == expected.shape
            assert torch.equal(window.inverse == -1, expected < 0)
            kept = expected >= 0
            assert torch.equal(window.index[window.inverse[kept]], expected[kept])
            assert torch.equal(packed[window.index][window.inverse[kept]], packed[expected[kept]])


def test_static_is_from_rows_of_such_rows() -> None:
    groups = [7, 3, 7, 7, 3, 9]
    ids = torch.arange(6 * 10).view(6, 10)
    ids[:, :4] = torch.tensor(groups)[:, None]
    for min_shared in (1, 4, 5):
        static = PrefixPlan.static(groups, 4, 10, "cpu", min_shared)
        plan = PrefixPlan.from_rows(ids, min_shared=min_shared)
        assert (static.order, static.shared, static.tokens) == (plan.order, plan.shared, plan.tokens)
        for name in TENSORS:
            assert torch.equal(getattr(static, name), getattr(plan, name)), name
    assert PrefixPlan.static([1, 1], 0, 3, min_shared=1).tokens == 6
    assert PrefixPlan.static([1, 1], 3, 3, min_shared=1).tokens == 3


def test_to_moves_all_but_the_nodes() -> None:
    plan = PrefixPlan.from_rows(shuffled(), min_shared=1).to("meta")
    assert {getattr(plan, name).device.type for name in TENSORS[:-1]} == {"meta"}
    assert plan.nodes.device.type == "cpu"


def test_default_min_shared() -> None:
    ids = torch.arange(80).repeat(2, 1)
    ids[1, 63:] = -1
    assert PrefixPlan.from_rows(ids).shared == (0, 0)
    ids[1, 63] = 63
    assert PrefixPlan.from_rows(ids).shared == (0, 64)


# Errors

IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("keys", "options", "message"),
    [
        ([], {}, "keys: expected at least one tensor"),
        ([[1, 2]], {}, r"keys\[0\]: expected a tensor \[B, S, ...\], got list"),
        (torch.zeros(3), {}, r"keys: expected shape \[B, S, ...\].*got \[3\]"),
        (torch.zeros(0, 3), {}, r"got \[0, 3\]"),
        (torch.zeros(3, 0), {}, r"got \[3, 0\]"),
        ([IDS, torch.zeros(2, 4)], {}, r"keys\[1\]: expected shape \[2, 3, ...\] as keys\[0\], got \[2, 4\]"),
        ([IDS, torch.zeros(2, 3, device="meta")], {}, r"keys\[1\]: expected a dense tensor with data"),
        (IDS.to_sparse(), {}, "keys: expected a dense tensor"),
        (IDS, {"min_shared": 0}, "min_shared: expected an int >= 1, got 0"),
        (IDS, {"min_shared": True}, "min_shared: expected an int >= 1, got True"),
        (IDS, {"min_shared": 1.0}, "min_shared: expected an int >= 1, got 1.0"),
        (IDS, {"keep": IDS}, r"keep: expected a tensor torch.bool \[2, 3\], got torch.int64 \[2, 3\]"),
        (IDS, {"keep": torch.ones(2, 2, dtype=torch.bool)}, r"keep: .*got torch.bool \[2, 2\]"),
        (IDS, {"keep": [[True]]}, "keep: .*got list"),
        (
            IDS,
            {"keep": torch.ones(2, 3, dtype=torch.bool, device="meta")},
            "keep: expected device cpu as keys, got meta",
        ),
    ],
)
def test_from_rows_refuses(keys: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrefixPlan.from_rows(keys, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 1, 2), "groups: expected at least one row"),
        (([1, "a"], 1, 2), r"groups\[1\]: expected an int, got 'a'"),
        (([1], 3, 2), r"shared_columns: expected an int in 0 .. 2, got 3"),
        (([1], -1, 2), "shared_columns"),
        (([1], 0, 0), "columns: expected an int >= 1, got 0"),
        (([1], 1, 2, "cpu", 0), "min_shared"),
    ],
)
def test_static_refuses(arguments: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PrefixPlan.static(*arguments)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 4), (0, True)])
def test_window_refuses(start: int, stop: int) -> None:
    with pytest.raises(InputError, match=r"^(start|stop): expected an int"):
        PrefixPlan.static([0, 0], 1, 3).window(start, stop)


@pytest.mark.parametrize("block", [0, -1, True, 1.0])
def test_classify_blocks_refuses(block: Any) -> None:
    with pytest.raises(InputError, match="block: expected an int >= 1"):
        classify_blocks(PrefixPlan.static([0, 0], 1, 3), block)


# On a device


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dropping", [False, True])
def test_one_synchronisation_on_a_device(dropping: bool) -> None:
    keys = shuffled()
    keep = keys[1].bool() if dropping else None
    expected = PrefixPlan.from_rows(keys, min_shared=1, keep=keep)
    on_device = [key.cuda() for key in keys]
    keep_on_device = None if keep is None else keep.cuda()
    PrefixPlan.from_rows(on_device, min_shared=1, keep=keep_on_device).window(2, 7)  # first use loads kernels
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = PrefixPlan.from_rows(on_device, min_shared=1, keep=keep_on_device)
        assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
        torch.cuda.set_sync_debug_mode("error")
        window = plan.window(2, 7)
        static = PrefixPlan.static([0, 1, 0], 3, 5, "cuda", 1)
        classes = classify_blocks(plan, 4)
        moved = expected.to("cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name in TENSORS:
        assert torch.equal(getattr(plan, name).cpu(), getattr(expected, name)), name
        assert torch.equal(getattr(moved, name).cpu(), getattr(expected, name)), name
        assert torch.equal(getattr(static, name).cpu(), getattr(PrefixPlan.static([0, 1, 0], 3, 5, "cpu", 1), name)), (
            name
        )
    for name in ("index", "inverse", "column"):
        assert torch.equal(getattr(window, name).cpu(), getattr(expected.window(2, 7), name)), name
    assert torch.equal(classes.cpu(), classify_blocks(expected, 4))
