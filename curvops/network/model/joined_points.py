"""Checks of points that a user's function joins for the model, at every batch: the first points do not show all."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.network.data.contents import digest_of
from curvops.network.data.inputs import Inputs, in_pieces, is_finite, num_points, take, value_of
from curvops.network.data.objects import Objects, WholeBatch
from curvops.network.data.randomness import own_randomness
from curvops.network.model.model import Model


def admit_all(model: Model, inputs: Inputs, most: int = 0, in_order: bool = False) -> None:
    """Try the model on inputs as `Model.admit` does, and on all of them if they are objects, `most` at a time.

    What is inside an object is not looked at, but its outputs have to be finite. With `in_order`, the points must also
    be joined in their order, and equally each time. Costs one forward pass for objects, or two, and none for tensors.
    Raises ValueError or TypeError.
    """
    model.admit(inputs)
    if not isinstance(inputs, Objects) or not num_points(inputs):
        return
    start = 0
    with torch.no_grad():
        for subset in in_pieces(inputs, most):
            outputs = model.raw(model.values, subset)
            _require_finite_outputs(outputs, start)
            start += num_points(subset)
            if in_order and not isinstance(subset, WholeBatch):
                _require_order(model, subset, outputs)


def _require_finite_outputs(outputs: Tensor, start: int) -> None:
    if not is_finite(outputs):
        finite = outputs.flatten(1).isfinite().all(1)
        raise ValueError(
            f"the model's outputs at point {start + int(finite.logical_not().nonzero()[0])} hold NaN or infinite "
            "values: look for them in that point, and remove it or impute them."
        )


def _require_order(model: Model, points: Inputs, outputs: Tensor) -> None:
    with own_randomness(model.theta.device):
        differ = digest_of(value_of(points, apart=True)) != digest_of(value_of(points, apart=True))
    # What differs may be without effect, such as a time.
    if differ and any(not torch.equal(model.raw(model.values, points), outputs) for _ in range(2)):
        raise ValueError(
            "the function that joins the points (collate=, collate_fn) made something else of the same points when "
            "called again. It must not be random, as cropping and other augmentation are: do that once, before."
        )
    turned = take(points, torch.arange(num_points(points) - 1, -1, -1))
    try:
        again = model.raw(model.values, turned)
    except (RuntimeError, ValueError):  # packed sequences may have to come in order of their lengths
        return
    slack = model.eps**0.5 * (1 + outputs.abs().max())
    if bool(((again.flip(0) - outputs).abs() > slack).any()):
        raise ValueError(
            "a point's outputs depend on its place among the points of its batch: the function that joins them "
            "(collate=, collate_fn) has to keep their order. Sort inside the model, and restore the order there."
        )
