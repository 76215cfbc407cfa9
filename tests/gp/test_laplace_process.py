"""Laplace's approximation in function space against dense algebra in weight space, at the linear model's mode.

Tests `laplace_process.py`, `function_space.py`.
"""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import gpytorch
import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.errors import ModeNotFoundError
from curvops.gp import LaplaceProcess, laplace_gp
from curvops.linalg import Reason
from curvops.posterior.terms import read_prior

DOUBLE = torch.float64
N = 9
EXACT = {"rtol": 1e-6, "atol": 1e-8}


def mlp(hidden: int, outputs: int, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs, bias=bias)).double()


def labels(classes: int) -> Tensor:
    return torch.arange(N) % classes


PROBLEMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Any]] = {
    "softmax": (lambda: mlp(8, 3), lambda: labels(3), "classification"),
    "weights of classes": (
        lambda: mlp(8, 3),
        lambda: labels(3),
        co.likelihoods.Categorical(weight=torch.tensor([1.0, 2.0, 0.5], dtype=DOUBLE), label_smoothing=0.1),
    ),
    "bernoulli": (
        lambda: mlp(8, 2),
        lambda: (labels(3)[:, None] > torch.tensor([0, 1])).double(),
        co.likelihoods.Bernoulli(),
    ),
    "poisson": (lambda: mlp(8, 1), lambda: labels(4)[:, None].double(), co.likelihoods.Poisson()),
    "gaussian": (lambda: mlp(8, 2), lambda: torch.randn(N, 2, dtype=DOUBLE), co.likelihoods.Gaussian(0.1)),
    "huber": (lambda: mlp(8, 2), lambda: 3 * torch.randn(N, 2, dtype=DOUBLE), nn.HuberLoss()),
    "few weights": (lambda: mlp(1, 3), lambda: labels(3), "classification"),
}
PRIORS: dict[str, Any] = {"number": 0.7, "layers": {"0.*": 0.5, "2.*": 2.0}}
SPACES = ("formed", "streamed")
CASES = [
    *((name, "layers", space) for name in PROBLEMS for space in SPACES),
    *((name, "number", "formed") for name in ("softmax", "gaussian")),
    ("softmax", "number", "streamed"),
]


def linearized(name: str, space: str = "formed", dtype: torch.dtype = DOUBLE) -> co.operators.Linearization:
    torch.manual_seed(0)
    make, targets, likelihood = PROBLEMS[name]
    network, x, y = make(), torch.randn(N, 3, dtype=DOUBLE), targets()
    data = [(x[:5], y[:5]), (x[5:], y[5:])]
    if dtype != DOUBLE:
        network = network.to(dtype)
    lin = co.linearize(network, data, likelihood)
    if space == "streamed":
        lin.memory.room = lambda: 0  # type: ignore[method-assign]
    return lin


@functools.cache
def dense_posterior_of(name: str, prior: str, mean: float) -> tuple[Tensor, Tensor, float]:
    """That of a problem, which is the same in either space."""
    return dense_posterior(linearized(name), PRIORS[prior], mean)


def dense_posterior(lin: co.operators.Linearization, precision: Any, mean: Any) -> tuple[Tensor, Tensor, float]:
    """The linear model's mode by damped Newton steps in weight space, its precision there and its log evidence."""
    J, f, prior = lin.jacobian().to_dense(), lin.outputs(), read_prior(precision, mean, lin.model)
    A = prior.diagonal.expand(len(lin.theta)).diag()
    m = prior.mean.expand_as(lin.theta)
    likelihood = lin.likelihood
    batches = list(lin.data)
    y = torch.cat([batch.targets for batch in batches])
    theta = lin.theta.clone()

    def outputs(theta: Tensor) -> Tensor:
        return f + (J @ (theta - lin.theta)).view_as(f)

    def loss(theta: Tensor) -> Tensor:
        gap = theta - m
        return -likelihood.log_prob(outputs(theta), y).sum() + gap @ A @ gap / 2

    for _ in range(60):
        at = outputs(theta)
        gradient = J.mT @ likelihood.residual(at, y).flatten() + A @ (theta - m)
        units = torch.eye(at.shape[1], dtype=DOUBLE).unsqueeze(1).expand(-1, len(at), -1)
        H = torch.block_diag(*likelihood.hessian_product(at, units, y).transpose(0, 1))
        P = J.mT @ H @ J + A
        step, share = -torch.linalg.solve(P, gradient), 1.0
        while loss(theta + share * step) > loss(theta) + 1e-9 and share > 1e-8:
            share /= 2
        theta = theta + share * step
        if float(step.norm()) < 1e-13:
            break
    evidence = -loss(theta) - (torch.logdet(P) - torch.logdet(A)) / 2
    return theta, P, float(evidence)


