"""Which rows of a layer belong to which point, where they are not those of the points in their order.

Unevenly: atoms of graphs, packed sequences, tokens that a mask selects. A layer that is called with m rows for n
points, in any order, is a layer at T positions of each point once its rows stand in a table (n, T), filled up with
zeros; T is the largest number of rows of a point. Sums over positions then have the same terms as before. The point of
a row is the one whose outputs depend on it, which backward passes show.

Once for all points: a transformer looks up its positions once, and adds them to the tokens of every point. If the
result is repeated for each point (a view without memory of its own), the outputs are the same, and δ of each copy is
that of its point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from curvops.checks import in_functorch
from curvops.network.data.inputs import first_of, num_points
from curvops.network.engines.rules import SingleRows
from curvops.network.model.model import Model

SILENT, SEVERAL = -1, -2
"""The points of a row on which no output depends, and of one on which outputs of several points depend."""


class RaggedRows:
    """The rows of one call of a layer, in a table of points.

    `layer_input` (n, T, *a) are the rows' inputs, and `inside` (n, T) says which entries of the table are rows.
    """

    def __init__(self, form: SingleRows, points: Int[Tensor, " m"], num_points: int) -> None:
        counts, order = torch.bincount(points, minlength=num_points), points.argsort(stable=True)
        self.width = max(1, int(counts.max()))
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[points[order]]
        self._split, self.places = form.split, points * self.width + position
        self.inside: Bool[Tensor, "n T"] = torch.arange(self.width, device=order.device) < counts.unsqueeze(1)
        self.layer_input = self._table(form.layer_input)

    def sensitivities(self, delta: Float[Tensor, "R *out"]) -> Float[Tensor, "n R T *b"]:
        """Return δ of the rows in the table from that of the call's output."""
        return self._table(self._split(delta).transpose(0, 1)).transpose(1, 2)

    def _table(self, rows: Tensor) -> Tensor:
        flat = rows.new_zeros(self.inside.numel(), *rows.shape[1:]).index_copy(0, self.places, rows)
        return flat.unflatten(0, self.inside.shape)


