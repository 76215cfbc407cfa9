"""How good is the posterior of m points of N, each with N/m times its weight?

    python -m benchmarks.subsampled --output docs/figures        # prints the table, draws subsampled.png

A trained 64-32-10 network on 1000 of scikit-learn's digits; predictions at 200 others, upright and turned by 60°.
The precision of a subset is unbiased; its inverse, and with it every variance, is not.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import curvops as co
from curvops.cli.demo.digits import load_digits
from curvops.cli.demo.network import fit, perceptron
from curvops.plots import style
from curvops.posterior import metrics

SIZES = (10, 30, 100, 300, 1000)
DRAWS = 10
PRIOR = 1.0
ANGLE = 60


@dataclass(frozen=True, eq=False)
class Measured:
    """Posteriors of subsets of one size; one entry a draw."""

    size: int
    ratio: Tensor
    """Mean over points and classes of the standard deviation, over that of all points."""
    error: Tensor
    """Root mean square of the relative error of a standard deviation."""
    upright: Tensor
    """Negative log-likelihood of upright test digits, nats a point."""
    turned: Tensor
    """That of turned ones."""


def measure(seed: int = 0) -> tuple[list[Measured], tuple[float, float]]:
    """All sizes, and the negative log-likelihood of the MAP, upright and turned."""
    digits = load_digits(1000)
    train, test = digits.train.to(torch.float64), digits.test.to(torch.float64).first(200)
    torch.manual_seed(seed)
    model = fit(perceptron(64, 32, 10).double(), train, prior_precision=PRIOR, steps=1500, rate=1e-2, cosine=True)
    lin = co.linearize(model, (train.x, train.y), "classification")
    turned = test.rotated(ANGLE)
    full = _posterior(lin).predict(test.x).stddev
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in SIZES:
        ratios, errors, losses = [], [], []
        for _ in range(DRAWS if size < lin.num_data else 1):
            post = _posterior(co.subsample(lin, size, generator))
            relative = post.predict(test.x).stddev / full
            ratios.append(relative.mean())
            errors.append((relative - 1).square().mean().sqrt())
            losses.append([metrics.nll(post.probabilities(x), test.y) for x in (test.x, turned.x)])
        upright, rotated = torch.tensor(losses).T
        found.append(Measured(size, torch.stack(ratios), torch.stack(errors), upright, rotated))
    plain = [float(metrics.nll(lin.predict(x).softmax(-1), test.y)) for x in (test.x, turned.x)]
    return found, (plain[0], plain[1])


def _posterior(lin: co.Linearization) -> co.Laplace:
    """Exact: the precision as a dense matrix, 2,410 × 2,410."""
    G = co.linalg.Dense(co.GGN(lin).to_dense(), psd=True)
    return co.laplace(lin, G, PRIOR, check_mode=False)


def table(found: list[Measured], plain: tuple[float, float]) -> str:
    """Mean and standard deviation over the draws of each size."""
    lines = [
        f"| m | std / full std | error of a std | NLL upright | NLL at {ANGLE}° |",
        "|---|---|---|---|---|",
        f"| MAP | 0 | | {plain[0]:.3f} | {plain[1]:.3f} |",
    ]
    for row in found:
        cells = [_spread(row.ratio, 2), _spread(100 * row.error, 0, " %"), _spread(row.upright), _spread(row.turned)]
        lines.append(f"| {row.size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Tensor, digits: int = 3, unit: str = "") -> str:
    spread = f" ± {float(values.std()):.{digits}f}" if len(values) > 1 else ""
    return f"{float(values.mean()):.{digits}f}{spread}{unit}"


def figure(found: list[Measured], plain: tuple[float, float]) -> Figure:
    """Left: standard deviations against those of all points; right: the loss of turned digits."""
    drawn = style.blank(9.2, 3.8)
    left, right = drawn.subplots(1, 2)
    sizes = [row.size for row in found]
    some = found[:-1]  # all points have no error
    _curve(left, 0, found, [row.ratio for row in found], "mean std / full std")
    _curve(left, 1, some, [row.error for row in some], "rms relative error of a std")
    _curve(right, 0, found, [row.turned for row in found], "posterior of m points")
    left.axhline(1, color=style.GREY, linewidth=1, linestyle=":")
    right.axhline(plain[1], color=style.GREY, linewidth=1.4, linestyle="--", label="MAP")
    for axes, what in ((left, "ratio (no unit)"), (right, f"NLL at {ANGLE}° (nats a point)")):
        axes.set_xscale("log")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        style.dress(axes, "points in the subset, m of 1,000", what)
        axes.legend(fontsize=style.SMALL, frameon=False)
    return drawn


def _curve(axes: Axes, look: int, rows: list[Measured], column: list[Tensor], label: str) -> None:
    spread = [float(values.std()) if len(values) > 1 else 0.0 for values in column]
    axes.errorbar(
        [row.size for row in rows],
        [float(values.mean()) for values in column],
        spread,
        color=style.COLOURS[look],
        marker=style.MARKERS[look],
        linestyle=style.DASHES[look],
        capsize=3,
        label=label,
    )


def main() -> None:
    """Measure, print the table, draw the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.subsampled", description=__doc__)
    parser.add_argument("--output", type=Path, default=None, metavar="FOLDER", help="for subsampled.png")
    arguments = parser.parse_args()
    found, plain = measure()
    print(table(found, plain))
    if arguments.output is not None:
        style.save(figure(found, plain), arguments.output / "subsampled.png")


if __name__ == "__main__":
    main()