@pytest.mark.parametrize(("name", "prior", "space"), CASES)
def test_it_is_the_posterior_of_the_weights_at_the_linear_model_s_mode(name: str, prior: str, space: str) -> None:
    lin, mean = linearized(name, space), 0.1
    process = laplace_gp(lin, PRIORS[prior], mean)
    assert process.is_formed == (space == "formed" and name != "few weights")
    assert process.reason in (Reason.CONVERGED, Reason.PRECISION_LIMIT) and process.gradient < 1e-6
    theta, P, evidence = dense_posterior_of(name, prior, mean)
    torch.testing.assert_close(process.mean, theta, **EXACT)
    x = torch.randn(4, 3, dtype=DOUBLE)
    J = lin.jacobian(x).to_dense()
    expected = lin.predict(x) + (J @ (theta - lin.theta)).view(4, -1)
    covariance = J @ torch.linalg.solve(P, J.mT)
    C = expected.shape[1]
    predicted, joint, pairs = process.predict(x), process.predict(x, joint=True), process.predict(x, groups=2)
    for found in (predicted, joint, pairs):
        torch.testing.assert_close(found.mean.reshape(4, C), expected, **EXACT)
    torch.testing.assert_close(joint.covariance_matrix, covariance, **EXACT)
    blocks = covariance.view(4, C, 4, C)
    torch.testing.assert_close(predicted.covariance_matrix, blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1), **EXACT)
    torch.testing.assert_close(predicted.variance, covariance.diagonal().view(4, C), **EXACT)
    torch.testing.assert_close(pairs.covariance_matrix[1], covariance[2 * C :, 2 * C :], **EXACT)
    mode = lin.outputs() + lin.push(theta - lin.theta)
    assert float((process.outputs - mode).norm() / mode.norm()) < 1e-7  # entries near 0 to the tolerance of all
    ratio = 1e-8 if process.is_formed or lin.num_parameters <= 1024 else 0.05
    found = process.log_evidence()
    assert float(found) == pytest.approx(evidence, rel=max(ratio, 1e-6))
    gamma = (
        len(theta)
        - (torch.linalg.inv(P) @ read_prior(PRIORS[prior], mean, lin.model).diagonal.expand(len(P)).diag()).trace()
    )
    assert float(found.effective_parameters) == pytest.approx(float(gamma), rel=1e-6)


@pytest.mark.parametrize("name", ["softmax", "few weights"])
def test_draws_have_the_mean_and_the_covariance_in_either_space(name: str) -> None:
    processes = [laplace_gp(linearized(name, space), 0.7, 0.1) for space in SPACES]
    draws = [each.sample(4, torch.Generator().manual_seed(1), rtol=1e-10) for each in processes]
    torch.testing.assert_close(*draws, **EXACT)
    process = processes[0]
    many = process.sample(1000, torch.Generator().manual_seed(2))
    x = torch.randn(3, 3, dtype=DOUBLE)
    predicted = process.predict(x)
    drawn, functions = process.predict(x, samples=many), process.functions(x, 1000, samples=many)
    torch.testing.assert_close(drawn.mean, predicted.mean)
    torch.testing.assert_close(drawn.variance, (functions - predicted.mean).square().mean(0))
    # Six standard errors of 9 variances and means each: a false alarm in 1e7.
    assert bool(((drawn.variance - predicted.variance).abs() < 6 * math.sqrt(2 / 1000) * predicted.variance).all())
    assert bool(((functions.mean(0) - predicted.mean).abs() < 6 * predicted.stddev / math.sqrt(1000)).all())


