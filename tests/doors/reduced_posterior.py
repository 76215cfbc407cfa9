"""What reduced posteriors refuse."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import nn

import curvops as co
from tests.doors.door import Door, Row

DOUBLE = torch.float64
X = torch.linspace(-1, 1, 12, dtype=DOUBLE).view(4, 3)


@cache
def lin(weight: float = 1.0, n: int = 20, **options: Any) -> co.operators.Linearization:
    """Of one output, with 31 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)).double()
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
            "a module": (
                lambda: co.gp.reduced_posterior(nn.Linear(3, 1), 5),
                TypeError,
                "lin must be a linearised network",
            ),
            "an operator": (lambda: co.gp.reduced_posterior(co.GGN(lin()), 5), TypeError, "got GGN"),
            "nothing": reduced(words="pass the number of features, rank=100, or the inputs points=Z"),
            "both": reduced(5, points=X, words="pass the number of features, rank=100, or the inputs points=Z"),
            "no features": reduced(0, words="rank must be at least 1, got 0"),
            "more features than points": reduced(21, words="at most 20: J has 20 rows and 31 columns, got 21"),
            "part of a feature": reduced(
                2.5, error=TypeError, words="rank must be a whole number of features, got 2.5"
            ),
            "a truth": reduced(True, error=TypeError, words="rank must be a whole number of features"),
            "a word": reduced("5", error=TypeError, words="rank must be a whole number of features"),
            "unknown features": reduced(5, features="best", words="features must be one of 'inducing', 'leading'"),
            "features of points": reduced(points=X, features="random", words="points=Z are the features themselves"),
            "no points": reduced(points=X[:0], words="points=Z has no points"),
            "points of another size": reduced(points=X[:, :2], words="the model failed on inputs"),
            "points with NaN": reduced(points=X * math.nan, words="NaN or infinite"),
            "points as a number": reduced(points=3, error=TypeError, words="Inputs are a tensor"),
            "few candidates": reduced(5, features="random", candidates=4, words="candidates must lie between 5 and"),
            "candidates of inducing points": reduced(5, candidates=9, words='candidates need features="random"'),
            "a prior of zero": reduced(5, 0.0, words="prior_precision must be positive and finite, got 0"),
            "a prior operator": reduced(
                5, co.linalg.Diagonal(torch.ones(31)), error=TypeError, words="prior_precision"
            ),
            "a short prior": reduced(5, torch.ones(3, dtype=DOUBLE), words="prior_precision.*31 entries"),
            "a mean with NaN": reduced(5, 1.0, math.nan, words="prior_mean holds NaN"),
            "a temperature of zero": reduced(5, temperature=0, words="temperature must be positive"),
            "a seed": reduced(5, generator=3, error=TypeError, words="torch.Generator"),
            "check_mode": reduced(5, check_mode="no", error=TypeError, words="check_mode"),
            "no curvature": (
                lambda: co.gp.reduced_posterior(lin(0.0), 5),
                ValueError,
                "Gaussian has no curvature at the outputs of these points",
            ),
            "no room": (
                lambda: co.gp.reduced_posterior(lin(n=200_000, memory_budget=2**24), 20),
                ValueError,
                r"20 features of 31 weights and 200,000 outputs need .* has room for .*, or \d features",
            ),
        },
    ),
    Door(
        "gp.ReducedPosterior",
        rows={
            "a density without the rest": (
                lambda: without_rest().log_prob(lin().theta),
                ValueError,
                "rank 5 in 31 weights, so this Gaussian has no density",
            ),
            "a penalty without the rest": (lambda: without_rest().penalty(lin().theta + 1), RuntimeError, "singular"),
            "the error under another prior": (
                lambda: (
                    co.gp.reduced_posterior(lin(), 5, check_mode=False)
                    .with_prior(torch.linspace(1, 2, 31, dtype=DOUBLE))
                    .error
                ),
                ValueError,
                "call co.gp.reduced_posterior again",
            ),
            "another noise": (
                lambda: co.gp.reduced_posterior(lin(), 5, check_mode=False).with_noise(2.0),
                ValueError,
                "LowRank does not record how it was built from its linearisation: build the posterior again",
            ),
        },
    ),
]
