"""After how many draws has a chain forgotten where it was?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style
from curvops.plots.chain_trace import checked_chains
from curvops.sampling.diagnostics.projected_chains import autocorrelation as correlations
from curvops.sampling.diagnostics.projected_chains import effective_size


def autocorrelation(draws: Mapping[str, Real[np.ndarray, "chains draws"]], lags: int = 100) -> Figure:
    """The mean autocorrelation over the chains against the lag, and the chains' range.

    `draws` maps the name of a number to its draws, a row for each chain; `lags` is the last lag shown. The legend gives
    the effective sample size of all chains together, small where they disagree. The dashed lines are ±1.96 / √(draws),
    within which 95 % of the autocorrelations of independent draws lie. ValueError where there is nothing to draw.
    """
    draws = checked_chains(draws, "autocorrelation")
    figure = style.blank(8.0, 4.4)
    axes = figure.subplots()
    for (name, look), chains in zip(style.looks(draws).items(), draws.values()):
        series = torch.as_tensor(chains, dtype=torch.float64)
        rho = correlations(series)[:, : lags + 1].numpy()
        size = float(effective_size(series))
        x = np.arange(rho.shape[1])
        label = f"{name}: {size:,.0f} of {chains.size:,} draws"
        axes.plot(x, rho.mean(0), color=look.color, linestyle=look.linestyle, linewidth=2, label=label)
        axes.fill_between(x, rho.min(0), rho.max(0), color=look.color, alpha=style.BAND, linewidth=0)
    longest = max(chains.shape[1] for chains in draws.values())
    for bound in (-1.96, 1.96):
        axes.axhline(bound / longest**0.5, color=style.GREY, linewidth=1, linestyle=(0, (6, 3)))
    style.dress(axes, "lag (draws)", "autocorrelation (no unit)", "Autocorrelation: mean and range of the chains")
    axes.legend(fontsize=style.SMALL, framealpha=0.9)
    return figure
