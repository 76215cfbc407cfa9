"""Figures of predictions: bands of a regression, calibration, distant inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Real
from matplotlib.axes import Axes
from torch import Tensor

from curvops import metrics
from curvops.checks import check_kind, refuse, shown
from curvops.network.likelihoods import Multitask
from curvops.plots import style
from curvops.plots.style import NumberSequence
from curvops.posterior import Laplace
from curvops.posterior.predictions.predictive import Predictive

Probabilities = Float[Tensor, "N *C"] | Float[np.ndarray, "N *C"]
"""Class probabilities (N, C), or of positions (N, ..., C) or (N, C, ...); or that of class 1, (N,) or (N, 1)."""


def regression(
    post: Laplace,
    x: NumberSequence,
    *,
    output: int | None = None,
    name: str | int | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw a posterior's mean with two bands of two standard deviations, of the function and of targets, and the data.

    The widest stretch without data between two training points is marked if it covers at least a tenth of their range.
    The second band, with the noise, needs real targets: of a Gaussian or heteroscedastic likelihood, or of a
    distribution that the user makes from the outputs. The curve is then the mean of the targets.

    Args:
        post: A posterior of a network with one input feature, from `co.laplace`, with its training data.
        x: Inputs of the curve (M,) or (M, 1), in any order.
        output: The index of the output (with a noise, of the target) that is drawn; needed if there are several.
        name: The name of one of several outputs, for a network that returns a mapping or a tuple.
        title: The panel's title.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: `post` is not a posterior, or `ax` is not a matplotlib Axes.
        ValueError: `x` is not a vector or a column, the network has several input features, or it has several outputs
            and `output` or `name` names none of them.

    Examples:
        >>> import torch, curvops as co
        >>> from curvops import plots
        >>> data = torch.randn(9, 1), torch.randn(9, 1)
        >>> lin = co.linearize(torch.nn.Linear(1, 1), data, co.likelihoods.Gaussian(noise=0.1))
        >>> post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
        >>> plots.regression(post, torch.linspace(-3, 3, 50)).get_ylabel()
        'target y'
    """
    check_kind("post", post, Predictive, "a posterior from co.laplace")
    points = np.sort(style.vector("x", x))
    lin = post.lin
    names = list(lin.likelihood.likelihoods) if isinstance(lin.likelihood, Multitask) else [None]
    refuse(name not in names, f"regression draws one output: pass name=, one of {names}; got name={name!r}.")
    x_train, y_train, shape = _training_data(lin, name)
    inputs = torch.as_tensor(points, dtype=lin.theta.dtype, device=lin.theta.device).reshape(shape)
    at: Any = post.at(inputs)
    at = at if name is None else at[name]
    if with_noise := at.lin.likelihood.form == "numbers":
        parts = at.uncertainty(torch.Generator().manual_seed(0))
        moments = parts.mean, parts.epistemic.sqrt(), parts.total.sqrt()
    else:
        predicted = at.predict()
        moments = predicted.mean, predicted.stddev, predicted.stddev
    outputs = moments[0].numel() // len(points)
    if output not in range(outputs) and (output is not None or outputs > 1):
        raise ValueError(f"regression draws one output of {outputs}: pass output=0 to {outputs - 1}, got {output}.")
    mean, std, total = (style.as_array(numbers.reshape(len(points), -1)[:, output or 0]) for numbers in moments)
    axes, blue = style.axes_of(ax, 8.4, 4.8), style.COLOURS[0]
    if with_noise:
        band = (mean - 2 * total, mean + 2 * total)
        axes.fill_between(points, *band, color=style.LIGHT, linewidth=0, label="±2 std with the noise")
    axes.fill_between(
        points, mean - 2 * std, mean + 2 * std, color=blue, alpha=0.4, linewidth=0, label="±2 std epistemic"
    )
    axes.plot(points, mean, color=blue, linewidth=2.2, label="predictive mean")
    axes.plot(
        x_train,
        y_train[:, output or 0],
        linestyle="none",
        marker="o",
        markersize=4.5,
        color=style.INK,
        label="training data",
    )
    _mark_gap(axes, np.sort(x_train))
    style.dress(axes, "input x", "target y", title)
    axes.set_xlim(points[0], points[-1])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, fontsize=style.SMALL, frameon=False)
    return axes


