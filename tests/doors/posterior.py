"""What posteriors refuse: their making, their uses and the scores of their predictions."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import nn

import curvops as co
from curvops import metrics
from tests.doors.door import Door
from tests.posterior.trained import problem

DOUBLE = torch.float64


TRAINING = (torch.linspace(-1, 1, 36, dtype=DOUBLE).sin().view(12, 3), torch.arange(12) % 2)


@cache
def small() -> co.operators.Linearization:
    """Of two classes, with 26 weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return co.linearize(model, TRAINING, "classification")


@cache
def numbers() -> co.operators.Linearization:
    """A regression of 26 weights, far from a mode."""
    x, _ = TRAINING
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
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


@cache
def after() -> co.posterior.Laplace:
    """The posterior of a second task."""
    return post().update(lin(20), check_mode=False)


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
    "NaN": (GOOD * float("nan"), LABELS, "sum to 1"),
    "a label too large": (GOOD, torch.tensor([0, 1, 2]), "0..1, not 0..2"),
    "a negative label": (GOOD, torch.tensor([0, -1, 1]), "0..1, not -1..1"),
    "lengths": (GOOD, torch.tensor([0, 1]), r"not \(3, 2\) and \(2,\)"),
    "real labels": (GOOD, torch.tensor([0.0, 1.0, 0.0]), "must be integers"),
    "one row": (GOOD[0], LABELS, r"not \(2,\) and \(3,\)"),
}
PAIRS, CHOSEN = torch.linspace(-1, 1, 72, dtype=DOUBLE).view(12, 2, 3), torch.arange(12) % 2


