"""Everything random that depends on data: equal seeds give equal numbers, for any batches and any number of ranks.

Tests `shard.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import curvops as co
from tests.ranks.processes import LONGEST, alone, assert_said, run_on_ranks
from tests.ranks.questions import DOUBLE, answered, linearise, own_points, seeded
from tests.ranks.test_refusals import outcome

N = 14


def linearisation(size: int = 1, rank: int = 0, group: Any = None, batch: int = N) -> co.operators.Linearization:
    """The problem "labels" of `questions.py`, in batches of so many points."""
    model = linearise("labels").model.module
    x, y = own_points("labels", size, rank)
    batches: Any = list(zip(x.split(batch), y.split(batch))) if len(x) else (x, y)
    return co.linearize(model, batches, "classification", process_group=group)


def curvatures(lin: co.operators.Linearization) -> dict[str, Any]:
    drawn = {"fisher": "mc", "generator": seeded()}
    kernel = co.TangentKernel(lin, 2.0)
    # Roots by eigenvectors are those of definite matrices: at an eigenvalue 0 they are accurate to √eps only.
    return {
        "GGN": co.GGN(lin),
        "GGN of drawn labels": co.GGN(lin, mc_samples=2, generator=seeded()),
        "empirical Fisher": co.EmpiricalFisher(lin),
        "KFAC of drawn labels": co.KFAC(lin, **drawn).add_diagonal(0.5),
        "EKFAC of drawn labels": co.EKFAC(lin, fisher="mc", generator=seeded()).add_diagonal(0.5),
        "diagonal of drawn labels": co.DiagonalGGN(lin, fisher="mc", generator=seeded()),
        "blocks": co.BlockDiagonal(lin).add_diagonal(0.5),
        "GGN and KFAC": 0.5 * co.GGN(lin) + co.KFAC(lin).add_diagonal(0.5),
        "GGN and a diagonal": co.GGN(lin).add_diagonal(0.5),
        "inverse": co.KFAC(lin).add_diagonal(0.5).inverse(),
        "tangent kernel": kernel,
        "tangent kernel and noise": kernel.add_diagonal(torch.tensor(0.5, dtype=DOUBLE)),
    }


def quantities(lin: co.operators.Linearization) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, A in curvatures(lin).items():
        yield f"{name}: matrix", A.to_dense
        yield f"{name}: draws", lambda A=A: co.linalg.draw(A, 4, seeded())
        if name in ("GGN", "tangent kernel"):  # probes: of weights, and of data
            for estimate in ("trace", "diagonal", "frobenius_norm"):
                yield f"{name}: {estimate}", lambda A=A, e=estimate: getattr(co.linalg, e)(A, generator=seeded()).value
            yield f"{name}: logdet", lambda A=A: co.linalg.logdet(A, shift=1.0, generator=seeded()).value
            yield f"{name}: density", lambda A=A: A.spectral_density(probes=3, generator=seeded()).density
            yield f"{name}: sketch", lambda A=A: co.low_rank(A, 5, generator=seeded()).to_dense()
    post = co.laplace(lin, co.GGN, prior_precision=3.0, check_mode=False)
    x = torch.randn(6, 4, generator=seeded(), dtype=DOUBLE)
    yield "posterior: draws", lambda: post.sample(3, seeded(), rtol=1e-12)
    for method in ("cg", "dual"):
        yield (
            f"posterior: {method}",
            lambda m=method: post.deviations(3, method=m, generator=seeded(), rtol=1e-12).draws,
        )
    yield "posterior: functions", lambda: post.functions(x, 3, generator=seeded())
    yield "posterior: uncertainty", lambda: post.uncertainty(x, generator=seeded()).total
    yield "posterior: trace", lambda: post.trace(co.GGN(lin), samples=4, generator=seeded()).value
    yield "posterior: probabilities", lambda: post.probabilities(x, link="mc", generator=seeded())
    yield "posterior: evidence", lambda: post.log_evidence(generator=seeded()).value
    yield "mackay", lambda: co.evidence.mackay(post, samples=4, steps=3, generator=seeded()).prior_precision
    yield "subsample", lambda: co.GGN(co.subsample(lin, 5, generator=seeded())).to_dense()
    yield "selection", lambda: co.select(lin, 5, score="random", generator=seeded())
    for features in ("random", "leading"):
        yield (
            f"features, {features}",
            lambda f=features: (
                co.gp.reduced_posterior(lin, 3, prior_precision=3.0, features=f, generator=seeded())
                .predict(x)
                .covariance_matrix
            ),
        )


def answers(lin: co.operators.Linearization) -> dict[str, np.ndarray]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return answered(quantities(lin))


def whole() -> dict[str, np.ndarray]:
    """The answers of one process."""
    return answers(linearisation())


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    return alone(trained)


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], where: str) -> None:
    assert found.keys() == expected.keys()
    errors = {name: np.abs(found[name] - truth).max() / np.abs(truth).max() for name, truth in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error < 1e-10}
    assert not wrong, (where, wrong)


def test_batches_change_nothing(expected) -> None:
    assert_equal(answers(linearisation(batch=3)), expected, "batches of 3")


def answers_of_rank(group: Any, size: int) -> dict[str, np.ndarray]:
    return answers(linearisation(size, dist.get_rank(group), group, 2)) | trained(size, dist.get_rank(group), group)


@pytest.mark.parametrize("size", LONGEST)
def test_ranks_change_nothing(expected, weights, size) -> None:
    for rank, found in run_on_ranks(size, answers_of_rank, size).items():
        assert_equal(found, expected | weights, f"rank {rank} of {size}")


def trained(size: int = 1, rank: int = 0, group: Any = None) -> dict[str, np.ndarray]:
    """Weights and hyperparameters of training that tunes itself, on all data, by minibatches and of a Dataset."""
    x, y = own_points("labels", size, rank)
    found = {}
    settings: dict[str, tuple[Any, dict[str, Any]]] = {
        "all points": ((x, y), {}),
        "minibatches": ((x, y), {"batch_size": 4, "over": "scalar"}),
        "a Dataset": (TensorDataset(x, y), {"batch_size": 5, "curvature": co.DiagonalGGN}),
    }
    for name, (points, options) in settings.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        options = {"epochs": 6, "every": 3, "generator": seeded(), "process_group": group} | options
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", co.errors.ModeWarning)
            post = co.evidence.train(model, points, "classification", prior_precision=2.0, **options)
        found[f"training, {name}: weights"] = post.lin.theta.numpy().copy()
        found[f"training, {name}: precision"] = post.prior_precision.numpy().copy()
    return found


def refusals_of_training(group: Any) -> dict[str, str]:
    rank = dist.get_rank(group)
    x, y = own_points("labels", 2, rank)

    def train(points: Any = (x, y), model: nn.Module | None = None, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double() if model is None else model
        options = {"epochs": 2, "every": 1, "generator": seeded(), "process_group": group} | options
        return co.evidence.train(model, points, "classification", **options).lin.theta

    torch.manual_seed(rank)
    other, normalised = nn.Linear(4, 3).double(), nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    normalised.load_state_dict({name: torch.ones_like(value) for name, value in normalised.state_dict().items()})
    return {
        "batches of one rank": outcome(lambda: train([(x, y)])),
        "other models": outcome(lambda: train(model=other)),
        "other seeds": outcome(lambda: train(batch_size=4, epochs=20, every=20, generator=seeded(rank))),
        "statistics of batches": outcome(lambda: train(model=normalised)),
        "not finite": outcome(lambda: train(optimizer=lambda p: torch.optim.SGD(p, 1e200), epochs=5, every=9)),
        "a step": outcome(lambda: train(optimizer=lambda p: torch.optim.SGD(p, 0.1 * (1 + rank)), epochs=9, every=9)),
    }


REFUSED = {
    "batches of one rank": "ValueError: over a process group pass this rank's points",
    "other models": "RanksDifferError: the network's tensors",
    "other seeds": "RanksDifferError: the generator of minibatches",
    "statistics of batches": "RanksDifferError: the network's tensors",
    "not finite": "ValueError: the loss is not finite",
    "a step": "RanksDifferError",
}


def test_training_that_differs_between_ranks_is_named() -> None:
    assert_said(run_on_ranks(2, refusals_of_training), REFUSED)
