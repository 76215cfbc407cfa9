"""The demo's three stories, written as a user would write them: train, linearise, average, compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from curvops import metrics
from curvops.cli.digits import load_digits

NOISE, GAP = 0.2, (-1.5, 1.5)
KNOWN, WRONG = 8, 0.2
"""The digits 0 to 7 are known, and this share of their labels is drawn at random."""
TRAIN, HELD_OUT = 500, 200


@dataclass(frozen=True)
class Size:
    """The number of steps of AdamW for the regression, and of epochs for the digits."""

    steps: int = 700
    epochs: int = 200


FULL = Size()
"""The length that a user sees."""


@dataclass(frozen=True)
class Row:
    """A score of the network alone, and that of its posterior."""

    score: str
    network: float
    laplace: float
    larger_is_better: bool = False

    @property
    def is_better(self) -> bool:
        """Whether the posterior's score is the better one, by more than a digit of the table shows."""
        gain = self.laplace - self.network
        return (gain if self.larger_is_better else -gain) > 5e-4


@dataclass(frozen=True, eq=False)
class Regression:
    """Error bars that open in a gap."""

    model: nn.Module
    points: tuple[Tensor, Tensor]
    post: co.posterior.Laplace
    widths: tuple[float, float]
    """The mean standard deviation of the function among the data, and in the gap."""
    rows: list[Row]


@dataclass(frozen=True, eq=False)
class Classification:
    """Predictions of digits with wrong labels, and the score by which unseen digits are told apart."""

    post: co.posterior.Laplace
    probabilities: dict[str, Tensor]
    labels: Tensor
    unseen: Tensor
    scores: dict[str, Tensor]
    """The uncertainty of each test digit, known or unseen."""
    rows: list[Row]


def perceptron(*widths: int, activation: type[nn.Module]) -> nn.Sequential:
    """Make linear layers of these widths with an activation between them."""
    layers = [layer for m, n in pairwise(widths) for layer in (nn.Linear(m, n), activation())]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[..., Tensor], epochs: int, rate: float) -> None:
    """Train as usual: AdamW on batches of 100 points, with a falling rate."""
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()
    model.eval()


def regression(seed: int, size: Size) -> Regression:
    """Fit a curve to points with a gap between them, and compare the error bars at new points."""
    torch.manual_seed(seed)

    def points(n: int, *ranges: tuple[float, float]) -> tuple[Tensor, Tensor]:
        x = torch.cat([low + (high - low) * torch.rand(n, 1) for low, high in ranges])
        return x, torch.sin(2 * x) + NOISE * torch.randn(x.shape)

    sides = (-3.0, GAP[0]), (GAP[1], 3.0)
    x, y = points(50, *sides)
    model = perceptron(1, 50, 50, 1, activation=nn.Tanh)
    train(model, x, y, nn.functional.mse_loss, size.steps, rate=1e-2)

    lin = co.linearize(model, (x, y), "regression")
    post = co.laplace(lin)

    rows, widths = [], []
    noise = float(post.observation_noise) ** 0.5
    for where, (at, targets) in {"among the data": points(500, *sides), "in the gap": points(1000, GAP)}.items():
        with_noise = post.predict(at, noise=True)
        alone = torch.distributions.Normal(model(at).detach(), noise)
        averaged = torch.distributions.Normal(with_noise.mean, with_noise.stddev)
        rows.append(Row(f"NLL {where}", _nll(alone, targets), _nll(averaged, targets)))
        rows.append(Row(f"outside 2 std {where}", _outside(alone, targets), _outside(averaged, targets)))
        widths.append(float(post.predict(at).stddev.mean()))
    return Regression(model, (x, y), post, (widths[0], widths[1]), rows)


def _nll(predicted: torch.distributions.Normal, targets: Tensor) -> float:
    return -float(predicted.log_prob(targets).mean())


def _outside(predicted: torch.distributions.Normal, targets: Tensor) -> float:
    return float(((targets - predicted.mean).abs() > 2 * predicted.stddev).float().mean())


def classification(seed: int, size: Size) -> Classification:
    """Train on digits of which some labels are wrong, and predict others; two digits are never seen in training."""
    torch.manual_seed(seed)
    images, digits = load_digits()
    order = torch.randperm(len(images))
    images, digits = images[order], digits[order]
    is_known = digits < KNOWN
    x, y, unseen = images[is_known], digits[is_known], images[~is_known]
    y = torch.where(torch.rand(len(y)) < WRONG, torch.randint(KNOWN, y.shape), y)
    parts = [TRAIN, HELD_OUT, len(y) - TRAIN - HELD_OUT]
    (x_train, x_held_out, x_test), (y_train, y_held_out, y_test) = x.split(parts), y.split(parts)
    model = perceptron(64, 100, 100, KNOWN, activation=nn.ReLU)
    train(model, x_train, y_train, nn.functional.cross_entropy, size.epochs, rate=5e-3)

    lin = co.linearize(model, (x_train, y_train), "classification")
    post = co.laplace(lin, validation=(x_held_out, y_held_out))

    logits = lin.predict(x_test)
    probabilities = {"network": logits.softmax(-1), "Laplace": post.probabilities(x_test)}
    temperature = metrics.temperature(lin.predict(x_held_out), y_held_out)
    everything, is_unseen = torch.cat([x_test, unseen]), torch.arange(len(x_test) + len(unseen)) >= len(x_test)
    scores = {
        "network": metrics.predictive_entropy(lin.predict(everything).softmax(-1)),
        "Laplace": post.uncertainty(everything, generator=torch.Generator().manual_seed(seed)).epistemic,
    }
    nll, ece = ([float(score(p, y_test)) for p in probabilities.values()] for score in (metrics.nll, metrics.ece))
    areas = [float(metrics.auroc(score, is_unseen)) for score in scores.values()]
    scaled = float(metrics.nll((logits / temperature).softmax(-1), y_test))
    rows = [
        Row("NLL", nll[0], nll[1]),
        Row("ECE", ece[0], ece[1]),
        Row("NLL with a temperature", scaled, nll[1]),
    ]
    rows.append(Row("AUROC", areas[0], areas[1], True))
    return Classification(post, probabilities, y_test, is_unseen, scores, rows)


def roc(score: Tensor, positive: Tensor) -> tuple[Any, Any]:
    """Return the shares of negatives and of positives above each threshold, from 0 to 1."""
    ordered = positive[score.argsort(descending=True)].double()
    zero = ordered.new_zeros(1)
    false, true = (torch.cat([zero, counted.cumsum(0) / counted.sum()]).numpy() for counted in (1 - ordered, ordered))
    return false, true
