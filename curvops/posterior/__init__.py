"""Gaussian posteriors over the weights, and what they predict."""

from curvops.posterior.laplace import Laplace, NotAMode, laplace
from curvops.posterior.load import load
from curvops.posterior.predictive import SampledNormal
from curvops.posterior.selection import InertWeights, select, wasserstein
from curvops.posterior.uncertainty import Uncertainty

__all__ = [
    "InertWeights",
    "Laplace",
    "NotAMode",
    "SampledNormal",
    "Uncertainty",
    "laplace",
    "load",
    "select",
    "wasserstein",
]
