"""Figures of what curvops computes, from plain arrays: one function a figure, each returns a matplotlib Figure.

No function here touches pyplot or matplotlib's global settings. Needs matplotlib, which comes with `curvops[demo]`.

>>> import numpy as np
>>> from curvops import plots
>>> figure = plots.convergence({"plain": (np.array([0, 1, 2]), np.array([1.0, 1e-3, 1e-6]))}, rtol=1e-5)
>>> figure.axes[0].get_yscale()
'log'
"""

from curvops.plots.chain_autocorrelation import autocorrelation
from curvops.plots.chain_trace import trace
from curvops.plots.convergence import convergence
from curvops.plots.density import spectral_density
from curvops.plots.estimates import estimates
from curvops.plots.evidence import evidence
from curvops.plots.evidence_trace import evidence_trace
from curvops.plots.heatmap import covariance
from curvops.plots.ray import ray
from curvops.plots.regression import regression
from curvops.plots.reliability import reliability
from curvops.plots.rotation import rotation
from curvops.plots.solves import solves
from curvops.plots.style import save

__all__ = [
    "autocorrelation",
    "convergence",
    "covariance",
    "estimates",
    "evidence",
    "evidence_trace",
    "ray",
    "regression",
    "reliability",
    "rotation",
    "save",
    "solves",
    "spectral_density",
    "trace",
]
