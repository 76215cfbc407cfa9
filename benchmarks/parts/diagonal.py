"""The exact diagonal of the GGN, in gradients, beside laplace-torch."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from benchmarks.machine import peer_version
from benchmarks.networks import Problem, build
from benchmarks.parts.figures import Figures
from benchmarks.timing import Comparison, Spread, alternate, alternate_fresh

TARGETS = {"mlp": 5.0, "cnn": 30.0, "resnet": 30.0}  # 5, else 3·C
FEW = (8, 16, 32)
"""Points at which laplace-torch is run; all 1,024 take minutes and tens of gigabytes."""


def measure(figures: Figures) -> None:
    """DiagonalGGN of the three networks."""
    for name, target in TARGETS.items():
        _network(figures, build(name), target)


def _network(figures: Figures, problem: Problem, target: float) -> None:
    """On a linearisation that was used before; for the MLP on a fresh one too, and beside laplace-torch."""
    lin = linearized(problem)
    figures.gradients(problem, "DiagonalGGN", lambda: co.DiagonalGGN(lin), target)
    figures.gradients(problem, "DiagonalGGN, one sample", lambda: co.DiagonalGGN(lin, fisher="mc"))
    if problem.name == "mlp":
        fresh = alternate_fresh(problem.unit(), lambda: _fresh(problem), max(1, figures.settings.pairs // 2))
        figures.add(problem.label, "linearize, then DiagonalGGN", fresh)
        if figures.settings.peers and peer_version("laplace-torch") is not None:
            _beside_laplace(figures, problem)


def linearized(problem: Problem, memory_budget: int | None = None) -> co.Linearization:
    """The problem's linearisation, its rules checked: what is done once for a network is not timed."""
    lin = co.linearize(problem.model, problem.batches(), "classification", memory_budget=memory_budget)
    lin.passes.engines.checked_owners(problem.inputs)
    return lin


def _fresh(problem: Problem) -> Any:
    return lambda: co.DiagonalGGN(co.linearize(problem.model, problem.batches(), "classification"))


def _beside_laplace(figures: Figures, problem: Problem) -> None:
    """Fits at few points and theirs scaled to all by the growth from the last size but one to the last."""
    theirs = {n: _laplace_seconds(problem, n) for n in FEW}
    last, before = FEW[-1], FEW[-2]
    slope = (theirs[last] - theirs[before]) / (last - before)
    scaled = theirs[last] + slope * (problem.points - last)
    unit = alternate(problem.unit(), problem.unit(), figures.settings.pairs).seconds
    ours = figures.times[0]["seconds"]["median"]
    measured = ", ".join(f"N = {n}: {seconds:.2f} s" for n, seconds in theirs.items())
    note = f"scaled to N = {problem.points} by its growth from {measured}; {scaled / ours:,.0f} times curvops' time"
    spread = Spread(scaled, scaled, scaled)
    comparison = Comparison(spread.scaled(1 / unit.median), spread, unit, 1)
    figures.add(problem.label, f"laplace-torch {peer_version('laplace-torch')}, diagonal fit", comparison, note=note)


def _laplace_seconds(problem: Problem, points: int) -> float:
    from laplace import DiagLaplace  # an environment of its own has it

    data = TensorDataset(problem.inputs[:points], problem.targets[:points])
    loader: Any = DataLoader(data, batch_size=points)
    fit = DiagLaplace(problem.model, "classification")
    start = time.perf_counter()
    fit.fit(loader)
    return time.perf_counter() - start
