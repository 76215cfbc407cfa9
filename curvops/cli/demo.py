"""The demo: what a posterior adds to a regression, to a classifier of wrong labels, and to inputs never seen.

The three stories are written as a user would write them: train, linearise, average, compare.
"""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import curvops as co
from curvops import metrics, plots
from curvops.plots import style

GAP = -1.5, 1.5


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
        return x, torch.sin(2 * x) + 0.2 * torch.randn(x.shape)

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
    is_known = digits < 8
    x, y, unseen = images[is_known], digits[is_known], images[~is_known]
    y = torch.where(torch.rand(len(y)) < 0.2, torch.randint(8, y.shape), y)
    parts = [500, 200, len(y) - 700]
    (x_train, x_held_out, x_test), (y_train, y_held_out, y_test) = x.split(parts), y.split(parts)
    model = perceptron(64, 100, 100, 8, activation=nn.ReLU)
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


def load_digits() -> tuple[Float[Tensor, "N 64"], Int[Tensor, " N"]]:
    """Return the images, with pixels in [0, 1], and their digits, in the order of scikit-learn."""
    try:
        dataset = import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError as error:
        raise ImportError("the digits need scikit-learn: pip install 'curvops[demo]'") from error
    x, y = (torch.as_tensor(array) for array in dataset)
    return x.float() / 16, y.long()


def run(output: Path, seed: int, say: Callable[[str], None], size: Size = FULL) -> bool:
    """Run the demo and write its figures and numbers.

    Args:
        output: Folder for results.json and the figures; it is created if missing.
        seed: Seed of the data and the networks.
        say: A function that is called with the lines of the report.
        size: The length of training.

    Returns:
        Whether all checks passed.
    """
    output.mkdir(parents=True, exist_ok=True)
    curve = regression(seed, size)
    say(_section("1. Error bars that open in a gap", _of_curve(curve), curve.rows))
    digits = classification(seed, size)
    say(_section("2. Digits with wrong labels", _of_digits(digits), digits.rows[:3]))
    say(_section("3. Digits never seen in training", _of_unseen(digits), digits.rows[3:]))
    at = torch.linspace(-4, 4, 20).unsqueeze(1)
    checks = run_checks(curve.model, *curve.points, at, torch.Generator().manual_seed(seed))
    say("\n".join(map(str, checks)))
    _draw(curve, digits, output)
    tables: dict[str, list[Any]] = {"regression": curve.rows, "digits": digits.rows, "checks": checks}
    results = {"seed": seed} | {name: [asdict(row) for row in rows] for name, rows in tables.items()}
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    say(f"\nFigures and numbers: {output}/")
    return all(check.passed for check in checks)


def _of_curve(curve: Regression) -> str:
    lin = curve.post.lin
    return (
        f"A network of {lin.num_parameters:,} weights, trained by AdamW on {lin.num_data} points with none between "
        f"{GAP[0]} and {GAP[1]}. Its noise is estimated from the residuals, its prior by the evidence. In the gap the "
        f"error bars are {curve.widths[1] / curve.widths[0]:.1f} times as wide as among the data. Scores at new "
        "points, in nats per point, and the share of targets more than two standard deviations off, where one in "
        "twenty is expected:"
    )


def _of_digits(digits: Classification) -> str:
    lin = digits.post.lin
    return (
        f"A network of {lin.num_parameters:,} weights, trained by AdamW on {lin.num_data} digits from 0 to 7, of which "
        "one label in five is drawn at random, as in the test digits. Held-out digits choose the prior precision, "
        f"{float(digits.post.prior_precision):.3g}. Scores of {len(digits.labels)} test digits, also of the network "
        "with a temperature that is fitted to the held-out labels:"
    )


def _of_unseen(digits: Classification) -> str:
    unseen = int(digits.unseen.sum())
    return (
        f"The same network sees {unseen} images of 8 and 9 among the test digits. How well does its uncertainty rank "
        "them above the others: the entropy of the network, and the epistemic part under the posterior?"
    )


