"""The look shared by all figures: colours, line styles, fonts, saving. matplotlib's settings are not changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Real
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Figure
from torch import Tensor

from curvops.checks import check_kind, refuse, shown

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

NumberSequence = (
    Real[np.ndarray, " _"] | Real[Tensor, " _"] | Sequence[float] | Real[np.ndarray, "_ 1"] | Real[Tensor, "_ 1"]
)
"""Numbers (N,), or a column (N, 1), as an array, a tensor on any device, or a list."""

TITLE, LABEL, SMALL = 13, 12, 10.5


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


def axes_of(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes that the user gave, or those of a new figure of pyplot, which a notebook shows."""
    if ax is None:
        return pyplot.figure(figsize=(width, height), layout="constrained").subplots()
    if not isinstance(ax, Axes):
        raise TypeError(f"ax must be the axes of one panel, got {shown(ax)}; pass ax from fig, ax = plt.subplots().")
    return ax


def panels(width: float, height: float, columns: int, **options: Any) -> np.ndarray:
    """Return the panels of a new figure of pyplot, by default in a row."""
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    rows = options.pop("rows", 1)
    return np.asarray(figure.subplots(rows, columns, **options))


def as_array(values: Any) -> np.ndarray:
    """Return numbers as an array; a tensor may be on any device, of any dtype, and require a gradient."""
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach().cpu()
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()


def vector(name: str, values: Any) -> Real[np.ndarray, " N"]:
    """Return finite or missing numbers (N,) of an array, a tensor or a list, or of a column (N, 1)."""
    array = as_array(values)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.ndim != 1 or not array.size or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        kind = f"shape {array.shape}" if np.issubdtype(array.dtype, np.number) else type(values).__name__
        raise ValueError(f"{name} must be a vector (N,), or a column (N, 1), of at least one number, got {kind}.")
    return array


def vectors(what: str, common: Any, named: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a vector and named vectors of its length as arrays, or raise TypeError or ValueError."""
    check_kind(f"what {what} draws", named, Mapping, "{name: vector}")
    first, arrays = vector("the first argument", common), {name: vector(repr(name), v) for name, v in named.items()}
    if not arrays or any(values.shape != first.shape for values in arrays.values()):
        shapes = {name: values.shape for name, values in arrays.items()}
        raise ValueError(f"{what} draws a vector against named vectors of equal length, got {first.shape}, {shapes}.")
    for name, values in {"the first argument": first, **arrays}.items():
        refuse(not np.isfinite(values).all(), f"{what} needs finite numbers, and {name} has others.")
    return first, arrays


def check_named(what: str, named: Any, kind: type, source: str) -> None:
    """Raise TypeError or ValueError unless at least one object of a kind is given, each by its name."""
    check_kind(f"what {what} draws", named, Mapping, f"{{name: {kind.__name__}}}")
    for name, value in named.items():
        check_kind(repr(name), value, kind, source)
    refuse(not named, f"{what} draws {{name: {kind.__name__}}}, got none.")


def save(drawn: Figure | Axes | np.ndarray, path: str | os.PathLike[str]) -> None:
    """Write a figure to a file, and close it in pyplot.

    Args:
        drawn: The result of a function of `curvops.plots`, or a figure.
        path: The file; its suffix determines the format (.png, .pdf, .svg), and its folder must exist.

    Raises:
        TypeError: The first argument is neither axes nor a figure.

    Examples:
        >>> plots.save(plots.influence([1.0, 2.0], {"GGN": [1.1, 1.8]}), "influence.png")  # doctest: +SKIP
    """
    first = drawn.flat[0] if isinstance(drawn, np.ndarray) and drawn.size else drawn
    figure = first.figure if isinstance(first, Axes) else first
    if not isinstance(figure, Figure):
        raise TypeError(f"plots.save takes axes or a figure, then a path; got {type(drawn).__name__} first.")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
