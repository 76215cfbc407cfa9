"""How are the eigenvalues of a curvature matrix spread, and which stand out?"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from torch import Tensor

from curvops.linalg import SpectralDensity
from curvops.plots import style

FLOOR = 1e-2
"""The y axis ends this much below what one eigenvalue alone would show."""


def spectral_density(
    grid: Real[np.ndarray, " G"] | SpectralDensity,
    density: Real[np.ndarray, " G"] | None = None,
    low: Real[np.ndarray, " G"] | None = None,
    high: Real[np.ndarray, " G"] | None = None,
    bandwidth: float | None = None,
    top: Any = None,
    size: int | None = None,
    scale: Literal["linear", "log", "symlog"] | None = None,
    level: float | None = None,
    zero_mass: float | None = None,
    title: str = "Spectral density",
) -> Figure:
    """Density of eigenvalues with its band, on a log axis, and the largest eigenvalues as marks below it.

    The first argument is what `curvops.linalg.spectral_density` returned, alone, or its arrays: `density` between `low`
    and `high` at the eigenvalues `grid`, per unit of λ, or of log λ on the log scale. `top` are eigenvalues known one
    by one. `size` is the number of rows n: the height of a single eigenvalue, 1/n over the broadening, is then drawn.
    `scale` is the density's own, or "symlog" for one on the linear scale whose eigenvalues are of both signs and span
    decades. By default scale, level and zero mass are those of the SpectralDensity, of arrays "linear", 0.95 and 0.

    Raises TypeError for a SpectralDensity with arrays beside it, or for arrays without the others; ValueError for
    arrays of different lengths or an unknown scale.
    """
    if isinstance(grid, SpectralDensity):
        found = grid
        if any(given is not None for given in (density, low, high, bandwidth)):
            raise TypeError("a SpectralDensity brings its density, band and bandwidth; give it alone, or arrays.")
        grid, density, low, high = (_array(part) for part in (found.grid, found.density, found.lower, found.upper))
        bandwidth, scale = found.bandwidth, found.scale if scale is None else scale
        level = found.level if level is None else level
        zero_mass = found.zero_mass if zero_mass is None else zero_mass
    if density is None or low is None or high is None or bandwidth is None:
        raise TypeError(
            "spectral_density takes what curvops.linalg.spectral_density(A) returned, or grid, density, low, high and "
            "bandwidth."
        )
    grid, density, low, high = (_array(part) for part in (grid, density, low, high))
    if len({part.shape for part in (grid, density, low, high)}) > 1 or grid.ndim != 1 or not len(grid):
        shapes = [part.shape for part in (grid, density, low, high)]
        raise ValueError(f"grid, density, low and high must be vectors of one length, got {shapes}.")
    if scale not in (None, "linear", "log", "symlog"):
        raise ValueError(f"scale={scale!r}; expected 'linear', 'log' or 'symlog'.")
    level = 0.95 if level is None else level
    top = None if top is None else _array(top)
    figure = style.blank(8.0, 5.0)
    axes = figure.subplots()
    blue, orange = style.COLOURS[:2]
    peak = float(density.max())
    one = 1 / (size * bandwidth * np.sqrt(2 * np.pi)) if size else peak * 1e-6
    floor = min(FLOOR * one, peak * 1e-3)
    shown = np.where(density >= floor, density, np.nan)  # a curve along the axis would look like a density
    band = f"{100 * level:.0f} % band over probes"
    axes.fill_between(
        grid,
        np.maximum(low, floor),
        np.clip(high, floor, peak * 10),
        color=blue,
        alpha=style.BAND,
        linewidth=0,
        label=band,
    )
    axes.plot(grid, shown, color=blue, linewidth=2, label="density")
    if size:
        axes.axhline(one, color=style.GREY, linewidth=1.2, linestyle=(0, (6, 3)), label=f"one eigenvalue of {size:,}")
    axes.set_yscale("log")
    axes.set_ylim(floor, 3 * peak)
    if top is not None and len(top):
        axes.plot(
            top,
            np.full(len(top), 0.035),
            transform=axes.get_xaxis_transform(),
            linestyle="none",
            marker="|",
            markersize=16,
            markeredgewidth=1.8,
            color=orange,
            label=f"{len(top)} largest eigenvalues",
        )
    if scale == "log":
        axes.set_xscale("log")
    elif scale == "symlog":
        axes.set_xscale("symlog", linthresh=3 * bandwidth)
    axes.set_xlim(float(grid[0]), float(grid[-1]))
    unit = "per unit of log λ" if scale == "log" else "per unit of λ"
    note = f"\n{100 * zero_mass:.1f} % of the eigenvalues count as zero and are not shown" if zero_mass else ""
    style.dress(axes, "eigenvalue λ", f"density ({unit})", title + note)
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper right")
    return figure


def _array(values: Any) -> np.ndarray:
    """Numbers as an array: tensors too, from any device."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