def _training_data(lin: Any, name: str | int | None) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return the training inputs as a vector, the targets (of this name) as rows, and the shape of a column of inputs.

    Targets of several outputs are rows with those of each name one after the other.
    """
    batches = [(batch.inputs, batch.targets) for batch in lin.data]
    first = batches[0][0]
    if not isinstance(first, Tensor) or first[0].numel() != 1:
        raise ValueError(f"regression draws against one input feature, and this network has inputs {shown(first)}.")
    x = np.concatenate([style.as_array(inputs).reshape(-1) for inputs, _ in batches])
    y = np.concatenate([style.as_array(targets).reshape(len(targets), -1) for _, targets in batches])
    if name is not None:
        widths = [form.columns for form in lin.likelihood.targets]
        y = dict(zip(lin.likelihood.likelihoods, np.split(y, np.cumsum(widths)[:-1], axis=1)))[name]
    return x, y, (-1, *first.shape[1:])


def _mark_gap(axes: Axes, places: Real[np.ndarray, " N"]) -> None:
    """Mark the widest stretch without data, if it covers at least a tenth of the range."""
    if len(places) < 2:
        return
    widest = int(np.argmax(np.diff(places)))
    left, right = places[widest], places[widest + 1]
    if right - left < 0.1 * (places[-1] - places[0]):
        return
    for edge in (left, right):
        axes.axvline(edge, color=style.GREY, linestyle=":", linewidth=1.2)
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 2}
    text: dict[str, Any] = {"fontsize": style.LABEL, "color": style.GREY, "style": "italic", "ha": "center"}
    axes.text((left + right) / 2, 0.03, "no data", transform=axes.get_xaxis_transform(), bbox=box, **text)


def reliability(
    predictions: Mapping[str, Probabilities] | Probabilities,
    labels: Int[Tensor, "N *T"] | Int[np.ndarray, "N *T"],
    *,
    bins: int = 15,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw a reliability diagram: the accuracy in bins of confidence against the confidence, after Guo et al. 2017.

    The area of a marker grows with the share of the points in its bin. The legend has the expected calibration errors.

    Args:
        predictions: Maps the name of a method to its class probabilities, (N, C), or of positions (N, ..., C) or (N, C,
            ...), or to the probability of class 1, (N,) or (N, 1); or the probabilities of a single method.
        labels: The true classes (N,) or (N, ...), in 0..C − 1.
        bins: The number of equally wide bins of (0, 1].
        title: The panel's title.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError, ValueError: There are no predictions, they are not probabilities and labels of these shapes, or `ax`
            is not a matplotlib Axes.

    Examples:
        >>> import torch
        >>> from curvops import plots
        >>> p = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.8, 0.2]])
        >>> ax = plots.reliability({"network": p}, torch.tensor([0, 0, 0]))
        >>> ax.get_legend_handles_labels()[1][1]
        'network, ECE 30.0 %'
    """
    named = predictions if isinstance(predictions, Mapping) else {"predictions": predictions}
    refuse(not named, "reliability draws {name: probabilities (N, C)}, got none.")
    y = torch.as_tensor(style.as_array(labels))
    probabilities = {name: _classes(name, values) for name, values in named.items()}
    pairs = [(p, y if p.ndim > 2 else y.reshape(-1)) for p in probabilities.values()]
    counted = [(metrics.reliability_bins(*pair, bins=bins), float(metrics.ece(*pair, bins=bins))) for pair in pairs]
    axes = style.axes_of(ax, 5.6, 5.4)
    axes.plot([0, 1], [0, 1], color=style.GREY, linestyle=":", linewidth=1.5, label="perfect calibration")
    for (name, look), (bin_, error) in zip(style.looks(probabilities).items(), counted):
        confidence, accuracy, count = (
            style.as_array(column) for column in (bin_.confidence, bin_.accuracy, bin_.count)
        )
        held = count > 0
        label = f"{name}, ECE {100 * error:.1f} %"
        axes.plot(confidence[held], accuracy[held], linewidth=1.8, label=label, **look._asdict(), markersize=5)
        area = 20 + 380 * count[held] / count.sum()
        axes.scatter(confidence[held], accuracy[held], area, look.color, alpha=0.35, linewidths=0)
    style.dress(axes, "confidence (largest probability)", "accuracy (fraction of points)", title)
    axes.set(xlim=(0, 1.03), ylim=(0, 1.03))
    note: dict[str, Any] = {"zorder": 1, "color": style.GREY, "fontsize": style.SMALL, "style": "italic"}
    axes.text(0.97, 0.04, "overconfident", ha="right", **note)
    axes.text(0.04, 0.62, "underconfident", **note)
    axes.legend(fontsize=style.SMALL, framealpha=0.9, loc="upper left")
    return axes


def _classes(name: str, probabilities: Any) -> Float[Tensor, "N C"]:
    """Return class probabilities (N, C) on the CPU, also of the probabilities of class 1."""
    p = torch.as_tensor(style.as_array(probabilities))
    if not p.is_floating_point() or not p.ndim:
        kind = f"{p.dtype} of shape {tuple(p.shape)}"
        raise TypeError(f"reliability draws class probabilities (N, C); got {kind} for {name!r}.")
    p = p.unsqueeze(1) if p.ndim == 1 else p
    return torch.cat([1 - p, p], 1) if p.shape[1:] == (1,) else p


def ray(
    distances: NumberSequence,
    confidence: Mapping[str, NumberSequence],
    *,
    limits: Mapping[str, float] | None = None,
    radius: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw the confidence of each prediction against the distance along a ray, on a log axis.

    Args:
        distances: Distances (M,), positive, in the inputs' units.
        confidence: Maps a prediction's name to its largest probabilities (M,).
        limits: Maps some of these names to the limit of the confidence, a dotted line.
        radius: The largest distance of the training data, the end of a grey band.
        ax: The axes to draw into; None makes a figure.

    Returns:
        The axes.

    Raises:
        TypeError: The confidences are not named.
        ValueError: The vectors differ in length.

    Examples:
        >>> from curvops import plots
        >>> plots.ray([1.0, 10.0, 100.0], {"network": [0.7, 0.9, 1.0]}, radius=2.0).get_xscale()
        'log'
    """
    distances, confidence = style.vectors("ray", distances, confidence)
    axes = style.axes_of(ax, 7.6, 4.6)
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
    return axes
