"""The evidence at the linear model's own mode: exact for that model, and the default with normalisation layers."""

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.test_evidence_parts import PRIORS
from tests.posterior.test_gradients import agrees
from tests.randomness import perceptron

DOUBLE = torch.float64


def early(likelihood="gaussian", noise=0.3):
    """A network that was never trained, so that θ* is far from a mode."""
    model = perceptron(3, 5, 2)
    x = torch.randn(9, 3, dtype=DOUBLE)
    if likelihood == "gaussian":
        return co.linearize(model, (x, x[:, :2].sin()), co.likelihoods.Gaussian(noise))
    return co.linearize(model, (x, x.argmax(1) % 2), "classification")


@pytest.mark.parametrize("prior", PRIORS)
def test_it_is_the_exact_log_density_of_the_linear_model(prior):
    lin = early()
    post = co.laplace(lin, co.GGN, prior_precision=PRIORS[prior](lin), prior_mean=0.1, check_mode=False)
    found, J = post.log_evidence(mode="linear"), lin.jacobian().to_dense()
    A = post.precision.to_dense() - co.GGN(lin).to_dense()
    covariance = 0.3 * torch.eye(len(J), dtype=DOUBLE) + J @ A.inverse() @ J.mT
    mean = lin.outputs().flatten() + J @ (0.1 - lin.theta)
    targets = torch.cat([batch.targets for batch in lin.data]).flatten()
    exact = torch.distributions.MultivariateNormal(mean, covariance).log_prob(targets)
    torch.testing.assert_close(found.value, exact, rtol=1e-8, atol=1e-8)
    assert found.mode == "linear" and post.log_evidence().mode == "map"
    assert abs(post.log_evidence().value - exact) > 1  # θ* is not that mode
    total = found.log_likelihood - 0.5 * (found.scatter + found.log_determinant_ratio.value)
    torch.testing.assert_close(found.value, total, rtol=1e-14, atol=0)


@pytest.mark.parametrize("likelihood", ["gaussian", "classes"])
def test_its_gradients_are_those_with_the_mode_moving(likelihood):
    lin = early(likelihood)
    for at in (torch.tensor(1.3).double(), torch.linspace(1, 2, lin.num_parameters).double()):
        agrees(
            lambda a: co.laplace(lin, co.GGN, prior_precision=a, check_mode=False).log_evidence(mode="linear").value, at
        )


def test_its_gradient_in_the_noise():
    agrees(
        lambda noise: co.laplace(early(noise=noise), co.GGN, 1.0, check_mode=False).log_evidence(mode="linear").value,
        torch.tensor(0.3, dtype=DOUBLE),
    )


class RootMeanSquareNorm(nn.Module):
    """One of the user's own, known by its name."""

    def forward(self, x):
        return x / x.square().mean(1, keepdim=True).sqrt()


@pytest.mark.parametrize("layer", [lambda: nn.LayerNorm(5), lambda: nn.BatchNorm1d(5), lambda: RootMeanSquareNorm()])
def test_a_network_with_a_normalisation_uses_it_by_default(layer):
    model = nn.Sequential(nn.Linear(3, 5), layer(), nn.Tanh(), nn.Linear(5, 1)).double().eval()
    x = torch.randn(9, 3, dtype=DOUBLE)
    post = co.laplace(
        co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(noise=1.0)), co.GGN, 1.0, check_mode=False
    )
    found = post.log_evidence()
    assert found.mode == "linear" and "mode='linear'" in repr(found)
    torch.testing.assert_close(found.value, post.log_evidence(mode="linear").value)
    assert abs(found.value - post.log_evidence(mode="map").value) > 0.1
    assert co.evidence.grid(post, [1.0])[0].mode == "linear"


def test_where_the_mode_was_not_found_the_reason_says_so():
    """Fisher scoring, where the Fisher is not the Hessian, takes hundreds of steps."""
    x, y = torch.randn(4, 3, dtype=DOUBLE), torch.randn(4, 1, dtype=DOUBLE)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    lin = co.linearize(model, (x, y), co.likelihoods.HeteroscedasticGaussian())
    found = co.laplace(lin, co.GGN, 0.7, check_mode=False).log_evidence(mode="linear")
    assert found.reason is co.linalg.Reason.ITERATION_LIMIT


def test_in_float32_the_mode_is_found_to_the_rounding_of_the_loss():
    """A strong prior on one layer: its gradient cannot fall to the tolerance, which must not end as a failure."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(15, 4)
    prior, found = {"0.*": 0.16, "2.*": 8e4}, []
    for dtype in (torch.float32, DOUBLE):
        lin = co.linearize(model.to(dtype), (x.to(dtype), x[:, :3].argmax(1)), "classification")
        post = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)
        mode = post.linear_mode()
        assert mode.converged and mode.steps < 20
        found.append(float(post.log_evidence(mode="linear").value))
    assert found[0] == pytest.approx(found[1], abs=1e-3)


def test_in_float32_a_prior_far_below_the_curvature_is_no_failure():
    """Rounding ends a solve early, and the next Newton step goes on from where it came."""
    model, x = perceptron(3, 8, 1, seed=18, dtype=torch.float32), torch.randn(200, 3)
    y, found = x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(200, 1), []
    for dtype in (torch.float32, DOUBLE):
        lin = co.linearize(model.to(dtype), (x.to(dtype), y.to(dtype)), co.likelihoods.Gaussian(0.01))
        post = co.laplace(lin, co.KFAC, prior_precision=1e-3, check_mode=False)
        found.append(float(post.log_evidence(mode="linear").value))
    assert found[0] == pytest.approx(found[1], abs=0.1)
