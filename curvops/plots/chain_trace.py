"""Where have the chains been, and do they agree?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style

BINS = 30


def trace(draws: Mapping[str, Real[np.ndarray, "chains draws"]]) -> Figure:
    """Each chain's values against the draw, and beside them how they are distributed, on the same axis.

    `draws` maps the name of a number (a weight, the log posterior) to its draws, a row for each chain; at most seven
    chains are told apart by colour. ValueError where there is nothing to draw.
    """
    draws = checked_chains(draws, "trace")
    figure = style.blank(9.6, 0.6 + 2.1 * len(draws))
    panels = figure.subplots(len(draws), 2, squeeze=False, sharey="row", width_ratios=[3, 1])
    for i_row, (row, (name, chains)) in enumerate(zip(panels, draws.items())):
        bins = np.linspace(chains.min(), chains.max(), BINS + 1) if np.ptp(chains) > 0 else 1
        for i, chain in enumerate(chains):
            colour = style.COLOURS[i % len(style.COLOURS)]
            row[0].plot(np.arange(len(chain)), chain, color=colour, linewidth=0.9, label=f"chain {i + 1}", alpha=0.85)
            row[1].hist(chain, bins, density=True, orientation="horizontal", color=colour, histtype="step", lw=1.6)
        last = i_row == len(panels) - 1
        style.dress(row[0], "draw" if last else "", name)
        style.dress(row[1], "density" if last else "", "")
    if 1 < max(map(len, draws.values())) <= len(style.COLOURS):
        panels[0, 0].legend(fontsize=style.SMALL, framealpha=0.9, ncols=4, loc="best")
    return figure


def checked_chains(draws: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """The draws as arrays (chains, draws); ValueError for none, and for another shape."""
    found = {name: np.asarray(chains) for name, chains in draws.items()}
    if not found:
        raise ValueError(f"{what} draws {{name: array (chains, draws)}}, got none.")
    for name, chains in found.items():
        if chains.ndim != 2 or not chains.size:
            raise ValueError(
                f"{what} draws numbers, each an array (chains, draws); {name!r} has shape {chains.shape}. Of a tensor "
                "take single entries, draws[name][..., i]."
            )
    return found
