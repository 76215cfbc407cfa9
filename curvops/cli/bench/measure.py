"""Measurements of one call: its time, the memory it added, and the course of its residual."""

from __future__ import annotations

import gc
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvops.cli.bench.problem import Counter

STATM = Path("/proc/self/statm")
INTERVAL = 0.002
MEMORY = "memory: growth of the resident set (GPU: of allocated memory) while it ran, sampled every 2 ms"


class Peak:
    """A context that measures how far memory grew inside it: ``bytes``, None if the system does not report it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start = torch.cuda.memory_allocated(self.device)
        elif STATM.exists():
            self.start = self.most = _resident()
            self.ended = threading.Event()
            self.thread = threading.Thread(target=self._sample, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.start
        elif STATM.exists():
            self.ended.set()
            self.thread.join()
            self.bytes = max(self.most, _resident()) - self.start

    def _sample(self) -> None:
        while not self.ended.wait(INTERVAL):
            self.most = max(self.most, _resident())


def _resident() -> int:
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@dataclass
class Trail:
    """The points (products, seconds, worst relative residual) of a solve; a callback of `cg` and similar solvers.

    ``worst`` reduces the residuals of the columns to one number.
    """

    counter: Counter
    worst: Callable[[Tensor], float] = field(default=lambda residuals: float(residuals.max()), repr=False)
    products: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    started: float = 0.0

    def start(self) -> None:
        """Start the clock; earlier products (a preconditioner's) count as well."""
        self.started = time.perf_counter()

    def __call__(self, iteration: int, residuals: Tensor) -> None:
        """Add a point: the products and the time so far, and the residuals that `cg` reports for an iteration."""
        self.put(self.counter.count, time.perf_counter() - self.started, self.worst(residuals))

    def put(self, products: int, seconds: float, residual: float) -> None:
        """Add an earlier point."""
        self.products.append(products)
        self.seconds.append(seconds)
        self.residuals.append(residual)


@dataclass(frozen=True, eq=False)
class Measurement:
    """The value of a call, its seconds, and how far memory grew."""

    value: Any
    seconds: float
    peak_bytes: int | None


def clock(call: Callable[[], Any], timer: Callable[[], float] = time.perf_counter) -> tuple[Any, float]:
    """Run a call once without collecting garbage; return its value and its time in seconds by the timer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        start = timer()
        value = call()
        return value, timer() - start
    finally:
        if enabled:
            gc.enable()


def measure(call: Callable[[], Any], device: torch.device) -> Measurement:
    """Run a call once, with the accelerator's queue emptied before and after, and measure time and memory."""

    def finish() -> Any:
        value = call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return value

    with Peak(device) as peak:
        value, seconds = clock(finish)
    return Measurement(value, seconds, peak.bytes)
