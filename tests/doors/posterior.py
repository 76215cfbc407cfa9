"""What posteriors refuse: their making, their uses and the scores of their predictions."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

import curvops as co
from curvops import metrics
from tests.doors.door import Door
from tests.posterior.trained import problem
from tests.randomness import perceptron

DOUBLE = torch.float64


TRAINING = (torch.linspace(-1, 1, 36, dtype=DOUBLE).sin().view(12, 3), torch.arange(12) % 2)


@cache
def small() -> co.operators.Linearization:
    """Of two classes, with 26 weights."""
    model = perceptron(3, 4, 2)
    return co.linearize(model, TRAINING, "classification")


@cache
def numbers() -> co.operators.Linearization:
    """A regression of 26 weights, far from a mode."""
    x, _ = TRAINING
    model = perceptron(3, 4, 2)
    return co.linearize(model, (x, 9 * x[:, :2]), co.likelihoods.Gaussian(1.0))


@cache
def small_post() -> co.posterior.Laplace:
    return co.laplace(small(), co.GGN, 1.0, check_mode=False)


@cache
def lin(n: int = 30, parameters: str | None = None) -> co.operators.Linearization:
    """Of three classes, at a mode, with 51 weights."""
    model, x, y = problem(n=n)
    return co.linearize(model, (x, y), "classification", parameters)


@cache
def post(curvature: type = co.GGN) -> co.posterior.Laplace:
    return co.laplace(lin(), curvature, 1.0, check_mode=False)


COVARIANCE = co.linalg.Diagonal(torch.linspace(1, 2, 51, dtype=DOUBLE))
TWO = torch.ones(2, 3, dtype=DOUBLE)
HELD_OUT = TWO, torch.tensor([0, 1])
X = torch.linspace(-1, 1, 20, dtype=DOUBLE).view(5, 4)
DRAWS = "samples must be"
SNAPSHOTS = torch.linspace(-1, 1, 9 * 51, dtype=DOUBLE).view(9, 51)
GOOD, LABELS = torch.full((3, 2), 0.5), torch.tensor([0, 1, 0])
SCORES = (metrics.accuracy, metrics.nll, metrics.brier, metrics.ece)
NO_SCORES = {
    "empty": (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "no data"),
    "logits": (torch.tensor([[5.0, -3.0], [0.1, 2.0], [1.0, 7.0]]), LABELS, "were logits given"),
    "a label too large": (GOOD, torch.tensor([0, 1, 2]), "0..1, not 0..2"),
    "lengths": (GOOD, torch.tensor([0, 1]), r"not \(3, 2\) and \(2,\)"),
    "real labels": (GOOD, torch.tensor([0.0, 1.0, 0.0]), "must be integers"),
}


def prior(precision: object = 1.0, **options: Any) -> Callable[[], object]:
    """A posterior of the three classes with this prior."""
    return lambda: co.laplace(lin(), prior_precision=precision, check_mode=False, **options)


DOORS = [
    Door(
        "laplace",
        rows={
            "a prior and held-out data": (
                lambda: co.laplace(small(), prior_precision=1.0, validation=HELD_OUT),
                "leave one of them out",
            ),
            "no held-out data": (lambda: co.laplace(small(), validation=[]), "no points"),
            "a Hessian, and no prior": (
                lambda: co.laplace(numbers(), "hessian"),
                r"left out.*indefinite.*Pass a prior_precision",
            ),
            "a tensor": (lambda: co.laplace(small(), torch.eye(26, dtype=DOUBLE)), TypeError, "co.linalg.Dense"),
            "a part": (lambda: co.laplace(small(), co.GGN(small())[:3, :3]), "shape"),
            "another dtype": (lambda: co.laplace(small(), co.KFAC(small()).to(torch.float32)), "float32.*convert"),
            "a list": (lambda: co.laplace(small(), prior_precision=[1.0] * 26), TypeError, "prior_precision"),
            "a matrix": (lambda: co.laplace(small(), prior_precision=torch.eye(26)), "prior_precision.*26"),
            "a curvature that is not symmetric": (
                lambda: co.laplace(
                    small(), co.linalg.Dense(torch.ones(26, 26, dtype=DOUBLE).triu(1)), 1.0, check_mode=False
                ),
                "is not known to be symmetric.*psd = True.*co.linalg.Dense",
            ),
        },
    ),
    Door(
        "prior of laplace",
        rows={
            "a leftover": (prior({"0.*": 1.0}), "2.weight.*2.bias"),
            "an overlap": (prior({"*": 1.0, "2.bias": 1.0}), "2.bias.*name it once"),
            "an unknown glob": (prior({"*": 1.0, "fc": 1.0}), "'fc' matches none"),
            "a list": (prior({"*": [1.0]}), TypeError, "must be a number"),
            "zero": (prior(0.0), "positive"),
            "not psd": (prior(co.linalg.Dense(torch.eye(51).double())), "psd=True"),
            "a mean's shape": (prior(prior_mean={"*": torch.ones(2)}), "2.*0.weight"),
            "a mean of NaN": (prior(prior_mean=float("nan")), "NaN"),
            "cold": (prior(temperature=0.0), "temperature must be positive"),
            "two means": (lambda: prior(post(), prior_mean=1.0)(), "its own mean"),
            "the same data": (lambda: prior(post())(), "count twice"),
        },
    ),
    Door(
        "a posterior",
        rows={
            "gathering without ranks": (lambda: small_post().predict(TWO, gather=True), "process_group="),
            "an array": (lambda: small_post().predict(TWO, samples=np.zeros((2, 26))), TypeError, DRAWS),
            "one draw": (lambda: small_post().predict(TWO, samples=small_post().sample(1)[0]), DRAWS),
            "draws in float32": (lambda: small_post().predict(TWO, samples=torch.zeros(2, 26)), "float32.*convert"),
            "no grid": (lambda: co.evidence.grid(post(), []), "positive finite numbers"),
            "another mode": (lambda: post().log_evidence(mode="mode"), "one of 'auto', 'map', 'linear'"),
        },
    ),
    Door(
        "predictions",
        rows={
            "integers": (lambda: post().predict(torch.zeros(2, 4).long()), "of torch.int64"),
            "targets in a list": (lambda: post().log_likelihood(X, [0] * 5), TypeError, "y must be a tensor"),
            "one point together": (lambda: post().log_likelihood(X[:1], torch.zeros(1).long(), True), "pairs"),
            "noise of classes": (lambda: post().predict(X, noise=True), "real targets.*Categorical"),
        },
    ),
    Door(
        "predictions of several answers",
        rows={
            "x again": (lambda: post().at(X).predict(X), TypeError, "joint"),
            "pairs by probit": (
                lambda: post().log_likelihood(X, torch.zeros(5).long(), True, link="probit"),
                "joint=True, need link='mc'",
            ),
            "numbers by probit": (
                lambda: co.laplace(numbers(), co.GGN, 1.0, check_mode=False).log_likelihood(
                    TWO, TWO[:, :2], link="probit"
                ),
                "no class probabilities",
            ),
            "functions without draws": (lambda: post().at(X).functions(), "samples=post.sample"),
            "groups and joint": (lambda: post().at(X).predict(joint=True, groups=5), "not both"),
        },
    ),
    Door(
        "log_prob",
        rows={
            "another model": (lambda: post().log_prob(nn.Linear(4, 3)), "lacks '0.weight'"),
            "another dtype": (lambda: post().log_prob(torch.zeros(4, 51)), "float32"),
        },
    ),
    Door(
        "update and penalty",
        rows={
            "a rank of KFAC": (lambda: post().update(post().lin, rank=3, form="kronecker"), "rank=3"),
            "a GGN as KFAC": (lambda: post().update(lin(20), form="kronecker"), "curvature=co.KFAC"),
            "blocks of other kinds": (
                lambda: co.laplace(lin(), co.KFAC, 1.0, check_mode=False).update(
                    lin(20), co.KFAC(lin(20), bias="separate"), form="kronecker", check_mode=False
                ),
                "into different blocks: build both with one bias=",
            ),
            "rows": (lambda: post().penalty(post().mean.expand(2, 51)), r"\(51,\), got shape \(2, 51\)"),
            "another selection": (
                lambda: post().update(lin(20, "last_layer"), check_mode=False),
                "different parameters",
            ),
        },
    ),
    Door(
        "deviations",
        rows={
            "noise of other data": (
                lambda: post().deviations(2, small_post().deviations(2).noise),
                "the noise belongs to 12 points",
            ),
            "a word for noise": (lambda: post().deviations(2, "cg"), TypeError, "noise must be"),
            "a number for a method": (lambda: post().deviations(2, None, 3), "method must be"),
            "sgd of KFAC": (lambda: post(co.KFAC).deviations(2, method="sgd"), "KFAC does not have"),
            "a tensor for the trace": (lambda: post().trace(torch.eye(51)), TypeError, r"\bM\b"),
            "one draw for the trace": (lambda: post().trace(post().curvature, samples=1), "two or more"),
        },
    ),
    Door(
        "GaussianPosterior",
        rows={
            "not a covariance": (lambda: co.posterior.GaussianPosterior.of(lin()), "covariance or its precision"),
            "a model": (
                lambda: co.posterior.GaussianPosterior.of(nn.Linear(4, 3), COVARIANCE),
                TypeError,
                "linearised network",
            ),
            "its evidence": (
                lambda: co.evidence.maximize(co.posterior.GaussianPosterior.of(lin(), COVARIANCE)),
                TypeError,
                "GaussianPosterior",
            ),
        },
    ),
    Door(
        "select and wasserstein",
        rows={
            "no snapshots": (lambda: co.select(lin(), 3, "swag"), "snapshots="),
            "read once": (lambda: [co.select(lin(), 3, "swag", snapshots=g) for g in [iter([])]], "once"),
            "a module": (lambda: co.select(lin(), 3, modules="fc"), "'fc' matches none"),
            "an operator": (lambda: co.select(lin(), 3, prior_precision=co.GGN(lin())), "operator"),
            "twice": (lambda: co.wasserstein(post(), [1, 1]), "twice"),
        },
    ),
    Door(
        "metrics",
        rows={
            **{
                f"{score.__name__} of {wrong}": (lambda score=score, p=p, y=y: score(p, y), words)
                for score in SCORES
                for wrong, (p, y, words) in NO_SCORES.items()
            },
            "one class": (lambda: metrics.auroc(torch.rand(3), torch.ones(3, dtype=torch.bool)), "both classes"),
            "scores of NaN": (
                lambda: metrics.auroc(torch.tensor([0.0, math.nan]), torch.tensor([True, False])),
                "finite",
            ),
            "three classes": (lambda: metrics.auroc(torch.rand(3), torch.tensor([0, 2, 1])), "0 and 1"),
            "one draw": (lambda: metrics.mutual_information(GOOD[None]), "draws"),
        },
    ),
]
