"""Figures of Markov chains: their values draw by draw, and their autocorrelation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Real
from matplotlib.axes import Axes
from torch import Tensor

from curvops.checks import check_kind
from curvops.plots import style
from curvops.sampling import diagnostics

Chains = Real[np.ndarray, "chains draws"] | Real[Tensor, "chains draws"]


def trace(draws: Mapping[str, Chains]) -> np.ndarray:
    """Draw each chain's values against the index of the draw, with their histogram next to them on the same axis.

    Args:
        draws: Maps the name of a quantity (a weight, the log posterior) to its draws, a row for each chain. At most
            seven chains have distinct colours.

    Returns:
        The axes, an array (quantities, 2).

    Raises:
        TypeError: The draws are not named.
        ValueError: There are no draws, or they are not an array (chains, draws).

    Examples:
        >>> import torch
        >>> from curvops import plots
        >>> plots.trace({"weight": torch.randn(3, 100)}).shape
        (1, 2)
    """
    draws = _checked(draws, "trace")
    shape: dict[str, Any] = {"squeeze": False, "sharey": "row", "width_ratios": [3, 1]}
    panels = style.panels(9.6, 0.6 + 2.1 * len(draws), 2, rows=len(draws), **shape)
    for i_row, (row, (name, chains)) in enumerate(zip(panels, draws.items())):
        bins = np.linspace(chains.min(), chains.max(), 31) if np.ptp(chains) > 0 else 1
        for i, chain in enumerate(chains):
            colour = style.COLOURS[i % len(style.COLOURS)]
            row[0].plot(np.arange(len(chain)), chain, color=colour, linewidth=0.9, label=f"chain {i + 1}", alpha=0.85)
            row[1].hist(chain, bins, density=True, orientation="horizontal", color=colour, histtype="step", lw=1.6)
        last = i_row == len(panels) - 1
        style.dress(row[0], "draw" if last else "", name)
        style.dress(row[1], "density" if last else "", "")
    if 1 < max(map(len, draws.values())) <= len(style.COLOURS):
        panels[0, 0].legend(fontsize=style.SMALL, framealpha=0.9, ncols=4, loc="best")
    return panels


def autocorrelation(draws: Mapping[str, Chains], *, lags: int = 100, ax: Axes | None = None) -> Axes:
    """Draw the mean autocorrelation over the chains against the lag, and the chains' range.

    The legend gives the effective sample size of all chains together, which is small if they disagree. The dashed
    lines are ±1.96 / √(draws), within which 95 % of the autocorrelations of independent draws lie.

    Args:
        draws: Maps the name of a quantity to its draws, a row for each chain.
        lags: The largest lag shown.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The draws are not named.
        ValueError: There are no draws, or they are not an array (chains, draws).

    Examples:
        >>> import torch
        >>> from curvops import plots
        >>> plots.autocorrelation({"weight": torch.randn(3, 100)}, lags=20).get_xlabel()
        'lag (draws)'
    """
    draws = _checked(draws, "autocorrelation")
    axes = style.axes_of(ax, 8.0, 4.4)
    for (name, look), chains in zip(style.looks(draws).items(), draws.values()):
        series = torch.as_tensor(chains, dtype=torch.float64)
        rho = diagnostics.autocorrelation(series)[:, : lags + 1].numpy()
        x, size = np.arange(rho.shape[1]), float(diagnostics.effective_size(series))
        axes.plot(x, rho.mean(0), linewidth=2, label=f"{name}: {size:,.0f} of {chains.size:,} draws", **look.line)
        axes.fill_between(x, rho.min(0), rho.max(0), color=look.color, alpha=style.BAND, linewidth=0)
    longest = max(chains.shape[1] for chains in draws.values())
    for bound in (-1.96, 1.96):
        axes.axhline(bound / longest**0.5, linewidth=1, **style.REFERENCE)
    style.dress(axes, "lag (draws)", "autocorrelation (no unit)", "Autocorrelation: mean and range of the chains")
    axes.legend(fontsize=style.SMALL, framealpha=0.9)
    return axes


def _checked(draws: Mapping[str, Chains], what: str) -> dict[str, np.ndarray]:
    """Return the draws as arrays (chains, draws), or raise TypeError or ValueError."""
    check_kind(what, draws, Mapping, "{name: array (chains, draws)}")
    arrays = {name: style.as_array(chains) for name, chains in draws.items()}
    if not arrays or any(chains.ndim != 2 or not chains.size for chains in arrays.values()):
        shapes = {name: chains.shape for name, chains in arrays.items()}
        raise ValueError(
            f"{what} draws numbers, each an array (chains, draws), such as draws[name][..., i]; got {shapes}."
        )
    return arrays