def digits_of(dtype: torch.dtype) -> int:
    """Return the number of points, at most 16, that one backward pass tells apart by weights of 1, 2, 4, ….

    Products with such weights are exact. Half of a dtype's range is left to the model.
    """
    return min(16, int(math.log2(torch.finfo(dtype).max)) // 2)


def digit_weights(num_points: int, like: Tensor) -> Float[Tensor, "k n"]:
    """Return weights that tell points apart: ones, and for each digit of their numbers 2 to the power of it."""
    points, base = torch.arange(num_points, device=like.device), digits_of(like.dtype)
    exponents = [torch.zeros_like(points)]
    while base ** (len(exponents) - 1) < num_points:
        exponents.append(points // base ** (len(exponents) - 1) % base)
    return (1 << torch.stack(exponents)).to(like.dtype)


def points_of_rows(deltas: Float[Tensor, "k m *b"], num_points: int, rounding: float) -> Int[Tensor, " m"]:
    """Return the point of each row from δ of outputs with `digit_weights`, or `SILENT`, or `SEVERAL`.

    If only outputs of point n depend on a row, each δ of the row is that of ones times a weight of n. Nothing is known
    of rows whose δ overflow: they are `SEVERAL`, too.
    """
    (k, m), base = deltas.shape[:2], digits_of(deltas.dtype)
    if not m or not bool(deltas.isfinite().all()):
        return torch.full((m,), SEVERAL, device=deltas.device)
    rows = deltas.flatten(2).to(torch.promote_types(deltas.dtype, torch.float32))  # squares, too, are in range
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    first, others, size = rows[0], rows[1:], rows[0].norm(dim=1)
    silent = size <= rounding * size.amax()
    ratio = (others * first).sum(2) / size.square().masked_fill(silent, 1)
    digits = ratio.clamp(1, 2 ** (base - 1)).log2().round().long()
    weights = (1 << digits).to(rows.dtype)
    gap = (others - weights.unsqueeze(2) * first).norm(dim=2) / weights
    points = (digits * base ** torch.arange(k - 1, device=rows.device).unsqueeze(1)).sum(0)
    single = (gap <= rounding**0.5 * size).all(0) & (points < num_points)
    return points.masked_fill(~single, SEVERAL).masked_fill(silent, SILENT)


def beside_others(points: Int[Tensor, " m"], num_points: int) -> Int[Tensor, " m"]:
    """Return a point for each row: those without one (`SILENT`) belong beside the row before them."""
    m, rows = len(points), torch.arange(len(points), device=points.device)
    silent = points == SILENT
    if bool(silent.all()):
        return rows * num_points // max(1, m)
    return points[torch.where(silent, -1, rows).cummax(0).values.clamp_min((~silent).int().argmax())]


SharedLayers = Mapping[nn.Module, torch.Size]
"""Layers that are called once for all points, with the shape of their output."""
Shapes = dict[nn.Module, torch.Size | None]
ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
"""What a model may raise whose layer gives another shape than usual."""


def for_each_point(tensors: tuple[Any, ...], output: Tensor, shape: torch.Size, points: int) -> tuple[Any, ...]:
    """Return the tensors of a call, and last its output, repeated for each point; as they are if they have points.

    The output has one row for all points, (1, ...), or none, where it was probed with `shape`.
    """
    if output.ndim != len(shape) or (shape[0] == 1 and output.shape[0] != 1):
        return *tensors, output  # a layer before this one was repeated
    every = [t if shape[0] == 1 or not isinstance(t, Tensor) else t.unsqueeze(0) for t in (*tensors, output)]
    return tuple(t.expand(points, *t.shape[1:]) if isinstance(t, Tensor) else t for t in every)


def find_shared_layers(model: Model, inputs: Any, layers: Collection[nn.Module]) -> SharedLayers:
    """Return those of the layers that are called once for all points, if each point uses its own copy of their rows.

    Then the outputs of a point are the same with copies, also if another point's copy is -2 times the row: neither the
    sum nor the mean of such copies is the row. Cost: four forward passes at two points, `inputs`.
    """
    of_one, points = first_of(inputs, 1), num_points(inputs)
    if num_points(of_one) == points:
        return {}
    several: Shapes = {}
    of_single: Shapes = {}
    outputs = _run(model, inputs, layers, partial(_note_shape, several))
    _run(model, of_one, layers, partial(_note_shape, of_single))
    shared = {module: shape for module, shape in several.items() if shape and of_single.get(module) == shape}

    def copies_and_another(point: int, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        copies = for_each_point((), output, shared[module], points)[-1].clone()
        copies[point] *= -2
        return copies

    for point in range(points) if shared else ():
        try:
            changed = _run(model, inputs, shared, partial(copies_and_another, point))
        except ERRORS:
            return {}
        others = [n for n in range(points) if n != point]
        if not torch.allclose(changed[others], outputs[others], model.eps**0.5, model.eps**0.5):
            return {}
    return shared


def _run(model: Model, inputs: Any, layers: Collection[nn.Module], hook: Callable[..., Any]) -> Tensor:
    """Return the outputs of a pass without gradients, with a forward hook on these layers."""
    handles = [module.register_forward_hook(hook) for module in layers]
    try:
        with torch.no_grad():
            return model(model.values, inputs)
    finally:
        for handle in handles:
            handle.remove()


def _note_shape(shapes: Shapes, module: nn.Module, args: Any, output: Any) -> None:
    """Note the shape of a layer's output; None if it is no tensor, if calls have different ones, or within `vmap`.

    A transform of `torch.func` takes the points' dimension away, and what is first then is none of points.
    """
    shape = output.shape if isinstance(output, Tensor) and not in_functorch() else None
    shapes[module] = shape if shapes.setdefault(module, shape) == shape else None
