"""Which likelihoods are there, and which one does a user's word or torch loss stand for?

>>> import torch
>>> from curvops.network.likelihoods import Categorical
>>> f, y = torch.zeros(1, 2), torch.tensor([0])
>>> Categorical().residual(f, y)
tensor([[-0.5000,  0.5000]])
"""

from __future__ import annotations

from torch import nn

from curvops.network.categorical import Categorical
from curvops.network.gaussian import Gaussian
from curvops.network.likelihood import Likelihood

__all__ = ["Categorical", "Gaussian", "Likelihood", "as_likelihood"]


def as_likelihood(spec: object) -> Likelihood:
    """The likelihood that a user's word or torch loss stands for.

    ``"classification"`` is ``Categorical()``, ``"regression"`` is ``Gaussian(noise=1.0)``. ``nn.CrossEntropyLoss``
    keeps its weight, ignore_index and label smoothing. ``nn.MSELoss`` is ``Gaussian(noise=0.5)``, whose negative
    log-likelihood is the sum of squared errors up to a constant. A loss's ``reduction`` is not used: the
    log-likelihood is always the sum over points. Raises TypeError for anything else.
    """
    if isinstance(spec, Likelihood):
        return spec
    if isinstance(spec, nn.CrossEntropyLoss):
        return Categorical(spec.weight, spec.ignore_index, spec.label_smoothing)
    if isinstance(spec, nn.MSELoss):
        return Gaussian(noise=0.5)
    if spec == "classification":
        return Categorical()
    if spec == "regression":
        return Gaussian(noise=1.0)
    raise TypeError(
        f"No likelihood for {spec!r}. Accepted: curvops.likelihoods.Categorical(...) and .Gaussian(noise=variance), "
        'torch.nn.CrossEntropyLoss and MSELoss (instances), and the strings "classification" and "regression".'
    )
