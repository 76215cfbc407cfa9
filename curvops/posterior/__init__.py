"""Gaussian posteriors over the weights, and what they predict."""

from curvops.posterior.deviations import Deviations
from curvops.posterior.gaussian_posterior import GaussianPosterior
from curvops.posterior.laplace import Laplace, laplace
from curvops.posterior.linear_mode import LinearMode
from curvops.posterior.load import load, save
from curvops.posterior.normals import SampledNormal
from curvops.posterior.selection import InertWeights, select, wasserstein
from curvops.posterior.stochastic_descent import Diverged, StochasticDescent
from curvops.posterior.uncertainty import Uncertainty
from curvops.posterior.updating import NotAMode

__all__ = [
    "Deviations",
    "Diverged",
    "GaussianPosterior",
    "InertWeights",
    "Laplace",
    "LinearMode",
    "NotAMode",
    "SampledNormal",
    "StochasticDescent",
    "Uncertainty",
    "laplace",
    "load",
    "save",
    "select",
    "wasserstein",
]
