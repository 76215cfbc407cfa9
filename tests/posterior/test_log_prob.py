"""The log density of weights, against torch's normal distribution of the dense precision."""

import math
from fractions import Fraction

import pytest
import torch

import curvops as co
from tests.posterior.test_gaussian_posterior import forms
from tests.posterior.trained import problem

TIGHT = {"rtol": 1e-10, "atol": 1e-8}
MODEL, X, Y = problem(steps=20)
LIN = co.linearize(MODEL, (X, Y), "classification")
ROWS = LIN.theta + 0.3 * torch.randn(4, 51, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def check(post, P):
    """Rows, one vector, names, and the gradient in them; exactly."""
    rows = ROWS.clone().requires_grad_()
    dense = torch.distributions.MultivariateNormal(LIN.theta, precision_matrix=P / post.temperature)
    found = post.log_prob(rows)
    torch.testing.assert_close(found.value, dense.log_prob(ROWS), **TIGHT)
    assert found.stderr.shape == (4,) and not found.stderr.any() and found.samples == 0
    (gradient,) = torch.autograd.grad(found.value.sum(), rows)
    torch.testing.assert_close(gradient, (LIN.theta - ROWS) @ P / post.temperature, **TIGHT)
    for one in (ROWS[1], LIN.unflatten(ROWS[1])):
        torch.testing.assert_close(post.log_prob(one).value, dense.log_prob(ROWS[1]), **TIGHT)
    constant = post.log_prob(post.mean).value
    torch.testing.assert_close(post.penalty(ROWS[2]), constant - post.log_prob(ROWS[2]).value, **TIGHT)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_it_is_that_of_the_dense_normal(curvature):
    """Of each prior and curvature `test_combinations.py` asks for the value."""
    G = curvature(LIN)
    post = co.laplace(LIN, G, 1.3, temperature=0.25, check_mode=False)
    check(post, G.to_dense() + 1.3 * torch.eye(51, dtype=torch.float64))


@pytest.mark.parametrize("form", forms(51))
def test_gaussians_with_a_covariance_of_their_own(form):
    sigma = forms(51)[form]
    P = torch.linalg.inv(sigma.to_dense())
    check(co.posterior.GaussianPosterior.of(LIN, sigma), (P + P.mT) / 2)
    check(co.posterior.GaussianPosterior.of(LIN, precision=co.linalg.Dense((P + P.mT) / 2, psd=True)), (P + P.mT) / 2)


def logdet_of_fractions(matrix):
    """log det of the numbers in a matrix, without rounding until the logarithm."""
    rows = [[Fraction(entry) for entry in row] for row in matrix.double().tolist()]
    logs = []
    for i, row in enumerate(rows):
        logs.append(math.log(row[i]))
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[i:] = [entry - factor * pivot for entry, pivot in zip(below[i:], row[i:])]
    return math.fsum(logs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("side", ["covariance", "precision"])
@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_a_determinant_of_a_matrix_states_its_rounding(condition, side, dtype):
    data = torch.ones(3, 5, dtype=dtype), torch.zeros(3, dtype=torch.int64)
    lin = co.linearize(torch.nn.Linear(5, 2).to(dtype), data, "classification")
    g = torch.Generator().manual_seed(int(condition))
    Q = torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=torch.float64)).Q
    matrix = (Q * torch.logspace(0, -math.log10(condition), 12, dtype=torch.float64)) @ Q.mT
    matrix = ((matrix + matrix.mT) / 2).to(dtype)
    post = co.posterior.GaussianPosterior.of(lin, **{side: co.linalg.Dense(matrix, psd=True)})
    found = post.log_prob(post.mean, rtol=1e-9)
    half = (0.5 if side == "precision" else -0.5) * logdet_of_fractions(matrix)
    error = abs(float(found.value) - (half - 6 * math.log(2 * math.pi)))
    bound = float(found.bias_bound)
    assert error <= bound < 100 * condition * torch.finfo(dtype).eps
    assert (found.reason is co.linalg.Reason.CONVERGED) == (dtype is torch.float64)
    low, high = found.interval()
    assert low < high


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_it_has_the_gradient_in_the_prior_precision(curvature):
    G = curvature(LIN)
    alpha = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(co.laplace(LIN, G, alpha, check_mode=False).log_prob(ROWS).value.sum(), alpha)
    dense = alpha * torch.eye(51, dtype=torch.float64) + G.to_dense()
    expected = torch.distributions.MultivariateNormal(LIN.theta, precision_matrix=dense).log_prob(ROWS).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, alpha)[0], **TIGHT)


def test_an_estimated_determinant_gives_its_error_bar_to_every_row():
    """One determinant for all rows: differences have no error."""
    model, x = torch.nn.Linear(60, 20).double(), torch.randn(30, 60, dtype=torch.float64)
    post = co.laplace(co.linearize(model, (x, torch.arange(30) % 20), "classification"), co.GGN, 1.0, check_mode=False)
    rows = post.mean + 0.1 * torch.randn(4, 1220, dtype=torch.float64)
    found = post.log_prob(rows, rtol=0.1, generator=torch.Generator().manual_seed(1))
    assert found.stderr.shape == (4,) and bool((found.stderr == found.stderr[0]).all()) and found.stderr[0] > 0
    penalties = torch.stack([post.penalty(row) for row in rows])
    torch.testing.assert_close(found.value - found.value[0], penalties[0] - penalties, **TIGHT)
