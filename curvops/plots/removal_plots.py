"""Figures of the effect of leaving out a training point, or of removing weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from curvops.plots import style
from curvops.plots.style import NumberSequence


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
        ValueError: There are no methods, the number of predicted changes differs from that of true changes, or one of
            them is not finite.

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
        ValueError: There are no rules, one has another number of errors than there are shares, or a number is not
            finite.

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
