"""The look shared by all figures: colours, line styles, fonts, saving. matplotlib's settings are not changed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

# Okabe and Ito's colours, and Tol's wine: distinct for every common kind of colour vision. Line styles and markers
# also differ, for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
Dash = str | tuple[int, tuple[int, ...]]
DASHES: tuple[Dash, ...] = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAND = 0.25
LIGHT = "#D9D9D9"
GREY = "#6E6E6E"
INK = "#1F1F1F"
REFERENCE: dict[str, Any] = {"color": GREY, "linestyle": (0, (6, 3))}
"""Options of a line that shows a bound or a tolerance."""

TITLE, LABEL, SMALL = 13, 12, 10.5
DPI = 150


def blank(width: float, height: float, title: str = "") -> Figure:
    """Make an empty figure of `width` by `height` inches, outside pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    if title:
        figure.suptitle(title, fontsize=TITLE + 1, color=INK)
    return figure


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Make a figure of `width` by `height` inches with one panel, and return both."""
    figure = blank(width, height)
    return figure, figure.subplots()


def dress(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Give one panel its labels, tick sizes, light grid and open frame."""
    axes.set_facecolor("white")
    axes.set_xlabel(xlabel, fontsize=LABEL, color=INK)
    axes.set_ylabel(ylabel, fontsize=LABEL, color=INK)
    if title:
        axes.set_title(title, fontsize=TITLE, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK)
    axes.grid(True, color=LIGHT, linewidth=0.6, alpha=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


class Look(NamedTuple):
    """Colour, dashes and marker of one name, the same in every panel."""

    color: str
    linestyle: Dash
    marker: str

    @property
    def line(self) -> dict[str, Any]:
        """Options of a line without markers."""
        return {"color": self.color, "linestyle": self.linestyle}

    @property
    def dots(self) -> dict[str, Any]:
        """Options of markers, with or without a solid line."""
        return {"color": self.color, "marker": self.marker}


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Assign each name a look, in the given order; a repeated name keeps its first."""
    return {
        name: Look(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(dict.fromkeys(names))
    }


def as_array(values: Any) -> np.ndarray:
    """Return numbers as an array; a tensor may be on any device and require a gradient."""
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file.

    Args:
        figure: The result of a function of `curvops.plots`.
        path: The file; its suffix determines the format (.png, .pdf, .svg), and its folder must exist.

    Raises:
        TypeError: The first argument is not a figure.
    """
    if not isinstance(figure, Figure):
        raise TypeError(f"plots.save takes a figure, then a path; got {type(figure).__name__} first.")
    figure.savefig(path, dpi=DPI)
