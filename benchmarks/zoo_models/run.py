"""Running one architecture: eager against packed, outputs and gradients, and how much of the work was packed."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

import dualkv_compile
import dualkv_compile.backend  # before any process is forked
from zoo_models.batch import Batch, mutant, rollouts
from zoo_models.build import build, class_name, configuration, routes
from zoo_models.flops import counting

#: Largest allowed difference / largest magnitude, of logits and of gradients.
LOGITS, GRADIENTS = 1e-5, 1e-4
#: Operations of the packed call may be so much more than the share of distinct tokens.
SLACK = 1.15


@dataclass(frozen=True)
class Settings:
    """How the models are run."""

    attention: str = "sdpa"
    checkpointing: bool = False
    dtype: str = "auto"  # float32, and float64 where that decides; or one dtype
    compiler: str = "eager"


@dataclass
class Record:
    """What one architecture gave. ``status`` is one of `STATUSES`."""

    name: str
    model: str = ""
    status: str = "error"
    attention: str = ""
    dtype: str = ""
    routes: bool = False
    parameters: int = 0
    tokens_given: int = 0
    tokens_computed: int = 0
    calls: int = 0
    packed_calls: int = 0
    graph_breaks: int = 0
    reasons: list[str] = field(default_factory=list)
    plain_flops: int = 0
    packed_flops: int = 0
    share: float = 1.0
    logits_error: float = float("nan")
    gradient_error: float = float("nan")
    mutant_error: float = float("nan")
    movement: float = float("nan")
    problem: str = ""
    seconds: float = 0.0

    @property
    def flops_ratio(self) -> float:
        """Operations of the packed call over those of the plain one."""
        return self.packed_flops / self.plain_flops if self.plain_flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "flops_ratio": self.flops_ratio}

    @classmethod
    def from_dict(cls, item: dict[str, Any]) -> Record:
        """The inverse of `to_dict`."""
        return cls(**{key: value for key, value in item.items() if key != "flops_ratio"})


#: packed: the work fell by the share of distinct tokens; partly: by less; plain: nothing shared; wrong: it disagrees
#: with eager; the others did not get that far.
STATUSES = ("packed", "partly", "plain", "wrong", "eager fails", "error", "timeout")


@dataclass
class _Outcome:
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


@contextmanager
def _experts_in(model: PreTrainedModel) -> Iterator[None]:
    """Eager experts by a product per token: eager's grouped products are not counted, and float64 has none."""
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        yield
        return
    model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        model.set_experts_implementation("grouped_mm")


class _EagerFails(Exception):
    """The model itself does not run."""


