"""Figures of choices and of chains: evidences, held-out scores, a tuning's course, points left out, draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Real
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from curvops.checks import check_kind
from curvops.evidence.maximize import Grid
from curvops.plots import style
from curvops.plots.style import NumberSequence
from curvops.posterior import Laplace
from curvops.posterior.log_evidence import Tuning, Validation
from curvops.sampling import diagnostics


def evidence(found: Grid | Validation, *, chosen: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw the log evidence with its 95 % interval, or held-out log-likelihoods, against the prior precision.

    Args:
        found: The result of `co.evidence.grid`, or the `tuning` of a posterior from `co.evidence.validate`. The
            precisions are scalars.
        chosen: A precision marked by a vertical line.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: `found` is another object, or `ax` is not a matplotlib Axes.

    Examples:
        >>> from curvops import plots
        >>> plots.evidence(co.evidence.grid(post, [0.1, 1.0, 10.0])).get_xscale()
        'log'
    """
    check_kind("evidence", found, (Grid, Validation), "the result of co.evidence.grid, or the tuning of validate")
    axes = style.axes_of(ax, 7.2, 4.2)
    precisions = np.array([float(value) for value in found.prior_precisions])
    order = np.argsort(precisions)
    x, (blue, orange) = precisions[order], style.COLOURS[:2]
    if isinstance(found, Grid):
        value, low, high = (
            np.array(column)[order]
            for column in zip(*((float(one.value), *map(float, one.interval())) for one in found))
        )
        axes.plot(x, value, color=blue, marker="o", markersize=4, linewidth=2, label="log evidence")
        if np.ptp(high - low) or high[0] > low[0]:  # an exact evidence has none
            # Bars have ends wider than the markers: a band would not show an interval narrower than the curve.
            ends = np.maximum(0, [value - low, high - value])
            bars: dict[str, Any] = {
                "fmt": "none",
                "ecolor": style.INK,
                "elinewidth": 1.4,
                "capsize": 6,
                "capthick": 1.4,
            }
            axes.errorbar(x, value, ends, label=f"95 % interval, at most ±{np.max((high - low) / 2):.2g} nats", **bars)
        what = "log evidence (nats)"
    else:
        value, what = np.array(found.scores)[order], "held-out log-likelihood (nats per point)"
        axes.plot(x, value, color=orange, marker="s", markersize=4, linewidth=2, label="held-out log-likelihood")
    best = np.nanargmax(value)
    ring: dict[str, Any] = {"marker": "o", "markersize": 13, "markerfacecolor": "none", "markeredgecolor": style.INK}
    axes.plot(x[best], value[best], linestyle="none", label=f"its largest, at {x[best]:.3g}", **ring)
    if chosen is not None:
        axes.axvline(chosen, color=style.INK, linestyle="--", linewidth=1.4, label=f"chosen: {chosen:.3g}")
    axes.set_xscale("log")
    style.dress(axes, "prior precision (1 / squared weight)", what)
    axes.legend(fontsize=style.SMALL, framealpha=1)
    return axes


