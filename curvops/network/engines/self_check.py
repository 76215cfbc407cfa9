"""The check that the layerwise engine multiplies by the same Jacobian as automatic differentiation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from curvops.network.data.batches import Batch
from curvops.network.engines.layerwise import Layerwise, Recording
from curvops.network.engines.routes import allowance, rounding, tolerance
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.output_fisher import Root, Sampled
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks

MOVING = {
    *("Index", "IndexSelect", "IndexAdd", "IndexCopy", "IndexPut", "IndexReduce", "Gather", "Take", "Sort"),
    *("Scatter", "ScatterAdd", "ScatterReduce", "MaskedSelect", "MaskedScatter"),
}
"""Operations that may reorder points, depending on the numbers they are given."""


@runtime_checkable
class Transpose(Protocol):
    """A product with Jᵀ or Jᵀ L by another route."""

    def pull(self, cotangents: Tensor) -> Blocks:
        """Return the product by parameter name."""


class Checked(NamedTuple):
    """The parameters whose layers are wrong, and whether each parameter had a gradient, without which nothing shows."""

    wrong: set[str]
    shown: bool


def mismatches(engine: Layerwise, reference: Transpose, names: Iterable[str] = ()) -> Checked:
    """Find the parameters for which Jᵀu differs from autograd's, or J from the adjoint of Jᵀ.

    The random u of each point multiplies its rows alone, which shows that the rows are its own. `names` are the
    parameters that need a gradient to show it.
    """
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    shape = 1, len(engine.outputs), engine.num_columns
    u = torch.randn(shape, dtype=engine.outputs.dtype, device=generator.device, generator=generator)
    bad, expected = _differing(engine.pull(u), u, reference, generator)
    for part in engine.parts:
        of_layer = part.layer.names
        tangents = {
            name: torch.randn(1, *part.layer.shape_of(local), dtype=u.dtype, device=u.device, generator=generator)
            for local, name in of_layer.items()
        }
        pushed = part.push(tangents)
        pulled = part.pull(pushed)  # not relative to u: ⟨u, Jv⟩ may be small by chance and hide a wrong push
        left = pushed.square().sum()
        right = torch.stack([(pulled[local] * tangents[name]).sum() for local, name in of_layer.items()]).sum()
        if not bool((left - right).abs() <= tolerance(u.dtype) * left):
            bad |= set(of_layer.values())
    return Checked(bad, all(bool(expected[name].any()) for name in names))


def random_root(points: int, num_outputs: int, like: Tensor) -> Root:
    """Return one random column per point, along which J is checked without targets, whose residuals may be zero."""
    generator = torch.Generator(device=like.device).manual_seed(0)
    draws = torch.randn(1, points, num_outputs, dtype=like.dtype, device=like.device, generator=generator)
    return Root(Sampled(Gaussian(), draws), Batch((), torch.empty(points)))


def bypassed(model: Model, recording: Recording) -> set[str]:
    """Find the parameters of layers that the outputs also depend on by a path through no call of the layer.

    The graph shows this at points without a gradient, too: a weight that is used elsewhere, or a layer whose output was
    written to through a view.
    """
    outputs, calls, _ = recording
    inputs = {call.edge.node: call.a for call in calls}
    todo = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = {*todo}
    places = set()
    for node in todo:  # the list grows
        parents: list[Node | None] = []
        if node in inputs:
            parents += [get_gradient_edge(inputs[node]).node] if inputs[node].requires_grad else []
        else:
            parents += [parent for parent, _ in node.next_functions]
            if (variable := getattr(node, "variable", None)) is not None:
                places.add(model.place_of(variable))
        new = [parent for parent in dict.fromkeys(parents) if parent is not None and parent not in seen]
        todo += new
        seen.update(new)
    found = {name for name, leaf in model.leaves().items() if model.place_of(leaf) in places}
    return found & {name for call in calls for name in call.layer.names.values()}


def _differing(ours: Blocks, u: Tensor, reference: Transpose, generator: torch.Generator) -> tuple[set[str], Blocks]:
    """Find the gradients Jᵀu that differ from autograd's by more than the model rounds; return autograd's, too."""
    expected = {name: value for name, value in reference.pull(u).items() if name in ours}
    scale = torch.stack([value.norm() for value in expected.values()]).norm()
    tol = tolerance(u.dtype)
    differences = {name: (ours[name] - value).norm() for name, value in expected.items()}
    bad = {name for name, value in expected.items() if not bool(differences[name] <= allowance(value) + tol**2 * scale)}
    if bad:
        noise = rounding(lambda block: reference.pull(block[""]), {"": u}, expected, generator)
        bad = {name for name in bad if not bool(differences[name] <= allowance(expected[name], noise[name]))}
    return bad, expected


def path_of(model: Model, recording: Recording) -> int | None:
    """Return a number that is equal for passes with the same operations and calls of layers, at any number of points.

    It determines whether layer rules are right: which paths lead from the outputs to a parameter, and which of them
    lead through the call of a layer. Return None if an operation may move points, as a sort does.
    """
    outputs, calls, _ = recording
    n = len(outputs)
    order = [] if outputs.grad_fn is None else [outputs.grad_fn]
    numbers: dict[Any, int] = dict.fromkeys(order, 0)
    path: list[Hashable] = [n == 1]
    for node in order:  # the list grows
        if not node.next_functions:
            variable = getattr(node, "variable", None)
            path.append(None if variable is None else model.place_of(variable))
            continue
        name = node.name()
        if name.partition("Backward")[0] in MOVING and _moves_points(node, n):
            return None
        path.append(name)
        for parent, place in node.next_functions:
            if parent is not None and parent not in numbers:
                numbers[parent] = len(order)
                order.append(parent)
            path.append((None if parent is None else numbers[parent], place))
    for call in calls:
        path.append((call.layer.path, numbers.get(call.edge.node), call.edge.output_nr))
    return hash(tuple(path))


def _moves_points(node: Any, n: int) -> bool:
    """Return whether an indexing operation may move points, unless it acts within each of the n leading points."""
    shape = node._input_metadata[0].shape
    if len(shape) == 0 or shape[0] != n:
        return True
    indices = getattr(node, "_saved_indices", None)
    if indices is not None:
        first = indices[0]
        return first is not None and not torch.equal(first.flatten(), torch.arange(n, device=first.device))
    dim = getattr(node, "_saved_dim", 0)
    return dim == 0 or dim == 2**64 - len(shape)
