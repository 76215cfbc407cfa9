"""Does the uncertainty of a fitted curve grow where there are no data?"""

from __future__ import annotations

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def regression(
    x_train: Real[np.ndarray, " N"],
    y_train: Real[np.ndarray, " N"],
    x: Real[np.ndarray, " M"],
    mean: Real[np.ndarray, " M"],
    std: Real[np.ndarray, " M"],
    noise_std: float,
) -> Figure:
    """Data, predictive mean and bands of two standard deviations: of the function, and with the noise added.

    `x_train`, `y_train` (N,) are the data; `mean` and `std` (M,), in the target's units, belong to the function at `x`
    (M,); `noise_std` is the standard deviation of the noise. The widest stretch without data between two points is
    marked when it covers a tenth of their range or more.
    """
    figure = style.blank(8.4, 4.8)
    axes = figure.subplots()
    order = np.argsort(x)
    x, mean, std = x[order], mean[order], std[order]
    total = np.sqrt(std**2 + noise_std**2)
    blue = style.COLOURS[0]
    axes.fill_between(
        x, mean - 2 * total, mean + 2 * total, color=style.LIGHT, linewidth=0, label="±2 std with the noise"
    )
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=blue, alpha=0.4, linewidth=0, label="±2 std epistemic")
    axes.plot(x, mean, color=blue, linewidth=2.2, label="predictive mean")
    axes.plot(x_train, y_train, linestyle="none", marker="o", markersize=4.5, color=style.INK, label="training data")
    places = np.sort(x_train)
    widest = int(np.argmax(np.diff(places)))
    left, right = places[widest], places[widest + 1]
    if right - left >= 0.1 * (places[-1] - places[0]):
        for edge in (left, right):
            axes.axvline(edge, color=style.GREY, linestyle=":", linewidth=1.2)
        axes.text(
            (left + right) / 2,
            0.03,
            "no data",
            transform=axes.get_xaxis_transform(),
            ha="center",
            fontsize=style.LABEL,
            color=style.GREY,
            style="italic",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2},
        )
    style.dress(axes, "input x (arbitrary units)", "target y (arbitrary units)", "Prediction and its uncertainty")
    axes.set_xlim(x[0], x[-1])
    figure.legend(loc="outside lower center", ncols=4, fontsize=style.SMALL)
    return figure
