"""Where points are few and weights many, the posterior solved for in function space is the same one."""

import pytest
import torch
from torch import nn

import curvops as co

DOUBLE = torch.float64
NOISE = 2.0


@pytest.fixture(scope="module")
def setting():
    """Six points, 62 weights, one precision a weight; three points to predict at."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    x, y = torch.randn(6, 2, dtype=DOUBLE), torch.randn(6, 2, dtype=DOUBLE)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=NOISE))
    prior = torch.linspace(0.5, 2, lin.num_parameters, dtype=DOUBLE)
    return lin, prior, x, torch.randn(3, 2, dtype=DOUBLE), torch.randn(12, dtype=DOUBLE)


def test_the_covariance_of_function_space_is_that_of_weight_space(setting):
    """K** − K*(K + σ²)⁻¹K*ᵀ = J* (JᵀJ/σ² + A)⁻¹ J*ᵀ."""
    lin, prior, x_train, x, _ = setting
    here, cross = co.TangentKernel(lin, prior, x), co.TangentKernel(lin, prior, x, x_train)
    solved = co.TangentKernel(lin, prior).add_diagonal(NOISE).solve(cross.to_dense().mT)
    expected = co.laplace(lin, prior_precision=prior, check_mode=False).predict(x, joint=True).covariance_matrix
    torch.testing.assert_close(here.to_dense() - cross.to_dense() @ solved, expected, rtol=1e-8, atol=1e-10)


def test_dual_descent_finds_the_weights_that_cg_finds(setting):
    """P⁻¹Jᵀr/σ² = A⁻¹Jᵀ(K + σ²)⁻¹r."""
    lin, prior, *_, r = setting
    J = lin.jacobian()
    expected = co.GGN(lin).add_diagonal(prior).cg((J.mT @ r)[:, None] / NOISE, rtol=1e-12).x[:, 0]
    kernel = co.TangentKernel(lin, prior).to_dense()  # its rows are read again and again
    found = co.linalg.dual_descent(kernel, r, noise=NOISE, batch_size=12, rtol=1e-11, maxiter=20_000)
    assert found.converged.all()
    torch.testing.assert_close(J.mT @ found.x / prior, expected, rtol=1e-8, atol=1e-8)
