"""Which prior precision: the log evidence, and what validation data would say, over the same axis."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from curvops.plots import style


def evidence(
    prior_precisions: ArrayLike,
    log_evidence: ArrayLike,
    interval: tuple[ArrayLike, ArrayLike],
    validation: tuple[ArrayLike, ArrayLike],
    chosen: float,
    map_validation_nll: float | None = None,
) -> Figure:
    """Log evidence (nats) with its 95 % interval above the validation NLL (nats a point), the chosen value marked.

    prior_precisions, log_evidence and both ends of `interval` are (P,); `validation` is (prior precisions, NLL), on
    the same or a coarser grid.
    """
    x, y = np.asarray(prior_precisions, float), np.asarray(log_evidence, float)
    low, high = np.asarray(interval[0], float), np.asarray(interval[1], float)
    style.same_length(prior_precisions=x, log_evidence=y, low=low, high=high)
    vx, vy = np.asarray(validation[0], float), np.asarray(validation[1], float)
    style.same_length(validation_precisions=vx, validation_nll=vy)
    figure, axes = style.grid_of_axes(2, 1, width=5.6, height=2.7, share_x=True)
    top, bottom = axes[0][0], axes[1][0]
    top.fill_between(x, low, high, color=style.BLUE, alpha=0.3, linewidth=0, label="95 % interval")
    top.plot(x, y, color=style.BLUE, marker="o", markersize=4, label="log evidence")
    style.label(top, "", "log evidence (nats)", "The evidence needs no validation data ...")
    bottom.plot(vx, vy, color=style.ORANGE, marker="s", markersize=4, label="validation NLL, Laplace")
    if map_validation_nll is not None:
        bottom.axhline(map_validation_nll, color=style.GREY, linestyle=":", label="validation NLL, MAP")
    style.label(bottom, "prior precision (1 / variance of a weight)", "NLL (nats a point)", "... and where they agree")
    for ax in (top, bottom):
        ax.set_xscale("log")
        ax.axvline(chosen, color=style.RED, linestyle="--", linewidth=1.2, label=f"chosen: {chosen:.3g}")
        ax.legend(frameon=False, fontsize=8.5)
    return figure
