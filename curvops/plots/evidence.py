"""Which prior precision do the training data ask for, and do held-out data agree?"""

from __future__ import annotations

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def evidence(
    precisions: Real[np.ndarray, " grid"],
    value: Real[np.ndarray, " grid"],
    low: Real[np.ndarray, " grid"],
    high: Real[np.ndarray, " grid"],
    validation_nll: Real[np.ndarray, " grid"],
    chosen: float,
) -> Figure:
    """Log evidence with its 95 % interval above, validation NLL below, against the prior precision (log axis).

    `value`, `low`, `high` in nats over the training set; `validation_nll` in nats a point; `chosen` is the precision
    that a vertical line marks in both panels.
    """
    figure = style.blank(7.2, 6.4)
    above, below = figure.subplots(2, 1, sharex=True)
    order = np.argsort(precisions)
    x = precisions[order]
    blue, orange = style.COLOURS[:2]
    above.fill_between(x, low[order], high[order], color=blue, alpha=style.BAND, linewidth=0, label="95 % interval")
    above.plot(x, value[order], color=blue, marker="o", markersize=4, linewidth=2, label="log evidence")
    below.plot(x, validation_nll[order], color=orange, marker="s", markersize=4, linewidth=2, label="validation NLL")
    best = np.nanargmin(validation_nll)
    below.plot(
        precisions[best],
        validation_nll[best],
        linestyle="none",
        marker="o",
        markersize=13,
        markerfacecolor="none",
        markeredgecolor=style.INK,
        label=f"its smallest, at {precisions[best]:.3g}",
    )
    for axes in (above, below):
        axes.axvline(chosen, color=style.INK, linestyle="--", linewidth=1.4, label=f"chosen by evidence: {chosen:.3g}")
    above.set_xscale("log")
    style.dress(above, "", "log evidence (nats)", "Training data: evidence of the prior precision")
    style.dress(below, "prior precision (1 / squared weight)", "validation NLL (nats a point)", "Held-out data")
    for axes in (above, below):
        axes.legend(fontsize=style.SMALL, framealpha=1)
    return figure
