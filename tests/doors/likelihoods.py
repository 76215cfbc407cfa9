"""What is refused as a likelihood, as its options and as its targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

import curvops as co
from curvops.network.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    as_likelihood,
)
from tests.doors.door import Door
from tests.network.definitions import normal

WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)


def quartic(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 4).sum(-1)


REALS = normal(5, 2, seed=4, scale=2.0)


def with_loss(loss: Any, y: Tensor = REALS) -> co.operators.Linearization:
    """A network of two outputs at five points."""
    return co.linearize(nn.Linear(2, 2).double(), (normal(5, 2), y), loss)


def cox(f: Tensor, y: Tensor) -> Tensor:
    """Return the terms of a partial likelihood: events y[:, 1] at times y[:, 0], those at risk before them."""
    risk = f.sum(1)
    return y[:, 1] * (risk.logcumsumexp(0) - risk)


def weighted_by_batch(f: Tensor, y: Tensor) -> Tensor:
    weight = len(y) / torch.bincount(y, minlength=f.shape[1]).clamp_min(1).to(f)
    return F.cross_entropy(f, y, weight, reduction="none")


N, C, T = 5, 3, 3
CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss


class Shaped(nn.Linear):
    """A linear map with outputs of any shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__(2, math.prod(shape))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(len(x), *self.shape)


def shaped(loss: Any, shape: tuple[int, ...], y: Tensor) -> co.operators.Linearization:
    return co.linearize(Shaped(*shape).double(), (normal(N, 2), y), loss)


def labels(*positions: int) -> Tensor:
    return torch.randint(0, C, (N, *positions), generator=torch.Generator().manual_seed(1))


def soft(*shape: int) -> Tensor:
    return normal(N, *shape, seed=3).softmax(1)


def events(*shape: int) -> Tensor:
    return (normal(N, *shape, seed=5) > 0).double()


def counts(*shape: int) -> Tensor:
    return torch.poisson(torch.full((N, *shape), 2.0).double(), generator=torch.Generator().manual_seed(6))


def distributed(function: Callable[[Tensor], Any], targets: Tensor) -> co.operators.Linearization:
    return co.linearize(nn.Linear(2, C), (normal(5, 2).float(), targets), function)


