"""How sure are predictions of inputs that go away from the data, ever further?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def ray(
    distances: Real[np.ndarray, " M"],
    confidence: Mapping[str, Real[np.ndarray, " M"]],
    limits: Mapping[str, float] | None = None,
    radius: float | None = None,
) -> Figure:
    """Confidence of each prediction against the distance along a ray, on a log axis.

    `distances` (M,), positive, are in the inputs' units; `confidence` maps a prediction's name to largest
    probabilities (M,). `limits` maps some of these names to what the confidence tends to, a dotted line. `radius` is
    how far the training data reach, a grey band.
    """
    figure = style.blank(7.6, 4.6)
    axes = figure.subplots()
    if radius is not None:
        axes.axvspan(float(distances.min()), radius, color=style.LIGHT, alpha=0.6, linewidth=0, label="training data")
    for (name, look), values in zip(style.looks(confidence).items(), confidence.values()):
        axes.plot(distances, values, color=look.color, linestyle=look.linestyle, linewidth=2.2, label=name)
        if limits is not None and name in limits:
            axes.axhline(
                limits[name], color=look.color, linestyle=":", linewidth=1.6, label=f"its limit, {limits[name]:.3f}"
            )
    axes.set_xscale("log")
    axes.set_xlim(float(distances.min()), float(distances.max()))
    style.dress(
        axes,
        "distance along the ray (units of the input)",
        "confidence (largest probability)",
        "Away from the data: does the confidence end below 1?",
    )
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="best")
    return figure
