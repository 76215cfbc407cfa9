"""Figures of the spectral density of a curvature matrix and its largest eigenvalues, and of the cost of solves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes

from curvops.checks import check_choice, check_kind
from curvops.linalg import Eigenpairs, Estimate, Solution, SpectralDensity
from curvops.plots import style
from curvops.plots.style import NumberSequence


def spectral_density(
    density: SpectralDensity,
    *,
    top: Eigenpairs | NumberSequence | None = None,
    size: int | None = None,
    scale: Literal["linear", "log", "symlog"] | None = None,
    title: str = "Spectral density",
    ax: Axes | None = None,
) -> Axes:
    """Draw a density of eigenvalues with its band, on a log axis, and the largest eigenvalues as marks below it.

    Args:
        density: The result of `curvops.linalg.spectral_density(A)` or `A.spectral_density()`.
        top: Eigenvalues known individually: the result of `A.eigsh(k)`, or numbers.
        size: The number of rows n, to draw the height of a single eigenvalue, 1/n over the broadening; Eigenpairs have
            it.
        scale: "linear", "log", or "symlog" for a density on the linear scale whose eigenvalues have both signs and span
            decades. The default is that of the density.
        title: The panel's title.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The first argument is not a SpectralDensity, or `ax` is not a matplotlib Axes.
        ValueError: The eigenvalues are not a vector, or the scale is unknown.

    Examples:
        >>> import torch, curvops as co
        >>> from curvops import plots
        >>> A = torch.diag(torch.linspace(1, 9, 20).double())
        >>> plots.spectral_density(co.linalg.spectral_density(A), top=co.linalg.eigsh(A, 2)).get_ylabel()
        'density (per unit of λ)'
    """
    check_kind("density", density, SpectralDensity, "the result of curvops.linalg.spectral_density(A)")
    check_choice("scale", scale or "linear", ("linear", "log", "symlog"))
    scale = density.scale if scale is None else scale
    if (scale == "log") != (density.scale == "log"):
        raise ValueError(f"scale={scale!r} does not fit this density: spectral_density(A, scale=...) has one for it.")
    if isinstance(top, Eigenpairs):
        size = top.vectors.shape[0] if size is None else size
        top = top.values
    bandwidth, zero_mass = density.bandwidth, density.zero_mass
    axes = style.axes_of(ax, 8.0, 5.0)
    blue, orange = style.COLOURS[:2]
    peak = float(density.density.max())
    one = 1 / (size * bandwidth * np.sqrt(2 * np.pi)) if size else peak * 1e-6
    floor = min(one / 100, peak * 1e-3)
    band = f"{100 * density.level:.0f} % band over probes"
    _draw_density(axes, density, (floor, peak), band, color=blue, linewidth=2, label="density")
    if size:
        axes.axhline(one, linewidth=1.2, label=f"one eigenvalue of {size:,}", **style.REFERENCE)
    if top is not None:
        values = style.vector("top", top)
        at = (values, np.full(len(values), 0.035))
        marks: dict[str, Any] = {
            "linestyle": "none",
            "marker": "|",
            "markersize": 16,
            "markeredgewidth": 1.8,
            "color": orange,
        }
        axes.plot(*at, transform=axes.get_xaxis_transform(), label=f"{len(values)} largest eigenvalues", **marks)
    if scale == "log":
        axes.set_xscale("log")
    elif scale == "symlog":
        axes.set_xscale("symlog", linthresh=3 * bandwidth)
    axes.set_xlim(float(density.grid[0]), float(density.grid[-1]))
    unit = "per unit of log λ" if scale == "log" else "per unit of λ"
    note = f"\n{100 * zero_mass:.1f} % of the eigenvalues count as zero and are not shown" if zero_mass else ""
    style.dress(axes, "eigenvalue λ", f"density ({unit})", title + note)
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper right")
    return axes


def _draw_density(
    axes: Axes, density: SpectralDensity, span: tuple[float, float], band: str | None, **options: Any
) -> None:
    """Draw a density and its band, with this label, on a log axis whose span is from a floor to the largest peak."""
    x, middle, low, high = (style.as_array(getattr(density, name)) for name in ("grid", "density", "lower", "upper"))
    floor, peak = span
    edges = np.maximum(low, floor), np.clip(high, floor, 10 * peak)
    axes.fill_between(x, *edges, color=options["color"], alpha=style.BAND, linewidth=0, label=band)
    # A curve along the axis would look like a density.
    axes.plot(x, np.where(middle >= floor, middle, np.nan), **options)
    axes.set_yscale("log")
    axes.set_ylim(floor, 3 * peak)


def training_spectra(
    checkpoints: Mapping[int, tuple[SpectralDensity, Eigenpairs, Estimate]], *, bound: float | None = None
) -> np.ndarray:
    """Draw spectra along training: densities with their bands, and the largest eigenvalues and the trace by step.

    Args:
        checkpoints: Maps a step of training to the results of `spectral_density` on the linear scale, of `eigsh`, and
            of `trace`, whose 95 % interval is drawn. If there are more than four densities, the first, the last and
            two between them are shown.
        bound: A level to compare the eigenvalues with, such as 2/η for gradient descent with learning rate η.

    Returns:
        The axes, an array (2,).

    Raises:
        ValueError: There are no checkpoints, their numbers of eigenvalues differ, or a density is on the log scale.

    Examples:
        >>> import torch, curvops as co
        >>> from curvops import plots
        >>> A = torch.diag(torch.linspace(1, 9, 20).double())
        >>> spectrum = co.linalg.spectral_density(A), co.linalg.eigsh(A, 2), co.linalg.trace(A)
        >>> plots.training_spectra({0: spectrum, 100: spectrum}, bound=8.0).shape
        (2,)
    """
    steps = sorted(checkpoints)
    densities, pairs, traces = zip(*(checkpoints[step] for step in steps))
    if any(density.scale != "linear" for density in densities):
        raise ValueError("training_spectra needs densities with scale='linear', whose axis holds both signs.")
    left, right = both = style.panels(11.5, 4.4, 2)
    shown = np.unique(np.linspace(0, len(steps) - 1, 4).round().astype(int))
    peak = max(float(densities[i].density.max()) for i in shown)
    for i, look in zip(shown, style.looks(map(str, shown)).values()):
        options = {"linewidth": 1.6, "label": f"step {steps[i]:,}", **look.line}
        _draw_density(left, densities[i], (1e-5 * peak, peak), None, **options)
    left.legend(fontsize=style.SMALL, framealpha=0.9)
    style.dress(left, "eigenvalue λ", "density (per unit of λ)", "Density, with its band over probes")
    for k, top in enumerate(np.stack([style.as_array(top.values) for top in pairs], 1)):
        name = "largest eigenvalue" if k == 0 else "those below it" if k == 1 else None
        right.plot(
            steps, top, color=style.COLOURS[1], marker="o", markersize=4, alpha=1 if k == 0 else 0.45, label=name
        )
    middle = np.array([float(trace) for trace in traces])
    low, high = (np.array([float(trace.interval()[end]) for trace in traces]) for end in (0, 1))
    errors = {"yerr": [middle - low, high - middle], "capsize": 3, "marker": "s", "markersize": 4}
    right.errorbar(steps, middle, color=style.COLOURS[0], linestyle="--", label="trace, 95 % interval", **errors)
    if bound is not None:
        right.axhline(bound, label=f"bound {bound:.3g}", **style.REFERENCE)
    right.legend(fontsize=style.SMALL, framealpha=0.9)
    style.dress(right, "step of training", "eigenvalue λ, trace", "Largest eigenvalues and trace")
    return both


def convergence(solutions: Mapping[str, Solution], *, rtol: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw the worst relative residual of a solve over its columns, on a log axis, against products with vectors.

    A block of K columns counts as K products a step. The steps of a solve are drawn at equal distances.

    Args:
        solutions: Maps a method's name to the `Solution` of `A.cg(b)` or another solver.
        rtol: The tolerance, a dashed line.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The values are not solutions, or `ax` is not a matplotlib Axes.
        ValueError: There are no solutions.

    Examples:
        >>> import torch, curvops as co
        >>> from curvops import plots
        >>> A = co.linalg.Dense(torch.diag(torch.linspace(1, 9, 20).double()), psd=True)
        >>> plots.convergence({"conjugate gradients": A.cg(torch.ones(20).double())}).get_yscale()
        'log'
    """
    style.check_named("convergence", solutions, Solution, "the result of A.cg(b)")
    axes = style.axes_of(ax, 7.6, 5.0)
    for (name, look), solution in zip(style.looks(solutions).items(), solutions.values()):
        residual = style.as_array(solution.history).max(1)
        products = np.linspace(0, solution.matvecs, len(residual))
        axes.plot(products, residual, label=f"{name}: {solution.matvecs:,} products", linewidth=2, **look.line)
        axes.plot(products[-1:], residual[-1:], markersize=8, **look.dots)
    if rtol is not None:
        axes.axhline(rtol, linewidth=1.4, label=f"tolerance {rtol:.0e}", **style.REFERENCE)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    style.dress(axes, "products with single vectors", "worst relative residual (no unit)", "Residual against cost")
    axes.legend(fontsize=style.SMALL, framealpha=0.9)
    return axes
