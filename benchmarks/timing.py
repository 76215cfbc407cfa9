"""Alternating runs of a candidate and the unit in one process, compared pair by pair.

A machine's speed drifts (frequency, other jobs), so a unit timed once at the start is no measure for a run a minute
later. Each candidate is timed as A B A B ..., with A the unit: both sides of a pair run at the same speed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one measurement or more."""
        return cls(statistics.median(values), min(values), max(values))

    def scaled(self, factor: float) -> Spread:
        """Convert the measurements to another unit."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Comparison:
    """A candidate beside the unit: the spread of the ratio by pair, and of both times in seconds."""

    ratio: Spread
    seconds: Spread
    unit_seconds: Spread
    pairs: int

    def shared(self, columns: int) -> Comparison:
        """The ratio as a vector's share of a block."""
        return replace(self, ratio=self.ratio.scaled(1 / columns))

    def as_json(self, columns: int = 1) -> dict[str, object]:
        """Plain numbers; the ratio is divided by `columns`, so that a block's is per vector."""
        return {
            "ratio": asdict(self.ratio.scaled(1 / columns)),
            "seconds": asdict(self.seconds),
            "unit_seconds": asdict(self.unit_seconds),
            "pairs": self.pairs,
        }


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


def seconds(run: Run, timer: Callable[[], float] = time.perf_counter) -> float:
    """Time one run; garbage of earlier runs is collected before it, none during it, and its result is freed after."""
    gc.collect()
    _, elapsed = clock(run, timer)
    return elapsed


def alternate(
    unit: Run, candidate: Run, pairs: int, warmup: int = 1, timer: Callable[[], float] = time.perf_counter
) -> Comparison:
    """Time A B A B ... after `warmup` untimed pairs; the ratio is B / A of each pair."""
    return alternate_fresh(unit, lambda: candidate, pairs, warmup, timer)


def alternate_fresh(
    unit: Run, make: Callable[[], Run], pairs: int, warmup: int = 1, timer: Callable[[], float] = time.perf_counter
) -> Comparison:
    """Time as `alternate` does, with a new candidate from `make` for every pair: for a cost paid only once.

    `make` itself is not timed; it runs before the unit, so that the two timed runs stay next to each other.
    """
    for _ in range(warmup):
        candidate = make()
        unit()
        candidate()
    times: list[tuple[float, float]] = []
    for _ in range(pairs):
        candidate = make()
        times.append((seconds(unit, timer), seconds(candidate, timer)))
    return Comparison(
        ratio=Spread.of([b / a for a, b in times]),
        seconds=Spread.of([b for _, b in times]),
        unit_seconds=Spread.of([a for a, _ in times]),
        pairs=pairs,
    )
