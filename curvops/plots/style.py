"""The look that every figure shares: colours, line styles, fonts, saving. Nothing global is touched."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, and Tol's wine: told apart by every common kind of colour vision. Line styles and markers
# repeat the difference, for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = (
    "-",
    "--",
    "-.",
    (0, (1, 1)),
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (8, 2)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
BAND = 0.25
LIGHT = "#D9D9D9"
GREY = "#6E6E6E"
INK = "#1F1F1F"

TITLE, LABEL, SMALL = 13, 12, 10.5
DPI = 150


def blank(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of `width` by `height` inches, known to no window system."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    if title:
        figure.suptitle(title, fontsize=TITLE + 1, color=INK)
    return figure


def dress(axes: Axes, xlabel: str, ylabel: str, title: str = "") -> None:
    """Labels, tick sizes, light grid and open frame of one panel."""
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
    """How one name is drawn, in every panel where it appears."""

    color: str
    linestyle: str | tuple[int, tuple[int, ...]]
    marker: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """One look for each name, in the order given; a name that comes twice keeps its first."""
    return {
        name: Look(COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(dict.fromkeys(names))
    }


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure; the ending of `path` says the format (.png, .pdf, .svg). Its folder must exist."""
    figure.savefig(path, dpi=DPI)