def evidence_trace(tunings: Mapping[str, Laplace | Tuning]) -> np.ndarray:
    """Draw prior precision (log axis), effective parameters ± 2 standard errors and products against the step.

    A step shows the values at its start. A cross marks the last point of a tuning that has not converged.

    Args:
        tunings: Maps a name to a posterior from `co.evidence.mackay` or `maximize`, or to its `tuning`; each of
            several groups has its own line.

    Returns:
        The axes, an array (3,).

    Raises:
        TypeError: The values are not posteriors with such a tuning.
        ValueError: There is no tuning.

    Examples:
        >>> import torch, curvops as co
        >>> from curvops import plots
        >>> data = torch.randn(9, 2), torch.randn(9, 1)
        >>> lin = co.linearize(torch.nn.Linear(2, 1), data, co.likelihoods.Gaussian(1.0))
        >>> post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
        >>> plots.evidence_trace({"MacKay": co.evidence.mackay(post, None)}).shape
        (3,)
    """
    runs: Any = tunings
    if isinstance(tunings, Mapping):
        runs = {name: run.tuning if isinstance(run, Laplace) else run for name, run in tunings.items()}
    style.check_named("evidence_trace", runs, Tuning, "a posterior from co.evidence.mackay or its tuning")
    axes_of_all = style.panels(12.5, 4.4, 3)
    left, middle, right = axes_of_all
    lines = {
        f"{name} · {tuning.groups[g]}" if len(tuning.groups) > 1 else name: (tuning, g)
        for name, tuning in runs.items()
        for g in range(len(tuning.steps[0].prior_precision))
    }
    for (name, look), (tuning, g) in zip(style.looks(lines).items(), lines.values()):
        options = look._asdict() | {"label": name, "markersize": 4, "linewidth": 2}
        alpha, gamma, error = (
            np.array([float(getattr(step, name)[g]) for step in tuning.steps])
            for name in ("prior_precision", "effective_parameters", "stderr")
        )
        x = np.arange(len(tuning.steps))
        left.plot(x, alpha, **options)
        middle.plot(x, gamma, **options)
        middle.fill_between(x, gamma - 2 * error, gamma + 2 * error, color=look.color, alpha=style.BAND, linewidth=0)
        if not tuning.converged:
            left.plot(x[-1:], alpha[-1:], marker="x", markersize=11, markeredgewidth=2.2, color=look.color)
    for (name, look), tuning in zip(style.looks(runs).items(), runs.values()):
        options = look._asdict() | {"label": name, "markersize": 4, "linewidth": 2}
        right.plot([step.matvecs for step in tuning.steps], **options)
    left.set_yscale("log")
    style.dress(left, "step", "prior precision (1 / squared weight)", "Prior precision")
    style.dress(middle, "step", "effective parameters", "Effective parameters, ± 2 standard errors")
    style.dress(right, "step", "products with single vectors", "Cost of each step")
    right.set_ylim(bottom=0)
    for axes in (left, middle, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize=style.SMALL, framealpha=1)
    return axes_of_all


def influence(truth: NumberSequence, predicted: Mapping[str, NumberSequence], *, ax: Axes | None = None) -> Axes:
    """Draw predicted changes against the true changes after training without each point, with the line of equality.

    The legend gives Pearson's correlation of each prediction with the truth.

    Args:
        truth: The change of an output or a loss after training without each point (N,).
        predicted: Maps the name of a method to the changes that it predicts (N,), in the same unit.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The predictions are not named.
        ValueError: There are no methods, or the number of predicted changes differs from that of true changes.

    Examples:
        >>> from curvops import plots
        >>> plots.influence([1.0, 2.0, 4.0], {"GGN": [1.1, 1.8, 3.9]}).get_ylabel()
        'predicted change'
    """
    truth, predicted = style.vectors("influence", truth, predicted)
    axes = style.axes_of(ax, 6.4, 5.4)
    ends = np.array([np.min(truth), np.max(truth)])
    axes.plot(ends, ends, label="equal", **style.REFERENCE)
    for (name, look), values in zip(style.looks(predicted).items(), predicted.values()):
        varies = np.ptp(truth) > 0 and np.ptp(values) > 0
        label = f"{name}, correlation {np.corrcoef(truth, values)[0, 1]:.2f}" if varies else name
        axes.plot(truth, values, linestyle="none", markersize=5, alpha=0.7, label=label, **look.dots)
    style.dress(axes, "change after training without the point", "predicted change", "Influence of each training point")
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper left")
    return axes


def pruning(
    sparsity: NumberSequence, errors: Mapping[str, NumberSequence], *, full: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the error of pruned networks against the share of weights removed.

    Args:
        sparsity: Shares of the weights that are removed (M,), from 0 to 1.
        errors: Maps the name of a rule to its errors at these shares (M,), as fractions of the points.
        full: The error of the network with all weights, a dashed line.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The errors are not named.
        ValueError: There are no rules, or one has another number of errors than there are shares.

    Examples:
        >>> from curvops import plots
        >>> plots.pruning([0.0, 0.5, 0.9], {"magnitude": [0.1, 0.12, 0.5]}, full=0.1).get_ylabel()
        'test error (fraction)'
    """
    sparsity, errors = style.vectors("pruning", sparsity, errors)
    axes = style.axes_of(ax, 7.6, 4.6)
    for (name, look), values in zip(style.looks(errors).items(), errors.values()):
        axes.plot(sparsity, values, markersize=5, linewidth=1.8, label=name, **look._asdict())
    if full is not None:
        axes.axhline(full, label="all weights", **style.REFERENCE)
    axes.set_ylim(bottom=0)
    style.dress(axes, "weights removed (fraction)", "test error (fraction)", "Error of the pruned network")
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper left")
    return axes


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
        raise ValueError(f"{what} draws numbers, each an array (chains, draws), as draws[name][..., i]; got {shapes}.")
    return arrays