def rewards(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def preferences(model: nn.Module, pairs: torch.Tensor, targets: torch.Tensor) -> co.operators.Linearization:
    return co.linearize(model, (pairs, targets), co.likelihoods.BradleyTerry())


INTERVALS = {
    "step_size": ("be positive and finite", [0, math.inf]),
    "momentum": (r"lie in \[0, 1\)", [-1e-300, 1]),
    "final": (r"lie in \(0, 1\]", [0, 1 + 1e-12]),
    "averaging": (r"lie in \(0, 1\]", [0, 1 + 1e-12]),
}

DOORS = [
    Door(
        "laplace",
        rows={
            "a module": (lambda: co.laplace(nn.Linear(3, 2)), TypeError, "linearised network"),
            "a curvature first": (lambda: co.laplace(co.GGN(small())), TypeError, "linearised network"),
            "another package's word": (lambda: co.laplace(small(), "kron"), ValueError, "one of 'kfac'.*got 'kron'"),
            "a prior and held-out data": (
                lambda: co.laplace(small(), prior_precision=1.0, validation=HELD_OUT),
                ValueError,
                "leave one of them out",
            ),
            "held-out data by position": (
                lambda: co.laplace(small(), co.KFAC, HELD_OUT),
                TypeError,
                "prior_precision must be a positive number",
            ),
            "held-out inputs alone": (lambda: co.laplace(small(), validation=TWO), TypeError, "inputs, targets"),
            "held-out targets of another length": (
                lambda: co.laplace(small(), validation=(TWO, torch.zeros(3).long())),
                ValueError,
                "2 inputs, but 3 targets",
            ),
            "held-out targets of another kind": (
                lambda: co.laplace(small(), validation=(TWO, TWO)),
                (TypeError, ValueError),
                "targets",
            ),
            "no held-out data": (lambda: co.laplace(small(), validation=[]), ValueError, "no points"),
            "a share of the data": (lambda: co.laplace(small(), validation=0.2), TypeError, "float"),
            "the training data as held-out ones": (
                lambda: co.laplace(small(), validation=TRAINING),
                ValueError,
                "training data",
            ),
            "a curvature without data, and no prior": (
                lambda: co.laplace(numbers(), 0 * co.GGN(numbers())),
                ValueError,
                r"left out.*validation=\(x, y\).*likelihood of the curvature",
            ),
            "a Hessian, and no prior": (
                lambda: co.laplace(numbers(), "hessian"),
                ValueError,
                r"left out.*indefinite.*Pass a prior_precision",
            ),
            "a link that is no name": (
                lambda: co.laplace(small()).probabilities(TWO, 1),
                ValueError,
                "link must be one of",
            ),
            "the prior second": (lambda: co.laplace(small(), 1.0), TypeError, "curvature.*1.0"),
            "a tensor": (lambda: co.laplace(small(), torch.eye(26, dtype=DOUBLE)), TypeError, "co.linalg.Dense"),
            "a function": (lambda: co.laplace(small(), lambda lin: co.GGN(lin)), TypeError, "call it"),
            "another class": (lambda: co.laplace(small(), nn.Linear), TypeError, "not an operator class"),
            "a kernel": (lambda: co.laplace(small(), co.TangentKernel), ValueError, "shape"),
            "a part": (lambda: co.laplace(small(), co.GGN(small())[:3, :3]), ValueError, "shape"),
            "another dtype": (
                lambda: co.laplace(small(), co.KFAC(small()).to(torch.float32)),
                ValueError,
                "float32.*convert",
            ),
            "a prior in words": (lambda: co.laplace(small(), prior_precision="1"), TypeError, "prior_precision.*'1'"),
            "a list": (lambda: co.laplace(small(), prior_precision=[1.0] * 26), TypeError, "prior_precision"),
            "a truth": (lambda: co.laplace(small(), prior_precision=True), TypeError, "prior_precision"),
            "a matrix": (lambda: co.laplace(small(), prior_precision=torch.eye(26)), ValueError, "prior_precision.*26"),
            "check_mode": (lambda: co.laplace(small(), check_mode="no"), TypeError, "check_mode"),
            **{
                f"a prior of {prior}": (
                    lambda prior=prior: co.laplace(lin(), prior_precision=prior),
                    ValueError,
                    "prior_precision",
                )
                for prior in (-1.0, 0.0, math.nan, math.inf, torch.ones(3), torch.zeros(51))
            },
            "a negative prior, named": (
                lambda: co.laplace(lin(), prior_precision=-1.0),
                ValueError,
                "prior_precision must be positive and finite, got -1",
            ),
            "a curvature that is not symmetric": (
                lambda: co.laplace(
                    small(), co.linalg.Dense(torch.ones(26, 26, dtype=DOUBLE).triu(1)), 1.0, check_mode=False
                ),
                ValueError,
                "symmetric",
            ),
        },
    ),
    Door(
        "prior of laplace",
        rows={
            "a leftover": (
                lambda: co.laplace(lin(), prior_precision={"0.*": 1.0}, check_mode=False),
                ValueError,
                "2.weight.*2.bias",
            ),
            "an overlap": (
                lambda: co.laplace(lin(), prior_precision={"*": 1.0, "2.bias": 1.0}, check_mode=False),
                ValueError,
                "2.bias.*both",
            ),
            "an unknown glob": (
                lambda: co.laplace(lin(), prior_precision={"*": 1.0, "fc": 1.0}, check_mode=False),
                ValueError,
                "'fc' matches none",
            ),
            "a negative one": (
                lambda: co.laplace(lin(), prior_precision={"0.*": 1.0, "2.*": -1.0}, check_mode=False),
                ValueError,
                "positive",
            ),
            "a key": (
                lambda: co.laplace(lin(), prior_precision={0: 1.0}, check_mode=False),
                TypeError,
                "glob over parameter names",
            ),
            "a list": (
                lambda: co.laplace(lin(), prior_precision={"*": [1.0]}, check_mode=False),
                TypeError,
                "must be a number",
            ),
            "an empty mapping": (
                lambda: co.laplace(lin(), prior_precision={}, check_mode=False),
                ValueError,
                "no glob matches",
            ),
            "zero": (lambda: co.laplace(lin(), prior_precision=0.0, check_mode=False), ValueError, "positive"),
            "infinite": (
                lambda: co.laplace(lin(), prior_precision=float("inf"), check_mode=False),
                ValueError,
                "positive and finite",
            ),
            "a matrix": (
                lambda: co.laplace(lin(), prior_precision=torch.eye(51), check_mode=False),
                ValueError,
                "co.linalg.Dense",
            ),
            "not psd": (
                lambda: co.laplace(lin(), prior_precision=co.linalg.Dense(torch.eye(51).double()), check_mode=False),
                ValueError,
                "psd=True",
            ),
            "a small operator": (
                lambda: co.laplace(lin(), prior_precision=co.linalg.Diagonal(torch.ones(3)), check_mode=False),
                ValueError,
                "51, 51",
            ),
            "single precision": (
                lambda: co.laplace(lin(), prior_precision=co.linalg.Diagonal(torch.ones(51)), check_mode=False),
                ValueError,
                "convert",
            ),
            "a mean's length": (
                lambda: co.laplace(lin(), prior_mean=torch.ones(3), check_mode=False),
                ValueError,
                "51 entries.*lin.flatten",
            ),
            "a mean's shape": (
                lambda: co.laplace(lin(), prior_mean={"*": torch.ones(2)}, check_mode=False),
                ValueError,
                "2.*0.weight",
            ),
            "a mean of NaN": (lambda: co.laplace(lin(), prior_mean=float("nan"), check_mode=False), ValueError, "NaN"),
            "check_mode by position": (
                lambda: co.laplace(lin(), prior_mean=False, check_mode=False),
                TypeError,
                "prior_mean must be a number",
            ),
            "cold": (
                lambda: co.laplace(lin(), temperature=0.0, check_mode=False),
                ValueError,
                "temperature must be positive",
            ),
            "a word": (lambda: co.laplace(lin(), temperature="cold", check_mode=False), TypeError, "temperature"),
            "a class": (
                lambda: co.laplace(lin(), prior_precision=co.GGN, check_mode=False),
                TypeError,
                "operator or an earlier posterior",
            ),
            "two means": (
                lambda: co.laplace(lin(), prior_precision=post(), prior_mean=1.0, check_mode=False),
                ValueError,
                "its own mean",
            ),
            "the same data": (
                lambda: co.laplace(lin(), prior_precision=post(), check_mode=False),
                ValueError,
                "count twice",
            ),
        },
    ),
    Door(
        "a posterior",
        rows={
            "no draws": (lambda: small_post().sample(0), ValueError, "k must be at least 1"),
            "negative": (lambda: small_post().sample(-1), ValueError, "k must be at least 1"),
            "a fraction of a draw": (lambda: small_post().sample(2.5), TypeError, "k must be a whole number"),
            "a float": (lambda: small_post().sample(2.0), TypeError, "k must be a whole number"),
            "a shape": (lambda: small_post().sample((2, 3)), TypeError, "k must be a whole number"),
            "a truth": (lambda: small_post().sample(True), TypeError, "k must be a whole number"),
            "a seed": (lambda: small_post().sample(3, generator=0), TypeError, "manual_seed"),
            "rtol of a sample": (lambda: small_post().sample(3, rtol=-1.0), ValueError, "rtol"),
            "rtol of zero": (lambda: small_post().sample(3, rtol=0.0), ValueError, "rtol"),
            "rtol in words": (lambda: small_post().sample(3, rtol="low"), TypeError, "rtol"),
            "draws as joint": (lambda: small_post().predict(TWO, small_post().sample(2)), TypeError, "joint"),
            "gathering without ranks": (lambda: small_post().predict(TWO, gather=True), ValueError, "process_group="),
            "gathering as a number": (lambda: small_post().predict(TWO, gather=2), TypeError, "gather"),
            "a number of draws": (lambda: small_post().predict(TWO, samples=100), TypeError, f"{DRAWS}.*post.sample"),
            "an array": (lambda: small_post().predict(TWO, samples=np.zeros((2, 26))), TypeError, DRAWS),
            "one draw": (lambda: small_post().predict(TWO, samples=small_post().sample(1)[0]), ValueError, DRAWS),
            "an empty block": (
                lambda: small_post().predict(TWO, samples=torch.zeros(0, 26, dtype=DOUBLE)),
                ValueError,
                DRAWS,
            ),
            "draws in float32": (
                lambda: small_post().predict(TWO, samples=torch.zeros(2, 26)),
                ValueError,
                "float32.*convert",
            ),
            "rtol of predict": (lambda: small_post().predict(TWO, rtol=float("nan")), ValueError, "rtol"),
            "inputs as a list": (
                lambda: small_post().predict(TWO.tolist()),
                TypeError,
                "convert lists with torch.tensor",
            ),
            "a link": (lambda: small_post().probabilities(TWO, "logit"), ValueError, "probit"),
            "draws of probabilities": (lambda: small_post().probabilities(TWO, "mc", 100), TypeError, DRAWS),
            "seed of probabilities": (
                lambda: small_post().probabilities(TWO, "mc", generator=0),
                TypeError,
                "manual_seed",
            ),
            "rtol of the evidence": (lambda: small_post().log_evidence(-0.1), ValueError, "rtol"),
            "seed of the evidence": (lambda: small_post().log_evidence(generator=1), TypeError, "manual_seed"),
            "rtol of the count": (lambda: small_post().effective_parameters(0), ValueError, "rtol"),
            "a prior in words": (lambda: small_post().with_prior("1"), TypeError, "prior_precision"),
            "a negative prior": (lambda: small_post().with_prior(-1), ValueError, "prior_precision"),
            "a grid of one": (lambda: co.evidence.grid(small_post(), 1.0), TypeError, "prior_precisions"),
            "a grid of words": (lambda: co.evidence.grid(small_post(), ["1"]), TypeError, "prior_precisions"),
            "a grid of matrices": (
                lambda: co.evidence.grid(small_post(), torch.ones(2, 2)),
                ValueError,
                "prior_precisions",
            ),
            "a grid with infinity": (
                lambda: co.evidence.grid(small_post(), [1, float("inf")]),
                ValueError,
                "prior_precisions",
            ),
            "seed of a grid": (lambda: co.evidence.grid(small_post(), [1.0], generator=0), TypeError, "manual_seed"),
            "grid of no posterior": (lambda: co.evidence.grid(small_post().lin, [1.0]), TypeError, "posterior"),
            "maximize of none": (lambda: co.evidence.maximize(small_post().lin), TypeError, "posterior"),
            "xtol": (lambda: co.evidence.maximize(small_post(), xtol=0.0), ValueError, "xtol"),
            "rtol of maximize": (lambda: co.evidence.maximize(small_post(), rtol=float("inf")), ValueError, "rtol"),
            "a link of a mode": (lambda: post().probabilities(X, link="logit"), ValueError, "probit"),
            "short draws": (
                lambda: post().predict(X, samples=torch.zeros(2, 3, dtype=DOUBLE)),
                ValueError,
                r"\(k, 51\)",
            ),
            "a curvature of some weights": (
                lambda: co.laplace(lin(), curvature=co.GGN(lin())[:3, :3]),
                ValueError,
                "curvature",
            ),
            "no grid": (lambda: co.evidence.grid(post(), []), ValueError, "positive finite numbers"),
            "a linear mode of data counted twice": (
                lambda: co.laplace(lin(), co.GGN(lin()) + co.GGN(lin()), 1.0, check_mode=False).linear_mode(),
                ValueError,
                "counts data 2 times",
            ),
            "a short start of a linear mode": (
                lambda: post().linear_mode(x0=torch.zeros(3, dtype=DOUBLE)),
                ValueError,
                "x0 must be",
            ),
            "a word to start from": (lambda: post().linear_mode(x0="x"), TypeError, "x0 must be a tensor"),
            "rtol of a linear mode": (lambda: post().linear_mode(rtol=0.0), ValueError, "rtol"),
            "no columns of a plan": (lambda: post().plan(0), ValueError, "columns must be at least 1"),
            "half a column of a plan": (lambda: post().plan(2.5), TypeError, "columns must be a whole number"),
            "no columns of a precision's plan": (
                lambda: post().precision.plan(0),
                ValueError,
                "columns must be at least 1",
            ),
            "half a column of a precision's plan": (
                lambda: post().precision.plan(2.5),
                TypeError,
                "columns must be a whole number",
            ),
        },
    ),
    Door(
        "predictions",
        rows={
            "another shape": (lambda: post().predict(torch.zeros(2, 7)), ValueError, r"failed on inputs \(2, 7\)"),
            "integers": (lambda: post().predict(torch.zeros(2, 4).long()), ValueError, "integer dtype|floating"),
            "text": (lambda: post().predict(np.array([["a"]])), TypeError, "cannot become a tensor"),
            "one target too many": (lambda: post().log_likelihood(X, torch.zeros(6).long()), ValueError, "5 inputs.*6"),
            "a class too high": (lambda: post().log_likelihood(X, torch.full((5,), 3)), ValueError, "3"),
            "targets in a list": (lambda: post().log_likelihood(X, [0] * 5), TypeError, "y must be a tensor"),
            "real targets": (
                lambda: post().log_likelihood(X, torch.zeros(5, dtype=DOUBLE)),
                (TypeError, ValueError),
                "targets",
            ),
            "one point together": (
                lambda: post().log_likelihood(X[:1], torch.zeros(1).long(), True),
                ValueError,
                "pairs",
            ),
            "joint by a number": (lambda: post().log_likelihood(X, torch.zeros(5).long(), 1), TypeError, "joint"),
            "another link": (lambda: post().probabilities(X, "logit"), ValueError, "'bridge_norm', 'network'"),
            "noise of classes": (lambda: post().predict(X, noise=True), ValueError, "Gaussian likelihood.*Categorical"),
            "noise in numbers": (lambda: post().predict(X, noise=0.1), TypeError, "noise"),
            "no functions": (lambda: post().functions(X, 0), ValueError, "at least 1"),
            "functions by position": (lambda: post().functions(3, X), TypeError, "number of draws"),
            "a seed": (lambda: post().uncertainty(X, generator=0), TypeError, "manual_seed"),
            "wrong draws": (lambda: post().uncertainty(X, torch.zeros(2, 3)), ValueError, "samples must be"),
            "NaN in x": (lambda: post().uncertainty(X * math.nan), ValueError, "NaN"),
        },
    ),
    Door(
        "predictions of several answers",
        rows={
            "no x": (lambda: post().at(), TypeError, "'x'"),
            "a number of draws": (lambda: post().at(X, 100), TypeError, f"{DRAWS}.*post.sample"),
            "short draws": (lambda: post().at(X, torch.zeros(2, 3, dtype=DOUBLE)), ValueError, r"\(k, 51\)"),
            "draws in float32": (
                lambda: post().at(X, post().mean.float().unsqueeze(0)),
                ValueError,
                "float32.*convert",
            ),
            "rtol": (lambda: post().at(X, rtol=0.0), ValueError, "rtol"),
            "gathering as a number": (lambda: post().at(X, gather=2), TypeError, "gather"),
            "gathering without ranks": (lambda: post().at(X, gather=True).predict(), ValueError, "process_group="),
            "another shape": (lambda: post().at(torch.zeros(2, 7)).predict(), ValueError, r"failed on inputs \(2, 7\)"),
            "NaN in x": (lambda: post().at(X * math.nan).probabilities(), ValueError, "NaN"),
            "x again": (lambda: post().at(X).predict(X), TypeError, "joint"),
            "x as a link": (lambda: post().at(X).probabilities(X), (TypeError, ValueError), "link"),
            "another link": (lambda: post().at(X).probabilities("logit"), ValueError, "'bridge_norm', 'network'"),
            "a score by another link": (
                lambda: post().log_likelihood(X, torch.zeros(5).long(), link="bridge"),
                ValueError,
                "one of 'mc', 'probit', got 'bridge'",
            ),
            "pairs by probit": (
                lambda: post().log_likelihood(X, torch.zeros(5).long(), True, link="probit"),
                ValueError,
                "joint=True, need link='mc'",
            ),
            "numbers by probit": (
                lambda: co.laplace(numbers(), co.GGN, 1.0, check_mode=False).log_likelihood(
                    TWO, TWO[:, :2], link="probit"
                ),
                ValueError,
                "no class probabilities",
            ),
            "held-out data by another link": (
                lambda: co.evidence.validate(post(), X, torch.zeros(5).long(), link="bridge"),
                ValueError,
                "one of 'probit', 'mc', got 'bridge'",
            ),
            "a seed": (lambda: post().at(X).uncertainty(0), TypeError, "manual_seed"),
            "functions without draws": (lambda: post().at(X).functions(), ValueError, "samples=post.sample"),
            "one target too many": (
                lambda: post().at(X).log_likelihood(torch.zeros(6).long()),
                ValueError,
                "5 inputs.*6",
            ),
            "noise of classes": (lambda: post().at(X).predict(noise=True), ValueError, "Gaussian.*Categorical"),
            "groups and joint": (lambda: post().at(X).predict(joint=True, groups=5), ValueError, "not both"),
        },
    ),
    Door(
        "log_prob",
        rows={
            "another model": (lambda: post().log_prob(nn.Linear(4, 3)), ValueError, "lacks '0.weight'"),
            "a missing name": (lambda: post().log_prob({"0.weight": torch.zeros(6, 4).double()}), ValueError, "0.bias"),
            "another length": (
                lambda: post().log_prob(torch.zeros(2, 3).double()),
                ValueError,
                r"vector \(51,\) or rows \(k, 51\), got shape \(2, 3\)",
            ),
            "rows of rows": (lambda: post().log_prob(post().mean.expand(2, 3, 51)), ValueError, r"shape \(2, 3, 51\)"),
            "another dtype": (lambda: post().log_prob(torch.zeros(4, 51)), ValueError, "float32"),
        },
    ),
    Door(
        "update and penalty",
        rows={
            "a form": (lambda: post().update(post().lin, form="kfac"), ValueError, "'low_rank_diagonal', 'kronecker'"),
            "a rank of KFAC": (lambda: post().update(post().lin, rank=3, form="kronecker"), ValueError, "rank=3"),
            "a rank of 1.5": (lambda: post().update(lin(), rank=1.5), TypeError, "whole number"),
            "a GGN as KFAC": (lambda: post().update(lin(20), form="kronecker"), ValueError, "curvature=co.KFAC"),
            "blocks of other kinds": (
                lambda: co.laplace(lin(), co.KFAC, 1.0, check_mode=False).update(
                    lin(20), co.KFAC(lin(20), bias="separate"), form="kronecker", check_mode=False
                ),
                ValueError,
                "bias='joint' and 'separate'",
            ),
            "another model": (lambda: post().penalty(nn.Linear(2, 2)), ValueError, "lacks '0.weight'"),
            "a model of another size": (
                lambda: post().penalty(nn.Sequential(nn.Linear(2, 6))),
                ValueError,
                "'0.weight' has shape",
            ),
            "the parameters": (lambda: post().penalty(nn.Linear(2, 2).parameters()), TypeError, "must be the model"),
            "a missing name": (lambda: post().penalty({"0.weight": torch.zeros(6, 4)}), ValueError, "0.bias"),
            "another length": (lambda: post().penalty(torch.zeros(3)), ValueError, "51"),
            "rows": (lambda: post().penalty(post().mean.expand(2, 51)), ValueError, r"\(51,\), got shape \(2, 51\)"),
            "another dtype": (lambda: post().penalty(post().mean.float()), ValueError, "float32"),
            "the same data": (lambda: post().update(post().lin, check_mode=False), ValueError, "count twice"),
            "its own prior": (lambda: post().with_prior(post()), ValueError, "count twice"),
            "data in place of a linearisation": (
                lambda: post().update((torch.zeros(2, 4), None)),
                TypeError,
                "linearised",
            ),
            "another selection": (
                lambda: post().update(lin(20, "last_layer"), check_mode=False),
                ValueError,
                "different parameters",
            ),
            "data of an earlier task": (lambda: after().update(lin(), check_mode=False), ValueError, "count twice"),
        },
    ),
    Door(
        "deviations",
        rows={
            "no draws": (lambda: post().deviations(0), ValueError, "k must be at least 1"),
            "half a draw": (lambda: post().deviations(2.5), TypeError, "k must be a whole number"),
            "noise of other data": (
                lambda: post().deviations(2, small_post().deviations(2).noise),
                ValueError,
                "the noise belongs to 12 points",
            ),
            "noise of fewer draws": (
                lambda: post().deviations(3, post().deviations(2).noise),
                ValueError,
                "the noise is for 2 draws",
            ),
            "a word for noise": (lambda: post().deviations(2, "cg"), TypeError, "noise must be"),
            "a method": (lambda: post().deviations(2, None, "CG"), ValueError, "method must be one of .*'CG'"),
            "a number for a method": (lambda: post().deviations(2, None, 3), TypeError, "method must be"),
            "no closed form": (lambda: post().deviations(2, None, "closed form"), ValueError, "no closed form"),
            "one start": (lambda: post().deviations(2, None, "cg", post().mean), ValueError, r"x0 must be \(2, 51\)"),
            "starts in columns": (
                lambda: post().deviations(2, None, "cg", torch.zeros(51, 2, dtype=DOUBLE)),
                ValueError,
                r"x0 must be \(2, 51\)",
            ),
            "starts in float32": (
                lambda: post().deviations(2, None, "cg", torch.zeros(2, 51)),
                ValueError,
                "x0 is torch.float32",
            ),
            "rtol": (lambda: post().deviations(2, None, "cg", None, -1.0), ValueError, "rtol"),
            "dual of KFAC": (lambda: post(co.KFAC).deviations(2, method="dual"), ValueError, "KFAC does not have"),
            "sgd of KFAC": (lambda: post(co.KFAC).deviations(2, method="sgd"), ValueError, "KFAC does not have"),
            "a tensor for the trace": (lambda: post().trace(torch.eye(51)), TypeError, r"\bM\b"),
            "a small operator for the trace": (
                lambda: post().trace(co.linalg.Dense(torch.eye(4, dtype=DOUBLE))),
                ValueError,
                r"\bM\b",
            ),
            "one draw for the trace": (lambda: post().trace(post().curvature, samples=1), ValueError, "two or more"),
        },
    ),
    Door(
        "StochasticDescent",
        rows={
            "loss": (lambda: co.posterior.StochasticDescent(loss="L"), ValueError, "loss"),
            "epochs": (lambda: co.posterior.StochasticDescent(epochs=0), ValueError, "epochs"),
            "clip": (lambda: co.posterior.StochasticDescent(clip=math.nan), ValueError, "clip"),
            "a negative step": (lambda: co.posterior.StochasticDescent(step_size=-1.0), ValueError, "step_size"),
            **{
                f"{name}={value}": (
                    lambda name=name, value=value: co.posterior.StochasticDescent(**{name: value}),
                    ValueError,
                    f"{name} must {words}, got",
                )
                for name, (words, outside) in INTERVALS.items()
                for value in outside
            },
            "a word for momentum": (
                lambda: co.posterior.StochasticDescent(momentum="0.9"),
                TypeError,
                "momentum must be a number, got '0.9'",
            ),
            "a truth for a batch size": (
                lambda: co.posterior.StochasticDescent(batch_size=True),
                TypeError,
                "batch_size must be a whole number, got True",
            ),
        },
    ),
    Door(
        "GaussianPosterior",
        rows={
            "not a covariance": (
                lambda: co.posterior.GaussianPosterior.of(lin()),
                ValueError,
                "covariance or its precision",
            ),
            "a model": (
                lambda: co.posterior.GaussianPosterior.of(nn.Linear(4, 3), COVARIANCE),
                TypeError,
                "linearised network",
            ),
            "a small covariance": (
                lambda: co.posterior.GaussianPosterior.of(lin(), co.linalg.Diagonal(torch.ones(48, dtype=DOUBLE))),
                ValueError,
                r"shape \(51, 51\)",
            ),
            "another dtype": (
                lambda: co.posterior.GaussianPosterior.of(lin(), COVARIANCE.to(torch.float32)),
                ValueError,
                "float32",
            ),
            "no draws": (
                lambda: co.posterior.GaussianPosterior.of(lin(), COVARIANCE).sample(0),
                ValueError,
                "at least 1",
            ),
            "half a draw": (
                lambda: co.posterior.GaussianPosterior.of(lin(), COVARIANCE).sample(1.5),
                TypeError,
                "whole number",
            ),
            "a tensor for the trace": (
                lambda: co.posterior.GaussianPosterior.of(lin(), COVARIANCE).trace(torch.eye(51)),
                TypeError,
                "M must be an operator",
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
            "a share": (lambda: co.select(lin(), 0.1), TypeError, r"int\(share \* D\)"),
            "a number of modules": (lambda: co.select(lin(), 2, modules=1), TypeError, "modules must be a glob"),
            "no modules": (lambda: co.select(lin(), 2, modules=[]), TypeError, "modules must be a glob"),
            "none": (lambda: co.select(lin(), 0), ValueError, "between 1 and the 51"),
            "too many": (lambda: co.select(lin(), 52), ValueError, "between 1 and the 51"),
            "too many of a module": (lambda: co.select(lin(), 22, modules="2.*"), ValueError, "the 21"),
            "a score": (lambda: co.select(lin(), 3, "hessian"), ValueError, "'obd'"),
            "a posterior": (lambda: co.select(post(), 3), TypeError, "linearised network"),
            "no snapshots": (lambda: co.select(lin(), 3, "swag"), ValueError, "snapshots="),
            "one snapshot": (lambda: co.select(lin(), 3, "swag", snapshots=SNAPSHOTS[:1]), ValueError, "gave 1"),
            "read once": (lambda: [co.select(lin(), 3, "swag", snapshots=g) for g in [iter([])]], ValueError, "once"),
            "short snapshots": (lambda: co.select(lin(), 3, "swag", snapshots=SNAPSHOTS[:, :3]), ValueError, "51"),
            "a module": (lambda: co.select(lin(), 3, modules="fc"), ValueError, "'fc' matches none"),
            "an operator": (lambda: co.select(lin(), 3, prior_precision=co.GGN(lin())), ValueError, "operator"),
            "a linearisation": (lambda: co.wasserstein(lin(), [1]), TypeError, "wasserstein takes a posterior"),
            "out of range": (lambda: co.wasserstein(post(), [51]), ValueError, "out of range"),
            "twice": (lambda: co.wasserstein(post(), [1, 1]), ValueError, "twice"),
            "a method": (lambda: co.wasserstein(post(), [1], "full"), ValueError, "one of 'exact', 'diagonal'"),
        },
    ),
    Door(
        "BradleyTerry",
        rows={
            "one item": (
                lambda: preferences(co.likelihoods.RewardPairs(rewards()), PAIRS[:, 0], CHOSEN),
                ValueError,
                r"two items per point.*torch.stack",
            ),
            "two outputs an item": (
                lambda: preferences(co.likelihoods.RewardPairs(rewards(2)), PAIRS, CHOSEN),
                ValueError,
                "one output per item",
            ),
            "a bare reward model": (
                lambda: preferences(rewards(), PAIRS[:, 0], CHOSEN),
                ValueError,
                r"two rewards.*co.likelihoods.RewardPairs\(model\)",
            ),
            "a third item": (
                lambda: preferences(co.likelihoods.RewardPairs(rewards()), PAIRS, CHOSEN + 1),
                ValueError,
                "must lie in 0 .. 1",
            ),
        },
    ),
    Door(
        "metrics",
        rows={
            **{
                f"{score.__name__} of {wrong}": (lambda score=score, p=p, y=y: score(p, y), ValueError, words)
                for score in SCORES
                for wrong, (p, y, words) in NO_SCORES.items()
            },
            "one class": (
                lambda: metrics.auroc(torch.rand(3), torch.ones(3, dtype=torch.bool)),
                ValueError,
                "both classes",
            ),
            "scores of NaN": (
                lambda: metrics.auroc(torch.tensor([0.0, math.nan]), torch.tensor([True, False])),
                ValueError,
                "finite",
            ),
            "three classes": (lambda: metrics.auroc(torch.rand(3), torch.tensor([0, 2, 1])), ValueError, "0 and 1"),
            "one draw": (lambda: metrics.mutual_information(GOOD[None]), ValueError, "draws"),
            "no bins": (lambda: metrics.ece(GOOD, LABELS, bins=0), ValueError, "bins"),
            "a reduction": (lambda: metrics.nll(GOOD, LABELS, reduction="sum"), ValueError, "reduction"),
            "bounds": (lambda: metrics.temperature(GOOD, LABELS, bounds=(1.0, 0.5)), ValueError, "bounds"),
            "infinite logits": (lambda: metrics.temperature(GOOD / 0, LABELS), ValueError, "finite"),
        },
    ),
]
