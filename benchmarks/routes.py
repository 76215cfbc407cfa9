"""The set-up of a product for a measurement: its engine, warm-up and build."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks.networks import Problem
from benchmarks.timing import Run
from curvops.network.engines.plan import EngineChoice

# A recorded engine is built at the second product, a forced layerwise one at the first.
LATEST_BUILD = 2


def ggn(problem: Problem, memory_budget: int | None = None, engine: EngineChoice = "auto") -> Any:
    """A GGN on a fresh linearisation. The data are one batch, as for the unit, whatever the budget."""
    lin = co.linearize(problem.model, problem.batches(), "classification", memory_budget=memory_budget, engine=engine)
    return co.GGN(lin)


def engines(operator: Any) -> str:
    """Name the engines that serve the products now, such as "layerwise"."""
    return "+".join(sorted(operator.plan.in_use)) or "streamed"


def settle(operator: Any, block: Tensor, products: int) -> list[tuple[int, str]]:
    """Warm up until the engine has stayed the same for that many products: what came into use after which product."""
    history = [(0, engines(operator))]
    count = 0
    while count < history[-1][0] + products:
        operator @ block
        count += 1
        if engines(operator) != history[-1][1]:
            history.append((count, engines(operator)))
    return history


def products_before(make: Callable[[], Any], vector: Tensor, engine: str) -> int | None:
    """Products that a forced engine lets pass before the one that builds it; None where it is never built."""
    operator = make()
    for count in range(LATEST_BUILD):
        operator @ vector
        if engine in engines(operator):
            return count
    return None


def building(make: Callable[[], Any], vector: Tensor, before: int) -> Callable[[], Run]:
    """Makes the one product that builds a forced engine, `before` products after the linearisation."""

    def prepare() -> Run:
        operator = make()
        for _ in range(before):
            operator @ vector
        return lambda: operator @ vector

    return prepare


def first(make: Callable[[], Any], vector: Tensor) -> Callable[[], Run]:
    """Makes the first product of a fresh linearisation, with everything that it triggers."""

    def prepare() -> Run:
        operator = make()
        return lambda: operator @ vector

    return prepare


def kept_bytes(operator: Any, engine: str) -> int:
    """Bytes that an engine keeps for all points, as the memory budget counts them."""
    plan = operator.lin.plan
    a_point = plan.layerwise_bytes if engine == "layerwise" else plan.routes.recorded_bytes
    return int(a_point * operator.lin.num_data)


def difference(result: Tensor, reference: Tensor) -> float:
    """Relative difference in norm: whether two routes gave the same product."""
    with torch.no_grad():
        return float((result.detach() - reference).norm() / reference.norm())
