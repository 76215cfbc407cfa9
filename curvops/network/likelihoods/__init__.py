"""Likelihoods, and the conversion of names, losses and functions given by users.

>>> import torch
>>> from curvops.network.likelihoods import Categorical
>>> f, y = torch.zeros(1, 2), torch.tensor([0])
>>> Categorical().residual(f, y)
tensor([[-0.5000,  0.5000]])
"""

from curvops.network.likelihoods.by_autograd import FromDistribution, FromLoss
from curvops.network.likelihoods.categorical import BradleyTerry, Categorical, RewardPairs
from curvops.network.likelihoods.composite import Multitask, Sequences
from curvops.network.likelihoods.conversions import as_likelihood
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.independent import Bernoulli, HeteroscedasticGaussian, Poisson
from curvops.network.likelihoods.likelihood import Likelihood

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "FromDistribution",
    "FromLoss",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Multitask",
    "Poisson",
    "RewardPairs",
    "Sequences",
    "as_likelihood",
]