def _section(title: str, text: str, rows: list[Row]) -> str:
    """Format a story: its title, what was done, and a line for each score."""
    lines = [title, *textwrap.wrap(text, 100), "", f"  {'':<32}{'network':>10}{'Laplace':>10}"]
    for row in rows:
        verdict = "better" if row.is_better else "not better"
        lines.append(f"  {row.score:<32}{row.network:>10.3f}{row.laplace:>10.3f}   {verdict}")
    return "\n".join(lines) + "\n"


def _draw(curve: Regression, digits: Classification, output: Path) -> None:
    ax = plots.regression(curve.post, torch.linspace(-4, 4, 200), title="Error bars open where there are no data")
    plots.save(ax, output / "regression.png")
    ax = plots.reliability(digits.probabilities, digits.labels, title="Digits, one label in five wrong")
    plots.save(ax, output / "reliability.png")
    ax = style.axes_of(None, 5.6, 5.4)
    names = {"network": "network's entropy", "Laplace": "epistemic uncertainty"}
    for (name, look), row in zip(style.looks(digits.scores).items(), (digits.rows[3].network, digits.rows[3].laplace)):
        label = f"{names[name]}, AUROC {row:.3f}"
        ax.plot(*roc(digits.scores[name], digits.unseen), linewidth=2, label=label, **look.line)
    ax.plot([0, 1], [0, 1], label="by chance", **style.REFERENCE)
    style.dress(ax, "known digits above the threshold", "unseen digits above it", "Digits never seen in training")
    ax.legend(fontsize=style.SMALL, loc="lower right")
    plots.save(ax, output / "unseen.png")


@dataclass(frozen=True)
class Check:
    """A line of the report: a relative error, and the largest that passes."""

    name: str
    error: float
    most: float = 1e-6

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.most

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        return f"{verdict}  {self.name}: relative error {self.error:.1e} (at most {self.most:.0e})"


def run_checks(model: nn.Module, x: Tensor, y: Tensor, at: Tensor, generator: torch.Generator) -> list[Check]:
    """Check a product, a solve and variances of the network's posterior under the full GGN at prior precision 1.

    The reference for the product is a finite difference, for the solve its residual, and for the variances a dense
    computation in function space from gradients by autograd (Woodbury's identity).
    """
    model, (x, y, at) = copy.deepcopy(model).double(), (points.double() for points in (x, y, at))
    noise = 0.04
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise))
    v = torch.randn(lin.num_parameters, generator=generator, dtype=torch.float64)
    product = lin.jacobian(at) @ v
    h = 1e-5  # the central difference is off by about h²
    difference = (_moved(model, h * v)(at) - _moved(model, -h * v)(at)).detach().flatten() / (2 * h)
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    solution = post.precision.cg(v, rtol=1e-8).x
    J, J_at = (_rows(model, points) for points in (x, at))
    inner = torch.linalg.solve(J @ J.mT + noise * torch.eye(len(x)).double(), J @ J_at.mT)
    exact = (J_at @ J_at.mT - (J @ J_at.mT).mT @ inner).diagonal()
    return [
        Check("Jacobian product against a finite difference", _error(product, difference)),
        Check("solve with the posterior's precision, its residual", _error(post.precision @ solution, v)),
        Check("variances against a dense computation", _error(post.predict(at).variance.flatten(), exact)),
    ]


def _moved(model: nn.Module, step: Tensor) -> nn.Module:
    moved = copy.deepcopy(model)
    vector_to_parameters(parameters_to_vector(moved.parameters()).detach() + step, moved.parameters())
    return moved


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient of the output at each point, (N, D)."""
    rows = [torch.autograd.grad(model(point[None]).sum(), list(model.parameters())) for point in x]
    return torch.stack([parameters_to_vector(row) for row in rows])


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value - exact).norm() / exact.norm())
