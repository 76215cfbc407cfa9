"""The exact diagonal of the GGN, in gradients, compared with laplace-torch."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from benchmarks.machine import peer_version
from benchmarks.networks import Problem, build
from benchmarks.parts.figures import Figures
from benchmarks.timing import alternate, alternate_fresh

TARGETS = {"mlp": 5.0, "cnn": 30.0, "resnet": 30.0}  # 5, else 3·C
BACKENDS = ("BackPackGGN", "AsdlGGN")
"""Backends of laplace-torch. The default, CurvlinopsGGN, takes minutes and tens of gigabytes for a batch's Jacobian."""


def measure(figures: Figures) -> None:
    """DiagonalGGN of the three networks."""
    for name, target in TARGETS.items():
        _network(figures, build(name), target)


def _network(figures: Figures, problem: Problem, target: float) -> None:
    """On a linearisation that was used before; for the MLP on a fresh one too."""
    lin = linearized(problem)
    figures.gradients(problem, "DiagonalGGN", lambda: co.DiagonalGGN(lin), target)
    figures.gradients(problem, "DiagonalGGN, one sample", lambda: co.DiagonalGGN(lin, fisher="mc"))
    if problem.name == "mlp":
        fresh = alternate_fresh(problem.unit(), lambda: _fresh(problem), max(1, figures.settings.pairs // 2))
        figures.add(problem.label, "linearize, then DiagonalGGN", fresh)


def measure_beside_laplace(figures: Figures) -> None:
    """DiagonalGGN and the fits of laplace-torch in processor time: of one thread with `--threads 1`."""
    if figures.settings.peers and peer_version("laplace-torch") is not None:
        for name in TARGETS:
            _beside_laplace(figures, build(name), f"laplace-torch {peer_version('laplace-torch')}")


def _beside_laplace(figures: Figures, problem: Problem, package: str) -> None:
    """This diagonal beside the backends that have it for this network, and beside the fastest of them."""
    fits = {name: fit for name in BACKENDS if (fit := _fit(problem, name)) is not None}
    if not fits:
        return
    lin = linearized(problem)
    timed = partial(alternate, pairs=figures.settings.pairs, timer=time.process_time)
    times = {name: timed(problem.unit(), fit) for name, fit in fits.items()}
    figures.add(problem.label, "DiagonalGGN", timed(problem.unit(), lambda: co.DiagonalGGN(lin)))
    for name, found in times.items():
        figures.add(problem.label, f"{package}, {name}", found)
    best = min(times, key=lambda name: times[name].ratio.median)
    ours = timed(fits[best], lambda: co.DiagonalGGN(lin))
    figures.add(problem.label, "DiagonalGGN", ours, against=f"{package}, {best}")


def linearized(problem: Problem, memory_budget: int | None = None) -> co.operators.Linearization:
    """The problem's linearisation, its rules checked: what is done once for a network is not timed."""
    lin = co.linearize(problem.model, problem.batches(), "classification", memory_budget=memory_budget)
    lin.passes.engines.checked_others(problem.inputs)
    return lin


def _fresh(problem: Problem) -> Any:
    return lambda: co.DiagonalGGN(co.linearize(problem.model, problem.batches(), "classification"))


def _fit(problem: Problem, backend: str) -> Any:
    """A fit with this backend, None where it fails on the network or has another diagonal."""
    import laplace.curvature  # an environment of its own has it
    from laplace import DiagLaplace

    model = copy.deepcopy(problem.model)  # BackPACK leaves hooks
    loader: Any = DataLoader(TensorDataset(problem.inputs, problem.targets), batch_size=problem.points)

    def fit(data: Any = loader) -> Any:
        found = DiagLaplace(model, "classification", backend=getattr(laplace.curvature, backend))
        found.fit(data)
        return found

    few = problem.inputs[:2], problem.targets[:2]
    try:
        theirs = fit(DataLoader(TensorDataset(*few), batch_size=2)).H
    except Exception:
        return None
    ours = co.DiagonalGGN(co.linearize(problem.model, few, "classification")).entries
    return fit if torch.allclose(theirs, ours, rtol=1e-3, atol=1e-6 * float(ours.max())) else None
