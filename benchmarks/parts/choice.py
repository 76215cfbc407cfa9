"""Linearise, then some products: the cost rule's choice and each forced engine, relative to the best of them."""

from __future__ import annotations

import gc
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from benchmarks import routes
from benchmarks.networks import Problem, build
from benchmarks.parts.figures import Figures
from benchmarks.timing import Comparison, Spread, clock
from curvops.network.engines.plan import EngineChoice

FORCED: tuple[EngineChoice, ...] = ("streamed", "autodiff", "layerwise")
PRODUCTS = (1, 8, 24)
TARGET = 1.3
# network, outputs, vectors of a block
PROBLEMS = [
    *[(name, 10, 1) for name in ("tiny", "small", "mlp", "cnn", "resnet", "transformer")],
    *[(name, 100, 1) for name in ("mlp", "cnn")],
    *[(name, 10, 16) for name in ("tiny", "small", "mlp", "cnn")],
]


def measure(figures: Figures) -> None:
    """Single vectors and blocks, networks from 50 to 11 million parameters."""
    for name, outputs, columns in PROBLEMS:
        network(figures, build(name, outputs), columns)


def network(figures: Figures, problem: Problem, columns: int) -> None:
    """One run of each engine a round, all products in it; a run tells the times after 1, 8 and 24 of them."""
    V = problem.block(columns)
    runs: dict[EngineChoice, list[list[float]]] = {engine: [] for engine in ("auto", *FORCED)}
    served = ""
    for turn in range(figures.settings.pairs + 1):
        for engine, kept in runs.items():
            times, now = _run(problem, V, engine)
            served = now if engine == "auto" else served
            if turn > 0:  # the first is warm-up
                kept.append(times)
    for i, count in enumerate(PRODUCTS):
        ours = [times[i] for times in runs["auto"]]
        theirs = {engine: [times[i] for times in runs[engine]] for engine in FORCED}
        best = min(FORCED, key=lambda engine: Spread.of(theirs[engine]).median)
        comparison = Comparison(
            ratio=Spread.of([a / b for a, b in zip(ours, theirs[best])]),
            seconds=Spread.of(ours),
            unit_seconds=Spread.of(theirs[best]),
            pairs=len(ours),
        )
        others = ", ".join(f"{e} {Spread.of(t).median / Spread.of(theirs[best]).median:.2f}" for e, t in theirs.items())
        what = f"linearize, then {count} products, K = {columns}"
        note = f"of the best: {others}; the choice after {PRODUCTS[-1]} is {served}"
        figures.add(problem.label, what, comparison, f"run of {best}", TARGET, note=note)


def _run(problem: Problem, V: Tensor, engine: EngineChoice) -> tuple[list[float], str]:
    """Seconds from nothing to the end of each number of products, and what served the last."""
    operator: Any = None

    def products(count: int) -> None:
        nonlocal operator
        operator = routes.ggn(problem, engine=engine) if operator is None else operator
        for _ in range(count):
            operator @ V

    gc.collect()
    steps = [clock(partial(products, b - a))[1] for a, b in pairwise((0, *PRODUCTS))]
    return list(accumulate(steps)), routes.engines(operator)
