"""Plans for graphs that cannot see the tokens: a decoder block compiled on its own, a piece of a model behind a break.

Such a graph takes hidden states ``[B, S, C]`` that require grad. Their values are equal for equal prefixes, but nothing
in the graph says that their gradients may be added up, as they may if the hidden states were computed from tokens and
parameters. Whoever has the tokens says so, by :func:`shared_prefixes` around the forward pass or :func:`attach` on the
model, and every graph that runs inside takes its prefix tree from there.

A publication belongs to the data. In the forward pass a graph takes the one that is open in its own call stack. In the
backward pass (recomputation of a checkpoint: later, on another thread, perhaps while another batch is open) only what
travels with the data counts: the storages of the tensors that the graph was called with, alive and unchanged, are
remembered with the publication, and a recomputation that finds none of them, or tensors of two publications, raises
:class:`RecomputationError`. Before a tree is used, all inputs that it says are equal are compared, once each.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dualkv_compile.errors import InputError, RecomputationError
from dualkv_compile.plan import PrefixPlan
from dualkv_compile.plan_cache import PlanCache


class Publication:
    """The keys of a batch ``[B, S]``, for graphs that do not have them; makes each plan that is asked for once."""

    def __init__(self, keys: Sequence[Tensor]) -> None:
        """``keys``: tensors ``[B, S, ...]`` that together decide what every position is; copied."""
        if not keys:
            raise InputError("shared_prefixes: expected at least one tensor [B, S, ...], got none")
        for key in keys:
            if not isinstance(key, Tensor) or key.ndim < 2 or key.shape[:2] != keys[0].shape[:2]:
                got = list(key.shape) if isinstance(key, Tensor) else type(key).__name__
                batch = list(keys[0].shape[:2])
                raise InputError(f"shared_prefixes: expected tensors [B, S, ...] of the same batch {batch}, got {got}")
        self.keys = [key.detach().clone() for key in keys]
        self.rows, self.columns = int(keys[0].shape[0]), int(keys[0].shape[1])
        self._cache = PlanCache(2)

    def plan(self, *extra: Tensor, min_shared: int, valid: Tensor | None) -> tuple[PrefixPlan, int]:
        """The plan of the keys and ``extra`` keys, and the number of device synchronisations it took."""
        return self._cache.get([*self.keys, *extra], min_shared=min_shared, valid=valid)


#: Arguments of Hugging Face models that decide, per token, what a position is.
TOKEN_KEYS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids")
#: The attribute that marks an attached module.
ATTACHED = "_dualkv_attached"

log = logging.getLogger("dualkv_compile")

_open: ContextVar[Publication | None] = ContextVar("dualkv_publication", default=None)


@contextlib.contextmanager
def shared_prefixes(
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    *others: Tensor,
) -> Iterator[None]:
    """Share prefixes in every compiled graph of the forward pass inside, also in those that see hidden states only.

    With it you promise that what those graphs take per token was computed from these tensors and from parameters, as a
    decoder's hidden states are: the gradient of equal copies then flows back through one of them.

    Args:
        input_ids: ``[B, S]``.
        attention_mask: ``[B, S]``, if the model gets one. (A four-dimensional mask needs not be told.)
        position_ids: ``[B, S]``, if the model gets them; ``[1, S]`` is left out, as it is the same for all rows.
        others: whatever else the model takes per token, ``[B, S, ...]``.

    The backward pass may come after the context is closed.

    Raises:
        InputError: the tensors are not of one batch.
    """
    keys = [x for x in (input_ids, attention_mask, position_ids, *others) if x is not None]
    keys = [x for x in keys if not (x is position_ids and x.ndim == 2 and x.shape[0] == 1 != keys[0].shape[0])]
    token = _open.set(Publication(keys))
    try:
        yield
    finally:
        _open.reset(token)


@contextlib.contextmanager
def opened(publication: Publication | None) -> Iterator[None]:
    """Open a publication (or close the present one, with None) for the graphs that run inside."""
    token = _open.set(publication)
    try:
        yield
    finally:
        _open.reset(token)


def attach(model: nn.Module, *, keys: Sequence[str] = TOKEN_KEYS) -> nn.Module:
    """Open :func:`shared_prefixes` at every call of ``model``, with what the call is given per token.

    For models of which only parts are compiled (their blocks, by ``block.compile(backend="dualkv")`` or accelerate's
    regional compilation), and for those that Dynamo cuts in pieces (PEFT with gradient checkpointing). Call it after
    ``model.compile``, on the module that is called in training (a wrapper such as DDP included). A call whose batch
    cannot be told from its arguments opens nothing, and the reason is logged once.

    Args:
        model: it is changed in place: its calls are wrapped, nothing is added to its state.
        keys: names of the arguments that decide what a position is, ``[B, S, ...]``, where a call has them. Labels are
            not among them; every other per-token argument must be.

    Returns:
        ``model``.

    Raises:
        InputError: ``model`` is no module, or was attached before.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"attach: expected a module, got {type(model).__name__}")
    if getattr(model, ATTACHED, False):
        raise InputError("attach: this module is attached already")
    inner = model._compiled_call_impl if model._compiled_call_impl is not None else model._call_impl
    signature = inspect.signature(model.forward)
    told: set[str] = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            publication = _of_call(signature, args, kwargs, keys)
        except InputError as failure:
            publication = None
            if str(failure) not in told:
                told.add(str(failure))
                log.warning("%s; nothing is shared in pieces that see hidden states only", failure)
        with opened(publication):
            return inner(*args, **kwargs)

    # What nn.Module.__call__ prefers to its own way: outside of anything that is traced, unlike a hook.
    model._compiled_call_impl = torch.compiler.disable(call, recursive=False)
    setattr(model, ATTACHED, True)
    return model


