"""What samplers, runs of chains, variational families, filters and diagnostics refuse."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvops as co
from curvops.sampling import diagnostics
from tests.doors.door import Door
from tests.sampling.gaussians import curvature, log_density, seeded

S = co.sampling
F = log_density(curvature(4))
ZERO = torch.zeros(4, dtype=torch.float64)
SGLD = S.sgld(F, 0.1, data_size=1)


def started(params: Any) -> Any:
    return SGLD.init(params)


def mean_of_entries(params: Any, batch: Any) -> Tensor:
    return -(params["x"] * batch[0].mean()).square().sum()


PARAMS, THREE = {"x": torch.ones(2)}, torch.ones(3)


def read(batches: Any) -> Any:
    return S.run(S.sgld(mean_of_entries, 0.1, data_size=1), PARAMS, batches, steps=4)


@cache
def regression() -> tuple[Any, DataLoader[Any]]:
    g = seeded(0)
    x, y = torch.randn(10, 3, dtype=torch.float64, generator=g), torch.randn(10, 1, dtype=torch.float64, generator=g)
    f = S.log_posterior(nn.Linear(3, 1).double(), co.likelihoods.Gaussian(noise=1.0), data_size=10)
    return f, DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=seeded(5))


def run(**options: Any) -> Any:
    return S.run(SGLD, ZERO, **options)


def run_metropolis(**options: Any) -> Any:
    return S.run(S.lmc(F, 0.1, data_size=1), ZERO, steps=5, **options)


X, Y = torch.linspace(-1, 1, 22, dtype=torch.float64).view(11, 2), torch.arange(11) % 3


@cache
def classifier() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()


@cache
def lin() -> co.operators.Linearization:
    return co.linearize(classifier(), (X, Y), "classification")


def density() -> Any:
    """Anew each time: only the first batch is checked."""
    return S.log_posterior(classifier(), "classification", data_size=11)


@cache
def linear() -> tuple[nn.Linear, tuple[Tensor, Tensor], Any]:
    """A linear model of two outputs, its points, and its log posterior."""
    x = torch.linspace(-1, 1, 72, dtype=torch.float64).view(24, 3)
    model = nn.Linear(3, 2).double()
    likelihood = co.likelihoods.Gaussian(0.5)
    return model, (x, x[:, :2]), S.log_posterior(model, likelihood, prior_precision=2.0, data_size=24)


def gaussian(model: nn.Module) -> co.operators.Linearization:
    return co.linearize(model, linear()[1], co.likelihoods.Gaussian(0.5))


MODEL, BATCH, LOG_POSTERIOR = linear()
START = LOG_POSTERIOR.params
VI, EKF = S.vi(LOG_POSTERIOR, lr=1e-2), S.ekf(LOG_POSTERIOR)
ONE, TWO = (torch.randn(k, 8, 2, dtype=torch.float64, generator=seeded(k)) for k in (1, 2))
NAN = TWO.clone()
NAN[1, 3, 0] = torch.nan


@cache
def chain() -> Any:
    """Two chains of five draws of the linear model."""
    return S.run(S.chains(S.sgld(LOG_POSTERIOR, 1e-3), 2), START, steps=5, batches=BATCHES, progress=False)


BATCHES = list(zip(*(part.split(8) for part in BATCH)))
DENSE = co.linalg.Dense(torch.eye(3, dtype=torch.float64), psd=True)


def drawn() -> dict[str, Tensor]:
    """Draws of two chains of the classifier, by name."""
    return {name: p.detach().expand(2, 5, *p.shape) for name, p in classifier().named_parameters()}


def empirical(given: tuple[Any, ...]) -> Any:
    return S.empirical(lin(), *given)


OTHER = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()
STATE, FILTERED = VI.init(START), EKF.init(START)
LOW_RANK = S.vi(LOG_POSTERIOR, "low_rank_diagonal", rank=3, lr=1e-2).init(START)
BY_ADAM = S.optimizer(torch.optim.Adam, LOG_POSTERIOR, lr=1e-2)
ADAM, _ = BY_ADAM.update(BY_ADAM.init(START), BATCH)
CLASSES = {"likelihood": "classification", "data_size": 11}

DOORS = [
    Door(
        "samplers",
        rows={
            "lambda: S.sgld(F, 0.1)": (lambda: S.sgld(F, 0.1), ValueError, "data_size is missing"),
            "lambda: S.sgld(F, 0.1, data_size=0)": (
                lambda: S.sgld(F, 0.1, data_size=0),
                ValueError,
                "data_size must be",
            ),
            "lambda: S.sgld(F, 0.1, data_size=2.5)": (
                lambda: S.sgld(F, 0.1, data_size=2.5),
                TypeError,
                "data_size must be",
            ),
            "lambda: S.sgld(0.1, F, data_size=1)": (
                lambda: S.sgld(0.1, F, data_size=1),
                TypeError,
                "log_posterior must be a function",
            ),
            "lambda: S.sgld(F, 0.0, data_size=1)": (
                lambda: S.sgld(F, 0.0, data_size=1),
                ValueError,
                "step_size must be positive",
            ),
            "lambda: S.sgld(F, -0.1, data_size=1)": (lambda: S.sgld(F, -0.1, data_size=1), ValueError, "step_size"),
            "lambda: S.sgld(F, float(nan), data_size=1)": (
                lambda: S.sgld(F, float("nan"), data_size=1),
                ValueError,
                "step_size",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1)": (lambda: S.sgld(F, "0.1", data_size=1), TypeError, "step_size"),
            "lambda: S.sgld(F, True, data_size=1)": (lambda: S.sgld(F, True, data_size=1), TypeError, "step_size"),
            "lambda: S.sgld(F, 0.1, data_size=1, temperature=-1.0)": (
                lambda: S.sgld(F, 0.1, data_size=1, temperature=-1.0),
                ValueError,
                "temperature must be finite",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1, temperature=None)": (
                lambda: S.sgld(F, 0.1, data_size=1, temperature=None),
                TypeError,
                "temperature",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1, beta=-1)": (
                lambda: S.sgld(F, 0.1, data_size=1, beta=-1),
                ValueError,
                "beta",
            ),
            "lambda: S.sgnht(F, 0.1, data_size=1, temperature=0)": (
                lambda: S.sgnht(F, 0.1, data_size=1, temperature=0),
                ValueError,
                "temperature=0.*sghmc",
            ),
            "lambda: S.lmc(F, 0.1, data_size=1, temperature=0)": (
                lambda: S.lmc(F, 0.1, data_size=1, temperature=0),
                ValueError,
                "must be positive.*optimiser",
            ),
            "lambda: S.pcn(F, 0.1, covariance=1.0, data_size=1, temperature=0)": (
                lambda: S.pcn(F, 0.1, covariance=1.0, data_size=1, temperature=0),
                ValueError,
                "must be positive",
            ),
            "lambda: S.sghmc(F, 0.1, data_size=1, alpha=0)": (
                lambda: S.sghmc(F, 0.1, data_size=1, alpha=0),
                ValueError,
                "alpha",
            ),
            "lambda: S.sghmc(F, 0.1, data_size=1, momentum_first=1)": (
                lambda: S.sghmc(F, 0.1, data_size=1, momentum_first=1),
                TypeError,
                "momentum_first",
            ),
            "lambda: S.baoa(F, 0.1, data_size=1, sigma=-1)": (
                lambda: S.baoa(F, 0.1, data_size=1, sigma=-1),
                ValueError,
                "sigma",
            ),
            "lambda: S.hmc(F, 0.1, data_size=1, leapfrog_steps=0)": (
                lambda: S.hmc(F, 0.1, data_size=1, leapfrog_steps=0),
                ValueError,
                "leapfrog_steps",
            ),
            "lambda: S.lmc(F, 0.1, data_size=1, refreshment=1.5)": (
                lambda: S.lmc(F, 0.1, data_size=1, refreshment=1.5),
                ValueError,
                r"\(0, 1\]",
            ),
            "lambda: S.pcn(F, 0.1, data_size=1)": (
                lambda: S.pcn(F, 0.1, data_size=1),
                ValueError,
                "covariance is missing",
            ),
            "lambda: S.pcn(F, 1.1, covariance=1.0, data_size=1)": (
                lambda: S.pcn(F, 1.1, covariance=1.0, data_size=1),
                ValueError,
                r"\(0, 1\]",
            ),
            "lambda: S.pcn(F, 0.1, covariance=-1.0, data_size=1)": (
                lambda: S.pcn(F, 0.1, covariance=-1.0, data_size=1),
                ValueError,
                "covariance",
            ),
            "lambda: S.pcn(F, 0.1, covariance=1.0, mean=float(nan), data_size=1)": (
                lambda: S.pcn(F, 0.1, covariance=1.0, mean=float("nan"), data_size=1),
                ValueError,
                "mean",
            ),
            "lambda: S.RobbinsMonro(0.1, gamma=0.5)": (
                lambda: S.RobbinsMonro(0.1, gamma=0.5),
                ValueError,
                "gamma must lie in",
            ),
            "lambda: S.RobbinsMonro(0.1, gamma=1.1)": (
                lambda: S.RobbinsMonro(0.1, gamma=1.1),
                ValueError,
                "gamma must lie in",
            ),
            "lambda: S.RobbinsMonro(-1.0)": (lambda: S.RobbinsMonro(-1.0), ValueError, "a must be"),
            "lambda: S.Cosine(0.1, 0)": (lambda: S.Cosine(0.1, 0), ValueError, "period"),
            "lambda: S.sgld(F, 0.1, data_size=1, preconditioner=eye(4))": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=torch.eye(4)),
                TypeError,
                "co.linalg.Dense",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1, preconditioner=-ones(4))": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=-torch.ones(4)),
                ValueError,
                "positive semidefinite",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1, preconditioner=Dense(-eye(4)))": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=co.linalg.Dense(-torch.eye(4))),
                ValueError,
                "positive semi",
            ),
            "lambda: S.sgld(F, 0.1, data_size=1, preconditioner=KFAC)": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=co.KFAC),
                TypeError,
                "preconditioner",
            ),
            "lambda: S.chains(F, 3)": (lambda: S.chains(F, 3), TypeError, "sampler of co.sampling"),
            "lambda: S.chains(S.sgld(F, 0.1, data_size=1), 0)": (
                lambda: S.chains(S.sgld(F, 0.1, data_size=1), 0),
                ValueError,
                "k must be at least 1",
            ),
            "lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2.0)": (
                lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2.0),
                TypeError,
                "k must be a whole",
            ),
            "lambda: S.chains(S.chains(S.sgld(F, 0.1, data_size=1), 2), 2)": (
                lambda: S.chains(S.chains(S.sgld(F, 0.1, data_size=1), 2), 2),
                ValueError,
                "already",
            ),
            "lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2, vectorized=1)": (
                lambda: S.chains(S.sgld(F, 0.1, data_size=1), 2, vectorized=1),
                TypeError,
                "vectorized",
            ),
            "lambda: S.optimizer(optim.LBFGS, F)": (lambda: S.optimizer(torch.optim.LBFGS, F), ValueError, "LBFGS"),
            "lambda: S.optimizer(optim.SGD([ones(1)], lr=1.0), F)": (
                lambda: S.optimizer(torch.optim.SGD([torch.ones(1)], lr=1.0), F),
                TypeError,
                "class",
            ),
            "lambda: S.optimizer(optim.SGD, F, learning_rate=1.0)": (
                lambda: S.optimizer(torch.optim.SGD, F, learning_rate=1.0),
                TypeError,
                "learning_rate",
            ),
            "lambda: S.optimizer(F, optim.SGD, lr=1.0)": (
                lambda: S.optimizer(F, torch.optim.SGD, lr=1.0),
                TypeError,
                "lr",
            ),
            "lambda: S.optimizer(list, F)": (lambda: S.optimizer(list, F), TypeError, "not a torch.optim.Optimizer"),
        },
    ),
    Door(
        "params of samplers",
        rows={
            "whole numbers": (
                lambda: started({"x": torch.ones(2, dtype=torch.int64)}),
                TypeError,
                r"params\['x'\] is torch.int64",
            ),
            "truths": (lambda: started({"x": torch.ones(2, dtype=torch.bool)}), TypeError, "torch.bool"),
            "complex numbers": (
                lambda: started({"x": torch.ones(2, dtype=torch.complex64)}),
                TypeError,
                "torch.complex64",
            ),
            "a list": (lambda: started({"x": [1.0, 2.0]}), TypeError, "is float"),
            "nothing": (lambda: started({}), ValueError, "no tensor"),
            "NaN": (lambda: started({"x": torch.tensor([1.0, float("nan")])}), ValueError, "NaN or Inf"),
            "two dtypes": (
                lambda: started({"x": torch.ones(2), "y": torch.ones(2, dtype=torch.float64)}),
                ValueError,
                "convert",
            ),
            "a module": (lambda: started(torch.nn.Linear(2, 2)), TypeError, r"dict\(model.named_parameters\(\)\)"),
            "a preconditioner of fewer": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=DENSE).init(ZERO),
                ValueError,
                r"\(3, 3\); these params have 4 entries",
            ),
            "a preconditioner in float32": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=torch.ones(4)).init(ZERO),
                ValueError,
                r"convert it with \.to",
            ),
            "a preconditioner of another order": (
                lambda: S.sgld(
                    lambda p, b: -p["weight"].sum(),
                    0.1,
                    data_size=1,
                    preconditioner=co.KFAC(gaussian(MODEL)).add_diagonal(1.0),
                ).init({"bias": torch.zeros(2).double(), "weight": torch.zeros(2, 3).double()}),
                ValueError,
                "same order",
            ),
        },
    ),
    Door(
        "states of samplers",
        rows={
            "a tensor": (lambda: SGLD.update(ZERO), TypeError, "state must come from init of this sampler"),
            "a mapping": (lambda: SGLD.update({"x": ZERO}), TypeError, "state must come from init of this sampler"),
            "a state of another sampler": (
                lambda: SGLD.update(S.baoa(F, 0.1, data_size=1).init(ZERO)),
                TypeError,
                "state must come from init of this sampler",
            ),
            "none": (lambda: SGLD.update(None), TypeError, "state must come from init of this sampler"),
            "one chain for many": (lambda: S.chains(SGLD, 2).update(SGLD.init(ZERO)), ValueError, "has chains"),
            "many chains for one": (lambda: SGLD.update(S.chains(SGLD, 2).init(ZERO)), ValueError, "has chains"),
            "a number for a flag": (lambda: SGLD.update(SGLD.init(ZERO), None, 1), TypeError, "inplace"),
            "a seed": (lambda: SGLD.init(ZERO, 0), TypeError, "generator"),
        },
    ),
    Door(
        "starts of chains",
        rows={
            "two of three": (
                lambda: S.chains(SGLD, 3).init([{"x": torch.ones(2)}] * 2),
                ValueError,
                "each of the 3 chains, but this one has 2",
            ),
            "another shape": (
                lambda: S.chains(SGLD, 3).init([{"x": torch.ones(2)}] * 2 + [{"x": torch.ones(3)}]),
                ValueError,
                r"start 2 has params\['x'\] \(3,\)",
            ),
            "another dtype": (
                lambda: S.chains(SGLD, 3).init([{"x": torch.ones(2)}] * 2 + [{"x": torch.ones(2).double()}]),
                ValueError,
                "start 2 is torch.float64",
            ),
            "none": (lambda: S.chains(SGLD, 3).init([]), ValueError, "this one has 0"),
            "a group that is a number": (
                lambda: S.chains(SGLD, 3, process_group=3),
                TypeError,
                "process_group must be",
            ),
            "not gathered in one process": (lambda: S.chains(SGLD, 3, gather=False), ValueError, "gather=False is for"),
            "gathered by a word": (lambda: S.chains(SGLD, 3, gather="all"), TypeError, "gather"),
        },
    ),
    Door(
        "log_posterior",
        rows={
            "no number of points": (lambda: S.log_posterior(classifier(), "classification"), TypeError, "data_size"),
            "no points": (
                lambda: S.log_posterior(classifier(), "classification", data_size=0),
                ValueError,
                "data_size",
            ),
            "a real number of points": (
                lambda: S.log_posterior(classifier(), "classification", data_size=11.0),
                TypeError,
                "data_size",
            ),
            "no likelihood": (lambda: S.log_posterior(classifier(), data_size=11), ValueError, "likelihood is missing"),
            "poetry": (lambda: S.log_posterior(classifier(), "poetry", data_size=11), TypeError, "No likelihood"),
            "points of a linearisation": (
                lambda: S.log_posterior(lin(), data_size=11),
                ValueError,
                "already has data_size",
            ),
            "likelihood of a linearisation": (
                lambda: S.log_posterior(lin(), "classification"),
                ValueError,
                "already has likelihood",
            ),
            "a noise to be estimated": (
                lambda: S.log_posterior(classifier(), "regression", data_size=11),
                ValueError,
                r"noise=variance.*linearisation",
            ),
            "a negative prior": (lambda: S.log_posterior(lin(), prior_precision=-1.0), ValueError, "positive"),
            "a short prior": (lambda: S.log_posterior(lin(), prior_precision=torch.ones(3)), ValueError, "entries"),
            "a last layer without a linearisation": (
                lambda: S.log_posterior(classifier(), parameters="last_layer", **CLASSES),
                ValueError,
                "linearisation",
            ),
            "a glob of nothing": (
                lambda: S.log_posterior(classifier(), parameters="nothing*", **CLASSES),
                ValueError,
                "names no",
            ),
            "a number": (lambda: S.log_posterior(3, **CLASSES), TypeError, "model must be"),
            "batch statistics": (
                lambda: S.log_posterior(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double(), **CLASSES),
                ValueError,
                r"model.eval\(\)",
            ),
            "a batch of inputs": (lambda: density()(density().params, X), TypeError, "A batch is"),
            "a mapping of inputs": (lambda: density()(density().params, {"x": X}), TypeError, "A batch is"),
            "a third item": (lambda: density()(density().params, (X, Y, Y)), TypeError, "third item"),
            "fewer targets": (lambda: density()(density().params, (X, Y[:5])), ValueError, "targets"),
            "a label too large": (lambda: density()(density().params, (X, Y + 5)), ValueError, "class"),
            "real labels": (lambda: density()(density().params, (X, Y.double())), (TypeError, ValueError), "target"),
            "a parameter alone": (
                lambda: density()({"0.weight": density().params["0.weight"]}, (X, Y)),
                ValueError,
                "params must have the names",
            ),
            "a list of parameters": (lambda: density()([1], (X, Y)), ValueError, "params must have the names"),
            "a parameter too many": (
                lambda: density()({**density().params, "more": X}, (X, Y)),
                ValueError,
                "params must have the names",
            ),
            "parameters in float32": (
                lambda: density()({name: value.float() for name, value in density().params.items()}, (X, Y)),
                ValueError,
                r"params\['0.weight'\] is torch.float32",
            ),
        },
    ),
    Door(
        "minibatches",
        rows={
            "your own density": (lambda: S.minibatches(F, (X, Y), 4), TypeError, "for your own density"),
            "a linearisation": (lambda: S.minibatches(lin(), (X, Y), 4), TypeError, "co.sampling.log_posterior"),
            "fewer points": (lambda: S.minibatches(density(), (X[:5], Y[:5]), 4), ValueError, "have 5 points"),
            "inputs alone": (lambda: S.minibatches(density(), X, 4), TypeError, "Dataset with a length"),
            "batches": (lambda: S.minibatches(density(), [(X, Y)], 4), TypeError, "Dataset with a length"),
            "a loader": (lambda: S.minibatches(density(), regression()[1], 4), TypeError, "got DataLoader"),
            "undeclared weights": (lambda: S.minibatches(density(), (X, Y, Y), 4), TypeError, "third item"),
            "no points": (lambda: S.minibatches(density(), (X, Y), 0), ValueError, "size must be"),
            "more than all points": (
                lambda: S.minibatches(density(), (X, Y), 12),
                ValueError,
                "more than the 11 points",
            ),
            "a real size": (lambda: S.minibatches(density(), (X, Y), 4.0), TypeError, "size must be"),
            "a seed": (lambda: S.minibatches(density(), (X, Y), 4, 0), TypeError, "generator"),
        },
    ),
    Door(
        "run",
        rows={
            "an iterator": (lambda: read(iter([(THREE, THREE)])), TypeError, "only once"),
            "a generator": (lambda: read(each for each in [(THREE, THREE)]), TypeError, "only once"),
            "a tensor": (lambda: read(THREE), TypeError, r"\[\(inputs, targets\)\]"),
            "a pair": (lambda: read((THREE, THREE)), TypeError, r"\[\(inputs, targets\)\]"),
            "a word": (lambda: read("data"), TypeError, "iterable of batches"),
            "a number": (lambda: read(7), TypeError, "iterable of batches"),
            "batches is empty": (lambda: read([]), ValueError, "empty"),
            "minibatches of a Metropolis sampler": (
                lambda: S.run(S.lmc(regression()[0], 0.1), regression()[0].params, regression()[1], steps=2),
                ValueError,
                "4 of the 10 points",
            ),
            "several batches of a Metropolis sampler": (
                lambda: S.run(
                    S.hmc(lambda p, b: regression()[0](p, b), 0.1, data_size=10),
                    regression()[0].params,
                    regression()[1],
                    steps=4,
                ),
                ValueError,
                "more than one batch",
            ),
            "no steps": (lambda: run(steps=0), ValueError, "steps must be at least 1"),
            "a real number of steps": (lambda: run(steps=2.0), TypeError, "steps must be a whole number"),
            "a truth for steps": (lambda: run(steps=True), TypeError, "steps"),
            "thin=0": (lambda: run(steps=5, thin=0), ValueError, "thin"),
            "thin above the steps": (lambda: run(steps=5, thin=6), ValueError, "no draw would be kept"),
            "warmup=-1": (lambda: run(steps=5, warmup=-1), ValueError, "warmup"),
            "a number for progress": (lambda: run(steps=5, progress=3), TypeError, "progress"),
            "a seed": (lambda: run(steps=5, generator=0), TypeError, "generator"),
            "an acceptance without Metropolis": (
                lambda: run(steps=5, warmup=5, target_acceptance=0.5),
                ValueError,
                "Metropolis",
            ),
            "a number for a folder": (lambda: run(steps=5, checkpoint=3), TypeError, "path"),
            "an acceptance without warm-up": (lambda: run_metropolis(target_acceptance=0.5), ValueError, "warm-up"),
            "an acceptance above 1": (
                lambda: run_metropolis(target_acceptance=1.5, warmup=5),
                ValueError,
                "between 0 and 1",
            ),
            "an acceptance with a schedule": (
                lambda: S.run(S.lmc(F, S.Cosine(0.1, 5), data_size=1), ZERO, steps=5, warmup=5, target_acceptance=0.5),
                ValueError,
                "follows a schedule",
            ),
            "a function": (lambda: S.run(F, ZERO, steps=5), TypeError, "sampler must be one of"),
            "a state of another sampler": (
                lambda: S.run(S.baoa(F, 0.1, data_size=1), SGLD.init(ZERO), steps=5),
                TypeError,
                "MomentumState",
            ),
            "one chain for many": (
                lambda: S.run(S.chains(SGLD, 2), SGLD.init(ZERO), steps=5),
                ValueError,
                "has chains",
            ),
            "a generator beside a state": (
                lambda: S.run(SGLD, SGLD.init(ZERO), steps=5, generator=seeded(0)),
                ValueError,
                "leave generator out",
            ),
            "a shuffling loader without a seed that is to be resumed": (
                lambda: S.run(
                    S.sgld(lambda p, b: -p.square().sum(), 0.1, data_size=1),
                    ZERO,
                    DataLoader(TensorDataset(torch.ones(4, 1)), 2, shuffle=True),
                    steps=2,
                    checkpoint=Path("never written"),
                ),
                ValueError,
                "generator=",
            ),
        },
    ),
    Door(
        "diagnostics",
        rows={
            "lambda: diagnostics.rhat(ONE)": (lambda: diagnostics.rhat(ONE), ValueError, "needs 2 chains"),
            "lambda: diagnostics.rhat(ONE[:, :1])": (
                lambda: diagnostics.rhat(ONE[:, :1]),
                ValueError,
                "1 chain of 1 draw",
            ),
            "lambda: diagnostics.ess(TWO[:, :3])": (
                lambda: diagnostics.ess(TWO[:, :3]),
                ValueError,
                "of 4 draws or more",
            ),
            "lambda: diagnostics.ess(TWO, mean)": (lambda: diagnostics.ess(TWO, "mean"), ValueError, "'bulk', 'tail'"),
            "lambda: diagnostics.ess(TWO[0, :, 0])": (
                lambda: diagnostics.ess(TWO[0, :, 0]),
                ValueError,
                r"leading dimensions \(chain, draw\)",
            ),
            "lambda: diagnostics.ess([TWO])": (lambda: diagnostics.ess([TWO]), TypeError, "got list"),
            "lambda: diagnostics.ess({})": (lambda: diagnostics.ess({}), ValueError, "no parameter"),
            "lambda: diagnostics.ess({w: TWO.numpy()})": (
                lambda: diagnostics.ess({"w": TWO.numpy()}),
                TypeError,
                "got ndarray",
            ),
            "lambda: diagnostics.ess(TWO.long())": (lambda: diagnostics.ess(TWO.long()), TypeError, "int64"),
            "lambda: diagnostics.rhat(NAN)": (
                lambda: diagnostics.rhat(NAN),
                ValueError,
                "NaN or Inf in 1 draws",
            ),
            "lambda: diagnostics.rhat(NAN of a number)": (
                lambda: diagnostics.rhat(torch.full((2, 8), torch.nan)),
                ValueError,
                "NaN or Inf in 16 draws",
            ),
            "lambda: diagnostics.rhat({a: TWO, b: TWO[:, 1:]})": (
                lambda: diagnostics.rhat({"a": TWO, "b": TWO[:, 1:]}),
                ValueError,
                "drawn together",
            ),
            "lambda: diagnostics.random_projections(TWO, 0)": (
                lambda: diagnostics.random_projections(TWO, 0),
                ValueError,
                "at least 1",
            ),
            "lambda: diagnostics.random_projections(TWO[:, :1])": (
                lambda: diagnostics.random_projections(TWO[:, :1]),
                ValueError,
                "of 2 draws or more",
            ),
            "lambda: diagnostics.random_projections(zeros(2, 5, 3))": (
                lambda: diagnostics.random_projections(torch.zeros(2, 5, 3)),
                ValueError,
                "2 of the 2 chains do not move",
            ),
            "lambda: diagnostics.random_projections(TWO, generator=0)": (
                lambda: diagnostics.random_projections(TWO, generator=0),
                TypeError,
                "torch.Generator",
            ),
            "lambda: diagnostics.stein_discrepancy(ONE, TWO)": (
                lambda: diagnostics.stein_discrepancy(ONE, TWO),
                ValueError,
                "names and the shapes",
            ),
            "lambda: diagnostics.stein_discrepancy({a: ONE}, {b: ONE})": (
                lambda: diagnostics.stein_discrepancy({"a": ONE}, {"b": ONE}),
                ValueError,
                "names and the shapes",
            ),
            "lambda: diagnostics.stein_discrepancy(ONE[:, :3], ONE[:, :3])": (
                lambda: diagnostics.stein_discrepancy(ONE[:, :3], ONE[:, :3]),
                ValueError,
                "needs four",
            ),
            "lambda: diagnostics.stein_discrepancy(ONE, ONE, 0.0)": (
                lambda: diagnostics.stein_discrepancy(ONE, ONE, 0.0),
                ValueError,
                "scale must be positive",
            ),
            "lambda: diagnostics.stein_discrepancy(ONE, NAN[1:])": (
                lambda: diagnostics.stein_discrepancy(ONE, NAN[1:]),
                ValueError,
                "scores holds NaN",
            ),
            "lambda: diagnostics.stein_discrepancy(0 * ONE, ONE, median)": (
                lambda: diagnostics.stein_discrepancy(0 * ONE, ONE, "median"),
                ValueError,
                "the same",
            ),
            "scores of one batch of three": (
                lambda: diagnostics.scores(LOG_POSTERIOR, chain(), BATCHES[:1]),
                ValueError,
                "8 of 24 points",
            ),
            "scores of no batch": (
                lambda: diagnostics.scores(LOG_POSTERIOR, chain(), []),
                ValueError,
                "0 of 24 points",
            ),
            "scores of a pair": (
                lambda: diagnostics.scores(LOG_POSTERIOR, chain(), BATCHES[0]),
                TypeError,
                "a list of batches",
            ),
            "scores of a tensor": (
                lambda: diagnostics.scores(LOG_POSTERIOR, chain().theta, BATCHES),
                TypeError,
                "got Tensor",
            ),
            "scores of a function": (
                lambda: diagnostics.scores(lambda p, b: 0.0, chain(), BATCHES),
                TypeError,
                "carries N",
            ),
        },
    ),
    Door(
        "empirical",
        rows={
            "a word": (lambda: empirical((drawn(), "net")), ValueError, "'network', 'linearization'"),
            "a tensor": (lambda: empirical((drawn()["0.bias"],)), ValueError, "vectors"),
            "some parameters": (
                lambda: empirical(({"0.bias": drawn()["0.bias"]},)),
                ValueError,
                "linearise with the parameters",
            ),
            "another shape": (
                lambda: empirical(({**drawn(), "0.bias": drawn()["0.bias"][..., :2]},)),
                ValueError,
                "to another network",
            ),
            "NaN": (lambda: empirical(({name: t / 0 for name, t in drawn().items()},)), ValueError, "NaN or Inf"),
            "float32": (lambda: empirical(({name: t.float() for name, t in drawn().items()},)), ValueError, "float32"),
            "whole numbers": (
                lambda: empirical(({name: t.long() for name, t in drawn().items()},)),
                TypeError,
                "int64",
            ),
            "draws of no chains": (
                lambda: empirical(({name: t[0] for name, t in drawn().items()},)),
                ValueError,
                "another network|chain, draw|drawn",
            ),
            "a word for draws": (lambda: empirical(("draws",)), TypeError, "got str"),
            "none": (lambda: empirical((None,)), TypeError, "got NoneType"),
        },
    ),
    Door(
        "vi",
        rows={
            "a family": (
                lambda: S.vi(LOG_POSTERIOR, "full"),
                ValueError,
                "'diagonal', 'dense', 'low_rank_diagonal', 'kronecker'",
            ),
            "no family": (lambda: S.vi(LOG_POSTERIOR, None), ValueError, "family must be one of"),
            "a rank of a diagonal": (lambda: S.vi(LOG_POSTERIOR, rank=3), ValueError, "'diagonal' has no rank"),
            "no rank": (
                lambda: S.vi(LOG_POSTERIOR, "low_rank_diagonal", rank=0),
                ValueError,
                "rank must be at least 1",
            ),
            "a real rank": (
                lambda: S.vi(LOG_POSTERIOR, "low_rank_diagonal", rank=2.5),
                TypeError,
                "rank must be a whole number",
            ),
            "no draws": (lambda: S.vi(LOG_POSTERIOR, draws=0), ValueError, "draws must be at least 1"),
            "no temperature": (lambda: S.vi(LOG_POSTERIOR, temperature=0), ValueError, "co.sampling.optimizer"),
            "a negative temperature": (lambda: S.vi(LOG_POSTERIOR, temperature=-1.0), ValueError, "temperature"),
            "no initial scale": (lambda: S.vi(LOG_POSTERIOR, initial_scale=0.0), ValueError, "initial_scale"),
            "an optimiser with a closure": (
                lambda: S.vi(LOG_POSTERIOR, optimizer=torch.optim.LBFGS),
                ValueError,
                "LBFGS",
            ),
            "an option that Adam has not": (lambda: S.vi(LOG_POSTERIOR, momentum=0.9), TypeError, "momentum"),
            "a number for a flag": (lambda: S.vi(LOG_POSTERIOR, stick_the_landing=1), TypeError, "stick_the_landing"),
            "a function without a size": (lambda: S.vi(lambda params, batch: 0.0), ValueError, "data_size"),
            "a model": (lambda: S.vi(MODEL), (TypeError, ValueError), "log_posterior|data_size"),
            "whole numbers": (lambda: VI.init({"w": torch.arange(3)}), TypeError, "int64"),
            "a module of parameters": (lambda: VI.init(MODEL), TypeError, "module"),
            "chains": (lambda: S.chains(VI, 2).init(START), ValueError, "one fit"),
            "a temperature that falls to 0": (
                lambda: S.vi(LOG_POSTERIOR, temperature=lambda step: 0.0, lr=1e-2).update(STATE, BATCH),
                ValueError,
                "temperature must be positive",
            ),
            "a posterior of a function": (
                lambda: VI.posterior(VI.update(STATE, BATCH)[0], LOG_POSTERIOR),
                TypeError,
                "linearised network",
            ),
            "a posterior at other weights": (
                lambda: VI.posterior(VI.update(STATE, BATCH)[0], gaussian(MODEL)),
                ValueError,
                "has other weights than the mean",
            ),
            "a posterior to another network": (
                lambda: VI.posterior(STATE, gaussian(OTHER)),
                ValueError,
                "linearise with the parameters",
            ),
            "a state of another family": (
                lambda: S.vi(LOG_POSTERIOR, "kronecker", lr=1e-2).update(STATE, BATCH),
                ValueError,
                "another family",
            ),
            "a state of another rank": (
                lambda: S.vi(LOG_POSTERIOR, "low_rank_diagonal", rank=2, lr=1e-2).update(LOW_RANK, BATCH),
                ValueError,
                "another rank",
            ),
            "a posterior of another family": (
                lambda: S.vi(LOG_POSTERIOR, "dense", lr=1e-2).posterior(STATE, gaussian(MODEL)),
                ValueError,
                "another family",
            ),
            "a state of another optimiser": (
                lambda: S.optimizer(torch.optim.RMSprop, LOG_POSTERIOR, lr=1e-2).update(ADAM, BATCH),
                ValueError,
                "another optimiser",
            ),
            "NaN at the start": (
                lambda: S.vi(lambda params, batch: params["weight"].sum() * torch.nan, data_size=3, lr=1e-2).update(
                    S.vi(lambda params, batch: 0.0, data_size=3, lr=1e-2).init({"weight": torch.zeros(2)})
                ),
                ValueError,
                "NaN or Inf at the initial params",
            ),
        },
    ),
    Door(
        "ekf",
        rows={
            "a form": (lambda: S.ekf(LOG_POSTERIOR, "full"), ValueError, "'diagonal', 'dense', 'low_rank_diagonal'"),
            "a Fisher": (lambda: S.ekf(LOG_POSTERIOR, fisher="exact"), ValueError, "'ggn', 'empirical'"),
            "negative noise": (
                lambda: S.ekf(LOG_POSTERIOR, transition_noise=-1.0),
                ValueError,
                "transition_noise must be finite",
            ),
            "no step": (lambda: S.ekf(LOG_POSTERIOR, lr=0.0), ValueError, "step_size|lr"),
            "a word for a step": (lambda: S.ekf(LOG_POSTERIOR, lr="fast"), TypeError, "step_size|lr"),
            "a rank of a diagonal": (lambda: S.ekf(LOG_POSTERIOR, rank=3), ValueError, "'diagonal' has no rank"),
            "no rank": (lambda: S.ekf(LOG_POSTERIOR, "low_rank_diagonal", rank=0), ValueError, "at least 1"),
            "a truth for a rank": (
                lambda: S.ekf(LOG_POSTERIOR, "low_rank_diagonal", rank=True),
                TypeError,
                "whole number",
            ),
            "a model": (lambda: S.ekf(MODEL), TypeError, "whose network it linearises"),
            "a function": (lambda: S.ekf(lambda params, batch: 0.0), TypeError, "whose network it linearises"),
            "no noise": (
                lambda: S.log_posterior(MODEL, co.likelihoods.Gaussian(0.0), data_size=24),
                ValueError,
                "noise is a variance",
            ),
            "a parameter alone": (
                lambda: EKF.init({"weight": START["weight"]}),
                ValueError,
                "params must have the names",
            ),
            "parameters in another order": (
                lambda: EKF.init(dict(reversed(START.items()))),
                ValueError,
                "in this order",
            ),
            "a parameter in float32": (lambda: EKF.init({**START, "bias": torch.zeros(2)}), ValueError, "float32"),
            "chains": (lambda: S.chains(EKF, 2).init(START), ValueError, "deterministic"),
            "fewer targets": (lambda: EKF.update(FILTERED, (BATCH[0], BATCH[1][:3])), ValueError, "3|inputs"),
            "targets of NaN": (lambda: EKF.update(FILTERED, (BATCH[0], BATCH[1] * torch.nan)), ValueError, "NaN"),
            "inputs alone": (lambda: EKF.update(FILTERED, BATCH[0]), TypeError, "inputs, targets|tuple|pair"),
            "a state of another form": (
                lambda: S.ekf(LOG_POSTERIOR, "dense").update(FILTERED, BATCH),
                ValueError,
                "another form",
            ),
            "parameters for a state": (lambda: EKF.update(FILTERED.params, BATCH), TypeError, "state must come from"),
            "a posterior at other weights": (
                lambda: EKF.posterior(
                    FILTERED, co.linearize(nn.Linear(3, 2).double(), BATCH, co.likelihoods.Gaussian(noise=1.0))
                ),
                ValueError,
                "has other weights than the mean",
            ),
            "a posterior of a model": (lambda: EKF.posterior(FILTERED, MODEL), TypeError, "linearised network"),
        },
    ),
]
