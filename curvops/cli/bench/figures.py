"""Figures of the benchmark: residuals and errors of its methods against products and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from curvops.plots import style

COLOURS = (*style.COLOURS, style.INK, "#999933")  # and Tol's olive
ResidualTrail = tuple[Real[np.ndarray, " p"], Real[np.ndarray, " p"], Real[np.ndarray, " p"]]
ErrorsByBudget = tuple[Real[np.ndarray, " b"], Real[np.ndarray, "b s"], Real[np.ndarray, " b"]]
LEAST_ERROR = 1e-17


def solves(
    curves: Mapping[tuple[str, str], ResidualTrail],
    rtol: float | None,
    title: str,
    what: str = "worst relative residual",
) -> Figure:
    """Draw the worst relative residual, on a log axis, against products and against seconds.

    Colours distinguish methods, dashes preconditioners. A cross marks the last point of a curve that ends above rtol.

    Args:
        curves: Maps (method, preconditioner) to (products, seconds, residual), the preconditioner's cost included.
        rtol: The tolerance, or None.
        title: The figure's title.
        what: The label of the residual's axis.

    Returns:
        A figure with two panels.
    """
    figure = style.blank(11.5, 4.8 + 0.09 * max(0, len(curves) - 12), title)
    left, right = figure.subplots(1, 2, sharey=True)
    methods, preconditioners = (list(dict.fromkeys(names)) for names in zip(*curves)) if curves else ([], [])
    for (method, preconditioner), (products, seconds, residual) in curves.items():
        rank, turn = methods.index(method), preconditioners.index(preconditioner)
        dash, marker = style.DASHES[turn % len(style.DASHES)], style.MARKERS[turn % len(style.MARKERS)]
        look = style.Look(COLOURS[rank] if rank < len(COLOURS) else style.GREY, dash, marker)._asdict()
        name = method if preconditioner == "none" else f"{method} · {preconditioner}"
        if rtol is not None and not (len(residual) and residual[-1] <= rtol):
            look |= {"marker": "x", "markersize": 9, "markeredgewidth": 2.2}
            name += " (tolerance not reached)"
        for axes, cost in ((left, products), (right, seconds)):
            shown = (cost > 0) & (residual > 0) & np.isfinite(residual)
            last = [max(int(shown.sum()) - 1, 0)]
            axes.plot(cost[shown], residual[shown], label=name, linewidth=1.4, markevery=last, **look)
    for axes, unit in ((left, "products with single vectors"), (right, "seconds")):
        if rtol is not None:
            axes.axhline(rtol, linewidth=1.4, label=f"tolerance {rtol:.0e}", **style.REFERENCE)
        axes.set_yscale("log")
        axes.set_xscale("log")
        lowest, highest = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 30 * lowest else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        style.dress(axes, unit, f"{what} (no unit)" if axes is left else "")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=style.SMALL, handlelength=3.2)
    return figure


def estimates(curves: Mapping[str, Mapping[str, ErrorsByBudget]], title: str) -> Figure:
    """Draw a panel for each quantity: the relative error of each run (points) and their mean (line).

    If points lie below the dotted line of their colour, the stated error bounds hold. Exact values are drawn at the
    lower edge.

    Args:
        curves: Maps a quantity and a method's name to (budgets, errors of each run (b, s), stated half-widths of the
            95 % interval).
        title: The figure's title.

    Returns:
        A figure with a panel for each quantity.
    """
    rows = max((len(methods) for methods in curves.values()), default=0) // 2 + 1
    figure = style.blank(5.2 * len(curves) + 1.5, 4.8 + 0.25 * rows, title)
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    for axes, (quantity, methods) in zip(panels, curves.items()):
        for (name, look), (spent, errors, claimed) in zip(style.looks(methods).items(), methods.values()):
            axes.plot(spent, np.maximum(errors, LEAST_ERROR), look.marker, color=look.color, markersize=4, alpha=0.45)
            axes.plot(spent, np.maximum(errors.mean(1), LEAST_ERROR), color=look.color, linewidth=2, label=name)
            axes.plot(spent, np.maximum(claimed, LEAST_ERROR), color=look.color, linewidth=1.6, linestyle=":")
        axes.set_xscale("log")
        axes.set_yscale("log")
        budgets = sorted({float(b) for values, _, _ in methods.values() for b in values})
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.set_xticks([], minor=True)
        style.dress(axes, "products with single vectors (budget)", "relative error (no unit)", quantity)
        handles, _ = axes.get_legend_handles_labels()
        handles += [Line2D([], [], color=style.INK, linewidth=1.6, linestyle=":", label="claimed, 95 %")]
        below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        axes.legend(handles=handles, ncols=2, fontsize=style.SMALL, **below)
    return figure
