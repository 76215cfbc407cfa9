"""Draws of N(0, P) and N(0, P⁻¹) for curvatures: their covariance is exact (see `samples`).

Tests `draws.py`.
"""

import functools

import pytest
import torch
from gpytorch.distributions import MultivariateNormal
from torch import nn

import curvops as co
from curvops.linalg import draw
from tests.linalg.samples import assert_covariance
from tests.randomness import seeded


@functools.cache
def lin(likelihood="classification"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(12, 3).double()
    y = torch.arange(12) % 3 if likelihood == "classification" else torch.randn(12, 3).double()
    return co.linearize(model, (x, y), likelihood)


OPERATORS = {
    "ggn": lambda: co.GGN(lin()),
    "ggn_gaussian": lambda: co.GGN(lin("regression")),
    "mc_fisher": lambda: co.GGN(lin(), mc_samples=3, generator=seeded(3)),
    "empirical_fisher": lambda: co.EmpiricalFisher(lin()),
    "kfac": lambda: co.KFAC(lin()),
    "ekfac": lambda: co.EKFAC(lin()),
    "block_diagonal": lambda: co.BlockDiagonal(lin()),
    "subnetwork": lambda: co.Subnetwork(co.GGN(lin()), torch.arange(0, 39, 3)),
    "low_rank": lambda: co.low_rank(co.GGN(lin()), rank=6, generator=seeded(3)),
    "tangent_kernel": lambda: co.TangentKernel(lin(), 2.0),
    "sum": lambda: co.GGN(lin()) + co.KFAC(lin("regression")),
    "sliced": lambda: co.GGN(lin())[3:20, 3:20],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_samples_match_the_operator_and_its_inverse(name):
    base = OPERATORS[name]()
    P = base.add_diagonal(0.7)
    dense = base.to_dense() + 0.7 * torch.eye(base.shape[0], dtype=torch.float64)
    assert_covariance(lambda k, g: draw(P, k, g), dense)
    assert_covariance(lambda k, g: draw(P.inverse(1e-10), k, g), torch.linalg.inv(dense), rtol=1e-8)


@pytest.mark.parametrize("name", ["ggn", "kfac", "low_rank", "block_diagonal", "subnetwork"])
def test_gpytorch_samples_are_ours(name, no_foreign_solvers):
    """A gpytorch distribution over one of our operators draws, solves and takes its density without an iteration."""
    P = OPERATORS[name]().add_diagonal(1.0)
    dense = P.to_dense()
    mean = torch.zeros(P.shape[0], dtype=torch.float64)
    for A, covariance in ((P.inverse(), torch.linalg.inv(dense)), (P, dense)):
        distribution = MultivariateNormal(mean, A)

        def drawn(k, _, distribution=distribution):
            return distribution.rsample(torch.Size((k,))).mT

        assert_covariance(drawn, covariance, generator=torch.default_generator)
    value = torch.linspace(-1, 1, P.shape[0], dtype=torch.float64)
    expected = torch.distributions.MultivariateNormal(mean, dense).log_prob(value)
    torch.testing.assert_close(distribution.log_prob(value), expected, rtol=1e-8, atol=1e-8)
