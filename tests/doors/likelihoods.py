"""What is refused as a likelihood, as its options and as its targets."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributions, nn

import curvops as co
from curvops.network.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from tests.doors.door import Door
from tests.network.definitions import normal
from tests.zoo_modules import Shaped

WEIGHT = torch.tensor([0.5, 2.0, 0.0, 1.3], dtype=torch.float64)


def quartic(f: Tensor, y: Tensor) -> Tensor:
    return ((f - y) ** 4).sum(-1)


REALS = normal(5, 2, seed=4, scale=2.0)


def with_loss(loss: Any, y: Tensor = REALS) -> co.operators.Linearization:
    """A network of two outputs at five points."""
    return co.linearize(nn.Linear(2, 2).double(), (normal(5, 2), y), loss)


N, C, T = 5, 3, 3
CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss


def shaped(loss: Any, shape: tuple[int, ...], y: Tensor) -> co.operators.Linearization:
    return co.linearize(Shaped(*shape).double(), (normal(N, 2), y), loss)


def events(*shape: int) -> Tensor:
    return (normal(N, *shape, seed=5) > 0).double()


def distributed(function: Callable[[Tensor], Any], targets: Tensor) -> co.operators.Linearization:
    return co.linearize(nn.Linear(2, C), (normal(5, 2).float(), targets), function)


def hollow(likelihood: Any, y: Tensor, *weights: Tensor) -> co.operators.Linearization:
    return co.linearize(nn.Linear(2, 2).double(), (normal(5, 2), y, *weights), likelihood, weights=bool(weights))


def targets(likelihood: Any, y: Tensor) -> Callable[[], object]:
    """A check of these targets by the likelihood of four outputs."""
    return lambda: likelihood.check_targets(y, 4)


DOORS = [
    Door(
        "missing targets",
        rows={
            "another word": (lambda: Gaussian(missing="drop"), "missing='drop'; expected None, or 'ignore'"),
            "no choice": (lambda: hollow("regression", REALS * math.nan), r"missing='ignore'"),
            "Inf": (lambda: hollow(Gaussian(missing="ignore"), REALS / 0), "targets of shape .* infinite"),
            "labels of 2": (lambda: hollow(Bernoulli(missing="ignore"), 0 * REALS + 2), "lie in"),
            "weights of classes": (
                lambda: hollow("classification", torch.zeros(5).long(), torch.ones(5, 2)),
                r"must have shape \(5,\); given \(5, 2\)",
            ),
            "weights of other targets": (
                lambda: hollow("regression", REALS, torch.ones(5, 3)),
                r"must have shape \(5,\) or, one per target, \(5, 2\); given \(5, 3\)",
            ),
            "NaN in weights": (lambda: hollow("regression", REALS, REALS * math.nan), "weights of shape .* NaN"),
        },
    ),
    Door(
        "Gaussian",
        rows={
            "one for each channel of an image, to be estimated": (
                lambda: co.linearize(
                    nn.Conv2d(1, 2, 1), (torch.ones(3, 1, 4, 5), torch.ones(3, 2, 4, 5)), Gaussian("per_output")
                ),
                r"\(C, 1, 1\)",
            ),
            "NaN": (lambda: Gaussian(math.nan), "variance"),
            "a column of variances": (
                lambda: Gaussian(torch.ones(4, 1)).check_targets(torch.zeros(3, 4), 4),
                r"noise has shape \(4, 1\)",
            ),
            "whole numbers": (targets(Gaussian(), torch.zeros(3, 4, dtype=torch.int64)), TypeError, r"y\.float\(\)"),
            "one dimension": (targets(Gaussian(), torch.zeros(3)), r"y\.unsqueeze\(-1\)"),
        },
    ),
    Door(
        "Categorical",
        rows={
            "weight=-ones(3)": (lambda: Categorical(weight=-torch.ones(3)), "label_smoothing|Class weights"),
            "truths": (targets(Categorical(), torch.zeros(3, dtype=torch.bool)), TypeError, "class indices, or"),
            "NaN": (targets(Categorical(), torch.full((3, 4), math.nan)), "sum to 1"),
            "another number of classes": (targets(Categorical(), torch.full((3, 3), 1 / 3)), "4 outputs"),
            "a column": (targets(Categorical(), torch.zeros(3, 1, dtype=torch.int64)), r"y\.squeeze"),
            "a negative label": (targets(Categorical(), torch.tensor([0, -1])), "0 .. 3.*from -1 to 0"),
        },
    ),
    Door(
        "Bernoulli",
        rows={"whole weights": (lambda: Bernoulli(weight=torch.ones(3).long()), "must be 0-d, .C,. or .T, C.,")},
    ),
    Door(
        "targets of the other likelihoods",
        rows={
            "Bernoulli, -1": (targets(Bernoulli(), torch.full((3, 4), -1.0)), r"\(y \+ 1\) / 2"),
            "Bernoulli with three weights": (targets(Bernoulli(WEIGHT[:3]), torch.zeros(3, 4)), "weight has 3 entries"),
            "Poisson, five columns": (targets(Poisson(), torch.zeros(3, 5)), "4 outputs"),
            "Poisson, -1": (targets(Poisson(), torch.full((3, 4), -1)), "at least 0"),
            "Poisson, truths": (targets(Poisson(), torch.zeros(3, 4, dtype=torch.bool)), TypeError, "use Bernoulli"),
            "HeteroscedasticGaussian, whole numbers": (
                targets(HeteroscedasticGaussian(), torch.zeros(3, 2, dtype=torch.int64)),
                TypeError,
                r"y\.float\(\)",
            ),
            "HeteroscedasticGaussian, one dimension": (
                targets(HeteroscedasticGaussian(), torch.zeros(3)),
                r"half of the model's 4 outputs; given \(3,\)",
            ),
        },
    ),
    Door(
        "a distribution of one's own",
        rows={
            "a column too few": (
                lambda: distributed(lambda f: distributions.Normal(f, 1.0), torch.zeros(5)),
                r"gives targets \(2, 3\)",
            ),
            "one number for all points": (
                lambda: distributed(lambda f: distributions.Normal(f.sum(), 1.0), torch.zeros(5)),
                r"expected one row per point",
            ),
            "no distribution": (
                lambda: distributed(lambda f: f.softmax(1), torch.zeros(5)),
                TypeError,
                "returns Tensor, expected a torch.distributions",
            ),
            "outside the support": (
                lambda: distributed(lambda f: distributions.Poisson(f[:, 0].exp()), -torch.ones(5)),
                "support",
            ),
        },
    ),
    Door(
        "a loss of one's own",
        rows={
            "a mean": (lambda: with_loss(lambda f, y: (f - y).square().mean()), "Is it reduced.*reduction='none'"),
            "swapped": (
                lambda: with_loss(lambda y, f: quartic(f, y)),
                TypeError,
                r"outputs first; this one takes \(y, f\)",
            ),
            "any arguments": (lambda: with_loss(lambda *given: given[0]), TypeError, r"neither \(outputs\) nor"),
            "detached": (lambda: with_loss(lambda f, y: quartic(f.detach(), y)), "no gradient"),
            "NaN": (lambda: with_loss(lambda f, y: (f - 100).log().sum(1)), "NaN or infinite"),
            "broadcast": (
                lambda: with_loss(lambda f, y: (f[:, 0] - y).square(), REALS[:, :1]),
                "other points of its batch",
            ),
        },
    ),
    Door(
        "losses of torch",
        rows={
            "channels first": (lambda: shaped(co.likelihoods.Gaussian(1.0), (2, 4, 3), events(1, 4, 3)), "movedim"),
            "weights of other positions": (
                lambda: shaped(co.likelihoods.Bernoulli(torch.ones(2, C)), (T, C), events(T, C)),
                "(?i)needs 2 positions per point; given 3",
            ),
            "weights of positions": (
                lambda: shaped(co.likelihoods.Bernoulli(torch.ones(2, C)), (C,), events(C)),
                "(?i)needs 2 positions per point; the model returns one",
            ),
        },
    ),
]
