"""Recognises a batch that comes again (old log-probabilities, reference, policy, recomputation) and returns its plan.

A batch is recognised by what it holds: the cache keeps copies of the keys and compares bits. Object identity, addresses
and version counters are not used; a freed tensor's address is used again, and writes through numpy, ``.data`` or DLPack
leave the version as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dualkv_compile.errors import InputError
from dualkv_compile.plan import PrefixPlan, build_plan, check_keys, fetch, key_bits, order_pairs, order_rows


class _Entry(NamedTuple):
    signature: Hashable
    bits: list[Tensor]  # own copies of the keys, each [B, S, F]
    plan: PrefixPlan


class PlanCache:
    """The plans of the last few distinct batches; safe to use from several threads.

    Keeps a copy of each entry's keys on their device, so ``entries`` times the keys' size. A plan is found again only
    by keys with the same bits, shapes, dtypes and device, the same ``min_shared`` and ``keep``, and (on CUDA) the same
    current stream, since plan and copies are ordered with that stream only.
    """

    def __init__(self, entries: int = 4) -> None:
        """``entries``: how many plans are kept, the least recently used goes first; at least 1, else InputError."""
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
            raise InputError(f"entries: expected an int >= 1, got {entries!r}")
        self._limit = entries
        self._entries: list[_Entry] = []  # the most recently used last
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forgets every plan."""
        with self._lock:
            self._entries.clear()

    def get(
        self,
        keys: Tensor | Sequence[Tensor],
        min_shared: int = 64,
        keep: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[PrefixPlan, int]:
        """The plan ``PrefixPlan.from_rows`` makes of these arguments, and how many device synchronisations it took.

        ``valid``: bool ``[B, S]``, the keys that queries may see; it counts as one more key, and the plan has
        ``visible``.

        On the CPU none. On another device one, hit or miss: the comparison with the cached entries and the comparison
        of the rows with each other are both enqueued, and one transfer brings both results. (On a hit the latter is
        wasted device time, far less than a pass over the batch; to wait for the former first would cost a second
        synchronisation.)

        Raises:
            InputError: as ``PrefixPlan.from_rows``.
        """
        given = keys if valid is None else [*([keys] if isinstance(keys, Tensor) else keys), valid]
        tensors = check_keys(given, min_shared, keep)
        return self._get(tensors, min_shared, keep, tensors[0].device.type != "cpu", valid)

    def _get(
        self, tensors: list[Tensor], min_shared: int, keep: Tensor | None, on_device: bool, valid: Tensor | None = None
    ) -> tuple[PrefixPlan, int]:
        """``get`` for checked keys (``keep`` among them); ``on_device`` True works on any device."""
        device, columns = tensors[0].device, tensors[0].shape[1]
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        described = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        signature = (described, keep is not None, valid is not None, device, stream, min_shared)
        with self._lock:
            bits = key_bits(tensors)
            known = [entry for entry in reversed(self._entries) if entry.signature == signature]
            if on_device:
                fetched = fetch(bits, keep, [_equal(bits, entry.bits) for entry in known], valid)
                hit = next((entry for entry, same in zip(known, fetched.flags, strict=True) if same), None)
            else:
                hit = next((entry for entry in known if all(map(torch.equal, bits, entry.bits))), None)
            if hit is not None:
                self._entries = [entry for entry in self._entries if entry is not hit]
                self._entries.append(hit)
                return hit.plan, int(on_device)
            if on_device:
                rows, kept, seen = order_pairs(fetched.lcp), fetched.keep, fetched.valid
            else:
                rows = order_rows(bits)
                kept, seen = (None if x is None else x.numpy() for x in (keep, valid))
            plan = build_plan(rows, columns, min_shared, device, keep, kept, on_device, seen)
            copies = [key.clone(memory_format=torch.contiguous_format) for key in bits]
            self._entries = [*self._entries, _Entry(signature, copies, plan)][-self._limit :]
            return plan, int(on_device)


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Whether all pairs are equal, a bool scalar on their device."""
    return torch.stack([(a == b).all() for a, b in zip(left, right, strict=True)]).all()
