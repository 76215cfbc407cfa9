"""Which outputs of which points vary together under the posterior?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def covariance(
    matrix: Real[np.ndarray, "rows rows"], labels: Sequence[str], title: str = "Predictive covariance of the logits"
) -> Figure:
    """Heat map of a joint predictive covariance, centred at zero, with the points' borders drawn.

    `matrix` (n·C, n·C), in squared logits, point-major: row i·C + c is output c of point i. `labels` names
    the n points. Raises ValueError when the matrix has no whole number of outputs for each label.
    """
    rows, points = len(matrix), len(labels)
    if not points or rows % points:
        raise ValueError(f"{rows} rows are no whole number of outputs for {points} labels; give one label a point.")
    outputs = rows // points
    figure = style.blank(7.6, 6.6)
    axes = figure.subplots()
    limit = float(np.abs(matrix).max()) or 1.0
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    style.dress(axes, f"point, its outputs 0 … {outputs - 1} from left to right", "", title)
    axes.set_ylabel(f"point, its outputs 0 … {outputs - 1} from top to bottom", fontsize=style.LABEL, color=style.INK)
    axes.grid(False)
    axes.spines[["top", "right"]].set_visible(True)
    for border in np.arange(1, points) * outputs - 0.5:
        axes.axhline(border, color=style.INK, linewidth=1)
        axes.axvline(border, color=style.INK, linewidth=1)
    centres = (np.arange(points) + 0.5) * outputs - 0.5
    axes.set_xticks(centres, labels)
    axes.set_yticks(centres, labels, rotation=90, va="center")
    axes.tick_params(length=0, labelsize=style.LABEL)
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_label("covariance (squared logits)", fontsize=style.LABEL, color=style.INK)
    bar.ax.tick_params(labelsize=style.SMALL, colors=style.INK)
    return figure
