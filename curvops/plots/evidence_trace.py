"""How did a tuning get where it ended: the hyperparameters, what was counted, and what each step cost."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from curvops.plots import style
from curvops.posterior.tuning import Tuning


def evidence_trace(tunings: Mapping[str, Tuning]) -> Figure:
    """Prior precision (log axis), effective parameters ± 2 standard errors and products against the step.

    `tunings` maps a name to the `tuning` of a posterior by `co.evidence.mackay` or `maximize`; several groups are told
    apart by theirs. A step shows what it started from; a tuning's last point is marked by a cross where it has not
    converged. ValueError where there is nothing to draw.
    """
    if not tunings or not all(tuning.steps for tuning in tunings.values()):
        raise ValueError("evidence_trace draws tunings of at least one step, {name: post.tuning}.")
    figure = style.blank(12.5, 4.4)
    left, middle, right = figure.subplots(1, 3)
    lines = {
        f"{name} · {tuning.groups[g]}" if len(tuning.groups) > 1 else name: (tuning, g)
        for name, tuning in tunings.items()
        for g in range(len(tuning.steps[0].prior_precision))
    }
    looks = style.looks(lines)
    for name, (tuning, g) in lines.items():
        look, x = looks[name]._asdict() | {"label": name, "markersize": 4, "linewidth": 2}, np.arange(len(tuning.steps))
        alpha, gamma, error = (
            np.array([float(getattr(step, part)[g]) for step in tuning.steps])
            for part in ("prior_precision", "effective_parameters", "stderr")
        )
        left.plot(x, alpha, **look)
        middle.plot(x, gamma, **look)
        middle.fill_between(x, gamma - 2 * error, gamma + 2 * error, color=look["color"], alpha=style.BAND, linewidth=0)
        if not tuning.converged:
            left.plot(x[-1:], alpha[-1:], marker="x", markersize=11, markeredgewidth=2.2, color=look["color"])
    first = style.looks(tunings)
    for name, tuning in tunings.items():
        look = first[name]._asdict() | {"label": name, "markersize": 4, "linewidth": 2}
        right.plot([step.matvecs for step in tuning.steps], **look)
    left.set_yscale("log")
    style.dress(left, "step", "prior precision (1 / squared weight)", "Prior precision")
    style.dress(middle, "step", "effective parameters", "Effective parameters, ± 2 standard errors")
    style.dress(right, "step", "products with single vectors", "Cost of each step")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=style.SMALL, framealpha=1)
    return figure
