"""What happens as the inputs leave the training data: confidence and uncertainty against the angle of rotation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from curvops.plots import style


def rotation(
    angles: ArrayLike, accuracy: ArrayLike, confidence: Mapping[str, ArrayLike], uncertainty: Mapping[str, ArrayLike]
) -> Figure:
    """Two panels over angles (degrees): mean confidence of each method beside the accuracy; uncertainties in nats.

    A method is honest where its confidence follows the accuracy down.
    """
    figure, axes = style.grid_of_axes(1, 2, width=4.6, height=3.6)
    x = np.asarray(angles, float)
    left, right = axes[0]
    left.plot(x, np.asarray(accuracy, float), color=style.BLACK, linestyle="--", linewidth=1.8, label="accuracy (MAP)")
    for i, (name, values) in enumerate(confidence.items()):
        y = np.asarray(values, float)
        style.same_length(angles=x, **{name: y})
        left.plot(x, y, color=style.CYCLE[i], marker=style.MARKERS[i], markersize=5, label=name)
    style.label(left, "rotation (degrees)", "mean confidence (probability)", "Confidence follows accuracy?")
    left.set(ylim=(0, 1.03), xticks=x)
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    for i, (name, values) in enumerate(uncertainty.items()):
        y = np.asarray(values, float)
        style.same_length(angles=x, **{name: y})
        right.plot(x, y, color=style.CYCLE[i], marker=style.MARKERS[i], markersize=5, label=name)
    style.label(right, "rotation (degrees)", "mean uncertainty (nats)", "Uncertainty away from the data")
    right.set(xticks=x)
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=8.5, loc="upper left")
    return figure
