"""How many products does each way of solving cost?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def convergence(histories: Mapping[str, tuple[Real[np.ndarray, " _"], Real[np.ndarray, " _"]]], rtol: float) -> Figure:
    """Worst relative residual over the columns, on a log axis, against products with single vectors.

    `histories` maps a method's name to (products, residual) of equal length: products spent so far, a block of K
    counting K, and max over columns of ‖b − P x‖ / ‖b‖. Start each at the residual before its first step. Where the
    first count is above zero (a preconditioner's sketch), a dotted run-up shows what was spent.
    `rtol` is the tolerance.
    """
    figure = style.blank(7.6, 5.0)
    axes = figure.subplots()
    for (name, look), (products, residual) in zip(style.looks(histories).items(), histories.values()):
        axes.plot(
            products,
            residual,
            label=f"{name}: {products[-1]:,.0f} products",
            color=look.color,
            linewidth=2,
            linestyle=look.linestyle,
        )
        axes.plot(products[-1], residual[-1], color=look.color, marker=look.marker, markersize=8)
        if products[0] > 0:
            run_up = f"{name}: sketch, {products[0]:,.0f} products"
            axes.plot(
                [0, products[0]],
                [residual[0]] * 2,
                color=look.color,
                linestyle=":",
                linewidth=2.5,
                zorder=4,
                label=run_up,
            )
    axes.axhline(rtol, color=style.GREY, linewidth=1.4, linestyle=(0, (6, 3)), label=f"tolerance {rtol:.0e}")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    style.dress(
        axes,
        "products with single vectors",
        "worst relative residual (no unit)",
        "Conjugate gradients: residual against cost",
    )
    axes.legend(fontsize=style.SMALL, framealpha=0.9)
    return figure
