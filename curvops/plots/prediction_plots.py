"""Figures of predictions: calibration, rotated inputs, bands of a regression, joint covariance, distant inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvops.plots import style

PANELS_A_ROW = 3
ENTRIES_A_ROW = 5
"""The number of legend entries that fit side by side."""


def reliability(
    curves: Mapping[str, tuple[Real[np.ndarray, " bins"], Real[np.ndarray, " bins"], Real[np.ndarray, " bins"]]],
    title: str = "Reliability",
    ece: Mapping[str, float] | None = None,
) -> Figure:
    """Draw reliability diagrams, three in a row, after Guo et al. 2017, figure 1.

    Args:
        curves: Maps a panel's name to (confidence, accuracy, share), each of shape (bins,) with values between 0 and 1:
            the mean confidence and the fraction of correct predictions in each of equally wide bins of (0, 1], and the
            fraction of all points in it. NaN marks a bin without points.
        title: The figure's title.
        ece: Maps the same names to expected calibration errors in [0, 1], shown next to them.

    Returns:
        A figure with a panel for each name.

    Raises:
        TypeError: The curves are not a mapping.
    """
    if not isinstance(curves, Mapping):
        raise TypeError(
            "reliability needs {name: (confidence, accuracy, share)}, which metrics.reliability_bins(probabilities, "
            f"labels) counts, got {type(curves).__name__}."
        )
    rows = -(-len(curves) // PANELS_A_ROW)
    columns = -(-len(curves) // rows)
    figure = style.blank(3.7 * columns + 0.7, 4.4 * rows + 1, title)
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for unused in panels[len(curves) :]:
        unused.remove()
    note: dict[str, Any] = {"zorder": 1, "color": style.GREY, "fontsize": style.SMALL, "style": "italic"}
    for axes, (name, look), (confidence, accuracy, share) in zip(panels, style.looks(curves).items(), curves.values()):
        bins = len(share)
        centres = (np.arange(bins) + 0.5) / bins
        axes.bar(centres, share, width=0.92 / bins, color=style.LIGHT, label="share of all points")
        axes.plot([0, 1], [0, 1], color=style.GREY, linestyle=":", linewidth=1.5, label="perfect calibration")
        held = np.isfinite(confidence) & np.isfinite(accuracy)
        line = look.dots | {"linewidth": 1.8, "markersize": 6, "markeredgecolor": "white"}
        axes.plot(confidence[held], accuracy[held], label="accuracy in the bin", **line)
        error = f"\nECE {100 * ece[name]:.1f} %" if ece is not None else ""
        style.dress(axes, "confidence (largest probability)", "", f"{name}{error}")
        axes.set(xlim=(0, 1), ylim=(0, 1.03))
        axes.set_xticks(np.linspace(0, 1, 6), ["0", "0.2", "0.4", "0.6", "0.8", "1"])
        # Drawn below the curve, so that the data stay readable where they meet.
        axes.text(0.6, 0.1, "overconfident", ha="center", **note)
        axes.text(0.05, 0.92, "underconfident", **note)
    for first in panels[::columns]:
        first.set_ylabel("fraction of points", fontsize=style.LABEL, color=style.INK)
    handles, labels = panels[0].get_legend_handles_labels()
    # Panels differ in colour and marker, so the common legend shows the curve in neither.
    handles[labels.index("accuracy in the bin")] = Line2D([], [], color=style.INK, linewidth=1.8)
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=style.SMALL)
    return figure


def rotation(
    angles: Real[np.ndarray, " angles"],
    confidence: Mapping[str, Real[np.ndarray, " angles"]],
    epistemic: Mapping[str, Real[np.ndarray, " angles"]] | Real[np.ndarray, " angles"],
    accuracy: Mapping[str, Real[np.ndarray, " angles"]] | None = None,
) -> Figure:
    """Draw mean confidence and accuracy (left) and mean epistemic uncertainty (right) against the angle of rotation.

    Args:
        angles: Angles in degrees.
        confidence: Maps the name of a method to the mean over points of the largest probability, in [0, 1].
        epistemic: Maps names to the mean mutual information of label and weights, in nats; a single array belongs to
            the last name of `confidence`.
        accuracy: Maps names to accuracies in [0, 1].

    Returns:
        A figure with two panels.
    """
    uncertain = epistemic if isinstance(epistemic, Mapping) else {list(confidence)[-1]: epistemic}
    looks = style.looks([*confidence, *uncertain])
    figure = style.blank(10.5, 4.6)
    left, right = figure.subplots(1, 2)
    for axes, curves in ((left, confidence), (right, uncertain)):
        for name, values in curves.items():
            axes.plot(angles, values, linewidth=2, **looks[name].dots)
    # Methods with equal decisions (a temperature changes none) have the same accuracy: nested markers show them all.
    kept = accuracy or {}
    for inside, (name, values) in enumerate(kept.items(), start=1):
        ring = looks[name].dots | {"markerfacecolor": "none", "markersize": 5 + 3 * (len(kept) - inside)}
        left.plot(angles, values, linestyle="--", linewidth=1.4, **ring)
    entries = [Line2D([], [], label=name, **look.dots) for name, look in looks.items()]
    entries.append(Line2D([], [], color=style.INK, label="mean confidence"))
    if kept:
        entries.append(Line2D([], [], color=style.INK, linestyle="--", label="accuracy"))
    rows = -(-len(entries) // ENTRIES_A_ROW)
    figure.legend(handles=entries, loc="outside lower center", ncols=-(-len(entries) // rows), fontsize=style.SMALL)
    turn, what = "rotation of the input (degrees)", "mean confidence and accuracy" if kept else "mean confidence"
    style.dress(left, turn, f"{what} (fraction)", "Confidence and accuracy")
    style.dress(right, turn, "mean epistemic uncertainty (nats)", "Uncertainty about the weights")
    left.set_ylim(0, 1.03)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xticks(angles if len(angles) <= 10 else angles[:: -(-len(angles) // 10)])
    return figure


def regression(
    x_train: Real[np.ndarray, " N"],
    y_train: Real[np.ndarray, " N"],
    x: Real[np.ndarray, " M"],
    mean: Real[np.ndarray, " M"],
    std: Real[np.ndarray, " M"],
    noise_std: float,
) -> Figure:
    """Draw data, predictive mean and two bands of two standard deviations: of the function, and with the noise added.

    The widest stretch without data between two points is marked if it covers at least a tenth of their range.

    Args:
        x_train: Training inputs (N,).
        y_train: Training targets (N,).
        x: Inputs of the curve (M,), in any order.
        mean: Mean of the function at `x` (M,), in the target's units.
        std: Standard deviation of the function at `x` (M,), in the target's units.
        noise_std: Standard deviation of the noise.

    Returns:
        A figure with one panel.
    """
    figure, axes = style.panel(8.4, 4.8)
    order = np.argsort(x)
    x, mean, std = x[order], mean[order], std[order]
    total, blue = 2 * np.sqrt(std**2 + noise_std**2), style.COLOURS[0]
    axes.fill_between(x, mean - total, mean + total, color=style.LIGHT, linewidth=0, label="±2 std with the noise")
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, color=blue, alpha=0.4, linewidth=0, label="±2 std epistemic")
    axes.plot(x, mean, color=blue, linewidth=2.2, label="predictive mean")
    axes.plot(x_train, y_train, linestyle="none", marker="o", markersize=4.5, color=style.INK, label="training data")
    places = np.sort(x_train)
    widest = int(np.argmax(np.diff(places)))
    left, right = places[widest], places[widest + 1]
    if right - left >= 0.1 * (places[-1] - places[0]):
        for edge in (left, right):
            axes.axvline(edge, color=style.GREY, linestyle=":", linewidth=1.2)
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
        text: dict[str, Any] = {
            "fontsize": style.LABEL,
            "color": style.GREY,
            "style": "italic",
            "ha": "center",
            "bbox": box,
        }
        axes.text((left + right) / 2, 0.03, "no data", transform=axes.get_xaxis_transform(), **text)
    style.dress(axes, "input x (arbitrary units)", "target y (arbitrary units)", "Prediction and its uncertainty")
    axes.set_xlim(x[0], x[-1])
    figure.legend(loc="outside lower center", ncols=4, fontsize=style.SMALL)
    return figure


def covariance(
    matrix: Real[np.ndarray, "rows rows"], labels: Sequence[str], title: str = "Predictive covariance of the logits"
) -> Figure:
    """Draw a heat map of a joint predictive covariance, centred at zero, with the points' borders.

    Args:
        matrix: Covariance (n·C, n·C), in squared logits, point-major: row i·C + c is output c of point i.
        labels: Names of the n points.
        title: The panel's title.

    Returns:
        A figure with one panel.

    Raises:
        ValueError: The matrix has no whole number of outputs for each label.
    """
    rows, points = len(matrix), len(labels)
    if not points or rows % points:
        raise ValueError(f"{rows} rows do not divide evenly among {points} labels; give one label per point.")
    outputs = rows // points
    figure, axes = style.panel(7.6, 6.6)
    limit = float(np.abs(matrix).max()) or 1.0
    image = axes.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
    style.dress(axes, f"point, its outputs 0 … {outputs - 1} from left to right", "", title)
    axes.set_ylabel(f"point, its outputs 0 … {outputs - 1} from top to bottom", fontsize=style.LABEL, color=style.INK)
    axes.grid(False)
    axes.spines[["top", "right"]].set_visible(True)
    for border in np.arange(1, points) * outputs - 0.5:
        axes.axhline(border, color=style.INK, linewidth=1)
        axes.axvline(border, color=style.INK, linewidth=1)
    centres = (np.arange(points) + 0.5) * outputs - 0.5
    axes.set_xticks(centres, labels)
    axes.set_yticks(centres, labels, rotation=90, va="center")
    axes.tick_params(length=0, labelsize=style.LABEL)
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_label("covariance (squared logits)", fontsize=style.LABEL, color=style.INK)
    bar.ax.tick_params(labelsize=style.SMALL, colors=style.INK)
    return figure


def ray(
    distances: Real[np.ndarray, " M"],
    confidence: Mapping[str, Real[np.ndarray, " M"]],
    limits: Mapping[str, float] | None = None,
    radius: float | None = None,
) -> Figure:
    """Draw the confidence of each prediction against the distance along a ray, on a log axis.

    Args:
        distances: Distances (M,), positive, in the inputs' units.
        confidence: Maps a prediction's name to its largest probabilities (M,).
        limits: Maps some of these names to the limit of the confidence, a dotted line.
        radius: The largest distance of the training data, the end of a grey band.

    Returns:
        A figure with one panel.
    """
    figure, axes = style.panel(7.6, 4.6)
    if radius is not None:
        axes.axvspan(float(distances.min()), radius, color=style.LIGHT, alpha=0.6, linewidth=0, label="training data")
    for (name, look), values in zip(style.looks(confidence).items(), confidence.values()):
        axes.plot(distances, values, linewidth=2.2, label=name, **look.line)
        if limits is not None and name in limits:
            label = f"its limit, {limits[name]:.3f}"
            axes.axhline(limits[name], color=look.color, linestyle=":", linewidth=1.6, label=label)
    axes.set_xscale("log")
    axes.set_xlim(float(distances.min()), float(distances.max()))
    title = "Away from the data: does the confidence end below 1?"
    style.dress(axes, "distance along the ray (units of the input)", "confidence (largest probability)", title)
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="best")
    return figure
