"""Residual against cost, for every method and preconditioner on one problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Real
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from curvops.plots import style

COLOURS = (*style.COLOURS, style.INK, "#999933")  # with Tol's olive
ResidualTrail = tuple[Real[np.ndarray, " p"], Real[np.ndarray, " p"], Real[np.ndarray, " p"]]


def solves(
    curves: Mapping[tuple[str, str], ResidualTrail],
    rtol: float | None,
    title: str,
    what: str = "worst relative residual",
) -> Figure:
    """Worst relative residual, on a log axis, against products and against seconds.

    ``curves`` maps (method, preconditioner) to (products, seconds, residual), what the preconditioner cost counted in.
    The last point is marked, by a cross where it is above rtol, if there is one. Colour tells the method, dashes the
    preconditioner.
    """
    figure = style.blank(11.5, 4.8 + 0.09 * max(0, len(curves) - 12), title)
    left, right = figure.subplots(1, 2, sharey=True)
    methods, preconditioners = _unique(curves, 0), _unique(curves, 1)
    for (method, preconditioner), (products, seconds, residual) in curves.items():
        rank = methods.index(method)
        color = COLOURS[rank] if rank < len(COLOURS) else style.GREY
        turn = preconditioners.index(preconditioner)
        look: dict[str, Any] = {
            "color": color,
            "linestyle": style.DASHES[turn % len(style.DASHES)],
            "marker": style.MARKERS[turn % len(style.MARKERS)],
        }
        name = method if preconditioner == "none" else f"{method} · {preconditioner}"
        if rtol is not None and not (len(residual) and residual[-1] <= rtol):
            look |= {"marker": "x", "markersize": 9, "markeredgewidth": 2.2}
            name += " (tolerance not reached)"
        _line(left, products, residual, name, look)
        _line(right, seconds, residual, name, look)
    for axes, cost in ((left, "products with single vectors"), (right, "seconds")):
        if rtol is not None:
            axes.axhline(rtol, color=style.GREY, linewidth=1.4, linestyle=(0, (6, 3)), label=f"tolerance {rtol:.0e}")
        axes.set_yscale("log")
        axes.set_xscale("log")
        lowest, highest = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if highest < 30 * lowest else (1,)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        style.dress(axes, cost, f"{what} (no unit)" if axes is left else "")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=style.SMALL, handlelength=3.2)
    return figure


def _unique(curves: Mapping[tuple[str, str], object], part: int) -> Sequence[str]:
    return list(dict.fromkeys(key[part] for key in curves))


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, label: str, look: dict[str, Any]) -> None:
    shown = (x > 0) & (y > 0) & np.isfinite(y)
    axes.plot(x[shown], y[shown], label=label, linewidth=1.4, markevery=[max(int(shown.sum()) - 1, 0)], **look)
