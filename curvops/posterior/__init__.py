"""Gaussian posteriors over the weights, and what they predict."""

from curvops.errors import DivergenceError, InertWeightsWarning, ModeWarning, NotSolvedError
from curvops.posterior.deviations import Deviations, StochasticDescent
from curvops.posterior.gaussians.fit_mode import ModeFit, fit_mode
from curvops.posterior.gaussians.gaussian_posterior import GaussianPosterior
from curvops.posterior.gaussians.laplace import Laplace
from curvops.posterior.gaussians.load import load, save
from curvops.posterior.gaussians.selection import select, wasserstein
from curvops.posterior.linear_mode import LinearMode
from curvops.posterior.predictions.answers import NamedPredictions, Uncertainty
from curvops.posterior.predictions.normals import SampledNormal
from curvops.posterior.predictions.predictive import Predictions

__all__ = [
    "Deviations",
    "DivergenceError",
    "GaussianPosterior",
    "InertWeightsWarning",
    "Laplace",
    "LinearMode",
    "ModeFit",
    "ModeWarning",
    "NamedPredictions",
    "NotSolvedError",
    "Predictions",
    "SampledNormal",
    "StochasticDescent",
    "Uncertainty",
    "fit_mode",
    "load",
    "save",
    "select",
    "wasserstein",
]
