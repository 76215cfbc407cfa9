"""Peak memory of building the diagonal and KFAC, compared with the memory budget."""

from __future__ import annotations

from benchmarks.networks import NETWORKS
from benchmarks.parts.figures import Figures
from benchmarks.tables import MIB

BUDGETS = [64 * MIB, 256 * MIB]


def measure(figures: Figures) -> None:
    """Processes of their own, the data in four batches."""
    for operator in ("diagonal", "kfac"):
        for name in NETWORKS:
            figures.peak(name, 10, operator, BUDGETS, batches=4)