def _step(model: PreTrainedModel, function: Callable[..., Any], batch: Batch) -> _Outcome:
    """Logits at real tokens, and the gradients of a fixed random functional of them."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    output = function(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits = output.logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits.dtype)
    real = batch.attention_mask.bool()
    (logits * weight)[real].sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return _Outcome(logits.detach()[real].clone(), gradients)


def _distance(a: torch.Tensor, b: torch.Tensor, floor: float = 0.0) -> float:
    """Largest absolute difference over the largest absolute value of the reference ``b``; inf for NaN."""
    scale = max(b.abs().max().item(), floor, 1e-30)
    difference = (a.double() - b.double()).abs().max().item() / scale
    return difference if difference == difference else float("inf")


def _gradient_distance(got: _Outcome, expected: _Outcome) -> float:
    floor = 1e-3 * max(g.abs().max().item() for g in expected.gradients.values() if g.numel())
    worst = 0.0
    for name in sorted({*got.gradients, *expected.gradients}):
        # No gradient is a gradient of zero: eager makes the one or the other of operators that nothing depends on.
        present = got.gradients.get(name, expected.gradients.get(name))
        assert present is not None
        zero = torch.zeros_like(present)
        if present.numel():
            worst = max(worst, _distance(got.gradients.get(name, zero), expected.gradients.get(name, zero), floor))
    return worst


def run(name: str, settings: Settings) -> Record:
    """Compare the architecture ``name`` with eager. Never raises: what went wrong is in the record."""
    start = time.perf_counter()
    record = Record(name, model=class_name(name))
    try:
        # Rounding may flip a choice of experts, and grow in deep products: float64 then decides (models still cast to
        # float32 inside norms and rotary tables).
        dtypes = ["float32", "float64"] if settings.dtype == "auto" else [settings.dtype]
        if routes(configuration(name)):
            dtypes.reverse()
        for dtype in dtypes:
            try:
                record = _compare(name, settings, dtype)
            except _EagerFails as error:  # some models run in one dtype only
                if record.status == "wrong":
                    break
                record.status, record.problem = "eager fails", str(error)
                continue
            if record.status != "wrong" or dtype == "float64":
                break
    except Exception as error:
        record.status, record.problem = "error", _where(error)
    record.seconds = time.perf_counter() - start
    return record


def _compare(name: str, settings: Settings, dtype: str) -> Record:
    record = Record(name, model=class_name(name), dtype=dtype)
    batch, changed = rollouts(), mutant(rollouts())
    try:
        model = build(name, getattr(torch, dtype), settings.attention)
        if settings.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with _experts_in(model):
            with counting() as plain:
                expected = _step(model, model, batch)
            expected_mutant = _step(model, model, changed)
    except Exception as error:
        raise _EagerFails(_where(error)) from error
    if not expected.logits.isfinite().all():
        raise _EagerFails("eager gives logits that are not finite")
    if not all(gradient.isfinite().all() for gradient in expected.gradients.values()):
        raise _EagerFails("eager gives gradients that are not finite")
    record.attention = str(model.config._attn_implementation)
    record.routes = routes(model.config)
    record.parameters = sum(p.numel() for p in model.parameters())
    record.plain_flops = plain.total
    record.share = batch.distinct() / batch.input_ids.numel()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = {"min_shared": 1, "min_saving": 0, "compiler": settings.compiler}
    packed = torch.compile(model, backend="dualkv", options=options)
    dualkv_compile.reset_stats()
    got = _step(model, packed, batch)
    stats = dualkv_compile.stats()
    record.tokens_given, record.tokens_computed = stats["tokens_given"], stats["tokens_computed"]
    record.calls, record.packed_calls = stats["calls"], stats["packed_calls"]
    record.reasons = list(stats["reasons"])
    record.graph_breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    with counting() as work:
        _step(model, packed, batch)
    record.packed_flops = work.total
    got_mutant = _step(model, packed, changed)

    record.logits_error = _distance(got.logits, expected.logits)
    record.gradient_error = _gradient_distance(got, expected)
    record.mutant_error = _distance(got_mutant.logits, expected_mutant.logits)
    # Only what follows the changed token in its row: the token itself moves in any model.
    behind = torch.zeros_like(batch.attention_mask, dtype=torch.bool)
    behind[0, batch.prompt :] = True
    behind = behind[batch.attention_mask.bool()]
    record.movement = _distance(got_mutant.logits[behind], got.logits[behind])
    record.status = _status(record)
    if record.status == "wrong":
        with _experts_in(model):
            again = _distance(_step(model, model, batch).logits, expected.logits)
        if again > LOGITS:  # Reformer seeds itself anew in every call
            raise _EagerFails(f"two eager runs with one seed differ by {again:.1e}")
    return record


def _status(record: Record) -> str:
    bounds = {"float32": 1.0, "float64": 1.0, "bfloat16": 5e3, "float16": 1e3}[record.dtype]
    logits = max(record.logits_error, record.mutant_error)
    if logits > LOGITS * bounds or record.gradient_error > GRADIENTS * bounds:
        record.problem = f"logits differ by {logits:.1e}, gradients by {record.gradient_error:.1e}"
        return "wrong"
    if record.movement < 100 * LOGITS:
        record.problem = f"blind: another prompt token moves the response by only {record.movement:.1e}"
        return "error"
    if not record.packed_calls:
        return "plain"
    return "packed" if record.flops_ratio <= SLACK * record.share else "partly"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if f"{os.sep}torch{os.sep}" not in frame.filename] or frames
    last = outside[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} [{os.path.basename(last.filename)}:{last.lineno}]"
