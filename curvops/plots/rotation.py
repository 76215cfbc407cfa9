"""Does a network notice that its inputs turn away from the training data?"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Real
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from curvops.plots import style

ENTRIES_A_ROW = 5
"""Legend entries that fit side by side."""


def rotation(
    angles: Real[np.ndarray, " angles"],
    confidence: Mapping[str, Real[np.ndarray, " angles"]],
    epistemic: Mapping[str, Real[np.ndarray, " angles"]] | Real[np.ndarray, " angles"],
    accuracy: Mapping[str, Real[np.ndarray, " angles"]] | None = None,
) -> Figure:
    """Mean confidence and accuracy (left), mean epistemic uncertainty (right) against the angle of rotation.

    `angles` in degrees; `confidence` (mean largest probability) and `accuracy`, both in [0, 1], and `epistemic` (mutual
    information of label and weights, in nats) are means over points, by name of the predictions. One array `epistemic`
    belongs to the last name of `confidence`.
    """
    uncertain = epistemic if isinstance(epistemic, Mapping) else {list(confidence)[-1]: epistemic}
    looks = style.looks([*confidence, *uncertain])
    figure = style.blank(10.5, 4.6)
    left, right = figure.subplots(1, 2)
    for name, values in confidence.items():
        left.plot(angles, values, color=looks[name].color, marker=looks[name].marker, linewidth=2)
    # Rows that share their decisions (a temperature moves none) have one accuracy: nested markers show them all.
    kept = accuracy or {}
    for inside, (name, values) in enumerate(kept.items(), start=1):
        left.plot(
            angles,
            values,
            color=looks[name].color,
            marker=looks[name].marker,
            markerfacecolor="none",
            markersize=5 + 3 * (len(kept) - inside),
            linestyle="--",
            linewidth=1.4,
        )
    for name, values in uncertain.items():
        right.plot(angles, values, color=looks[name].color, marker=looks[name].marker, linewidth=2)

    names = [Line2D([], [], color=look.color, marker=look.marker, label=name) for name, look in looks.items()]
    kinds = [Line2D([], [], color=style.INK, label="mean confidence")]
    if kept:
        kinds.append(Line2D([], [], color=style.INK, linestyle="--", label="accuracy"))
    entries = [*names, *kinds]
    rows = -(-len(entries) // ENTRIES_A_ROW)
    figure.legend(handles=entries, loc="outside lower center", ncols=-(-len(entries) // rows), fontsize=style.SMALL)
    what = "mean confidence and accuracy (fraction)" if kept else "mean confidence (fraction)"
    style.dress(left, "rotation of the input (degrees)", what, "Is the confidence kept?")
    style.dress(
        right, "rotation of the input (degrees)", "mean epistemic uncertainty (nats)", "Doubt about the weights"
    )
    left.set_ylim(0, 1.03)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xticks(angles if len(angles) <= 10 else angles[:: -(-len(angles) // 10)])
    return figure
