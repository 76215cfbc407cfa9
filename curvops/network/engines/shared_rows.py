"""Layers called once for all points, such as the positions of a transformer, in the form of layers with rows of points.

A transformer looks up its positions once, and adds them to the tokens of every point. If the result is repeated for
each point (a view without memory of its own), the outputs are the same, and δ of each copy is that of its point.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvops.checks import in_functorch
from curvops.network.data.inputs import first_of, num_points
from curvops.network.model.model import Model

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
