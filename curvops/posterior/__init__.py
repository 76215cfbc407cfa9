"""Gaussian posteriors over the weights, and what they predict."""

from curvops.posterior.draws.deviations import Deviations, NotSolved
from curvops.posterior.draws.stochastic_descent import Diverged, StochasticDescent
from curvops.posterior.gaussians.gaussian_posterior import GaussianPosterior
from curvops.posterior.gaussians.laplace import Laplace, laplace
from curvops.posterior.gaussians.load import load, save
from curvops.posterior.gaussians.selection import InertWeights, select, wasserstein
from curvops.posterior.gaussians.updating import NotAMode
from curvops.posterior.predictions.normals import SampledNormal
from curvops.posterior.predictions.predictive import Predictions
from curvops.posterior.predictions.uncertainty import Uncertainty
from curvops.posterior.solves.linear_mode import LinearMode

__all__ = [
    "Deviations",
    "Diverged",
    "GaussianPosterior",
    "InertWeights",
    "Laplace",
    "LinearMode",
    "NotAMode",
    "NotSolved",
    "Predictions",
    "SampledNormal",
    "StochasticDescent",
    "Uncertainty",
    "laplace",
    "load",
    "save",
    "select",
    "wasserstein",
]
