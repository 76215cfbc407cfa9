"""Is a forecast of 80 % right 80 % of the time? Reliability diagrams, one panel a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from curvops.plots import style

Bins = Mapping[str, ArrayLike]
"""edges (B + 1,), confidence (B,), accuracy (B,), count (B,): the fields of `metrics.ReliabilityBins`."""


def reliability(panels: Sequence[Mapping[str, Bins]], row_titles: Sequence[str]) -> Figure:
    """Accuracy against confidence in bins: one row of panels for each of `panels`, one column a method.

    panels: for each row, a mapping from method name to its bins. Bars are accuracies; the hatched part is the gap to
    the mean confidence, whose weighted mean is the ECE written in the panel. Grey bars below: share of points.
    """
    if not panels or len(panels) != len(row_titles):
        raise ValueError(f"need one title a row, not {len(panels)} rows and {len(row_titles)} titles")
    columns = max(len(row) for row in panels)
    figure, axes = style.grid_of_axes(len(panels), columns, width=3.1, height=3.1)
    for row, (methods, title) in enumerate(zip(panels, row_titles, strict=True)):
        for column, (name, bins) in enumerate(methods.items()):
            ax = axes[row][column]
            _panel(ax, bins)
            style.label(
                ax,
                "confidence (largest probability)" if row == len(panels) - 1 else "",
                "accuracy (fraction right)" if column == 0 else "",
                f"{name}, {title}",
            )
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    return figure


def _panel(ax: Axes, bins: Bins) -> None:
    edges, confidence = np.asarray(bins["edges"], float), np.asarray(bins["confidence"], float)
    accuracy, count = np.asarray(bins["accuracy"], float), np.asarray(bins["count"], float)
    style.same_length(confidence=confidence, accuracy=accuracy, count=count)
    width, share = np.diff(edges), count / max(count.sum(), 1)
    left = edges[:-1]
    filled = count > 0
    gap = np.where(filled, np.abs(accuracy - confidence), 0)
    low = np.where(filled, np.minimum(accuracy, confidence), 0)
    ax.bar(left, np.where(filled, accuracy, 0), width, align="edge", color=style.BLUE, alpha=0.85, label="accuracy")
    ax.bar(
        left,
        gap,
        width,
        bottom=low,
        align="edge",
        color="none",
        edgecolor=style.RED,
        hatch="////",
        linewidth=0,
        label="gap to confidence",
    )
    ax.bar(left, -0.2 * share, width, align="edge", color=style.GREY, label="share of points (below zero)")
    ax.plot([0, 1], [0, 1], color=style.BLACK, linewidth=1, linestyle="--", label="calibrated")
    ece = float((gap * share).sum())
    ax.text(0.04, 0.94, f"ECE {100 * ece:.1f} %", transform=ax.transAxes, fontsize=9, va="top")
    ax.set(xlim=(0, 1), ylim=(-0.22, 1.02), yticks=np.linspace(0, 1, 6))
