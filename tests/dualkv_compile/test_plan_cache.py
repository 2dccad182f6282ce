"""The plan cache knows a batch by its bits, and by nothing else."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.plan import PrefixPlan, check_keys
from dualkv_compile.plan_cache import PlanCache


class DeviceWayCache(PlanCache):
    """Takes the way of other devices on the CPU too."""

    def get(self, keys: Any, min_shared: int = 64, keep: Tensor | None = None) -> tuple[PrefixPlan, int]:
        return self._get(check_keys(keys, min_shared, keep), min_shared, keep, on_device=True)


@pytest.fixture(params=[PlanCache, DeviceWayCache])
def cache(request: pytest.FixtureRequest) -> PlanCache:
    made: PlanCache = request.param()
    return made


def rows(seed: int = 0) -> Tensor:
    ids = torch.arange(5 * 6).view(5, 6) + 1000 * seed
    ids[:, :3] = seed
    return ids


def same(left: PrefixPlan, right: PrefixPlan) -> bool:
    names = ("token", "inverse", "rank", "column", "end", "nodes")
    return left.order == right.order and all(torch.equal(getattr(left, n), getattr(right, n)) for n in names)


def test_equal_keys_in_other_tensors_find_the_plan(cache: PlanCache) -> None:
    plan, syncs = cache.get(rows(), 1)
    assert syncs == int(isinstance(cache, DeviceWayCache))
    assert same(plan, PrefixPlan.from_rows(rows(), min_shared=1))
    again, syncs = cache.get([rows().t().contiguous().t()], 1)
    assert again is plan
    assert syncs == int(isinstance(cache, DeviceWayCache))
    assert len(cache) == 1


def test_writes_that_bump_no_version_are_seen(cache: PlanCache) -> None:
    ids = rows()
    first, _ = cache.get(ids, 1)
    version = ids._version
    ids.numpy()[1, 1] = 77
    assert ids._version == version
    changed, _ = cache.get(ids, 1)
    assert changed is not first
    assert same(changed, PrefixPlan.from_rows(ids, min_shared=1))
    ids.data[1, 1] = 0
    assert cache.get(ids, 1)[0] is first  # the cached copy did not follow the write


def test_a_write_before_the_second_call_does_not_reach_the_copy(cache: PlanCache) -> None:
    ids = rows()
    plan, _ = cache.get(ids, 1)
    ids[:, 0] = torch.arange(5)
    assert cache.get(rows(), 1)[0] is plan


def test_fresh_tensors_at_the_addresses_of_freed_ones(cache: PlanCache) -> None:
    for seed in range(50):
        ids = rows()
        ids[seed % 5, seed % 6] += 1 + seed
        plan, _ = cache.get(ids, 1)
        assert same(plan, PrefixPlan.from_rows(ids, min_shared=1))
        del ids  # freed here: the next tensor may get its address


def test_floats_are_compared_by_bits(cache: PlanCache) -> None:
    nan = float("nan")
    zero = torch.tensor([[0.0, nan], [0.0, nan]])
    plan, _ = cache.get(zero, 1)
    assert cache.get(zero.clone(), 1)[0] is plan
    mixed = torch.tensor([[0.0, nan], [-0.0, nan]])
    assert cache.get(mixed, 1)[0].tokens == 4


def test_every_argument_counts(cache: PlanCache) -> None:
    ids = rows()
    keep = torch.ones(5, 6, dtype=torch.bool)
    partial = keep.clone()
    partial[:, :2] = False
    calls: list[tuple[Any, int, Tensor | None]] = [
        (ids, 1, None),
        (ids, 4, None),
        ([ids, ids], 1, None),
        (ids.int(), 1, None),
        (ids.view(5, 3, 2), 1, None),
        (ids, 1, keep),
        (ids, 1, partial),
        ([ids, partial], 1, None),  # the same tensors as keys: nothing is dropped
    ]
    big = type(cache)(entries=len(calls))
    plans = [big.get(*call)[0] for call in calls]
    assert len({id(plan) for plan in plans}) == len(calls) == len(big)
    for (keys, min_shared, kept), plan in zip(calls, plans, strict=True):
        assert same(plan, PrefixPlan.from_rows(keys, min_shared=min_shared, keep=kept))
        assert big.get(keys, min_shared, kept)[0] is plan


def test_the_least_recently_used_plan_goes(cache: PlanCache) -> None:
    first, second = (cache.get(rows(seed), 1)[0] for seed in (0, 1))
    for seed in (2, 3):
        cache.get(rows(seed), 1)
    assert cache.get(rows(0), 1)[0] is first
    cache.get(rows(4), 1)
    assert len(cache) == 4
    assert cache.get(rows(0), 1)[0] is first
    assert cache.get(rows(1), 1)[0] is not second
    cache.clear()
    assert len(cache) == 0
    assert cache.get(rows(0), 1)[0] is not first


def test_plans_made_in_inference_mode_serve_training(cache: PlanCache) -> None:
    with torch.inference_mode():
        plan, _ = cache.get(rows().clone(), 1)
    assert cache.get(rows(), 1)[0] is plan
    x = torch.randn(plan.tokens, requires_grad=True)
    (x[plan.inverse] ** 2).sum().backward()
    assert x.grad is not None


def test_threads_share_one_plan(cache: PlanCache) -> None:
    barrier = threading.Barrier(8)
    found: list[list[PrefixPlan]] = [[] for _ in range(8)]

    def work(mine: list[PrefixPlan]) -> None:
        barrier.wait()
        for step in range(30):
            mine.append(cache.get(rows(step % 3), 1)[0])

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(mine) == 30 for mine in found)
    assert {len({id(mine[step]) for mine in found for step in range(seed, 30, 3)}) for seed in range(3)} == {1}


def test_errors(cache: PlanCache) -> None:
    with pytest.raises(InputError, match="entries: expected an int >= 1, got 0"):
        PlanCache(0)
    with pytest.raises(InputError, match="min_shared"):
        cache.get(rows(), 0)
    with pytest.raises(InputError, match="keep"):
        cache.get(rows(), 1, rows())
    assert len(cache) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dropping", [False, True])
def test_one_synchronisation_hit_or_miss(dropping: bool) -> None:
    cache = PlanCache()
    keep = torch.ones(5, 6, dtype=torch.bool, device="cuda") if dropping else None
    cache.get(rows(9).cuda(), 1, keep)  # first use loads kernels
    batches = [rows(0).cuda(), rows(1).cuda(), rows(0).cuda()]
    plans = []
    torch.cuda.set_sync_debug_mode("warn")
    try:
        for ids in batches:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan, syncs = cache.get(ids, 1, keep)
            assert len([w for w in caught if "synchroniz" in str(w.message)]) == syncs == 1
            plans.append(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plans[0] is plans[2]
    assert plans[0] is not plans[1]
    assert same(
        plans[1].to("cpu"), PrefixPlan.from_rows(rows(1), min_shared=1, keep=None if keep is None else keep.cpu())
    )
    with torch.cuda.stream(torch.cuda.Stream()):
        assert cache.get(batches[0], 1, keep)[0] is not plans[0]  # ordered with another stream


@pytest.mark.parametrize("with_keep", [False, True])
def test_visible_nodes_are_the_same_on_a_device(with_keep: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 3, (6, 20), generator=generator)
    valid = ids != 0
    keep = ids != 1 if with_keep else None
    here, _ = PlanCache().get(ids, 1, keep, valid)
    cache = PlanCache()
    there, _ = cache._get(check_keys([ids, valid], 1, keep), 1, keep, True, valid)
    assert here.visible is not None
    assert there.visible is not None
    assert torch.equal(here.visible, there.visible)
    covered = torch.zeros(here.tokens, dtype=torch.bool)
    for start, stop, _ in here.visible.tolist():
        covered[start:stop] = True
    assert torch.equal(covered, valid.flatten()[here.token])
    assert cache._get(check_keys([ids, valid], 1, keep), 1, keep, True, valid)[0] is there
    other, _ = cache._get(check_keys([ids, ~valid], 1, keep), 1, keep, True, ~valid)
    assert other is not there
    assert PlanCache().get(ids, 1, keep)[0].visible is None
