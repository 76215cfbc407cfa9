"""One look for all figures: a blank figure with quiet axes, and the Okabe-Ito palette.

The palette (Okabe & Ito 2008) can be told apart with every common form of colour blindness. Figures are plain
`matplotlib.figure.Figure` objects: no window, no global state, so they can be drawn on any thread and without a
display.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK = "#000000"
GREY = "#6e6e6e"
ORANGE = "#e69f00"
SKY = "#56b4e9"
GREEN = "#009e73"
BLUE = "#0072b2"
RED = "#d55e00"
PURPLE = "#cc79a7"

CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, BLACK)
"""Line colours in order of use."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""Markers in the same order: a figure printed in grey can still be read."""


def grid_of_axes(
    rows: int = 1, columns: int = 1, *, width: float = 4.2, height: float = 3.4, share_x: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` axes of the given size in inches each, without top and right frame."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained", facecolor="white")
    axes: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False, sharex=share_x).tolist()
    for ax in (ax for row in axes for ax in row):
        quiet(ax)
    return figure, axes


def quiet(ax: Axes) -> None:
    """Thin frame, light grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(GREY)
    ax.grid(color="#e4e4e4", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(color=GREY, labelsize=9)


def label(ax: Axes, x: str, y: str, title: str = "") -> None:
    """Axis labels (quantity and unit) and a left-aligned title."""
    ax.set_xlabel(x, fontsize=10)
    ax.set_ylabel(y, fontsize=10)
    if title:
        ax.set_title(title, fontsize=10.5, loc="left")


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG at 150 dots an inch; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def same_length(**arrays: np.ndarray) -> None:
    """Raise ValueError unless all arrays have the same first dimension, naming those that differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays must have one length, not {lengths}")
