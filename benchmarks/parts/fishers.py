"""Products with the Monte Carlo and the empirical Fisher for many outputs, compared with curvlinops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import curvops as co
from benchmarks import peer_operators, routes
from benchmarks.networks import NETWORKS, Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.timing import alternate, alternate_fresh
from benchmarks.transformer import VOCABULARY

COLUMNS = 16
BUILT = 2.0
# network, outputs, most gradients a product
PROBLEMS = [(name, 100, 0.9) for name in NETWORKS] + [("transformer", 10, 1.0), ("language", VOCABULARY, 1.0)]
PEERS = {"GGN(mc_samples=1)": "FisherMCLinearOperator", "EmpiricalFisher": "EFLinearOperator"}


def measure(figures: Figures) -> None:
    """Single vectors and blocks, and what building the rows adds to the first product."""
    for name, outputs, target in PROBLEMS:
        problem = build(name, outputs)
        lin = linearized(problem)
        _operator(figures, problem, "GGN(mc_samples=1)", partial(_sampled, lin), target)
        _operator(figures, problem, "EmpiricalFisher", partial(co.EmpiricalFisher, lin), target)


def _sampled(lin: co.operators.Linearization) -> co.GGN:
    return co.GGN(lin, mc_samples=1, generator=torch.Generator().manual_seed(0))


def _operator(figures: Figures, problem: Problem, what: str, make: Callable[[], Any], target: float) -> None:
    operator, V = make(), problem.block(COLUMNS)
    v = V[:, 0].contiguous()
    routes.settle(operator, v, 3)
    served = f"served {routes.engines(operator)}"
    figures.gradients(problem, f"{what} @ v", lambda: operator @ v, target, note=served)
    pairs = max(1, figures.settings.pairs // 3)
    block = alternate(problem.unit(), lambda: operator @ V, pairs)
    figures.add(
        problem.label, f"{what} @ V, K = {COLUMNS}, a vector", block.shared(COLUMNS), target=target, note=served
    )
    if what.startswith("GGN"):  # the empirical rows are kept by the linearisation, for all who ask
        fresh = alternate_fresh(problem.unit(), lambda: routes.first(make, v)(), pairs)
        figures.add(problem.label, f"{what}: the first product", fresh, target=BUILT + target)
    if figures.settings.peers and peer_operators.label() is not None:
        beside(figures, problem, what, operator, v, PEERS[what])


def beside(figures: Figures, problem: Problem, what: str, ours: Any, v: torch.Tensor, name: str) -> None:
    """Their operator of this name in gradients, and ours in times of theirs."""
    label = f"{peer_operators.label()}, {name}"
    try:
        theirs = peer_operators.operator(problem, name)
        theirs @ v
    except Exception as error:  # it refuses what it does not support
        print(f"  {problem.label}: {label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return
    figures.gradients(problem, label, lambda: theirs @ v)
    pairs = max(1, figures.settings.pairs // 2)
    figures.add(problem.label, f"{what} @ v", alternate(lambda: theirs @ v, lambda: ours @ v, pairs), label)
