"""The mode of the linear model: stationary, and for a Gaussian the solution of the normal equations."""

import functools

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import problem

DOUBLE = torch.float64


def untrained(kind, outputs=3):
    """A network far from a mode, with its J by autograd."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x = torch.randn(20, 4, dtype=DOUBLE)
    y = {
        "classification": x[:, :3].argmax(1),
        "regression": x[:, :outputs].sin(),
        "poisson": x[:, :outputs].abs().round(),
    }[kind]
    likelihoods = {"poisson": co.likelihoods.Poisson(), "regression": co.likelihoods.Gaussian(noise=1.0)}
    return model, x, y, likelihoods.get(kind, kind)


@functools.cache
def in_batches(kind):
    """The linearisation of such a network with its data in two batches, J as a matrix, and the targets."""
    model, x, y, likelihood = untrained(kind)
    lin = co.linearize(model, [(x[:8], y[:8]), (x[8:], y[8:])], likelihood)
    return lin, lin.jacobian().to_dense(), y


@pytest.mark.parametrize("kind", ["classification", "regression", "poisson"])
@pytest.mark.parametrize("prior", ["number", "vector", "operator"])
def test_it_is_stationary_for_the_linear_model(kind, prior):
    lin, J, y = in_batches(kind)
    D = lin.num_parameters
    diagonal = torch.linspace(0.5, 2, D, dtype=DOUBLE)
    chosen = {"number": 0.7, "vector": diagonal, "operator": co.linalg.Dense(torch.diag(diagonal), psd=True)}[prior]
    A = torch.eye(D, dtype=DOUBLE) * 0.7 if prior == "number" else torch.diag(diagonal)
    post = co.laplace(lin, co.GGN, prior_precision=chosen, check_mode=False, prior_mean=0.3)
    mode = post.linear_mode(rtol=1e-9)
    assert mode.converged and mode.gradient <= 1e-9
    f = lin.outputs()
    delta = (mode.theta - lin.theta).requires_grad_()
    outputs = f + (J @ delta).unflatten(0, f.shape)
    if kind == "regression":
        log_p = torch.distributions.Normal(outputs, 1.0).log_prob(y).sum()
    elif kind == "poisson":
        log_p = torch.distributions.Poisson(outputs.exp()).log_prob(y).sum()
    else:
        log_p = -nn.functional.cross_entropy(outputs, y, reduction="sum")
    gap = lin.theta + delta - 0.3
    (gradient,) = torch.autograd.grad(-log_p + 0.5 * gap @ A @ gap, delta)
    assert gradient.norm() <= 1e-7
    torch.testing.assert_close(mode.log_likelihood, log_p.detach(), rtol=1e-10, atol=1e-10)
    again = post.linear_mode(x0=mode.theta, rtol=1e-8)
    assert again.steps == 0 and again.matvecs == 2


def test_a_gaussian_takes_one_solve_and_gives_the_normal_equations():
    model, x, y, _ = untrained("regression")
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=0.25))
    post = co.laplace(lin, co.KFAC, prior_precision=2.0, check_mode=False)  # whatever its curvature
    mode = post.linear_mode(rtol=1e-10)
    J, f = lin.jacobian().to_dense(), lin.outputs()
    target = (y - f).flatten() + J @ lin.theta
    P = J.mT @ J / 0.25 + 2 * torch.eye(lin.num_parameters, dtype=DOUBLE)
    expected = torch.linalg.solve(P, J.mT @ target / 0.25)
    torch.testing.assert_close(mode.theta, expected, rtol=1e-8, atol=1e-9)
    assert mode.steps <= 2


def test_single_precision_steps_on_where_the_loss_is_lost_in_rounding(annotations_unchecked):
    """All points are told with certainty: the loss is far below the rounding of the log-likelihoods that it sums."""
    model, x, y = problem(n=100, prior=0.01, steps=60)
    exact = co.laplace(co.linearize(model, (x, y), "classification"), co.GGN, prior_precision=1e-4, check_mode=False)
    single = co.laplace(exact.lin.cast(torch.float32), co.GGN, prior_precision=1e-4, check_mode=False)
    found = single.linear_mode(rtol=1e-4)
    assert found.reason is co.linalg.Reason.CONVERGED and found.gradient <= 1e-4 and found.steps <= 12
    assert exact.linear_mode(x0=found.theta.double(), rtol=2e-4).steps == 0


def test_the_mode_is_found_in_function_space_whatever_the_curvature_is():
    """There the Hessian is the GGN's. With little memory, a solve of one column by CG takes more than the budget."""
    model = nn.Sequential(nn.Linear(40, 60), nn.LayerNorm(60), nn.Tanh(), nn.Linear(60, 3)).double()
    data = torch.randn(10, 40, dtype=DOUBLE), torch.arange(10) % 3
    wide, narrow = (co.linearize(model, data, "classification", memory_budget=b) for b in (2**30, 14 * 2763 * 8))
    rows = (wide, co.GGN), (narrow, co.GGN), (wide, co.KFAC), (wide, co.DiagonalGGN)
    modes = [co.laplace(lin, kind, 0.05, check_mode=False).linear_mode(rtol=1e-10) for lin, kind in rows]
    for mode in modes:
        assert mode.converged and mode.matvecs < 15
        torch.testing.assert_close(mode.theta, modes[0].theta, rtol=1e-9, atol=1e-9)
    weak = co.laplace(wide.cast(torch.float32), co.GGN, 0.001, check_mode=False).linear_mode()
    assert weak.converged and weak.matvecs < 15  # refined, where products in single precision have lost the digits
    counts = co.linearize(model, (data[0], data[0][:, :3].abs().round()), co.likelihoods.Poisson())
    lost = co.laplace(counts, co.GGN, 0.05, prior_mean=1e4, check_mode=False).linear_mode()
    assert not lost.converged and lost.reason is co.linalg.Reason.NON_FINITE
