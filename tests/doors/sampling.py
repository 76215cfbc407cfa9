"""What samplers, runs of chains, variational families, filters and diagnostics refuse."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

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


def run(**options: Any) -> Any:
    return S.run(SGLD, ZERO, **options)


def resumed(**order: Any) -> Any:
    return run(batches=DataLoader(TensorDataset(X), 2, **order), steps=2, checkpoint=Path("never written"))


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


def gaussian(model: nn.Module, parameters: Any = None) -> co.operators.Linearization:
    return co.linearize(model, linear()[1], co.likelihoods.Gaussian(0.5), parameters)


def moved_subnetwork() -> Any:
    lin = gaussian(MODEL, torch.tensor([0]))
    method = S.vi(S.log_posterior(lin), lr=1e-2)
    return method.posterior(method.update(method.init({"subnetwork": lin.theta}), BATCH)[0], lin)


MODEL, BATCH, LOG_POSTERIOR = linear()
START = LOG_POSTERIOR.params
VI, EKF = S.vi(LOG_POSTERIOR, lr=1e-2), S.ekf(LOG_POSTERIOR)
ONE, TWO = (torch.randn(k, 8, 2, dtype=torch.float64, generator=seeded(k)) for k in (1, 2))


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


STATE, FILTERED = VI.init(START), EKF.init(START)
CLASSES = {"likelihood": "classification", "data_size": 11}

DOORS = [
    Door(
        "samplers",
        rows={
            "no size of the data": (lambda: S.sgld(F, 0.1), "data_size is missing"),
            "two sizes of the data": (lambda: S.sgld(density(), 0.1, data_size=12), "built for 11 points"),
            "no network": (lambda: S.log_posterior(SGLD), TypeError, "model must be an nn.Module.*got SGLD"),
            "an optimiser": (
                lambda: S.optimizer(torch.optim.SGD([ZERO], 0.1), F),
                TypeError,
                "the class of an optimiser",
            ),
            "a line search": (lambda: S.optimizer(torch.optim.LBFGS, F), TypeError, "one gradient per step"),
            "no covariance": (lambda: S.pcn(F, 0.1, data_size=1), "covariance is missing"),
            "a step beyond one": (
                lambda: S.run(S.pcn(F, 1.1, covariance=1.0, data_size=1), ZERO, steps=1),
                r"\(0, 1\]",
            ),
            "a mean of NaN": (lambda: S.pcn(F, 0.1, covariance=1.0, mean=float("nan"), data_size=1), "mean"),
            "a slow schedule": (lambda: S.RobbinsMonro(0.1, gamma=0.5), "gamma must lie in"),
            "a negative preconditioner": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=-torch.ones(4)),
                "positive semidefinite",
            ),
            "chains of chains": (lambda: S.chains(S.chains(S.sgld(F, 0.1, data_size=1), 2), 2), "already"),
        },
    ),
    Door(
        "params of samplers",
        rows={
            "truths": (lambda: started({"x": torch.ones(2, dtype=torch.bool)}), TypeError, "torch.bool"),
            "half precision": (lambda: started({"x": torch.ones(2).bfloat16()}), TypeError, "float32 or float64"),
            "NaN": (lambda: started({"x": torch.tensor([1.0, float("nan")])}), "NaN or Inf"),
            "two dtypes": (lambda: started({"x": torch.ones(2), "y": torch.ones(2, dtype=torch.float64)}), "convert"),
            "a module": (lambda: started(torch.nn.Linear(2, 2)), TypeError, r"dict\(model.named_parameters\(\)\)"),
            "a preconditioner of fewer": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=DENSE).init(ZERO),
                r"preconditioner Dense must have shape \(4, 4\)",
            ),
            "a preconditioner in float32": (
                lambda: S.sgld(F, 0.1, data_size=1, preconditioner=torch.ones(4)).init(ZERO),
                "preconditioner Diagonal is torch.float32",
            ),
            "a preconditioner of another order": (
                lambda: S.sgld(
                    lambda p, b: -p["weight"].sum(),
                    0.1,
                    data_size=1,
                    preconditioner=co.KFAC(gaussian(MODEL)).add_diagonal(1.0),
                ).init({"bias": torch.zeros(2).double(), "weight": torch.zeros(2, 3).double()}),
                "different orders",
            ),
        },
    ),
    Door(
        "chains",
        rows={
            "a state of one chain": (lambda: S.chains(SGLD, 2).update(SGLD.init(ZERO)), "has chains"),
            "another shape": (
                lambda: S.chains(SGLD, 3).init([{"x": torch.ones(2)}] * 2 + [{"x": torch.ones(3)}]),
                "differ in the names or shapes",
            ),
            "none": (lambda: S.chains(SGLD, 3).init([]), "0 starts for 3 chains"),
            "a group that is a number": (
                lambda: S.chains(SGLD, 3, process_group=3),
                TypeError,
                "process_group must be",
            ),
            "not gathered in one process": (lambda: S.chains(SGLD, 3, gather=False), "gather=False is for"),
        },
    ),
    Door(
        "log_posterior",
        rows={
            "points of a linearisation": (lambda: S.log_posterior(lin(), data_size=11), "already has data_size"),
            "a last layer without a linearisation": (
                lambda: S.log_posterior(classifier(), parameters="last_layer", **CLASSES),
                "for parameters=.*pass co.linearize",
            ),
            "fewer targets": (lambda: density()(density().params, (X, Y[:5])), "targets"),
            "more than N": (lambda: density()(density().params, (X.repeat(2, 1), Y.repeat(2))), "data_size=11"),
            "targets that would broadcast": (
                lambda: S.log_posterior(gaussian(MODEL))(START, (BATCH[0], BATCH[1][:, :1])),
                r"2 outputs, but the targets have shape \(24, 1\)",
            ),
            "a parameter alone": (
                lambda: density()({"0.weight": density().params["0.weight"]}, (X, Y)),
                "params must have the names",
            ),
            "parameters in float32": (
                lambda: density()({name: value.float() for name, value in density().params.items()}, (X, Y)),
                r"params\['0.weight'\] is torch.float32",
            ),
        },
    ),
    Door(
        "minibatches",
        rows={
            "fewer points": (lambda: S.minibatches(density(), (X[:5], Y[:5]), 4), "have 5 points"),
            "batches": (lambda: S.minibatches(density(), [(X, Y)], 4), TypeError, "Dataset with a length"),
            "more than all points": (lambda: S.minibatches(density(), (X, Y), 12), "between 1 and the 11"),
        },
    ),
    Door(
        "run",
        rows={
            "batches is empty": (lambda: read([]), "empty"),
            "minibatches of a Metropolis sampler": (
                lambda: S.run(S.lmc(LOG_POSTERIOR, 0.1), START, BATCHES, steps=2),
                "8 of the 24 points",
            ),
            "several batches of a Metropolis sampler": (
                lambda: S.run(S.hmc(lambda p, b: LOG_POSTERIOR(p, b), 0.1, data_size=24), START, BATCHES, steps=4),
                "several batches",
            ),
            "thin above the steps": (lambda: run(steps=5, thin=6), "no draw would be kept"),
            "an acceptance without Metropolis": (lambda: run(steps=5, warmup=5, target_acceptance=0.5), "Metropolis"),
            "a number for a folder": (lambda: run(steps=5, checkpoint=3), TypeError, "path"),
            "a generator beside a state": (
                lambda: S.run(SGLD, SGLD.init(ZERO), steps=5, generator=seeded(0)),
                "leave generator out",
            ),
            "a shuffling loader without a seed that is to be resumed": (lambda: resumed(shuffle=True), "generator="),
            "a loader whose sampler has no seed, to be resumed": (
                lambda: resumed(sampler=RandomSampler(X), generator=seeded(0)),
                r"\(or your own RandomSampler\) a generator=",
            ),
        },
    ),
    Door(
        "diagnostics",
        rows={
            "one chain": (lambda: diagnostics.rhat(ONE), r"\(1, 8\); this needs 2 or more chains"),
            "a series": (lambda: diagnostics.ess(TWO[0, :, 0]), r"leading dimensions \(chain, draw\)"),
            "lengths that differ": (
                lambda: diagnostics.rhat({"a": TWO, "b": TWO[:, 1:]}),
                "unequal numbers of chains and draws",
            ),
            "chains that stand still": (
                lambda: diagnostics.random_projections(torch.zeros(2, 5, 3)),
                "2 of the 2 chains do not move",
            ),
            "scores of other draws": (lambda: diagnostics.stein_discrepancy(ONE, TWO), "names and the shapes"),
            "scores of no batch": (lambda: diagnostics.scores(LOG_POSTERIOR, chain(), []), "0 of 24 points"),
            "scores of a pair": (
                lambda: diagnostics.scores(LOG_POSTERIOR, chain(), BATCHES[0]),
                TypeError,
                "a list of batches",
            ),
        },
    ),
    Door(
        "empirical",
        rows={
            "a tensor": (lambda: empirical((drawn()["0.bias"],)), r"must have shape \(2, 5, 27\).*\(chain, draw, w"),
            "draws of a reprior": (
                lambda: S.empirical(lin(), S.run(S.pcn(S.reprior(MODEL, BATCH, 0.5), 0.3), START, steps=2)),
                "draws of φ",
            ),
            "some parameters": (lambda: empirical(({"0.bias": drawn()["0.bias"]},)), "linearise with the parameters"),
            "another shape": (
                lambda: empirical(({**drawn(), "0.bias": drawn()["0.bias"][..., :2]},)),
                r"must have shape \(2, 5, 4\), got \(2, 5, 2\)",
            ),
            "NaN": (lambda: empirical(({name: t / 0 for name, t in drawn().items()},)), "NaN or Inf"),
            "float32": (lambda: empirical(({name: t.float() for name, t in drawn().items()},)), "float32"),
        },
    ),
    Door(
        "vi",
        rows={
            "a rank of a diagonal": (lambda: S.vi(LOG_POSTERIOR, rank=3), "'diagonal' has no rank"),
            "an option that Adam has not": (lambda: S.vi(LOG_POSTERIOR, momentum=0.9), TypeError, "momentum"),
            "chains": (lambda: S.chains(VI, 2).init(START), "one fit"),
            "a temperature that falls to 0": (
                lambda: S.vi(LOG_POSTERIOR, temperature=lambda step: 0.0, lr=1e-2).update(STATE, BATCH),
                "temperature must be positive",
            ),
            "a posterior at other weights": (
                lambda: VI.posterior(VI.update(STATE, BATCH)[0], gaussian(MODEL)),
                r"has other weights than the mean.*load_state_dict\(state.params",
            ),
            "a subnetwork at other weights": (moved_subnetwork, r"load_state_dict\(lin.unflatten_weights\(state.theta"),
            "NaN at the start": (
                lambda: S.vi(lambda params, batch: params["weight"].sum() * torch.nan, data_size=3, lr=1e-2).update(
                    S.vi(lambda params, batch: 0.0, data_size=3, lr=1e-2).init({"weight": torch.zeros(2)})
                ),
                "NaN or Inf at the initial params",
            ),
        },
    ),
    Door(
        "ekf",
        rows={
            "a rank of a diagonal": (lambda: S.ekf(LOG_POSTERIOR, rank=3), "'diagonal' has no rank"),
            "a parameter alone": (lambda: EKF.init({"weight": START["weight"]}), "params must have the names"),
            "chains": (lambda: S.chains(EKF, 2).init(START), "deterministic"),
        },
    ),
]