def _of_call(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], keys: Sequence[str]
) -> Publication:
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"attach: the call does not fit the model's forward ({error})") from None
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        given.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    found = [given[name] for name in keys if isinstance(given.get(name), Tensor)]
    if not found:
        raise InputError(f"attach: the call has none of the arguments {', '.join(keys)}")
    batch = next((x.shape[:2] for x in found if x.ndim == 2), found[0].shape[:2])
    # Positions [1, S] are the same for all rows; masks of four dimensions are data that the graphs look at themselves.
    per_token = [x for x in found if x.ndim >= 2 and x.shape[:2] == batch]
    if any(x.requires_grad for x in per_token):
        raise InputError(
            "attach: a per-token argument of the call requires grad: equal rows have gradients of their own"
        )
    return Publication(per_token)


@dataclass
class _Carrier:
    """A tensor that some graph was called with, or returned: its storage and place in it, and the publications."""

    storage: StorageWeakRef
    version: int
    publications: list[Publication | None]
    equal: set[int]  # ids of publications whose copies were compared, or are equal by construction


_Key = tuple[Any, ...]


class Carriers:
    """Which tensors travel with which publication; safe to use from several threads."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Carrier] = {}
        self._lock = threading.Lock()
        self._last: Publication | None = None
        self.used = False  # whether any publication was ever used in this process

    def find(self, tensors: Iterable[Tensor]) -> Publication | None:
        """The publication to use for a graph that is called with ``tensors``.

        Raises RecomputationError in a backward pass if it cannot be told.
        """
        if torch._C._current_graph_task_id() == -1:
            return _open.get()
        with self._lock:
            found = [carrier.publications for x in tensors if (carrier := self._carrier(x)) is not None]
        # A tensor that was used with several batches (a mask given twice) does not tell which of them it is.
        candidates = [p for p in found[0] if all(p in others for others in found)] if found else []
        if len(candidates) == 1:
            return candidates[0]
        if not self.used:
            return None
        raise RecomputationError(
            "a graph is recomputed in the backward pass, and "
            + ("its inputs belong to several batches" if found else "none of its inputs was seen in the forward pass")
            + ", so it is not known which prefixes it shared (inputs that are copied on the way, by offloading or by a"
            " cast inside the checkpoint, are not recognised)"
        )

    def remember(self, tensors: Iterable[Tensor], publication: Publication | None, *, equal: bool = False) -> None:
        """Note that a graph was called with ``tensors`` under a publication, or, if ``equal``, returned them."""
        with self._lock:
            self.used = self.used or publication is not None
            if publication is not self._last:
                self._last = publication
                self._known = {key: c for key, c in self._known.items() if not c.storage.expired()}
            for x in tensors:
                carrier = self._carrier(x)
                if carrier is None:
                    carrier = _Carrier(StorageWeakRef(x.untyped_storage()), x._version, [], set())
                    self._known[_key(x)] = carrier
                if publication not in carrier.publications:
                    carrier.publications.append(publication)
                if equal and publication is not None:
                    carrier.equal.add(id(publication))

    def known_equal(self, x: Tensor, publication: Publication) -> bool:
        """Whether the copies in ``x`` are known to be equal wherever the publication says so."""
        with self._lock:
            carrier = self._carrier(x)
            return carrier is not None and id(publication) in carrier.equal

    def _carrier(self, x: Tensor) -> _Carrier | None:
        """What is known of a tensor (an ordinary one: inference tensors have no version)."""
        carrier = self._known.get(_key(x))
        if carrier is None:
            return None
        # An address may be used again by another storage, and memory may have been written to.
        if carrier.storage.expired() or carrier.version != x._version:
            del self._known[_key(x)]
            return None
        return carrier


def _key(x: Tensor) -> _Key:
    return (x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape), x.stride(), x.dtype)


CARRIERS = Carriers()


def copies_agree(x: Tensor, plan: PrefixPlan) -> Tensor:
    """Whether ``x [B, S, ...]`` is, at each position of the grid, what it is at the position's packed token.

    Floating-point numbers may differ by what the order of a sum changes: graphs before this one may have computed the
    copies one by one. A bool scalar on the device of ``x``.
    """
    flat = x.detach().flatten(0, 1)
    inverse = plan.inverse.flatten().to(x.device)
    token = plan.token.to(x.device)
    if not plan.tokens:
        return torch.ones((), dtype=torch.bool, device=x.device)
    other = flat[token[inverse.clamp_min(0)]]
    kept = (inverse >= 0).view(-1, *(1,) * (flat.ndim - 1))
    if not flat.is_floating_point():
        return ((flat == other) | ~kept).all()
    limit = 64 * torch.finfo(flat.dtype).eps * flat.abs().amax()
    # NaN beside NaN is equal; NaN beside a number is not.
    return (((flat - other).abs() <= limit) | (flat == other) | (flat.isnan() & other.isnan()) | ~kept).all()
