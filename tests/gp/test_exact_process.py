"""A linearised network as gpytorch's `ExactGP` in one line, against the posterior and the evidence of its weights."""

from __future__ import annotations

import copy
from typing import Any

import gpytorch
import pytest
import torch
from torch import nn

import curvops as co
from curvops.gp import ComposedKernel, LinearizedGP, LinearizedKernel, LinearizedMean
from curvops.posterior.predictions import MultitaskNormal, Normal

DOUBLE = torch.float64
OUTPUTS = {"one output": 1, "two outputs": 2}


def linearized(name: str, noise: Any = 1e-5) -> co.operators.Linearization:
    torch.manual_seed(0)
    outputs = OUTPUTS[name]
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x, y = torch.randn(12, 3, dtype=DOUBLE), torch.randn(12, outputs, dtype=DOUBLE)
    return co.linearize(network, [(x[:5], y[:5]), (x[5:], y[5:])], co.likelihoods.Gaussian(noise))


@pytest.mark.usefixtures("no_foreign_solvers")
@pytest.mark.parametrize("name", OUTPUTS)
def test_it_is_the_posterior_and_the_evidence_of_the_weights(name: str) -> None:
    lin = linearized(name, 0.01)
    gp = LinearizedGP(lin, prior_precision=2.0, over="layers")
    post = co.laplace(lin, co.GGN, prior_precision=2.0, check_mode=False)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp.train())
    value = marginal(gp(*gp.train_inputs), gp.train_targets) * gp.train_targets.numel()
    torch.testing.assert_close(value, post.log_evidence(mode="linear").value, rtol=1e-8, atol=1e-8)
    value.backward()
    assert all(parameter.grad is not None for parameter in gp.parameters())
    new = torch.randn(4, 3, dtype=DOUBLE)
    predicted, exact = gp.eval()(new.flatten(1)), co.gp.laplace_gp(lin, 2.0).predict(new, joint=True)
    assert isinstance(predicted, Normal) and isinstance(predicted, MultitaskNormal) == (lin.num_outputs > 1)
    torch.testing.assert_close(predicted.covariance_matrix, exact.covariance_matrix, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(predicted.mean.reshape(4, -1), exact.mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(copy.deepcopy(gp)(new.flatten(1)).mean, predicted.mean)


def test_kernel_mean_and_likelihood_may_be_given() -> None:
    lin = linearized("two outputs")
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2).double()
    kernel = ComposedKernel(gpytorch.kernels.ScaleKernel(LinearizedKernel(lin))).double()
    gp = LinearizedGP(lin, likelihood, kernel, LinearizedMean(lin, 0.5)).eval()
    assert gp.covar_module is kernel and gp.likelihood is likelihood
    assert gp(torch.randn(4, 3, dtype=DOUBLE)).mean.shape == (4, 2)
    again = linearized("two outputs", 0.3)  # the same weights, another likelihood
    assert LinearizedGP(again, kernel=kernel).covar_module is kernel
