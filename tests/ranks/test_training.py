"""Training that tunes itself, on data of several ranks: equal seeds give equal weights, for any number of ranks.

Tests `shard.py`.
"""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import curvops as co
from tests.ranks.processes import LONGEST, assert_said, assert_those_of_one_process, run_on_ranks
from tests.ranks.questions import own_points, place_of, seeded
from tests.ranks.test_refusals import outcome


def whole(group: Any = None) -> dict[str, np.ndarray]:
    """Weights and hyperparameters, on all data, by minibatches and of a Dataset."""
    x, y = own_points("labels", *place_of(group))
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
        found[f"{name}: weights"] = post.lin.theta.numpy().copy()
        found[f"{name}: precision"] = post.prior_precision.numpy().copy()
    return found


@pytest.mark.parametrize("size", LONGEST)
def test_weights_are_those_of_one_process(expected: Any, size: int) -> None:
    assert_those_of_one_process(run_on_ranks(size, whole), expected)


def refusals(group: Any) -> dict[str, str]:
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
    assert_said(run_on_ranks(2, refusals), REFUSED)
