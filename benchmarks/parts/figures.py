"""The results of one part of the operator benchmark: rows of times, and rows of peak memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import run_apart
from benchmarks.networks import Problem
from benchmarks.tables import MIB
from benchmarks.timing import Comparison, Run, alternate, seconds

UNIT = "gradient"
LONGEST = 15.0
"""Seconds that the runs behind one figure may take in all, as far as two runs allow it."""


@dataclass(frozen=True)
class Settings:
    """Pairs of runs behind a median, threads, and whether other packages are run too."""

    pairs: int
    threads: int
    peers: bool


@dataclass(eq=False)
class Figures:
    """The rows of one part as they are taken; each is shown when it is there."""

    settings: Settings
    times: list[dict[str, Any]] = field(default_factory=list)
    peaks: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        subject: str,
        what: str,
        comparison: Comparison,
        against: str = UNIT,
        target: float | None = None,
        at_least: float | None = None,
        note: str = "",
    ) -> None:
        """Keep a comparison, with the most (`target`) or the least (`at_least`) that its ratio should be."""
        row = {"subject": subject, "what": what, "against": against, **comparison.as_json()}
        self.times.append({**row, "target": target, "at_least": at_least, "note": note})
        ratio = comparison.ratio
        text = f"{ratio.median:8.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of a {against}"
        goal = "" if target is None else f", target {target:g}"
        goal += "" if at_least is None else f", at least {at_least:g}"
        print(f"  {subject}: {what}: {text}, {comparison.seconds.median:.4f} s{goal} {note}", file=sys.stderr)

    def gradients(self, problem: Problem, what: str, run: Run, target: float | None = None, note: str = "") -> None:
        """Time a run beside the gradient of the same data; fewer pairs where one takes seconds."""
        unit = problem.unit()
        unit()
        pairs = max(1, min(self.settings.pairs, round(LONGEST / seconds(run))))
        comparison = alternate(unit, run, pairs, warmup=0)
        self.add(problem.label, what, comparison, target=target, note=note)

    def peak(
        self, network: str, outputs: int, operator: str, budgets: list[int], batches: int = 1, result: int = 0
    ) -> None:
        """The greatest resident set of processes of their own, beside the baseline plus the memory budget.

        `result` bytes were asked for as the answer: they count with the baseline.
        """
        baseline = result + _peak(network, outputs, operator, batches, self.settings.threads, None)
        for budget in budgets:
            peak = _peak(network, outputs, operator, batches, self.settings.threads, budget)
            row = {"subject": f"{network} C={outputs}", "what": operator, "batches": batches}
            self.peaks.append({**row, "memory_budget": budget, "baseline": baseline, "peak": peak})
            text = f"peak {peak / MIB:,.0f} MiB, bound {(baseline + budget) / MIB:,.0f} MiB"
            print(f"  {row['subject']}: {operator} with {budget / MIB:,.0f} MiB: {text}", file=sys.stderr)

    def as_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {"times": self.times, "peaks": self.peaks, "points": self.points}


def _peak(network: str, outputs: int, operator: str, batches: int, threads: int, budget: int | None) -> int:
    arguments: list[object] = [network, "--outputs", outputs, "--operator", operator]
    arguments += ["--batches", batches, "--threads", threads]
    arguments += [] if budget is None else ["--memory-budget", budget]
    (found,) = run_apart("benchmarks.peak", *arguments)
    return int(found["peak"])
