"""Seconds against N, D, C and K: GGN products, the diagonal and KFAC of a network with two hidden layers."""

from __future__ import annotations

import sys

import torch
from torch import nn

import curvops as co
from benchmarks.layers import linear_layers
from benchmarks.networks import SEED, Problem
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import settle
from benchmarks.timing import Run, seconds

SIZES = {"N": (128, 256, 512, 1024, 2048), "D": (64, 128, 256, 512), "C": (3, 6, 12, 24, 48), "K": (1, 2, 4, 8, 16, 32)}
USUAL = {"N": 512, "D": 256, "C": 10, "K": 1}
RUNS = 9


def measure(figures: Figures) -> None:
    """One size at a time, the others as usual; D by the hidden width. The least of nine runs."""
    for axis, sizes in SIZES.items():
        for size in sizes:
            sized = USUAL | {axis: size}
            problem = network(sized["N"], sized["D"], sized["C"])
            value = problem.num_parameters if axis == "D" else size
            for what, run in _runs(problem, sized["K"], axis == "K").items():
                run()
                taken = min(seconds(run) for _ in range(RUNS))
                figures.points.append({"axis": axis, "value": value, "what": what, "seconds": taken})
                print(f"  {axis} = {value:,}: {what}: {taken * 1e3:.2f} ms", file=sys.stderr)


def _runs(problem: Problem, columns: int, products_only: bool) -> dict[str, Run]:
    """Make the runs that are timed; only products depend on K."""
    lin = linearized(problem)
    G, V = co.GGN(lin), problem.block(columns)
    settle(G, V, 12)
    runs: dict[str, Run] = {"GGN @ V": lambda: G @ V}
    if columns == 1 and not products_only:
        runs |= {"DiagonalGGN": lambda: co.DiagonalGGN(lin), "KFAC": lambda: co.KFAC(lin)}
    return runs


def network(points: int, width: int, outputs: int) -> Problem:
    """64 inputs, two hidden layers of that width, C outputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = linear_layers(64, width, width, outputs, activation=nn.ReLU).eval()
    generator = torch.Generator().manual_seed(SEED + 1)
    inputs = torch.randn(points, 64, generator=generator)
    return Problem("two layers", outputs, model, inputs, torch.randint(0, outputs, (points,), generator=generator))
