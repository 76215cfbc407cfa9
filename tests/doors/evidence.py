"""What the tuning of hyperparameters refuses."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from tests.doors.door import Door
from tests.posterior.trained import linear_problem

DOUBLE = torch.float64


@cache
def linear() -> tuple[co.posterior.Laplace, Tensor, Tensor]:
    """The linear problem, made once for all rows."""
    return linear_problem()


def post() -> co.posterior.Laplace:
    return linear()[0]


@cache
def network(likelihood: object = 0.3) -> co.posterior.Laplace:
    """Of two layers and two outputs; a number is the noise of a Gaussian."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(25, 4, dtype=DOUBLE)
    if likelihood == "classification":
        return co.laplace(co.linearize(model, (x, x[:, :2].argmax(1)), likelihood), co.GGN, 1.0, check_mode=False)
    likelihood = co.likelihoods.Gaussian(likelihood)
    return co.laplace(co.linearize(model, (x, x[:, :2].sin()), likelihood), co.GGN, 1.0, check_mode=False)


DATA = torch.rand(20, 64, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10


def classifier() -> nn.Linear:
    return nn.Linear(64, 10)


def train(data: object = DATA, epochs: int = 1, **options: Any) -> Callable[[], object]:
    """A training of the classifier."""
    return lambda: co.evidence.train(classifier(), data, "classification", epochs=epochs, **options)


def validate(*options: object, **named: Any) -> Callable[[], object]:
    """A choice by the points of the linear problem, as held-out data."""
    return lambda: co.evidence.validate(*linear(), *options, **named)


def huge() -> nn.Module:
    """Of outputs whose exponentials overflow."""
    model = nn.Linear(64, 1)
    model.weight.data.fill_(50.0)
    return model


DOORS = [
    Door(
        "mackay",
        rows={
            "one draw": (lambda: co.evidence.mackay(post(), 1), "two or more"),
            "noise without draws": (
                lambda: co.evidence.mackay(post(), None, noise=post().deviations(2).noise),
                "leave noise",
            ),
            "few draws of noise": (lambda: co.evidence.mackay(post(), 4, noise=post().deviations(2).noise), "2 draws"),
            "an operator": (
                lambda: co.evidence.mackay(post().with_prior(post().precision.detached_from_weights())),
                "with_prior",
            ),
            "noise of an empirical Fisher": (
                lambda: co.evidence.mackay(
                    co.laplace(post().lin, co.EmpiricalFisher, 1.0, check_mode=False), tune_noise=True
                ),
                "empirical Fisher is not proportional",
            ),
            "noise of classes": (
                lambda: co.evidence.mackay(network("classification"), tune_noise=True),
                "Categorical.*has no noise that is one number",
            ),
            "no curvature": (
                lambda: co.evidence.mackay(co.laplace(post().lin, 0 * co.GGN(post().lin), 1.0, check_mode=False), None),
                "likelihood of the curvature",
            ),
        },
    ),
    Door(
        "maximize",
        rows={
            "twice": (lambda: co.evidence.maximize(network(), ("noise", "noise")), "pair"),
            "a scalar from a vector": (
                lambda: co.evidence.maximize(network().with_prior(torch.ones(network().lin.num_parameters).double())),
                "with_prior",
            ),
            "noise of a sum": (
                lambda: co.evidence.maximize(
                    co.laplace(network().lin, co.low_rank(network().curvature), 1.0, check_mode=False), "noise"
                ),
                "cannot be built at another noise",
            ),
            "noises for more outputs": (lambda: network().with_noise(torch.ones(7)), "a number or a tensor"),
        },
    ),
    Door(
        "fit_mode",
        rows={
            "an infinite loss": (
                lambda: co.fit_mode(huge(), (DATA[0], DATA[1].float().unsqueeze(1)), co.likelihoods.Poisson(), 1.0),
                "or scale the inputs",
            )
        },
    ),
    Door(
        "train",
        rows={
            "a loader and a size": (train([DATA], batch_size=3), "data come in batches"),
            "weight decay twice": (
                train(optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1)),
                "weight decay",
            ),
            "diverging": (
                train(epochs=60, every=100, optimizer=lambda p: torch.optim.SGD(p, 1e30)),
                "smaller learning rate",
            ),
        },
    ),
    Door(
        "validate",
        rows={
            "no targets": (lambda: co.evidence.validate(linear()[0], linear()[1], None), "labels are missing"),
            "layers": (validate("layers"), "scalar"),
            "precisions of a noise": (validate("noise", prior_precisions=[1.0]), "leave them out"),
        },
    ),
]
