"""Is a stated confidence kept? Accuracy against confidence, one panel for each set of predictions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvops.plots import style

PANELS_A_ROW = 3


def reliability(
    curves: Mapping[str, tuple[Real[np.ndarray, " bins"], Real[np.ndarray, " bins"], Real[np.ndarray, " bins"]]],
    title: str = "Reliability",
    ece: Mapping[str, float] | None = None,
) -> Figure:
    """Reliability diagrams, three in a row, after Guo et al. 2017, figure 1.

    `curves` maps a panel's name to (confidence, accuracy, share), each of shape (bins,) and between 0 and 1: mean
    confidence and fraction correct in each of equally wide bins of (0, 1], and the fraction of all points in it. NaN
    marks a bin without points. `ece` maps the same names to expected calibration errors in [0, 1], shown beside them.
    """
    rows = -(-len(curves) // PANELS_A_ROW)
    columns = -(-len(curves) // rows)
    figure = style.blank(3.7 * columns + 0.7, 4.4 * rows + 1, title)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for unused in panels[len(curves) :]:
        unused.remove()
    for axes, (name, look), (confidence, accuracy, share) in zip(panels, style.looks(curves).items(), curves.values()):
        bins = len(share)
        axes.bar(
            (np.arange(bins) + 0.5) / bins, share, width=0.92 / bins, color=style.LIGHT, label="share of all points"
        )
        axes.plot([0, 1], [0, 1], color=style.GREY, linestyle=":", linewidth=1.5, label="perfect calibration")
        held = np.isfinite(confidence) & np.isfinite(accuracy)
        axes.plot(
            confidence[held],
            accuracy[held],
            color=look.color,
            marker=look.marker,
            linewidth=1.8,
            markersize=6,
            markeredgecolor="white",
            label="accuracy in the bin",
        )
        error = f"\nECE {100 * ece[name]:.1f} %" if ece is not None else ""
        style.dress(axes, "confidence (largest probability)", "", f"{name}{error}")
        axes.set(xlim=(0, 1), ylim=(0, 1.03))
        axes.set_xticks(np.linspace(0, 1, 6), ["0", "0.2", "0.4", "0.6", "0.8", "1"])
        # Below the curve in drawing order: where they meet, the data stay readable.
        axes.text(0.6, 0.1, "too sure", ha="center", zorder=1, color=style.GREY, fontsize=style.SMALL, style="italic")
        axes.text(0.05, 0.92, "too cautious", zorder=1, color=style.GREY, fontsize=style.SMALL, style="italic")
    for first in panels[::columns]:
        first.set_ylabel("fraction of points", fontsize=style.LABEL, color=style.INK)
    handles, labels = panels[0].get_legend_handles_labels()
    # Panels differ in colour and marker: the common legend shows the curve in neither.
    handles[labels.index("accuracy in the bin")] = Line2D([], [], color=style.INK, linewidth=1.8)
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=style.SMALL)
    return figure
