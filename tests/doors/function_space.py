"""What kernels, means and Laplace's approximation in function space refuse."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

import curvops as co
from curvops.gp import ComposedKernel, LinearizedGP, LinearizedKernel, LinearizedMean, laplace_gp
from tests.doors.door import Door

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


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network(1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner(a + b)


def of_pairs() -> co.operators.Linearization:
    return co.linearize(Added().double(), [((X, X), Y)], co.likelihoods.Gaussian(0.1))


class Process(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = LinearizedMean(lin("gaussian")), LinearizedKernel(lin("gaussian"))

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def marginal(x: Tensor, y: Tensor, noise: float = 0.1) -> Tensor:
    allowed = gpytorch.constraints.GreaterThan(-1.0)
    likelihood: Any = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=allowed).double()
    likelihood.noise = torch.tensor(noise, dtype=DOUBLE)
    gp = Process(x, y, likelihood)
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
            "a network": (lambda: laplace_gp(network()), TypeError, "linearised network"),
            "a posterior": (
                lambda: laplace_gp(co.laplace(lin(), co.GGN, 1.0, check_mode=False)),
                TypeError,
                "linearised network",
            ),
            "half precision": (lambda: laplace_gp(half()), TypeError, "too coarse"),
            "no precision": (lambda: laplace_gp(lin(), 0.0), ValueError, "prior_precision"),
            "a negative precision": (lambda: laplace_gp(lin(), -1.0), ValueError, "prior_precision"),
            "a precision that is NaN": (lambda: laplace_gp(lin(), float("nan")), ValueError, "prior_precision"),
            "a vector of another size": (lambda: laplace_gp(lin(), torch.ones(3, dtype=DOUBLE)), ValueError, "26"),
            "names of no weights": (lambda: laplace_gp(lin(), {"5.*": 1.0}), ValueError, "5"),
            "an operator": (
                lambda: laplace_gp(lin(), co.GGN(lin()).add_diagonal(1.0)),
                ValueError,
                "co.laplace accepts operators",
            ),
            "an earlier posterior": (
                lambda: laplace_gp(lin(), co.laplace(lin(), co.GGN, 1.0, check_mode=False)),
                TypeError,
                "prior_precision",
            ),
            "a word": (lambda: laplace_gp(lin(), "strong"), TypeError, "prior_precision"),
            "a mean that is NaN": (lambda: laplace_gp(lin(), prior_mean=float("nan")), ValueError, "prior_mean"),
            "a precision with a gradient": (
                lambda: laplace_gp(lin(), torch.tensor(1.0, dtype=DOUBLE, requires_grad=True)),
                ValueError,
                "which laplace_gp does not have: detach it",
            ),
            "a noise with a gradient": (lambda: laplace_gp(learned()), ValueError, "laplace_gp has no gradient"),
            "a tolerance of zero": (lambda: laplace_gp(lin(), rtol=0.0), ValueError, "rtol"),
            "a tolerance that is a word": (lambda: laplace_gp(lin(), rtol="fine"), TypeError, "rtol"),
            "no steps": (lambda: laplace_gp(lin(), maxiter=0), ValueError, "maxiter"),
            "half a step": (lambda: laplace_gp(lin(), maxiter=1.5), TypeError, "maxiter"),
            "a weak prior in few steps": (
                lambda: laplace_gp(lin(), 1e-6, maxiter=1),
                co.gp.ModeNotFoundError,
                "ITERATION_LIMIT: Newton's method spent its steps",
            ),
        },
    ),
    Door(
        "LaplaceProcess",
        rows={
            "inputs of another size": (lambda: process().predict(X[:, :2]), ValueError, "mat1 and mat2|shape"),
            "noise of a classifier": (lambda: process().predict(X, noise=True), ValueError, "noise=True adds"),
            "groups that cut": (lambda: process().predict(X, groups=3).covariance_matrix, ValueError, "divide the 8"),
            "no draws": (lambda: process().sample(0), ValueError, "k"),
            "draws of another size": (lambda: process().predict(X, samples=X), ValueError, "samples must be"),
            "a link of numbers": (lambda: laplace_gp(lin("gaussian")).probabilities(X), ValueError, "probabilities"),
            "targets of another length": (lambda: process().log_likelihood(X, Y[:3]), ValueError, "8 inputs"),
            "a tolerance of the evidence": (lambda: process().log_evidence(rtol=-1), ValueError, "rtol"),
        },
    ),
    Door(
        "LinearizedKernel",
        rows={
            "a network": (lambda: LinearizedKernel(network()), TypeError, "lin must be a linearised network"),
            "a posterior": (
                lambda: LinearizedKernel(co.laplace(lin(), co.GGN, 1.0, check_mode=False)),
                TypeError,
                "lin must be a linearised network, .* got Laplace",
            ),
            "a precision for each weight": (
                lambda: LinearizedKernel(lin(), torch.ones(26, dtype=DOUBLE)),
                TypeError,
                "prior_precision must be a number or {glob: number}",
            ),
            "a precision set to 0": (
                lambda: setattr(LinearizedKernel(lin()), "prior_precision", 0.0),
                ValueError,
                r"prior_precision must be finite and within its constraint, Positive\(\), got 0.0",
            ),
            "a precision set to infinity": (
                lambda: setattr(LinearizedKernel(lin()), "prior_precision", torch.inf),
                ValueError,
                "prior_precision must be finite",
            ),
            "precisions of other layers": (
                lambda: setattr(LinearizedKernel(lin(), over="layers"), "prior_precision", torch.ones(3)),
                ValueError,
                r"prior_precision has the shape \(2,\), got \(3,\)",
            ),
            "a diagonal of other points": (
                lambda: LinearizedKernel(lin())(X, X[:3], diag=True),
                ValueError,
                "for a diagonal, different numbers of points",
            ),
            "batches that do not go together": (
                lambda: LinearizedKernel(lin())(X.view(2, 4, 3), X.view(4, 2, 3)).to_dense(),
                ValueError,
                "batches that do not broadcast together",
            ),
            "no precision": (lambda: LinearizedKernel(lin(), 0.0), ValueError, "prior_precision"),
            "precisions of other groups": (lambda: LinearizedKernel(lin(), over="neurons"), ValueError, "over must be"),
            "globs and groups": (lambda: LinearizedKernel(lin(), {"*": 1.0}, over="layers"), ValueError, "leave out"),
            "outputs by another name": (
                lambda: LinearizedKernel(lin(), outputs="separate"),
                ValueError,
                "outputs must be",
            ),
            "a prior of no scale": (
                lambda: LinearizedKernel(lin(), outputscale_prior=gpytorch.priors.GammaPrior(1.0, 1.0)),
                ValueError,
                "pass outputscale=1.0",
            ),
            "a scale that is not there": (
                lambda: setattr(LinearizedKernel(lin()), "outputscale", 2.0),
                ValueError,
                "no output scale",
            ),
            "inputs of another size": (
                lambda: LinearizedKernel(lin())(X[:, :2]).to_dense(),
                ValueError,
                r"expected \(..., n, 3\)",
            ),
            "inputs that are NaN": (lambda: LinearizedKernel(lin())(X * torch.nan).to_dense(), ValueError, "NaN"),
            "a kernel of each dimension": (
                lambda: LinearizedKernel(lin())(X, last_dim_is_batch=True).to_dense(),
                ValueError,
                "a network takes them together",
            ),
            "batches that are not those of the outputs": (
                lambda: LinearizedKernel(lin(), outputs="independent").forward(X.expand(3, 8, 3), X),
                ValueError,
                "a last batch dimension of 1 or 2, got 3",
            ),
            "one of independent outputs": (
                lambda: LinearizedKernel(lin(), outputs="independent")[0],
                ValueError,
                "index its evaluated matrix",
            ),
            "a composition of none": (lambda: ComposedKernel(lin()), TypeError, "must be a kernel of gpytorch"),
        },
    ),
    Door(
        "LinearizedMean",
        rows={
            "a network": (lambda: LinearizedMean(network()), TypeError, "lin must be a linearised network"),
            "inputs as a list": (
                lambda: LinearizedMean(lin()).forward(X.tolist()),
                TypeError,
                "inputs must be a tensor",
            ),
            "a mean that is no number": (lambda: LinearizedMean(lin(), "zero"), TypeError, "prior_mean"),
            "a mean of another size": (lambda: LinearizedMean(lin(), torch.ones(3, dtype=DOUBLE)), ValueError, "26"),
            "inputs of another size": (lambda: LinearizedMean(lin())(X[:, :2]), ValueError, r"expected \(..., n, 3\)"),
            "outputs by another name": (lambda: LinearizedMean(lin(), outputs="all"), ValueError, "outputs must be"),
        },
    ),
    Door(
        "LinearizedGP",
        rows={
            "a network": (lambda: LinearizedGP(network(1)), TypeError, "linearised network"),
            "classes": (lambda: LinearizedGP(lin()), ValueError, "co.gp.laplace_gp takes any"),
            "a likelihood of this library": (
                lambda: LinearizedGP(lin("gaussian"), co.likelihoods.Gaussian(0.1)),
                TypeError,
                "must be one of gpytorch",
            ),
            "a likelihood that is not Gaussian": (
                lambda: LinearizedGP(lin("gaussian"), gpytorch.likelihoods.BernoulliLikelihood()),
                RuntimeError,
                "only handle Gaussian likelihoods",
            ),
            "a kernel of other weights": (
                lambda: LinearizedGP(lin("gaussian"), kernel=LinearizedKernel(elsewhere())),
                ValueError,
                "covar_module, a LinearizedKernel, belongs to another linearisation than the process",
            ),
            "a kernel of other weights in a sum": (
                lambda: LinearizedGP(
                    lin("gaussian"), kernel=LinearizedKernel(lin("gaussian")) + LinearizedKernel(elsewhere())
                ),
                ValueError,
                "kernels.1, a LinearizedKernel, belongs to another linearisation than the process",
            ),
            "a mean of other weights": (
                lambda: LinearizedGP(lin("gaussian"), mean=LinearizedMean(elsewhere())),
                ValueError,
                "mean_module, a LinearizedMean, belongs to another linearisation than the process",
            ),
            "a kernel and its options": (
                lambda: LinearizedGP(lin("gaussian"), kernel=LinearizedKernel(lin("gaussian")), over="layers"),
                ValueError,
                "leave these out",
            ),
            "several noises": (
                lambda: LinearizedGP(several_noises()),
                ValueError,
                r"pass likelihood=MultitaskGaussianLikelihood\(2\)",
            ),
            "weights of points": (lambda: LinearizedGP(weighted()), ValueError, "no weights of points"),
            "inputs of another size": (
                lambda: LinearizedGP(lin("gaussian")).eval()(X[:, :2]),
                (ValueError, RuntimeError),
                "size|shape",
            ),
            "a likelihood of one output for two": (
                lambda: LinearizedGP(two_numbers(), gpytorch.likelihoods.GaussianLikelihood()),
                ValueError,
                r"than the network's 2: pass MultitaskGaussianLikelihood\(2\)",
            ),
            "a likelihood of three outputs for two": (
                lambda: LinearizedGP(two_numbers(), gpytorch.likelihoods.MultitaskGaussianLikelihood(3)),
                ValueError,
                "another number of outputs than the network's 2",
            ),
            "a likelihood of several outputs for one": (
                lambda: LinearizedGP(lin("gaussian"), gpytorch.likelihoods.MultitaskGaussianLikelihood(1)),
                ValueError,
                "pass GaussianLikelihood",
            ),
            "a posterior as the kernel": (
                lambda: LinearizedGP(
                    lin("gaussian"), kernel=co.laplace(lin("gaussian"), co.GGN, 1.0, check_mode=False)
                ),
                TypeError,
                "kernel must be one of gpytorch, got Laplace",
            ),
            "a number as the mean": (lambda: LinearizedGP(lin("gaussian"), mean=0.0), TypeError, "mean must be one of"),
            "inputs of two tensors": (lambda: LinearizedGP(of_pairs()), TypeError, "a module that splits one tensor"),
        },
    ),
    Door(
        "ExactGP",
        rows={
            "a likelihood that is not Gaussian": (
                lambda: Process(X, Y[:, 0], gpytorch.likelihoods.BernoulliLikelihood()),
                RuntimeError,
                "only handle Gaussian likelihoods",
            ),
            "repeated points without noise": (
                lambda: fast(lambda: marginal(X.repeat(2, 1), Y[:, 0].repeat(2), 0.0)),
                ValueError,
                "singular or indefinite",
            ),
            "repeated points without noise, fast computations off": (
                lambda: slowly(lambda: marginal(X.repeat(2, 1), Y[:, 0].repeat(2), 0.0)),
                ValueError,
                "no jitter is added",
            ),
            "too few targets": (lambda: marginal(X, Y[:5, 0]), RuntimeError, "must match the size"),
        },
    ),
]
