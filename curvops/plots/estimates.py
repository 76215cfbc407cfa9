"""Error of stochastic estimates against their budget, beside the error that they claim."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvops.plots import style

ErrorsByBudget = tuple[Real[np.ndarray, " b"], Real[np.ndarray, "b s"], Real[np.ndarray, " b"]]
FLOOR = 1e-17


def estimates(curves: Mapping[str, Mapping[str, ErrorsByBudget]], title: str) -> Figure:
    """A panel for each quantity: relative error of each run (points) and their mean (line).

    ``curves`` maps a quantity and a method's name to (budgets, errors of each run (b, s), claimed half-widths at 95 %).
    Where the points lie below the dotted line of their colour the claims hold. Exact values are at the lower edge.
    """
    rows = max((len(methods) for methods in curves.values()), default=0) // 2 + 1
    figure = style.blank(5.2 * len(curves) + 1.5, 4.8 + 0.25 * rows, title)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (quantity, methods) in zip(panels, curves.items()):
        for (name, look), (spent, errors, claimed) in zip(style.looks(methods).items(), methods.values()):
            axes.plot(spent, np.maximum(errors, FLOOR), look.marker, color=look.color, markersize=4, alpha=0.45)
            axes.plot(spent, np.maximum(errors.mean(1), FLOOR), color=look.color, linewidth=2, label=name)
            axes.plot(spent, np.maximum(claimed, FLOOR), color=look.color, linewidth=1.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        budgets = sorted({float(b) for values, _, _ in methods.values() for b in values})
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.set_xticks([], minor=True)
        style.dress(axes, "products with single vectors (budget)", "relative error (no unit)", quantity)
        handles, _ = axes.get_legend_handles_labels()
        claim = Line2D([], [], color=style.INK, linewidth=1.6, linestyle=":", label="claimed, 95 %")
        axes.legend(
            handles=[*handles, claim], loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=style.SMALL
        )
    return figure