@pytest.mark.parametrize(
    ("name", "scale"), [("softmax", 0.7), ("softmax", 1e-2), ("bernoulli", 1e-2), ("gaussian", 1e-2)]
)
def test_in_single_precision_predictions_are_those_of_double(name: str, scale: float) -> None:
    one, two = linearized(name, dtype=torch.float32), linearized(name)
    x = torch.randn(4, 3)
    found, expected = laplace_gp(one, scale), laplace_gp(two, scale)
    assert found.is_formed and found.mean.dtype == torch.float32
    predicted, exact = found.predict(x), expected.predict(x.double())
    assert predicted.variance.dtype == torch.float32 and predicted.mean.dtype == torch.float32
    torch.testing.assert_close(predicted.variance.double(), exact.variance, rtol=5e-3, atol=0)
    torch.testing.assert_close(predicted.mean.double(), exact.mean, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(
        found.log_evidence().value.double(), expected.log_evidence().value, rtol=1e-4, atol=1e-3, check_dtype=False
    )


def test_gradients_in_the_inputs() -> None:
    process = laplace_gp(linearized("softmax"), 0.7)
    x = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        found = process.predict(x)
        return found.mean, found.covariance_matrix

    assert torch.autograd.gradcheck(moments, (x,), fast_mode=True)


def test_sequences_are_their_positions() -> None:
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = torch.randn(4, 5, 3, dtype=DOUBLE), torch.arange(20).view(4, 5) % 2
    process = laplace_gp(co.linearize(network, (x, y), "classification"), 0.7)
    apart = laplace_gp(co.linearize(network, (x.flatten(0, 1), y.flatten()), "classification"), 0.7)
    assert process.outputs.shape == process.residual_weights.shape == (4, 5, 2)
    torch.testing.assert_close(process.outputs.flatten(0, 1), apart.outputs, **EXACT)
    alone = apart.predict(x[:2].flatten(0, 1)).variance.view(2, 5, 2)
    torch.testing.assert_close(process.predict(x[:2]).variance, alone, **EXACT)
    torch.testing.assert_close(process.log_evidence().value, apart.log_evidence().value, **EXACT)


def test_repeated_points_and_separable_classes_take_no_jitter() -> None:
    x = torch.randn(4, 3, dtype=DOUBLE).repeat(3, 1)
    lin = co.linearize(mlp(8, 2), (x, (x[:, 0] > 0).long()), "classification")
    process = laplace_gp(lin, 1e-4)
    P = dense_posterior(lin, 1e-4, 0.0)[1]
    J = lin.jacobian(x[:4]).to_dense()
    variances = (J * torch.linalg.solve(P, J.mT).mT).sum(1).view(4, 2)
    torch.testing.assert_close(process.predict(x[:4]).variance, variances, rtol=1e-6, atol=0)


def test_scoring_by_a_fisher_that_is_no_hessian_ends_at_the_same_mode_after_more_steps() -> None:
    x, y = torch.randn(N, 3, dtype=DOUBLE), torch.randn(N, 1, dtype=DOUBLE)
    lin = co.linearize(mlp(3, 2), (x, y), co.likelihoods.HeteroscedasticGaussian())
    with pytest.raises(ModeNotFoundError, match="raise maxiter"):
        laplace_gp(lin, 2.0, maxiter=5)
    process = laplace_gp(lin, 2.0, maxiter=500, rtol=1e-6)
    mode = co.laplace(lin, co.GGN, prior_precision=2.0, check_mode=False).linear_mode(maxiter=500)
    assert mode.converged
    torch.testing.assert_close(process.training_log_likelihood, mode.log_likelihood, rtol=1e-4, atol=1e-4)


def test_it_says_why_the_search_ended() -> None:
    lin = linearized("softmax")
    with pytest.raises(
        ModeNotFoundError, match=r"after 1 Newton steps .* ITERATION_LIMIT: Newton's method spent"
    ) as caught:
        laplace_gp(lin, 1e-3, maxiter=1)
    assert caught.value.reason is Reason.ITERATION_LIMIT and caught.value.steps == 1
    assert caught.value.gradient > 1e-6
    with pytest.raises(ModeNotFoundError, match="NON_FINITE: At the linear model's outputs"):
        laplace_gp(linearized("poisson"), 1.0, prior_mean=1e4)


def test_it_prints_and_copies() -> None:
    process = laplace_gp(linearized("softmax"), 0.7)
    assert "CONVERGED" in repr(process) and "_cache" not in repr(process)
    x = torch.randn(2, 3, dtype=DOUBLE)
    for copied in (copy.deepcopy(process), pickle.loads(pickle.dumps(process))):
        assert isinstance(copied, LaplaceProcess)
        torch.testing.assert_close(copied.predict(x).variance, process.predict(x).variance)
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(3).double()
    noisy = likelihood(process.predict(x, joint=True))
    assert bool((noisy.variance > process.predict(x).variance).all())
