"""Figures of the cost of solves: residuals against products."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from curvops.linalg import Solution
from curvops.plots import style


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
        axes.plot(products[-1], residual[-1], markersize=8, **look.dots)
    if rtol is not None:
        axes.axhline(rtol, linewidth=1.4, label=f"tolerance {rtol:.0e}", **style.REFERENCE)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    style.dress(axes, "products with single vectors", "worst relative residual (no unit)", "Residual against cost")
    axes.legend(fontsize=style.SMALL, framealpha=0.9)
    return axes
