"""The check that the layerwise engine multiplies by the same Jacobian as automatic differentiation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from curvops.network.data.batches import Batch
from curvops.network.engines.autodiff import Streamed
from curvops.network.engines.layerwise import Layerwise, Recording, sensitivities
from curvops.network.engines.routes import allowance, rounding, tolerance
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.output_fisher import Root, Sampled
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks


@runtime_checkable
class Transpose(Protocol):
    """A product with Jᵀ or Jᵀ L by another route."""

    def pull(self, cotangents: Tensor) -> Blocks:
        """Return the product by parameter name."""


class Checked(NamedTuple):
    """The parameters whose layers are wrong, and whether each parameter had a gradient, without which nothing shows."""

    wrong: set[str]
    shown: bool


def mismatches(engine: Layerwise, reference: Transpose) -> Checked:
    """Find the parameters for which Jᵀu differs from autograd's, or J from the adjoint of Jᵀ."""
    generator = torch.Generator(device=engine.outputs.device).manual_seed(0)
    shape = 1, len(engine.outputs), engine.num_columns
    u = torch.randn(shape, dtype=engine.outputs.dtype, device=generator.device, generator=generator)
    bad, shown = _differing(engine.pull(u), u, reference, generator)
    for part in engine.parts:
        names = part.layer.names
        tangents = {
            name: torch.randn(1, *part.layer.shape_of(local), dtype=u.dtype, device=u.device, generator=generator)
            for local, name in names.items()
        }
        pushed = part.push(tangents)
        pulled = part.pull(pushed)  # not relative to u: ⟨u, Jv⟩ may be small by chance and hide a wrong push
        left = pushed.square().sum()
        right = torch.stack([(pulled[local] * tangents[name]).sum() for local, name in names.items()]).sum()
        if not bool((left - right).abs() <= tolerance(u.dtype) * left):
            bad |= set(names.values())
    return Checked(bad, shown)


def random_root(points: int, num_outputs: int, like: Tensor) -> Root:
    """Return one random column per point, along which J is checked without targets, whose residuals may be zero."""
    generator = torch.Generator(device=like.device).manual_seed(0)
    draws = torch.randn(1, points, num_outputs, dtype=like.dtype, device=like.device, generator=generator)
    return Root(Sampled(Gaussian(), draws), Batch((), torch.empty(points)))


def wrong_layers(model: Model, recording: Recording, names: Iterable[str], reference: Streamed) -> Checked:
    """Find the parameters among these whose layers do not give autograd's Jᵀu for a random u. Two backward passes.

    Each point's part of u has a factor that is applied to the rows alone, which shows that the rows are its own.
    """
    outputs, calls, misfits = recording
    generator = torch.Generator(device=outputs.device).manual_seed(0)
    u = torch.randn(1, *outputs.shape, dtype=outputs.dtype, device=outputs.device, generator=generator)
    factors = torch.randn(len(outputs), 1, dtype=u.dtype, device=u.device, generator=generator)
    with torch.no_grad():
        deltas = model.holding(model.leaves(), lambda: sensitivities(model, outputs, calls, u))
        values = model.values
        ours: Blocks = {name: torch.zeros_like(values[name]).unsqueeze(0) for name in names}
        for call, delta in zip(calls, deltas):
            if delta is not None:
                layer, kept = call.layer, call.kept.detach()
                scaled = delta * factors.view(-1, *[1] * (delta.ndim - 1))
                for local, gradient in layer.rule.pull(layer.module, kept, scaled, tuple(layer.names)).items():
                    ours[layer.names[local]] = ours[layer.names[local]] + gradient
    bad, shown = _differing(ours, u * factors, reference, generator)
    return Checked(misfits | bad, shown)


def bypassed(model: Model, recording: Recording) -> set[str]:
    """Find the parameters of layers that the outputs also depend on by a path through no call of the layer.

    The graph shows this at points without a gradient, too: a weight that is used elsewhere, or a layer whose output was
    written to through a view.
    """
    outputs, calls, _ = recording
    inputs = {call.edge.node: [a for a in call.inputs if a.requires_grad] for call in calls}
    todo = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = {*todo}
    places = set()
    for node in todo:  # the list grows
        parents: list[Node | None] = []
        if node in inputs:
            parents += [get_gradient_edge(a).node for a in inputs[node]]
        else:
            parents += [parent for parent, _ in node.next_functions]
            if (variable := getattr(node, "variable", None)) is not None:
                places.add(model.place_of(variable))
        new = [parent for parent in dict.fromkeys(parents) if parent is not None and parent not in seen]
        todo += new
        seen.update(new)
    found = {name for name, leaf in model.leaves().items() if model.place_of(leaf) in places}
    return found & {name for call in calls for name in call.layer.names.values()}


def _differing(ours: Blocks, u: Tensor, reference: Transpose, generator: torch.Generator) -> Checked:
    """Find the gradients Jᵀu that differ from autograd's by more than the model's own rounding allows."""
    expected = {name: value for name, value in reference.pull(u).items() if name in ours}
    scale = torch.stack([value.norm() for value in expected.values()]).norm()
    tol = tolerance(u.dtype)
    differences = {name: (ours[name] - value).norm() for name, value in expected.items()}
    bad = {name for name, value in expected.items() if not bool(differences[name] <= allowance(value) + tol**2 * scale)}
    if bad:
        noise = rounding(lambda block: reference.pull(block[""]), {"": u}, expected, generator)
        bad = {name for name in bad if not bool(differences[name] <= allowance(expected[name], noise[name]))}
    return Checked(bad, all(bool(value.any()) for value in expected.values()))
