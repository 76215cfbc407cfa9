"""Products, builds and solves of each network on the GPU, in gradients, beside curvlinops in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvops as co
from benchmarks import peer_operators
from benchmarks.gpu.networks import build
from benchmarks.gpu.stage import Row, Stage
from benchmarks.networks import Problem
from benchmarks.routes import difference, engines

CELLS = [
    *(("mlp", 10), ("resnet", 10), ("gpt2-lora", 50_257), ("vit", 10), ("cnn", 10)),
    *(("resnet", 100), ("vit", 1000), ("mlp", 1000), ("mlp", 100), ("cnn", 100)),
]
"""Networks and their outputs, the first ones first where time is short."""
COLUMNS, WARM = 16, 12
"""Vectors of a block; products before the first that is measured, by which an engine has been chosen."""
MANY = 1000
"""Outputs from which on KFAC takes one draw, and the diagonal, whose passes are one for each output, is left out."""


def measure(stage: Stage) -> None:
    """Measure cell by cell; within a cell what most users ask for comes first."""
    for name, outputs in CELLS[:3:2] if stage.toy else CELLS:
        problem = None
        for label, run in routes(stage, name, outputs):
            if stage.left < 3:
                return
            problem = problem or build(name, outputs, stage.toy, stage.device)
            stage.row(f"{name}, C = {outputs:,}: {label}", lambda run=run, problem=problem: run(problem))  # type: ignore[misc]


def routes(stage: Stage, name: str, outputs: int) -> Iterator[tuple[str, Callable[[Problem], Row]]]:
    """Yield what is measured of a network: a label, and the function that measures it."""
    units: dict[str, float] = {}

    def timed(run: Callable[[], object], columns: int = 1, **more: Any) -> Row:
        seconds, peak = stage.seconds(run)
        row = {"seconds": seconds, "peak": peak, **more}
        return row | ({"gradients": seconds / columns / units["gradient"]} if units else {})

    def gradient(problem: Problem) -> Row:
        row = timed(problem.unit(), parameters=problem.num_parameters, points=problem.points)
        units["gradient"] = row["seconds"]
        return row

    def in_gradients(run: Callable[[Problem], Row]) -> Callable[[Problem], Row]:
        def measured(problem: Problem) -> Row:
            if not units:  # the gradient's row is of an earlier run, on another card perhaps
                gradient(problem)
            return run(problem)

        return measured

    def linearised(problem: Problem) -> Any:
        return co.linearize(problem.model, problem.batches(), "classification")

    def product(make: Callable[[Any], Any], columns: int) -> Callable[[Problem], Row]:
        def run(problem: Problem) -> Row:
            lin = linearised(problem)
            operator, V = make(lin), vectors(problem, columns)
            for _ in range(WARM):
                operator @ V
            return timed(lambda: operator @ V, columns, engine=engines(operator), budget=lin.memory_budget)

        return run

    def theirs(columns: int) -> Callable[[Problem], Row]:
        def run(problem: Problem) -> Row:
            operator, V = peer_operators.ggn(problem), vectors(problem, columns)
            ours = co.GGN(linearised(problem))
            with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward mode, which the peer takes
                return timed(lambda: operator @ V, columns, difference=difference(operator @ V, ours @ V))

        return run

    fisher = "exact" if outputs < MANY else "mc"

    def kfac(problem: Problem) -> Any:
        return co.KFAC(linearised(problem), fisher=fisher, generator=generator(stage))

    def kfac_build(problem: Problem) -> Row:
        lin = linearised(problem)
        return timed(lambda: co.KFAC(lin, fisher=fisher, generator=generator(stage)), fisher=fisher)

    def kfac_product(problem: Problem) -> Row:
        K, V = kfac(problem), vectors(problem, COLUMNS)
        return timed(lambda: K @ V, COLUMNS)

    def kfac_solve(problem: Problem) -> Row:
        P, V = kfac(problem).add_diagonal(1.0), vectors(problem, COLUMNS)
        P.solve(V)
        return timed(lambda: P.solve(V), COLUMNS)

    yield "gradient", gradient
    yield "GGN, K = 1", in_gradients(product(co.GGN, 1))
    if peer_operators.label():
        yield f"{peer_operators.label()}, GGN, K = 1", in_gradients(theirs(1))
    yield "linearize", in_gradients(lambda problem: timed(lambda: linearised(problem)))
    yield f"GGN, K = {COLUMNS}", in_gradients(product(co.GGN, COLUMNS))
    if peer_operators.label():
        yield f"{peer_operators.label()}, GGN, K = {COLUMNS}", in_gradients(theirs(COLUMNS))
    yield "KFAC, build", in_gradients(kfac_build)
    yield f"KFAC, product, K = {COLUMNS}", in_gradients(kfac_product)
    yield f"KFAC, solve, K = {COLUMNS}", in_gradients(kfac_solve)
    yield "empirical Fisher, K = 1", in_gradients(product(co.EmpiricalFisher, 1))
    yield (
        "Fisher of one draw, K = 1",
        in_gradients(product(lambda lin: co.GGN(lin, mc_samples=1, generator=generator(stage)), 1)),
    )
    if outputs < MANY:
        yield "diagonal", in_gradients(lambda problem: timed(lambda: co.DiagonalGGN(linearised(problem))))


def generator(stage: Stage) -> torch.Generator:
    """Return a seeded generator on the stage's device."""
    return torch.Generator(stage.device).manual_seed(0)


def vectors(problem: Problem, columns: int) -> Tensor:
    """Return random vectors on the problem's device: (D,) for one, (D, K) for more."""
    block = problem.block(columns).to(problem.inputs.device)
    return block[:, 0].contiguous() if columns == 1 else block
