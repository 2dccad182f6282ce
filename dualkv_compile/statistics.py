"""Counters of what the backend did, for the whole process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

_NAMES = ("calls", "packed_calls", "plain_calls", "tokens_given", "tokens_computed", "graphs_compiled", "device_syncs")


class Statistics:
    """Thread-safe counters; reasons are counted once per call that ran (partly) on the grid because of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Increase counters by name."""
        with self._lock:
            for name, amount in amounts.items():
                assert name in _NAMES, name
                self._counts[name] += amount

    def reason(self, text: str) -> None:
        """Count one call for a reason."""
        with self._lock:
            self._reasons[text] += 1

    def snapshot(self) -> dict[str, Any]:
        """A copy of all counters."""
        with self._lock:
            return {**{name: self._counts[name] for name in _NAMES}, "reasons": dict(self._reasons)}

    def reset(self) -> None:
        """Set every counter to zero."""
        with self._lock:
            self._counts.clear()
            self._reasons.clear()


STATISTICS = Statistics()


def stats() -> dict[str, Any]:
    """What the backend did in this process since the last `reset_stats`.

    ``calls`` of compiled graphs that contain attention, of which ``packed_calls`` ran the rewritten graph and
    ``plain_calls`` the untouched one; ``tokens_given`` (grid positions) and ``tokens_computed`` over those of the
    calls whose rows were read (not where the graph was refused as a whole); ``reasons`` (text -> number of
    calls) for everything that did not run packed; ``graphs_compiled`` by the inner compiler; ``device_syncs`` made to
    read batches.
    """
    return STATISTICS.snapshot()


def reset_stats() -> None:
    """Set the counters of `stats` to zero."""
    STATISTICS.reset()
