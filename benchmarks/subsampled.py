"""How good is the posterior from m of N points, each with N/m times its weight?

    python -m benchmarks.subsampled

A trained 64-32-10 network on 1000 of scikit-learn's digits; predictions at 200 others, upright and turned by 60°.
The precision of a subset is unbiased; its inverse, and with it every variance, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import curvops as co
from benchmarks import study_page
from benchmarks.claims import spread
from benchmarks.digits import load_digits
from benchmarks.layers import fit, perceptron
from benchmarks.tables import table
from curvops import metrics
from curvops.plots import style

SIZES = (10, 30, 100, 300, 1000)
DRAWS = 10
PRIOR = 1.0
ANGLE = 60


Found = dict[str, dict[str, Any]]
"""By m, and of "MAP", one number a subset: `ratio`, the mean over points and classes of the standard deviation over
that of all points; `error`, the root mean square of its relative error; `upright` and `turned`, the negative
log-likelihood of test digits, nats a point."""


def study(seed: int) -> Found:
    """All sizes, and the MAP."""
    digits = load_digits(1000)
    train, test = digits.train.to(torch.float64), digits.test.to(torch.float64).first(200)
    torch.manual_seed(seed)
    model = fit(perceptron(64, 32, 10).double(), train, prior_precision=PRIOR, steps=1500, rate=1e-2, cosine=True)
    lin = co.linearize(model, (train.x, train.y), "classification")
    parts = {"upright": test, "turned": test.turn(ANGLE)}
    full = _posterior(lin).predict(test.x).stddev
    generator = torch.Generator().manual_seed(seed)
    plain = {name: [metrics.nll(lin.predict(part.x).softmax(-1), part.y)] for name, part in parts.items()}
    found: Found = {"MAP": {"ratio": [0.0], "error": [1.0]} | plain}
    for size in SIZES:
        rows = found[f"{size:,}"] = {"ratio": [], "error": [], "upright": [], "turned": []}
        for _ in range(DRAWS if size < lin.num_data else 1):
            post = _posterior(co.subsample(lin, size, generator))
            relative = post.predict(test.x).stddev / full
            rows["ratio"].append(relative.mean())
            rows["error"].append((relative - 1).square().mean().sqrt())
            for name, part in parts.items():
                rows[name].append(metrics.nll(post.probabilities(part.x), part.y))
    return found


def _posterior(lin: co.operators.Linearization) -> co.posterior.Laplace:
    """Exact: the precision as a dense matrix, 2,410 × 2,410."""
    G = co.linalg.Dense(co.GGN(lin).to_dense(), psd=True)
    return co.laplace(lin, G, PRIOR, check_mode=False)


def results_table(found: Found) -> str:
    """Mean and standard deviation over the subsets of each size."""
    rows = [
        [m, cell(row["ratio"], 2), cell(100 * row["error"], 0, " %"), cell(row["upright"]), cell(row["turned"])]
        for m, row in found.items()
    ]
    header = ["m", "std / full std", "error of a std (rms)", "NLL upright", f"NLL at {ANGLE}°"]
    return f"Mean ± standard deviation over {DRAWS} subsets of one training set.\n\n{table(header, rows)}"


def cell(values: Tensor, digits: int = 3, unit: str = "") -> str:
    """Mean ± standard deviation, of several; alone what there is once."""
    return (spread(values, digits) if len(values) > 1 else f"{float(values):.{digits}f}") + unit


def figure(found: Found) -> Figure:
    """Left: standard deviations against those of all points; right: the loss of turned digits."""
    drawn = style.blank(9.2, 3.8)
    left, right = drawn.subplots(1, 2)
    rows = [found[f"{size:,}"] for size in SIZES]
    _curve(left, 0, SIZES, [row["ratio"] for row in rows], "mean std / full std")
    _curve(left, 1, SIZES[:-1], [row["error"] for row in rows[:-1]], "rms relative error of a std")  # all have none
    _curve(right, 0, SIZES, [row["turned"] for row in rows], "posterior of m points")
    left.axhline(1, color=style.GREY, linewidth=1, linestyle=":")
    right.axhline(float(found["MAP"]["turned"]), color=style.GREY, linewidth=1.4, linestyle="--", label="MAP")
    for axes, what in ((left, "ratio (no unit)"), (right, f"NLL at {ANGLE}° (nats a point)")):
        axes.set_xscale("log")
        axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        style.dress(axes, "points in the subset, m of 1,000", what)
        axes.legend(fontsize=style.SMALL, frameon=False)
    return drawn


def _curve(axes: Axes, look: int, sizes: Sequence[int], column: list[Tensor], label: str) -> None:
    bars = [float(values.std()) if len(values) > 1 else 0.0 for values in column]
    means = [float(values.mean()) for values in column]
    options = style.Look(style.COLOURS[look], style.DASHES[look], style.MARKERS[look])._asdict()
    axes.errorbar(sizes, means, bars, capsize=3, label=label, **options)


STUDY = study_page.Study(
    "subsampled",
    __doc__,
    study,
    {"subsampled": results_table},
    "docs/few_points.md",
    figures={"subsampled": figure},
    options={"seed": (0, "of the network and of the subsets")},
)

if __name__ == "__main__":
    STUDY.run()
