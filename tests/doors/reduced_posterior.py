"""What reduced posteriors refuse."""

from functools import cache
from typing import Any

import torch

import curvops as co
from tests.doors.door import Door, Row
from tests.randomness import perceptron

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 12, dtype=DOUBLE).view(4, 3)


@cache
def lin(weight: float = 1.0, n: int = 20, **options: Any) -> co.operators.Linearization:
    """Of one output, with 31 weights."""
    model = perceptron(3, 6, 1)
    x = torch.randn(n, 3, dtype=DOUBLE)
    data = [(x, x[:, :1], torch.full((n,), weight, dtype=DOUBLE))]
    return co.linearize(model, data, co.likelihoods.Gaussian(0.1), weights=True, **options)


def reduced(*args: Any, error: type[Exception] = ValueError, words: str, **options: Any) -> Row:
    return lambda: co.gp.reduced_posterior(lin(), *args, **options), error, words


@cache
def without_rest() -> co.posterior.GaussianPosterior:
    return co.gp.reduced_posterior(lin(), 5, check_mode=False).without_rest()


DOORS = [
    Door(
        "gp.reduced_posterior",
        rows={
            "both": reduced(5, points=X, words="pass the number of features, rank=100, or the inputs points=Z"),
            "features of points": reduced(points=X, features="random", words="points=Z are the features themselves"),
            "candidates of inducing points": reduced(5, candidates=9, words='candidates need features="random"'),
            "no curvature": (lambda: co.gp.reduced_posterior(lin(0.0), 5), "has no curvature at these points"),
            "no room": (lambda: co.gp.reduced_posterior(lin(n=200_000, memory_budget=2**24), 20), "room for 5"),
        },
    ),
    Door(
        "gp.ReducedPosterior",
        rows={
            "a density without the rest": (
                lambda: without_rest().log_prob(lin().theta),
                "a covariance of rank 5 has no density over 31 weights",
            ),
            "a penalty without the rest": (lambda: without_rest().penalty(lin().theta + 1), RuntimeError, "singular"),
            "another noise": (
                lambda: co.gp.reduced_posterior(lin(), 5, check_mode=False).with_noise(2.0),
                "LowRank does not record how it was built: build the posterior again",
            ),
        },
    ),
]
