"""The demo from end to end: its stories, checks and figures, and what it prints."""

from __future__ import annotations

import copy
import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import curvops as co
from curvops import plots
from curvops.cli.demo.stories import FULL, GAP, Classification, Regression, Row, Size, classification, regression, roc
from curvops.plots import style

WIDTH = 100
"""The width of a line of the report."""
STEP = 1e-5
"""The step of the central difference, whose error is about its square."""


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
    lines = [title, *textwrap.wrap(text, WIDTH), "", f"  {'':<32}{'network':>10}{'Laplace':>10}"]
    for row in rows:
        verdict = "better" if row.is_better else "not better"
        lines.append(f"  {row.score:<32}{row.network:>10.3f}{row.laplace:>10.3f}   {verdict}")
    return "\n".join(lines) + "\n"


def _draw(curve: Regression, digits: Classification, output: Path) -> None:
    figure, ax = style.panel(8.4, 4.8)
    plots.regression(curve.post, torch.linspace(-4, 4, 200), title="Error bars open where there are no data", ax=ax)
    plots.save(figure, output / "regression.png")
    figure, ax = style.panel(5.6, 5.4)
    plots.reliability(digits.probabilities, digits.labels, title="Digits, one label in five wrong", ax=ax)
    plots.save(figure, output / "reliability.png")
    figure, ax = style.panel(5.6, 5.4)
    names = {"network": "network's entropy", "Laplace": "epistemic uncertainty"}
    for (name, look), row in zip(style.looks(digits.scores).items(), (digits.rows[3].network, digits.rows[3].laplace)):
        label = f"{names[name]}, AUROC {row:.3f}"
        ax.plot(*roc(digits.scores[name], digits.unseen), linewidth=2, label=label, **look.line)
    ax.plot([0, 1], [0, 1], label="by chance", **style.REFERENCE)
    style.dress(ax, "known digits above the threshold", "unseen digits above it", "Digits never seen in training")
    ax.legend(fontsize=style.SMALL, loc="lower right")
    plots.save(figure, output / "unseen.png")


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
    difference = (_moved(model, STEP * v)(at) - _moved(model, -STEP * v)(at)).detach().flatten() / (2 * STEP)
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