DOORS = [
    Door(
        "as_likelihood",
        rows={
            "poisson": (lambda: as_likelihood("poisson"), TypeError, "Categorical.*MSELoss"),
            "BCELoss()": (lambda: as_likelihood(nn.BCELoss()), TypeError, "Categorical.*MSELoss"),
            "MSELoss": (lambda: as_likelihood(nn.MSELoss), TypeError, "Categorical.*MSELoss"),
            "CrossEntropyLoss": (lambda: as_likelihood(nn.CrossEntropyLoss), TypeError, "Categorical.*MSELoss"),
            "NLLLoss()": (lambda: as_likelihood(nn.NLLLoss()), TypeError, r"use nn.CrossEntropyLoss\(\)"),
            "BCELoss(), by its remedy": (
                lambda: as_likelihood(nn.BCELoss()),
                TypeError,
                r"drop the model's last sigmoid and use nn.BCEWithLogitsLoss\(\)",
            ),
        },
    ),
    Door(
        "Gaussian",
        rows={
            "zero": (lambda: Gaussian(0.0), ValueError, "variance"),
            "a word": (lambda: Gaussian("estimate"), TypeError, "None or 'per_output'"),
            "a flag": (lambda: Gaussian(True), TypeError, "variance"),
            "one for each channel of an image, to be estimated": (
                lambda: co.linearize(
                    nn.Conv2d(1, 2, 1), (torch.ones(3, 1, 4, 5), torch.ones(3, 2, 4, 5)), Gaussian("per_output")
                ),
                ValueError,
                r"\(C, 1, 1\)",
            ),
            "negative": (lambda: Gaussian(-1.0), ValueError, "variance"),
            "NaN": (lambda: Gaussian(math.nan), ValueError, "variance"),
            "infinite": (lambda: Gaussian(math.inf), ValueError, "variance"),
            "one variance of zero": (lambda: Gaussian(torch.tensor([1.0, 0.0])), ValueError, "variance"),
            "a matrix of variances": (lambda: Gaussian(torch.ones(2, 2)), ValueError, "variance"),
            "a column of variances": (
                lambda: Gaussian(torch.ones(4, 1)).check_targets(torch.zeros(3, 4), 4),
                ValueError,
                r"shape \(4, 1\), expected \(\) or \(4,\)",
            ),
            "whole numbers": (
                lambda: Gaussian().check_targets(torch.zeros(3, 4, dtype=torch.int64), 4),
                TypeError,
                r"y\.float\(\)",
            ),
            "one dimension": (lambda: Gaussian().check_targets(torch.zeros(3), 4), ValueError, r"y\.unsqueeze\(-1\)"),
            "three dimensions": (lambda: Gaussian().check_targets(torch.zeros(3, 2, 2), 4), ValueError, "Flatten"),
            "another number of outputs": (
                lambda: Gaussian().check_targets(torch.zeros(3, 2), 4),
                ValueError,
                "4 outputs",
            ),
            "NaN in targets": (lambda: Gaussian().check_targets(torch.full((3, 4), math.nan), 4), ValueError, "NaN"),
            "infinite targets": (
                lambda: Gaussian().check_targets(torch.full((3, 4), -math.inf), 4),
                ValueError,
                "infinite",
            ),
        },
    ),
    Door(
        "Categorical",
        rows={
            "label_smoothing=1.0": (
                lambda: Categorical(label_smoothing=1.0),
                ValueError,
                "label_smoothing|Class weights",
            ),
            "label_smoothing=-0.1": (
                lambda: Categorical(label_smoothing=-0.1),
                ValueError,
                "label_smoothing|Class weights",
            ),
            "weight=-ones(3)": (
                lambda: Categorical(weight=-torch.ones(3)),
                ValueError,
                "label_smoothing|Class weights",
            ),
            "real labels": (
                lambda: Categorical().check_targets(torch.zeros(3), 4),
                TypeError,
                r"integer dtype.*y\.long\(\)",
            ),
            "truths": (
                lambda: Categorical().check_targets(torch.zeros(3, dtype=torch.bool), 4),
                TypeError,
                "integer dtype",
            ),
            "logits": (
                lambda: Categorical().check_targets(torch.zeros(3, 4), 4),
                ValueError,
                r"class probabilities.*y\.softmax\(-1\)",
            ),
            "NaN": (lambda: Categorical().check_targets(torch.full((3, 4), math.nan), 4), ValueError, "sum to 1"),
            "negative probabilities": (
                lambda: Categorical().check_targets(torch.tensor([[1.5, -0.5, 0.0, 0.0]]), 4),
                ValueError,
                "at least 0",
            ),
            "another number of classes": (
                lambda: Categorical().check_targets(torch.full((3, 3), 1 / 3), 4),
                ValueError,
                "4 outputs",
            ),
            "a column": (
                lambda: Categorical().check_targets(torch.zeros(3, 1, dtype=torch.int64), 4),
                ValueError,
                r"y\.squeeze",
            ),
            "one-hot labels": (
                lambda: Categorical().check_targets(torch.zeros(3, 4, dtype=torch.int64), 4),
                ValueError,
                "argmax",
            ),
            "a negative label": (
                lambda: Categorical().check_targets(torch.tensor([0, -1]), 4),
                ValueError,
                "0 .. 3.*from -1 to 0",
            ),
            "a label too large": (
                lambda: Categorical().check_targets(torch.tensor([0, 4]), 4),
                ValueError,
                "0 .. 3.*from 0 to 4",
            ),
        },
    ),
    Door(
        "Bernoulli",
        rows={
            "a negative weight": (
                lambda: Bernoulli(weight=-WEIGHT),
                ValueError,
                "floating-point tensor, 0-d, .C,. or .T, C.,",
            ),
            "a stack of weights": (
                lambda: Bernoulli(pos_weight=torch.ones(2, 2, 2)),
                ValueError,
                "floating-point tensor, 0-d, .C,. or .T, C.,",
            ),
            "whole weights": (
                lambda: Bernoulli(weight=torch.ones(3).long()),
                ValueError,
                "floating-point tensor, 0-d, .C,. or .T, C.,",
            ),
        },
    ),
    Door(
        "targets of the other likelihoods",
        rows={
            "Bernoulli(), zeros(3)": (
                lambda: Bernoulli().check_targets(torch.zeros(3), 4),
                ValueError,
                r"y\.unsqueeze\(-1\)",
            ),
            "Bernoulli(), zeros(3, 2)": (
                lambda: Bernoulli().check_targets(torch.zeros(3, 2), 4),
                ValueError,
                "4 outputs",
            ),
            "Bernoulli(), full((3, C), 2)": (
                lambda: Bernoulli().check_targets(torch.full((3, 4), 2), 4),
                ValueError,
                r"\[0, 1\].*for Categorical",
            ),
            "Bernoulli(), full((3, C), -1.0)": (
                lambda: Bernoulli().check_targets(torch.full((3, 4), -1.0), 4),
                ValueError,
                r"\(y \+ 1\) / 2",
            ),
            "Bernoulli(), full((3, C), math.nan)": (
                lambda: Bernoulli().check_targets(torch.full((3, 4), math.nan), 4),
                ValueError,
                r"\[0, 1\]",
            ),
            "Bernoulli(WEIGHT[:3]), zeros(3, C)": (
                lambda: Bernoulli(WEIGHT[:3]).check_targets(torch.zeros(3, 4), 4),
                ValueError,
                "weight has 3 entries",
            ),
            "Bernoulli(None, WEIGHT[:3]), zeros(3, C)": (
                lambda: Bernoulli(None, WEIGHT[:3]).check_targets(torch.zeros(3, 4), 4),
                ValueError,
                "pos_weight has 3 entries",
            ),
            "Poisson(), zeros(3)": (
                lambda: Poisson().check_targets(torch.zeros(3), 4),
                ValueError,
                r"y\.unsqueeze\(-1\)",
            ),
            "Poisson(), zeros(3, 5)": (lambda: Poisson().check_targets(torch.zeros(3, 5), 4), ValueError, "4 outputs"),
            "Poisson(), full((3, C), -1)": (
                lambda: Poisson().check_targets(torch.full((3, 4), -1), 4),
                ValueError,
                "at least 0",
            ),
            "Poisson(), full((3, C), 0.5)": (
                lambda: Poisson().check_targets(torch.full((3, 4), 0.5), 4),
                ValueError,
                "whole numbers.*log exposure",
            ),
            "Poisson(), full((3, C), math.inf)": (
                lambda: Poisson().check_targets(torch.full((3, 4), math.inf), 4),
                ValueError,
                "whole numbers",
            ),
            "Poisson(), zeros(3, C, bool)": (
                lambda: Poisson().check_targets(torch.zeros(3, 4, dtype=torch.bool), 4),
                TypeError,
                "use Bernoulli",
            ),
            "HeteroscedasticGaussian(), zeros(3, 2, int64)": (
                lambda: HeteroscedasticGaussian().check_targets(torch.zeros(3, 2, dtype=torch.int64), 4),
                TypeError,
                r"y\.float\(\)",
            ),
            "HeteroscedasticGaussian(), zeros(3, C)": (
                lambda: HeteroscedasticGaussian().check_targets(torch.zeros(3, 4), 4),
                ValueError,
                r"shape \(n, 2\), one column for each of the 2",
            ),
            "HeteroscedasticGaussian(), zeros(3)": (
                lambda: HeteroscedasticGaussian().check_targets(torch.zeros(3), 4),
                ValueError,
                r"shape \(n, 2\).*given \(3,\)",
            ),
            "HeteroscedasticGaussian(), full((3, 2), math.nan)": (
                lambda: HeteroscedasticGaussian().check_targets(torch.full((3, 2), math.nan), 4),
                ValueError,
                "NaN",
            ),
        },
    ),
    Door(
        "a distribution of one's own",
        rows={
            "a column too few": (
                lambda: distributed(lambda f: distributions.Normal(f, 1.0), torch.zeros(5)),
                ValueError,
                r"Normal over targets of shape \(2, 3\)",
            ),
            "a column too many": (
                lambda: distributed(lambda f: distributions.Poisson(f[:, 0].exp()), torch.ones(5, 1)),
                ValueError,
                r"given \(2, 1\)",
            ),
            "one number for all points": (
                lambda: distributed(lambda f: distributions.Normal(f.sum(), 1.0), torch.zeros(5)),
                ValueError,
                r"expected \(n, ...\) with n = 2",
            ),
            "no distribution": (
                lambda: distributed(lambda f: f.softmax(1), torch.zeros(5)),
                TypeError,
                "returns Tensor, expected a torch.distributions",
            ),
            "outside the support": (
                lambda: distributed(lambda f: distributions.Poisson(f[:, 0].exp()), -torch.ones(5)),
                ValueError,
                "support",
            ),
        },
    ),
    Door(
        "a loss of one's own",
        rows={
            "a mean": (
                lambda: with_loss(lambda f, y: (f - y).square().mean()),
                ValueError,
                "Is it reduced.*reduction='none'",
            ),
            "torch's own mean": (lambda: with_loss(F.huber_loss), TypeError, r"averages.*Pass nn.HuberLoss\(\)"),
            "another shape": (
                lambda: with_loss(lambda f, y: f.new_ones(7)),
                ValueError,
                "expected a loss per point",
            ),
            "swapped": (
                lambda: with_loss(lambda y, f: quartic(f, y)),
                TypeError,
                r"outputs first; <lambda> takes \(y, f\)",
            ),
            "three arguments": (
                lambda: with_loss(lambda f, y, w: quartic(f, y)),
                TypeError,
                "neither one argument.*FromLoss",
            ),
            "any arguments": (
                lambda: with_loss(lambda *given: given[0]),
                TypeError,
                "neither one argument.*FromLoss",
            ),
            "not differentiable": (
                lambda: with_loss(lambda f, y: (f.argmax(1) != y.argmax(1)).double()),
                ValueError,
                "no gradient",
            ),
            "detached": (lambda: with_loss(lambda f, y: quartic(f.detach(), y)), ValueError, "no gradient"),
            "integers": (
                lambda: with_loss(nn.HuberLoss(), torch.arange(10).view(5, 2) % 2),
                ValueError,
                r"y.float\(\)",
            ),
            "NaN": (lambda: with_loss(lambda f, y: (f - 100).log().sum(1)), ValueError, "NaN or infinite"),
            "nothing": (lambda: with_loss(lambda f, y: None), TypeError, "returns NoneType"),
            "broadcast": (
                lambda: with_loss(lambda f, y: (f[:, 0] - y).square(), REALS[:, :1]),
                ValueError,
                "other points of its batch",
            ),
            "a mean over points": (
                lambda: with_loss(lambda f, y: quartic(f - f.mean(0), y)),
                ValueError,
                "other points of its batch",
            ),
            "Cox's, in order of time": (
                lambda: with_loss(cox, torch.stack([torch.arange(5.0), torch.ones(5)], 1).double()),
                ValueError,
                "couples the points of a batch",
            ),
            "Cox's, most censored": (
                lambda: with_loss(cox, torch.tensor([[0.0, 1], [1, 1], [2, 0], [3, 0], [4, 0]]).double()),
                ValueError,
                "couples the points of a batch",
            ),
            "class weights of a batch": (
                lambda: shaped(weighted_by_batch, (C,), torch.tensor([0, 0, 0, 2, 0])),
                ValueError,
                "couples the points of a batch.*class weights.*once",
            ),
            "class weights of a batch of positions": (
                lambda: shaped(weighted_by_batch, (T, C), torch.tensor([0] * 10 + [2, 1, 0, 0, 0]).view(N, T)),
                ValueError,
                "the other points of its batch",
            ),
            "ranks in a batch": (
                lambda: with_loss(lambda f, y: quartic(f, y) * y[:, 0].argsort()),
                ValueError,
                "points of (a|its) batch",
            ),
            "a spread over a batch": (
                lambda: with_loss(lambda f: distributions.Normal(f, f[-1:].exp())),
                ValueError,
                "couples the points of a batch",
            ),
            "an error of its own": (
                lambda: with_loss(lambda f, y: f.no_such_method()),
                ValueError,
                "cannot score.*no_such_method",
            ),
            "a class": (lambda: with_loss(nn.HuberLoss), TypeError, "No likelihood for"),
            "lengths": (
                lambda: with_loss(nn.CTCLoss()),
                TypeError,
                r"takes \(log_probs, targets, input_lengths",
            ),
        },
    ),
    Door(
        "losses of torch",
        rows={
            "classes last": (
                lambda: shaped(CE(), (4, C), labels(4)),
                ValueError,
                r"(?i)dimension 1: outputs \(N, 4, 3\) are C = 4 classes at",
            ),
            "classes first": (
                lambda: shaped("classification", (C, 4), labels(4)),
                ValueError,
                "(?i)They fit outputs with the classes at dim",
            ),
            "pixels in a row": (
                lambda: shaped("classification", (2, 2, C), labels(4)),
                ValueError,
                r"(?i)2 x 2 positions .* \(n, 2, 2\) or",
            ),
            "class range": (
                lambda: shaped(CE(), (2, T), labels(T)),
                ValueError,
                "(?i)with each of the 3 positions.*must lie in 0 .. 1",
            ),
            "one class": (
                lambda: shaped(CE(), (1, T), labels(T) * 0),
                ValueError,
                "(?i)needs a model with C >= 2 outputs",
            ),
            "one number a point": (lambda: shaped(CE(), (), labels()), ValueError, r"(?i)add outputs.unsqueeze\(1\)"),
            "class weights": (
                lambda: shaped(CE(torch.ones(4)), (C, T), labels(T)),
                ValueError,
                "(?i)4 class weights were given",
            ),
            "ignored class of probabilities": (
                lambda: shaped(CE(ignore_index=1), (C,), soft(C)),
                ValueError,
                "(?i)no meaning for class prob",
            ),
            "votes": (lambda: shaped(CE(), (C, T), 3 * soft(C, T)), ValueError, "(?i)rows that sum to 1"),
            "weights of points": (
                lambda: shaped(BCE(torch.ones(N, 1)), (C,), events(C)),
                ValueError,
                r"(?i)\(5, 1\) does not broadcast.*\(3,\)",
            ),
            "weights of another size": (
                lambda: shaped(BCE(pos_weight=torch.ones(4)), (C,), events(C)),
                ValueError,
                "(?i)does not broadcast",
            ),
            "targets of another shape": (
                lambda: shaped(BCE(), (1,), events()),
                ValueError,
                r"(?i)Use y.unsqueeze\(-1\)",
            ),
            "squares of integers": (
                lambda: shaped(nn.MSELoss(), (C,), labels(C)),
                TypeError,
                r"(?i)Convert with y.float\(\)",
            ),
            "rates": (
                lambda: shaped(nn.PoissonNLLLoss(log_input=False), (C,), counts(C)),
                ValueError,
                "(?i)NaN or infinite at the first points",
            ),
            "half counts": (lambda: shaped(nn.PoissonNLLLoss(), (C,), counts(C) / 2), ValueError, "(?i)whole numbers"),
            "weights of other positions": (
                lambda: shaped(co.likelihoods.Bernoulli(torch.ones(2, C)), (T, C), events(T, C)),
                ValueError,
                "(?i)needs 2 positions per point; given 3",
            ),
            "weights of positions": (
                lambda: shaped(co.likelihoods.Bernoulli(torch.ones(2, C)), (C,), events(C)),
                ValueError,
                "(?i)needs 2 positions per point; the model returns one",
            ),
        },
    ),
]
