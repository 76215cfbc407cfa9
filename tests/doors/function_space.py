"""What kernels, means and Laplace's approximation in function space refuse."""

from collections.abc import Callable
from functools import cache
from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

import curvops as co
from curvops.gp import LinearizedGP, LinearizedKernel, LinearizedMean, laplace_gp
from tests.doors.door import Door
from tests.gp.test_infinite_width import Process

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 24, dtype=DOUBLE).view(8, 3)
Y = X[:, :1].sin()


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


@cache
def lin(likelihood: str = "classification") -> co.operators.Linearization:
    """Of 26 weights and two classes, or of one number."""
    if likelihood == "classification":
        return co.linearize(network(), (X, (X[:, 0] > 0).long()), likelihood)
    return co.linearize(network(1), (X, Y), co.likelihoods.Gaussian(0.1))


@cache
def process() -> co.gp.LaplaceProcess:
    return laplace_gp(lin())


def learned() -> co.operators.Linearization:
    noise = torch.tensor(0.1, dtype=DOUBLE, requires_grad=True)
    return co.linearize(network(1), (X, Y), co.likelihoods.Gaussian(noise))


def half() -> co.operators.Linearization:
    return co.linearize(network().bfloat16(), (X, (X[:, 0] > 0).long()), "classification")


@cache
def elsewhere() -> co.operators.Linearization:
    moved = network(1)
    with torch.no_grad():
        next(moved.parameters()).add_(1)
    return co.linearize(moved, (X, Y), co.likelihoods.Gaussian(0.1))


def two_numbers() -> co.operators.Linearization:
    return co.linearize(network(2), (X, X[:, :2]), co.likelihoods.Gaussian(0.1))


def several_noises() -> co.operators.Linearization:
    noise = torch.tensor([0.1, 0.2], dtype=DOUBLE)
    return co.linearize(network(2), (X, X[:, :2]), co.likelihoods.Gaussian(noise))


def weighted() -> co.operators.Linearization:
    return co.linearize(network(1), (X, Y, Y[:, 0].abs()), co.likelihoods.Gaussian(0.1), weights=True)


def marginal(x: Tensor, y: Tensor, noise: float = 0.1) -> Tensor:
    allowed = gpytorch.constraints.GreaterThan(-1.0)
    likelihood: Any = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=allowed).double()
    likelihood.noise = torch.tensor(noise, dtype=DOUBLE)
    gp = Process(x, y, likelihood, LinearizedKernel(lin("gaussian")), LinearizedMean(lin("gaussian")))
    return gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)(gp(x), y)


def fast(call: Callable[[], object]) -> object:
    with gpytorch.settings.fast_computations(log_prob=True):
        return call()


def slowly(call: Callable[[], object]) -> object:
    """As after BoTorch was imported: gpytorch takes its own Cholesky factor."""
    with gpytorch.settings.fast_computations(log_prob=False):
        return call()


DOORS = [
    Door(
        "laplace_gp",
        rows={
            "half precision": (lambda: laplace_gp(half()), TypeError, "too coarse"),
            "an operator": (
                lambda: laplace_gp(lin(), co.GGN(lin()).add_diagonal(1.0)),
                "needs a prior_precision that is a number",
            ),
            "a precision with a gradient": (
                lambda: laplace_gp(lin(), torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)),
                "laplace_gp has no gradient",
            ),
            "a noise with a gradient": (lambda: laplace_gp(learned()), "laplace_gp has no gradient"),
        },
    ),
    Door(
        "LaplaceProcess",
        rows={"groups that cut": (lambda: process().predict(X, groups=3).covariance_matrix, "divide the 8")},
    ),
    Door(
        "LinearizedKernel",
        rows={
            "globs and groups": (lambda: LinearizedKernel(lin(), {"*": 1.0}, over="layers"), "leave out"),
            "a prior of no scale": (
                lambda: LinearizedKernel(lin(), outputscale_prior=gpytorch.priors.GammaPrior(1.0, 1.0)),
                "pass outputscale=1.0",
            ),
            "inputs of another size": (
                lambda: LinearizedKernel(lin())(X[:, :2]).to_dense(),
                r"\(\.\.\., n, 3\), a row per point",
            ),
            "batches that are not those of the outputs": (
                lambda: LinearizedKernel(lin(), outputs="independent").forward(X.expand(3, 8, 3), X),
                "a last batch dimension of 1 or 2",
            ),
            "one of independent outputs": (
                lambda: LinearizedKernel(lin(), outputs="independent")[0],
                "index its evaluated matrix",
            ),
        },
    ),
    Door(
        "LinearizedGP",
        rows={
            "classes": (lambda: LinearizedGP(lin()), "needs a Gaussian likelihood"),
            "a kernel of other weights": (
                lambda: LinearizedGP(lin("gaussian"), kernel=LinearizedKernel(elsewhere())),
                "belongs to another linearisation",
            ),
            "a kernel and its options": (
                lambda: LinearizedGP(lin("gaussian"), kernel=LinearizedKernel(lin("gaussian")), over="layers"),
                "leave these out",
            ),
            "several noises": (
                lambda: LinearizedGP(several_noises()),
                r"pass likelihood=MultitaskGaussianLikelihood\(2\)",
            ),
            "weights of points": (lambda: LinearizedGP(weighted()), "no weights of points"),
            "a likelihood of one output for two": (
                lambda: LinearizedGP(two_numbers(), gpytorch.likelihoods.GaussianLikelihood()),
                r"needs likelihood=MultitaskGaussianLikelihood\(2\)",
            ),
        },
    ),
    Door(
        "ExactGP",
        rows={
            "repeated points without noise": (
                lambda: fast(lambda: marginal(X.repeat(2, 1), Y[:, 0].repeat(2), 0.0)),
                "singular or indefinite",
            ),
            "repeated points without noise, fast computations off": (
                lambda: slowly(lambda: marginal(X.repeat(2, 1), Y[:, 0].repeat(2), 0.0)),
                "no jitter is added",
            ),
        },
    ),
]
