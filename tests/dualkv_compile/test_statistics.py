"""`stats` and `reset_stats`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dualkv_compile import reset_stats, stats
from dualkv_compile.backend import dualkv
from dualkv_compile.statistics import Statistics

NAMES = {"calls", "packed_calls", "plain_calls", "tokens_given", "tokens_computed", "graphs_compiled", "device_syncs"}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reset_stats()
    yield
    reset_stats()


def test_names_and_reset() -> None:
    assert stats() == {**dict.fromkeys(NAMES, 0), "reasons": {}}
    counters = Statistics()
    counters.add(calls=2, tokens_given=5)
    counters.reason("because")
    counters.reason("because")
    found = counters.snapshot()
    assert (found["calls"], found["tokens_given"], found["packed_calls"]) == (2, 5, 0)
    assert found["reasons"] == {"because": 2}
    found["reasons"]["other"] = 1  # a copy: changing it changes nothing
    assert counters.snapshot()["reasons"] == {"because": 2}
    counters.reset()
    assert counters.snapshot() == {**dict.fromkeys(NAMES, 0), "reasons": {}}
    with pytest.raises(AssertionError):
        counters.add(nonsense=1)


def test_threads_lose_no_count() -> None:
    counters = Statistics()

    def work() -> None:
        for _ in range(2000):
            counters.add(calls=1)
            counters.reason("because")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot()["calls"] == counters.snapshot()["reasons"]["because"] == 8000


def attention(ids: Tensor, weight: Tensor, causal: bool) -> Tensor:
    x = F.embedding(ids, weight)[:, None]
    return F.scaled_dot_product_attention(x, x, x, is_causal=causal)


def test_what_calls_count() -> None:
    weight = torch.randn(10, 8)
    ids = torch.zeros(3, 6, dtype=torch.long)
    ids[:, 5] = torch.arange(3)
    compiled = torch.compile(attention, backend=dualkv, options={"compiler": "eager", "min_shared": 1})
    for _ in range(2):
        compiled(ids, weight, True)
    expected = {"calls": 2, "packed_calls": 2, "plain_calls": 0, "tokens_given": 36, "tokens_computed": 16}
    assert stats() == {**expected, "graphs_compiled": 1, "device_syncs": 0, "reasons": {}}

    reset_stats()
    compiled(torch.arange(18).remainder(10).reshape(3, 6), weight, True)  # nothing in common: plain, and no reason
    expected = {"calls": 1, "packed_calls": 0, "plain_calls": 1, "tokens_given": 18, "tokens_computed": 18}
    assert stats() == {**expected, "graphs_compiled": 1, "device_syncs": 0, "reasons": {}}

    reset_stats()
    for _ in range(2):
        compiled(ids, weight, False)
    found = stats()
    assert (found["calls"], found["packed_calls"], found["plain_calls"]) == (2, 0, 2)
    ((reason, count),) = found["reasons"].items()
    assert "not causal" in reason
    assert f"{__file__}:" in reason
    assert count == 2


def test_graphs_without_attention_are_not_counted() -> None:
    torch.compile(lambda x: x * 2, backend=dualkv, options={"compiler": "eager"})(torch.ones(3))
    assert (stats()["calls"], stats()["graphs_compiled"]) == (0, 1)
