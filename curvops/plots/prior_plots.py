"""Figures of the prior precision: the evidence on a grid, and the course of a tuning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from curvops.plots import style
from curvops.posterior.log_evidence.tuning import Tuning


def evidence(
    precisions: Real[np.ndarray, " grid"],
    value: Real[np.ndarray, " grid"],
    low: Real[np.ndarray, " grid"],
    high: Real[np.ndarray, " grid"],
    validation_nll: Real[np.ndarray, " grid"],
    chosen: float,
) -> Figure:
    """Draw the log evidence with its 95 % interval above the validation NLL, against the prior precision (log axis).

    Args:
        precisions: The prior precisions, in any order.
        value: Log evidence, in nats over the training set.
        low: Lower end of its interval, in nats.
        high: Upper end of its interval, in nats.
        validation_nll: The NLL of held-out data, in nats per point.
        chosen: The precision marked by a vertical line in both panels.

    Returns:
        A figure with two panels.
    """
    figure = style.blank(7.2, 6.4)
    above, below = figure.subplots(2, 1, sharex=True)
    order = np.argsort(precisions)
    x = precisions[order]
    blue, orange = style.COLOURS[:2]
    above.plot(x, value[order], color=blue, marker="o", markersize=4, linewidth=2, label="log evidence")
    # Bars have ends wider than the markers: a band would not show an interval narrower than the curve.
    widest = np.max((high - low) / 2)
    ends = np.maximum(0, [(value - low)[order], (high - value)[order]])
    bars: dict[str, Any] = {"fmt": "none", "ecolor": style.INK, "elinewidth": 1.4, "capsize": 6, "capthick": 1.4}
    above.errorbar(x, value[order], ends, label=f"95 % interval, at most ±{widest:.2g} nats", **bars)
    below.plot(x, validation_nll[order], color=orange, marker="s", markersize=4, linewidth=2, label="validation NLL")
    best = np.nanargmin(validation_nll)
    least, label = (precisions[best], validation_nll[best]), f"its smallest, at {precisions[best]:.3g}"
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": style.INK}
    below.plot(*least, linestyle="none", label=label, **ring)
    above.set_xscale("log")
    style.dress(above, "", "log evidence (nats)", "Training data: evidence of the prior precision")
    style.dress(below, "prior precision (1 / squared weight)", "validation NLL (nats per point)", "Held-out data")
    for axes in (above, below):
        axes.axvline(chosen, color=style.INK, linestyle="--", linewidth=1.4, label=f"chosen by evidence: {chosen:.3g}")
        axes.legend(fontsize=style.SMALL, framealpha=1)
    return figure


def evidence_trace(tunings: Mapping[str, Tuning]) -> Figure:
    """Draw prior precision (log axis), effective parameters ± 2 standard errors and products against the step.

    A step shows the values at its start. A cross marks the last point of a tuning that has not converged.

    Args:
        tunings: Maps a name to the `tuning` of a posterior from `co.evidence.mackay` or `maximize`; each of several
            groups has its own line.

    Returns:
        A figure with three panels.

    Raises:
        ValueError: There is no tuning, or a tuning has no steps.
    """
    if not tunings or not all(tuning.steps for tuning in tunings.values()):
        raise ValueError("evidence_trace needs tunings of at least one step, {name: post.tuning}.")
    figure = style.blank(12.5, 4.4)
    left, middle, right = figure.subplots(1, 3)
    lines = {
        f"{name} · {tuning.groups[g]}" if len(tuning.groups) > 1 else name: (tuning, g)
        for name, tuning in tunings.items()
        for g in range(len(tuning.steps[0].prior_precision))
    }
    for (name, look), (tuning, g) in zip(style.looks(lines).items(), lines.values()):
        options = look._asdict() | {"label": name, "markersize": 4, "linewidth": 2}
        alpha, gamma, error = (
            np.array([float(getattr(step, part)[g]) for step in tuning.steps])
            for part in ("prior_precision", "effective_parameters", "stderr")
        )
        x = np.arange(len(tuning.steps))
        left.plot(x, alpha, **options)
        middle.plot(x, gamma, **options)
        middle.fill_between(x, gamma - 2 * error, gamma + 2 * error, color=look.color, alpha=style.BAND, linewidth=0)
        if not tuning.converged:
            left.plot(x[-1:], alpha[-1:], marker="x", markersize=11, markeredgewidth=2.2, color=look.color)
    for (name, look), tuning in zip(style.looks(tunings).items(), tunings.values()):
        options = look._asdict() | {"label": name, "markersize": 4, "linewidth": 2}
        right.plot([step.matvecs for step in tuning.steps], **options)
    left.set_yscale("log")
    style.dress(left, "step", "prior precision (1 / squared weight)", "Prior precision")
    style.dress(middle, "step", "effective parameters", "Effective parameters, ± 2 standard errors")
    style.dress(right, "step", "products with single vectors", "Cost of each step")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=style.SMALL, framealpha=1)
    return figure
