"""Products with the Monte-Carlo and the empirical Fisher where outputs are many, beside curvlinops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import curvops as co
from benchmarks import routes
from benchmarks.machine import peer_version
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


def _sampled(lin: co.Linearization) -> co.GGN:
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
    if figures.settings.peers and peer_version(routes.PEER) is not None:
        _beside(figures, problem, what, operator, v)


def _beside(figures: Figures, problem: Problem, what: str, ours: Any, v: torch.Tensor) -> None:
    label = f"{routes.peer_label()}, {PEERS[what]}"
    try:
        theirs = peer(problem, PEERS[what])
        theirs @ v
    except Exception as error:  # what it cannot do, it says
        print(f"  {problem.label}: {label}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return
    figures.gradients(problem, label, lambda: theirs @ v)
    pairs = max(1, figures.settings.pairs // 2)
    figures.add(problem.label, f"{what} @ v", alternate(lambda: theirs @ v, lambda: ours @ v, pairs), label)


def peer(problem: Problem, name: str) -> Any:
    """Its operator on the same data; positions are its points, by one more module that flattens them."""
    import curvlinops  # an environment of its own has it

    model, data = problem.model, problem.batches()
    if problem.targets.ndim == 2:
        model = nn.Sequential(model, nn.Flatten(0, 1))
        data = [(inputs, targets.flatten()) for inputs, targets in data]
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = getattr(curvlinops, name)
    return operator(model, loss, problem.parameters, data, check_deterministic=False)
