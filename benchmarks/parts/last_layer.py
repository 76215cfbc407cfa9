"""A last layer with a thousand classes: no array of size N × C × D or (C · features)² may be formed."""

from __future__ import annotations

import curvops as co
from benchmarks.networks import build
from benchmarks.parts.diagonal import linearized
from benchmarks.parts.figures import Figures
from benchmarks.routes import settle
from benchmarks.tables import MIB

CLASSES = 1000
BUDGET = 256 * MIB


def measure(figures: Figures) -> None:
    """Diagonal, KFAC and GGN products on 512 features of 256 points, with a small memory budget; peaks apart."""
    problem = build("last", CLASSES)
    lin = linearized(problem, BUDGET)
    G, v, V = co.GGN(lin), problem.block(1)[:, 0].contiguous(), problem.block(16)
    settle(G, v, 12)
    bound = 3.0 * CLASSES
    figures.gradients(problem, "GGN @ v", lambda: G @ v)
    figures.gradients(problem, "GGN @ V, K = 16", lambda: G @ V)
    figures.gradients(problem, "DiagonalGGN", lambda: co.DiagonalGGN(lin), bound)
    figures.gradients(problem, "KFAC, exact", lambda: co.KFAC(lin), 1.5 * CLASSES)
    figures.gradients(problem, "KFAC, one sample", lambda: co.KFAC(lin, fisher="mc"), 5.0)
    for operator in ("products", "diagonal", "kfac"):
        figures.peak("last", CLASSES, operator, [BUDGET])
