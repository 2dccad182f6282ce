"""Which way computes attention on the packed tokens of a GPU: the fastest of those that gave right numbers here.

Candidates come from what device, dtype, head dimension and mask allow. Each is then tried once, in a process of its own
(:mod:`~dualkv_compile.kernels.strategy_trial`): on a small ragged tree against float64, forward and gradients, since
fused kernels have been silently wrong at single head dimensions; and for time on a larger one. A candidate that is
wrong, fails, or takes the process down is not used. The results are kept on disk, by class of calls and by the versions
of everything involved.

Environment: ``DUALKV_STRATEGY_CACHE=0`` keeps results in memory only. ``DUALKV_STRATEGY_TRIAL=0`` takes the first
candidate by capability without trying it.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dualkv_compile.errors import InputError
from dualkv_compile.kernels import flex, fused

log = logging.getLogger("dualkv_compile.kernels")

#: Works on any device, for any operands and masks, bit for bit repeatably; slow.
FALLBACK = "blocks"
#: Seconds after which a trial counts as failed: compiling takes most of it.
TRIAL_SECONDS = 300.0


@dataclass(frozen=True)
class Workload:
    """A class of attention calls that one choice serves.

    ``device``: its index. ``dtype``: without "torch.". ``mask``: "none"; "keys" if beside the tree it only hides the
    same keys from all queries (padding), which the plan knows; or "any".
    ``repeatable``: whether gradients must be the same, bit for bit, in every run. ``scores``: what is done to them
    beside scaling and masking, "" or some of "softcap+bias+sinks".
    """

    device: int
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask: str
    repeatable: bool
    scores: str = ""

    @staticmethod
    def of(
        device: torch.device,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        mask: str = "none",
        scores: str = "",
    ) -> Workload:
        """The class of calls with these operands under torch's present deterministic mode."""
        index = torch.cuda.current_device() if device.index is None else device.index
        repeatable = torch.are_deterministic_algorithms_enabled()
        name = str(dtype).removeprefix("torch.")
        return Workload(index, name, heads, kv_heads, head_dim, value_dim, mask, repeatable, scores)


def candidates(workload: Workload, mask: str = "") -> tuple[str, ...]:
    """The strategies that could compute a workload on its CUDA device, the most promising first."""
    device = torch.device("cuda", workload.device)
    half = workload.dtype in ("float16", "bfloat16")
    equal = workload.head_dim == workload.value_dim
    found = []
    if (
        flex.flash_available()
        and half
        and equal
        and workload.head_dim in flex.FLASH_HEAD_DIMS
        and torch.cuda.get_device_capability(device)[0] in (9, 10)
        and not workload.repeatable
        and not workload.scores
        and flex.expressible("flex_flash", mask)
    ):
        found.append("flex_flash")
    regions = half and equal and workload.mask != "any" and workload.scores in ("", "sinks")
    if regions and fused.flash_usable(device, workload.head_dim):
        found.append("dense")
    if (
        workload.dtype != "float64"
        and min(workload.head_dim, workload.value_dim) >= 16
        and "bias" not in workload.scores
    ):
        found.append("flex")
    return (*found, FALLBACK)


def check_repeatable(strategy: str) -> None:
    """Raise InputError if ``strategy`` was asked for and its gradients differ between runs in deterministic mode."""
    if strategy == "flex_flash" and torch.are_deterministic_algorithms_enabled():
        raise InputError(
            "attention 'flex_flash': its gradients are not repeatable, which torch.use_deterministic_algorithms(True) "
            "asks for; use 'auto'"
        )


@dataclass(frozen=True)
class Trial:
    """What trying a strategy gave: milliseconds of forward and backward, or why it is not used."""

    milliseconds: float = math.inf
    failure: str = ""


class Chooser:
    """Chooses once per class of calls; ``trial`` tries one strategy (other than in tests, in a process of its own)."""

    def __init__(self, trial: Callable[[str, Workload], Trial], store: Path | None) -> None:
        """``store``: the file that keeps results, None for none."""
        self._trial = trial
        self._store = store
        self._known: dict[str, dict[str, Any]] = _read(store)
        self._lock = threading.Lock()

    def choose(self, workload: Workload, mask: str = "") -> str:
        """The strategy for a workload; may take a minute or two the first time."""
        able = candidates(workload, mask)
        if os.environ.get("DUALKV_STRATEGY_TRIAL") == "0":
            return able[0]
        with self._lock:
            results = {name: self._tried(name, workload) for name in able if name != FALLBACK}
        best = min(results, key=lambda name: results[name].milliseconds, default=FALLBACK)
        if best == FALLBACK or not math.isfinite(results[best].milliseconds):
            if results:
                log.warning("no fast attention works here for %s: plain matrix products, slow", workload)
            return FALLBACK
        return best

    def _tried(self, name: str, workload: Workload) -> Trial:
        key = json.dumps([name, *_versions(workload.device), asdict(workload) | {"device": 0}])
        if key not in self._known:
            log.info("trying attention %r for %s", name, workload)
            result = self._trial(name, workload)
            if result.failure:
                log.warning("attention %r is not used for %s: %s", name, workload, result.failure)
            self._known[key] = asdict(result)
            _write(self._store, self._known)
        return Trial(**self._known[key])


def try_in_process(name: str, workload: Workload) -> Trial:
    """Try a strategy in a process of its own, which a broken kernel may take down without harm."""
    # The safe path keeps the present folder out: it may hold modules that have the names of installed ones.
    command = [sys.executable, "-P", "-m", "dualkv_compile.kernels.strategy_trial"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    question = json.dumps({"name": name, "workload": asdict(workload)})
    try:
        done = subprocess.run(
            command, input=question, env=environment, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Trial(failure=f"it could not be tried ({type(error).__name__})")
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
        return Trial(float(answer["milliseconds"]), str(answer["failure"]))
    except (IndexError, ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Trial(failure=f"its trial ended with status {done.returncode}: {last[:300]}")


def choose(workload: Workload, mask: str = "") -> str:
    """The strategy of this process for a workload; see the module."""
    global _chooser
    if _chooser is None:
        _chooser = Chooser(try_in_process, default_store())
    return _chooser.choose(workload, mask)


_chooser: Chooser | None = None


def default_store() -> Path | None:
    """The file that keeps results, None if switched off."""
    if os.environ.get("DUALKV_STRATEGY_CACHE") == "0":
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "dualkv-compile" / "strategies.json"


def _versions(device: int) -> list[str]:
    """Whatever a result depends on beside the workload."""
    found = [torch.cuda.get_device_name(device), torch.__version__, str(torch.backends.cudnn.version())]
    for package in ("dualkv-compile", "triton", "flash-attn-4"):
        try:
            found.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            found.append("")
    return found


def _read(store: Path | None) -> dict[str, dict[str, Any]]:
    """The results on disk; none if the file is missing or damaged."""
    try:
        known = json.loads(store.read_text(encoding="utf-8")) if store is not None else {}
        return {str(key): asdict(Trial(float(x["milliseconds"]), str(x["failure"]))) for key, x in known.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write(store: Path | None, known: dict[str, dict[str, Any]]) -> None:
    """Put results on disk beside those of other processes; a disk that cannot be written is no error."""
    if store is None:
        return
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**_read(store), **known}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=store.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(store)
    except OSError as error:
        log.info("results of trials are not kept: %s", error)
