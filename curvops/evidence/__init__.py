"""Tuning a posterior's hyperparameters by its evidence; every function returns a new posterior."""

from curvops.evidence.grid import grid
from curvops.evidence.maximize import maximize
from curvops.posterior.evidence_parts import Evidence

__all__ = ["Evidence", "grid", "maximize"]
