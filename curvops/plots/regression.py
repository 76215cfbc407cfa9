"""A one-dimensional regression: data with a gap, the mean, and bands that open where there are no data."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from curvops.plots import style


def regression(
    x: ArrayLike,
    mean: ArrayLike,
    deviation: ArrayLike,
    noise_deviation: float,
    data: tuple[ArrayLike, ArrayLike],
    truth: ArrayLike | None = None,
    samples: ArrayLike | None = None,
) -> Figure:
    """Mean ± 2 standard deviations of the function (dark) and of a new observation (light), with the data.

    x, mean and deviation are (M,); `noise_deviation` is the standard deviation of the observation noise; `truth` (M,)
    the function the data came from; `samples` (S, M) draws of the function.
    """
    grid, centre, spread = np.asarray(x, float), np.asarray(mean, float), np.asarray(deviation, float)
    style.same_length(x=grid, mean=centre, deviation=spread)
    total = np.sqrt(spread**2 + noise_deviation**2)
    figure, axes = style.grid_of_axes(1, 1, width=6.6, height=3.8)
    ax = axes[0][0]
    ax.fill_between(
        grid,
        centre - 2 * total,
        centre + 2 * total,
        color=style.SKY,
        alpha=0.3,
        linewidth=0,
        label="observation ± 2 sd",
    )
    ax.fill_between(
        grid,
        centre - 2 * spread,
        centre + 2 * spread,
        color=style.BLUE,
        alpha=0.35,
        linewidth=0,
        label="function ± 2 sd",
    )
    if samples is not None:
        for i, draw in enumerate(np.asarray(samples, float)):
            ax.plot(grid, draw, color=style.BLUE, linewidth=0.7, alpha=0.7, label="posterior draws" if i == 0 else None)
    if truth is not None:
        ax.plot(grid, np.asarray(truth, float), color=style.BLACK, linestyle="--", linewidth=1.3, label="truth")
    ax.plot(grid, centre, color=style.RED, linewidth=2, label="network (mean)")
    ax.plot(*(np.asarray(values, float) for values in data), "o", color=style.BLACK, markersize=3.5, label="data")
    inside = np.concatenate([centre - 2 * total, centre + 2 * total, np.asarray(data[1], float)])
    low, high = np.quantile(inside, [0.02, 0.98])
    ax.set(xlim=(grid[0], grid[-1]), ylim=(low - 0.15 * (high - low), high + 0.15 * (high - low)))
    style.label(ax, "input x (unitless)", "output y (unitless)", "A network's error bars open where it saw no data")
    ax.legend(frameon=False, fontsize=8.5, ncols=2, loc="best")
    return figure
