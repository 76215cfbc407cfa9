"""Layers called once for all points, such as the positions of a transformer, in the form of layers with rows of points.

A transformer looks up its positions once, and adds them to the tokens of every point. If the result is repeated for
each point (a view without memory of its own), the outputs are the same, and δ of each copy is that of its point.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvops.network.data.inputs import first_of, num_points
from curvops.network.model.model import Model

SharedLayers = Mapping[nn.Module, torch.Size]
"""Layers that are called once for all points, with the shape of their output."""
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

    Then the outputs are the same with copies, and those of a point do not change if another point's copy is zero.
    Cost: six forward passes at two points, `inputs`.
    """
    of_one, points = first_of(inputs, 1), num_points(inputs)
    if num_points(of_one) == points:
        return {}
    several, one = (_output_shapes(model, some, layers) for some in (inputs, of_one))
    shapes = {m: several[m].pop() for m in several if len(several[m]) == 1 and several[m] == one.get(m)}
    shared = {module: shape for module, shape in shapes.items() if shape}
    if not shared:
        return {}

    def copies_but_one(point: int | None, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        copies = for_each_point((), output, shared[module], points)[-1].clone()
        if point is not None:
            copies[point] = 0
        return copies

    with torch.no_grad():
        outputs = model(model.values, inputs)
        for point in (None, *range(points)):
            handles = [module.register_forward_hook(partial(copies_but_one, point)) for module in shared]
            try:
                repeated = model(model.values, inputs)
            except ERRORS:
                return {}
            finally:
                for handle in handles:
                    handle.remove()
            others = [n for n in range(points) if n != point]
            if not torch.allclose(repeated[others], outputs[others], model.eps**0.5, model.eps**0.5):
                return {}
    return shared


def _output_shapes(model: Model, inputs: Any, layers: Collection[nn.Module]) -> dict[nn.Module, set[torch.Size]]:
    """Return the shapes of the layers' outputs in one forward pass."""
    shapes: dict[nn.Module, set[torch.Size]] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        shapes.setdefault(module, set()).add(output.shape if isinstance(output, Tensor) else torch.Size())

    handles = [module.register_forward_hook(note) for module in layers]
    try:
        with torch.no_grad():
            model(model.values, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return shapes
