"""Products and damped solves of the structured operators, compared with the matrix products that they consist of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks.networks import Problem, build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import LONGEST, Figures
from benchmarks.timing import Run, alternate, seconds
from curvops.linalg import EigenKronecker, Kronecker, LowRank

TARGET = 1.3
LEAST = 1e-3
"""Seconds of bare products from which on the target holds: a call takes some 0.1 ms, a solve 0.3, whatever the size."""
RANK = 100
COLUMNS = {"small": (1, 64), "mlp": (1, 16), "wide": (1,)}
"""The numbers of vectors for each network."""
AGAINST = "the bare products"


def measure(figures: Figures) -> None:
    """KFAC and EKFAC of a small, a middle and a large network, LowRank of the middle one, for several vectors."""
    for name, columns in COLUMNS.items():
        _network(figures, build(name), columns)


def _network(figures: Figures, problem: Problem, numbers: tuple[int, ...]) -> None:
    lin = linearized(problem)
    kfac, ekfac = co.KFAC(lin, fisher="mc"), co.EKFAC(lin, fisher="mc")
    for columns in numbers:
        V = problem.block(columns)
        V = V[:, 0].contiguous() if columns == 1 else V
        label = f"{problem.label}, K = {columns}"
        rotation = _rotations(ekfac, columns)
        _pair(figures, label, "KFAC", kfac, V, (_sandwiches(kfac, columns), "2 a layer"), (rotation, "4 a layer"))
        _pair(figures, label, "EKFAC", ekfac, V, (rotation, "4 a layer"), (rotation, "4 a layer"))
        if problem.name == "mlp":
            low = _low_rank(problem)
            _pair(figures, label, f"LowRank({RANK})", low, V, (_tall(low, V), "2 in all"), (_tall(low, V), "2 in all"))


def _low_rank(problem: Problem) -> LowRank:
    generator = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(problem.num_parameters, RANK, generator=generator)).Q
    return LowRank(U, torch.rand(RANK, generator=generator) + 0.1)


Bare = tuple[Run, str]


def _pair(figures: Figures, label: str, name: str, operator: Any, V: Tensor, product: Bare, solve: Bare) -> None:
    """A product and a damped solve, each beside its matrix products."""
    damped = operator.add_diagonal(1.0)
    for what, run, (bare, count) in (
        (f"{name} @ V", lambda: operator @ V, product),
        (f"({name} + λ).solve(V)", lambda: damped.solve(V), solve),
    ):
        run()
        pairs = max(3, min(3 * figures.settings.pairs, round(LONGEST / 2 / seconds(run))))
        comparison = alternate(bare, run, pairs, warmup=min(3, pairs))
        target = TARGET if comparison.unit_seconds.median > LEAST else None
        figures.add(label, what, comparison, AGAINST, target, note=f"matrix products: {count}")


def _sandwiches(kfac: Any, columns: int) -> Run:
    """left V, then V right, for each block: (p, p) by (p, K·q), then (p·K, q) by (q, q)."""
    pairs = [(b.left, b.right) for b in kfac.blocks if isinstance(b, Kronecker)]
    return _two_sided([(left[0], right[0]) for left, right in pairs], columns)


def _rotations(ekfac: Any, columns: int) -> Run:
    """Into the eigenbasis and back: two times what a product with the factors consists of."""
    blocks = [b for b in ekfac.blocks if isinstance(b, EigenKronecker)]
    there = [(b.left_vectors[0].mT, b.right_vectors[0].mT) for b in blocks]
    back = [(b.left_vectors[0], b.right_vectors[0]) for b in blocks]
    return _two_sided([*there, *back], columns)


def _two_sided(factors: list[tuple[Tensor, Tensor]], columns: int) -> Run:
    wide = [torch.randn(len(left), columns * len(right)) for left, right in factors]
    tall = [torch.randn(len(left) * columns, len(right)) for left, right in factors]

    def run() -> object:
        return [(left @ w, t @ right.mT) for (left, right), w, t in zip(factors, wide, tall)]

    return run


def _tall(low: LowRank, V: Tensor) -> Run:
    U = low.vectors
    inner = torch.randn(U.shape[1], *V.shape[1:])
    return lambda: (U.mT @ V, U @ inner)
