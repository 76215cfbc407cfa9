"""Figures of the effect of leaving out a training point, or of removing weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure

from curvops.plots import style


def influence(truth: Real[np.ndarray, " N"], predicted: Mapping[str, Real[np.ndarray, " N"]]) -> Figure:
    """Draw predicted changes against the true changes after training without each point, with the line of equality.

    The legend gives Pearson's correlation of each prediction with the truth.

    Args:
        truth: The change of an output or a loss after training without each point (N,).
        predicted: Maps the name of a method to the changes that it predicts (N,), in the same unit.

    Returns:
        A figure with one panel.

    Raises:
        TypeError: The predictions are not named.
        ValueError: There are no methods, the number of predicted changes differs from that of true changes, or one of
            them is not finite.
    """
    truth, predicted = _checked("influence", truth, predicted)
    figure, axes = style.panel(6.4, 5.4)
    ends = np.array([np.min(truth), np.max(truth)])
    axes.plot(ends, ends, label="equal", **style.REFERENCE)
    for (name, look), values in zip(style.looks(predicted).items(), predicted.values()):
        varies = np.ptp(truth) > 0 and np.ptp(values) > 0
        label = f"{name}, correlation {np.corrcoef(truth, values)[0, 1]:.2f}" if varies else name
        axes.plot(truth, values, linestyle="none", markersize=5, alpha=0.7, label=label, **look.dots)
    style.dress(axes, "change after training without the point", "predicted change", "Influence of each training point")
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper left")
    return figure


def pruning(
    sparsity: Real[np.ndarray, " M"], errors: Mapping[str, Real[np.ndarray, " M"]], full: float | None = None
) -> Figure:
    """Draw the error of pruned networks against the share of weights removed.

    Args:
        sparsity: Shares of the weights that are removed (M,), from 0 to 1.
        errors: Maps the name of a rule to its errors at these shares (M,), as fractions of the points.
        full: The error of the network with all weights, a dashed line.

    Returns:
        A figure with one panel.

    Raises:
        TypeError: The errors are not named.
        ValueError: There are no rules, one has another number of errors than there are shares, or a number is not
            finite.
    """
    sparsity, errors = _checked("pruning", sparsity, errors)
    figure, axes = style.panel(7.6, 4.6)
    for (name, look), values in zip(style.looks(errors).items(), errors.values()):
        axes.plot(sparsity, values, markersize=5, linewidth=1.8, label=name, **look._asdict())
    if full is not None:
        axes.axhline(full, label="all weights", **style.REFERENCE)
    axes.set_ylim(bottom=0)
    style.dress(axes, "weights removed (fraction)", "test error (fraction)", "Error of the pruned network")
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper left")
    return figure


def _checked(what: str, common: Any, named: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return a vector and named vectors of its length as arrays, or raise TypeError or ValueError."""
    if not isinstance(named, Mapping):
        raise TypeError(f"{what} draws a vector against {{name: vector}}, got {type(named).__name__} for the latter.")
    vector, arrays = style.as_array(common), {name: style.as_array(values) for name, values in named.items()}
    shapes = {name: values.shape for name, values in arrays.items()}
    if vector.ndim != 1 or not vector.size or not shapes or set(shapes.values()) != {vector.shape}:
        raise ValueError(f"{what} draws a vector against named vectors of equal length, got {vector.shape}, {shapes}.")
    for name, values in {"the vector": vector, **arrays}.items():
        if not np.isfinite(values).all():
            raise ValueError(f"{what} needs finite numbers, and {name} has others.")
    return vector, arrays
