"""What a solve costs: relative residual against matrix products, one line a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from curvops.plots import style


def convergence(
    panels: Sequence[Mapping[str, tuple[ArrayLike, ArrayLike]]], titles: Sequence[str], rtol: float
) -> Figure:
    """Worst relative residual (log scale) against products with the matrix, one panel a problem.

    panels: for each problem, method name -> (products so far, worst residual over the columns), two arrays of one
    length. Products spent before the first iteration (a preconditioner's sketch) show as a line that starts later.
    """
    if not panels or len(panels) != len(titles):
        raise ValueError(f"need one title a panel, not {len(panels)} panels and {len(titles)} titles")
    figure, axes = style.grid_of_axes(1, len(panels), width=4.6, height=3.6)
    for ax, methods, title in zip(axes[0], panels, titles, strict=True):
        for i, (name, (products, residual)) in enumerate(methods.items()):
            x, y = np.asarray(products, float), np.asarray(residual, float)
            style.same_length(products=x, residual=y)
            colour = style.CYCLE[i]
            ax.semilogy(x, y, color=colour, linewidth=1.8, label=f"{name}: {x[-1]:.0f} products")
            ax.plot(x[-1:], y[-1:], color=colour, marker=style.MARKERS[i], markersize=6)
            if x[0] > 0:
                ax.plot([0, x[0]], [y[0], y[0]], color=colour, linewidth=1.2, linestyle=":")
        ax.axhline(rtol, color=style.GREY, linewidth=1, linestyle="--", label=f"tolerance {rtol:.0e}")
        style.label(ax, "products with the GGN (vectors)", "worst relative residual ‖b − Ax‖ / ‖b‖", title)
        ax.set_xlim(left=0)
        ax.legend(frameon=False, fontsize=8.5)
    return figure
