"""A device: how time and memory are measured there, and how fast it can be at all."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: Some five milliseconds, in which Python prepares the launches that follow.
_SLEEP_CYCLES = 10_000_000


class DeviceLostError(RuntimeError):
    """An error after which the device runs nothing any more in this process."""


class Budget:
    """Seconds since the start, of those there are."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, time.perf_counter()

    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)


@dataclass(frozen=True)
class Device:
    """Where the benchmark runs, and how time and memory are measured there."""

    device: torch.device

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, step: Callable[[], T]) -> tuple[T, float]:
        """The step's result and the milliseconds the device worked on it, launches not included."""
        if not self.cuda:
            begin = time.perf_counter()
            result = step()
            return result, (time.perf_counter() - begin) * 1e3
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        result = step()
        stop.record()
        torch.cuda.synchronize()
        return result, start.elapsed_time(stop)

    def median(self, step: Callable[[], Any], runs: int) -> float:
        """Median of ``timed`` in ms, after two runs that do not count."""
        return statistics.median([self.timed(step)[1] for _ in range(runs + 2)][2:])

    def wall(self, step: Callable[[], Any], runs: int) -> float:
        """Median ms from the call until the device is done, after two runs that do not count."""
        times = []
        for _ in range(runs + 2):
            self.synchronize()
            begin = time.perf_counter()
            step()
            self.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(times[2:])

    def allocated(self) -> int:
        """Bytes in use; also begins a new peak. 0 where it cannot be known."""
        if not self.cuda:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else 0

    def release(self) -> None:
        """Give memory back that nothing uses; raises DeviceLostError if the device no longer answers."""
        gc.collect()
        if self.cuda:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                raise DeviceLostError(first_line(error)) from error


class Product:
    """A square matrix product of random numbers, to be timed again and again."""

    def __init__(self, device: Device, dtype: torch.dtype, size: int) -> None:
        self.device, self.size = device, size
        self._a, self._b = (torch.randn(size, size, device=device.device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def run(self) -> None:
        """Compute it once."""
        torch.mm(self._a, self._b, out=self._out)

    def tflops(self, milliseconds: float) -> float:
        """TFLOP/s of one product in this time."""
        return 2 * self.size**3 / milliseconds / 1e9


def ceilings(device: Device, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    """Of the idle device: TFLOP/s of the faster of two square products, its size, GB/s (read + written) of a copy."""
    found: dict[int, float] = {}
    for size in (128, 256) if quick else (8192, 16384):
        product = Product(device, dtype, size)
        found[size] = product.tflops(device.median(product.run, 20))
    best = max(found, key=lambda size: found[size])
    copied = _copy_gb_per_s(device, 2**16 if quick else 2**30)
    device.release()
    return {"matmul_tflops": found[best], "matmul_size": best, "copy_gb_per_s": copied}


def _copy_gb_per_s(device: Device, elements: int) -> float:
    source = torch.randn(elements, device=device.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device.median(lambda: target.copy_(source), 10) / 1e6


def first_line(error: BaseException) -> str:
    """The first line of an error, short."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:160]
