"""The demo from end to end: its stories, checks and figures, and what it prints."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from curvops import plots
from curvops.cli.demo import demo_checks
from curvops.cli.demo.stories import GAP, Classification, Regression, Row, Size, classification, regression, roc
from curvops.plots import style

WIDTH = 100
"""The width of a line of the report."""


def run(output: Path, seed: int, say: Callable[[str], None], size: Size | None = None) -> bool:
    """Run the demo and write its figures and numbers.

    Args:
        output: Folder for results.json and the figures; it is created if missing.
        seed: Seed of the data and the networks.
        say: A function that is called with the lines of the report.
        size: The length of training.

    Returns:
        Whether all checks passed.
    """
    began, size = time.perf_counter(), size or Size()

    def announce(what: str) -> None:
        print(f"{time.perf_counter() - began:5.1f} s  {what}", file=sys.stderr, flush=True)

    output.mkdir(parents=True, exist_ok=True)
    announce("a curve with a gap")
    curve = regression(seed, size)
    say(_section("1. Error bars that open in a gap", _of_curve(curve), curve.rows))
    announce("digits with wrong labels")
    digits = classification(seed, size)
    say(_section("2. Digits with wrong labels", _of_digits(digits), digits.rows[:2]))
    say(_section("3. Digits never seen in training", _of_unseen(digits), digits.rows[2:]))
    announce("checks and figures")
    at = torch.linspace(-4, 4, 20).unsqueeze(1)
    checks = demo_checks.run_checks(curve.model, *curve.points, at, torch.Generator().manual_seed(seed))
    say("\n".join(map(str, checks)))
    _draw(curve, digits, output)
    rows = {"regression": curve.rows, "digits": digits.rows, "temperature": [digits.temperature]}
    numbers = {name: [asdict(row) for row in found] for name, found in rows.items()}
    results = {"seed": seed, **numbers, "checks": [asdict(check) for check in checks]}
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    say(f"\nFigures and numbers: {output}/\n")
    say(conclude(curve, digits))
    return all(check.passed for check in checks)


def _of_curve(curve: Regression) -> str:
    lin = curve.post.lin
    return (
        f"A network of {lin.num_parameters:,} weights, trained by AdamW on {lin.num_data} points with none between "
        f"{GAP[0]} and {GAP[1]}. Its noise is estimated from the residuals, its prior by the evidence. Scores at new "
        "points, in nats per point, and the share of targets more than two standard deviations off, where one in "
        "twenty is expected:"
    )


def _of_digits(digits: Classification) -> str:
    lin = digits.post.lin
    return (
        f"A network of {lin.num_parameters:,} weights, trained by AdamW on {lin.num_data} digits from 0 to 7, of which "
        "one label in five is drawn at random, as in the test digits. Held-out digits choose the prior precision, "
        f"{float(digits.post.prior_precision):.3g}. Scores of {len(digits.labels)} test digits:"
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


def conclude(curve: Regression, digits: Classification) -> str:
    """Say in three sentences what the posterior gained, and in one what it did not, as the numbers show."""
    among, _, gap, _ = curve.rows
    nll, ece, area = digits.rows
    near, far = curve.widths
    scaled = digits.temperature
    sentences = (
        f"In the gap the error bars are {far / near:.1f} times as wide as among the data, and the NLL of new targets "
        f"there is {_compared(gap)}.",
        f"With wrong labels the NLL of the digits is {_compared(nll)}, and the ECE {_compared(ece)}.",
        f"The AUROC for unseen digits is {_compared(area)}.",
        f"A caveat: among its data the curve's NLL is {_compared(among)}; and a single temperature, fitted to the same "
        f"held-out labels, has an NLL of {scaled.network:.3f} on the digits, than which the posterior's is "
        f"{'' if scaled.is_better else 'not '}better.",
    )
    return "\n".join(textwrap.fill(sentence, WIDTH) for sentence in sentences)


def _compared(row: Row) -> str:
    verdict = "better than" if row.is_better else "not better than"
    return f"{row.laplace:.3f}, {verdict} the network's {row.network:.3f}"


def _draw(curve: Regression, digits: Classification, output: Path) -> None:
    figure, ax = style.panel(8.4, 4.8)
    plots.regression(curve.post, torch.linspace(-4, 4, 200), title="Error bars open where there are no data", ax=ax)
    plots.save(figure, output / "regression.png")
    figure, ax = style.panel(5.6, 5.4)
    plots.reliability(digits.probabilities, digits.labels, title="Digits, one label in five wrong", ax=ax)
    plots.save(figure, output / "reliability.png")
    figure, ax = style.panel(5.6, 5.4)
    names = {"network": "network's entropy", "Laplace": "epistemic uncertainty"}
    for (name, look), row in zip(style.looks(digits.scores).items(), (digits.rows[2].network, digits.rows[2].laplace)):
        label = f"{names[name]}, AUROC {row:.3f}"
        ax.plot(*roc(digits.scores[name], digits.unseen), linewidth=2, label=label, **look.line)
    ax.plot([0, 1], [0, 1], label="by chance", **style.REFERENCE)
    style.dress(ax, "known digits above the threshold", "unseen digits above it", "Digits never seen in training")
    ax.legend(fontsize=style.SMALL, loc="lower right")
    plots.save(figure, output / "unseen.png")
