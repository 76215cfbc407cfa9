"""Figures: arrays in, a `matplotlib.figure.Figure` out; needs matplotlib (the `demo` extra)."""

from curvops.plots.convergence import convergence
from curvops.plots.covariance import covariance
from curvops.plots.evidence import evidence
from curvops.plots.regression import regression
from curvops.plots.reliability import reliability
from curvops.plots.rotation import rotation
from curvops.plots.style import save

__all__ = ["convergence", "covariance", "evidence", "regression", "reliability", "rotation", "save"]
