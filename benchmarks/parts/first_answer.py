"""The first predictions under KFAC of a network with six million weights, stage by stage, and how they report."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import curvops as co
from benchmarks.networks import Problem, build
from benchmarks.parts.figures import Figures
from benchmarks.timing import Comparison, Spread, seconds

PREDICTIONS = 20
LIMIT = 40.0
"""Seconds with one thread that all stages together should take."""


def measure(figures: Figures) -> None:
    """Factors, then the first prediction with the eigendecompositions, then further ones; each stage runs once."""
    answer(figures, build("wide"))


def answer(figures: Figures, problem: Problem) -> None:
    """The stages of one problem, in gradients of its data."""
    gradient, heard, times = seconds(problem.unit()), [0.0], []
    lin = co.linearize(
        problem.model, problem.batches(), "classification", progress=lambda *_: heard.append(time.perf_counter())
    )
    posteriors: list[co.posterior.GaussianPosterior] = []
    first, *others = problem.inputs[:PREDICTIONS].split(1)
    stages: dict[str, Callable[[], object]] = {
        "factors": lambda: posteriors.append(co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)),
        "eigendecompositions and the first prediction": lambda: posteriors[0].predict(first).variance,
        f"{len(others)} further predictions": lambda: [posteriors[0].predict(x).variance for x in others],
    }
    for what, run in stages.items():
        heard[:] = [time.perf_counter()]
        times.append(seconds(run))
        heard.append(time.perf_counter())
        silent = max(later - earlier for earlier, later in pairwise(heard))
        figures.add(problem.label, what, _once(times[-1], gradient), note=f"at most {silent:.1f} s without a report")
    target = round(LIMIT / gradient, 1) if figures.settings.threads == 1 else None
    note = f"the target is {LIMIT:g} s with one thread"
    figures.add(problem.label, "all of it", _once(sum(times), gradient), target=target, note=note)


def _once(taken: float, gradient: float) -> Comparison:
    return Comparison(Spread.of([taken / gradient]), Spread.of([taken]), Spread.of([gradient]), 1)
