"""Outputs, rows of J and products with it at given inputs, with gradients in these inputs.

The pass is recorded from the inputs on. It enters the user's graph as one step, whose backward pass runs while the
module holds its snapshot; the weights get no gradient. A row of J is itself a first derivative, computed with its
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.checks import refuse
from curvops.network.data.inputs import Inputs, components, first_of, join, move, num_points, replace_tensors
from curvops.network.engines.autodiff import point_rows, record_graph
from curvops.network.engines.engine import Engines
from curvops.network.engines.layer_calls import Call, sensitivities
from curvops.network.engines.layerwise import Features
from curvops.network.engines.self_check import custom_functions
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group, JacobianRows, groups_of, groups_of_calls, unlike

Compute = Callable[..., Tensor]


def through_inputs(model: Model, inputs: Inputs, compute: Compute, *vectors: Tensor) -> Tensor:
    """Return `compute(inputs, *vectors)` with its gradient in those inputs and vectors that require one.

    It has first derivatives only, and raises RuntimeError if a gradient of the gradient is recorded.
    """
    names = [name for name, tensor in components(inputs) if tensor.requires_grad]
    tensors = dict(components(inputs))
    result: Tensor = _ThroughInputs.apply(  # type: ignore[no-untyped-call]
        model, inputs, names, compute, *(tensors[name] for name in names), *vectors
    )
    return result


class _ThroughInputs(Function):
    """A recorded computation that keeps its own graph."""

    @staticmethod
    def forward(ctx: Any, model: Model, inputs: Inputs, names: list[str], compute: Compute, *tensors: Tensor) -> Tensor:
        with model.differentiating():
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            value = compute(replace_tensors(inputs, dict(zip(names, leaves))), *leaves[len(names) :])
        ctx.model, ctx.leaves, ctx.value = model, leaves, value
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: without a graph the second derivative would count as zero
            raise RuntimeError("there are only first derivatives in the inputs: no create_graph=True.")
        model: Model = ctx.model
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        leaf_gradients: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if ctx.value.requires_grad:
            with model.differentiating(), model.holding(model.leaves()):
                leaf_gradients = torch.autograd.grad(ctx.value, wanted, gradient, retain_graph=True, allow_unused=True)
        gradients = iter(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(wanted, leaf_gradients))
        return None, None, None, None, *(next(gradients) if leaf.requires_grad else None for leaf in ctx.leaves)


def outputs_at(model: Model, inputs: Inputs, values: Blocks) -> Float[Tensor, "n C"]:
    """Return f(inputs) at these weights with its gradient in the inputs; raise ValueError if autograd has none."""

    def compute(x: Inputs) -> Tensor:
        outputs = model(values, x)
        cut = not outputs.requires_grad
        refuse(cut, "an input requires a gradient, but the model cuts it off: pass x.detach().")
        return outputs

    return through_inputs(model, inputs, compute)


class GraphRows(JacobianRows):
    """The rows of J at some inputs by layer, with their graph, for use while gradients are recorded."""

    def __init__(self, engines: Engines, inputs: Inputs, chunk_bytes: int = 2**27) -> None:
        self.model, self._engines, self._inputs, self.chunk_bytes = engines.model, engines, inputs, chunk_bytes

    def features(self) -> list[Features] | None:
        if not self._engines.plan.is_last_layer:
            return None
        _, calls = self._record()
        if len(calls) == 1 and calls[0].layer.is_last:
            return [Features(calls[0].layer, calls[0].layer_input)]
        return None

    def _record(self) -> tuple[Tensor, list[Call]]:
        self._engines.checked_others(self._inputs)
        outputs, calls, misfits = self._engines.record(self._inputs, graph=True)
        if misfits:
            raise RuntimeError(f"{unlike(misfits)} Or compute gradients in the inputs for fewer points at a time.")
        return outputs, calls

    def jacobian_rows(self) -> Iterator[tuple[int, int, list[Group]]]:
        """Yield (0, n·C, the rows of all points)."""
        model, inputs = self.model, self._inputs
        others = self._engines.checked_others(inputs)
        columns, n = self._engines.plan.num_outputs, num_points(inputs)
        units = torch.eye(columns, dtype=model.theta.dtype, device=model.theta.device)
        groups: list[Group] = []
        if self._engines.plan.layers:
            outputs, calls = self._record()
            deltas = sensitivities(model, outputs, calls, units.unsqueeze(1).expand(-1, n, -1), graph=True)
            groups += groups_of_calls(calls, deltas)
        if others:
            each = [*point_rows(model, inputs, others, units.unsqueeze(1).expand(-1, n, -1), graph=True)]
            groups.append(Group(others, (), True, {name: torch.stack([row[name] for row in each]) for name in others}))
        yield 0, n * columns, groups

    def by_layer(self) -> list[Group]:
        """Return the rows of all points, one group per layer; for a last layer, from its inputs alone."""
        if (last := self.features()) is not None:
            return groups_of(last[0], self._engines.plan.num_outputs)
        ((_, _, groups),) = self.jacobian_rows()
        return groups


class InputGraph:
    """Inputs some of which require a gradient; results computed with J have gradients in these inputs and in vectors.

    `inputs` have their graph, and `names` are those that require a gradient.
    """

    def __init__(self, engines: Engines, inputs: Inputs, names: tuple[str, ...] = ()) -> None:
        if names:
            require_input_gradients(engines, inputs)
        self.engines, self.inputs, self.names = engines, inputs, names

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        named = dict(components(self.inputs))
        return [named[name] for name in self.names]

    def at(self, tensors: Sequence[Tensor]) -> InputGraph:
        """Return the graph with other tensors in place of those that require a gradient."""
        other = copy(self)
        other.inputs = replace_tensors(self.inputs, dict(zip(self.names, tensors)))
        return other

    def detached(self) -> InputGraph:
        """Return the graph with its inputs detached."""
        return self.at([tensor.detach() for tensor in self.tensors])

    def cast(self, engines: Engines, device: torch.device | None, dtype: torch.dtype | None) -> InputGraph:
        """Return the converted inputs for a network that was converted."""
        other = copy(self)
        other.engines, other.inputs = engines, move(self.inputs, device, dtype)
        return other

    def outputs(self) -> Float[Tensor, "n C"]:
        """Return f(θ*) at the inputs."""
        model = self.engines.model
        return outputs_at(model, self.inputs, model.values)

    def push(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "nC K"]:
        """Return J V from the rows of J, by C backward passes.

        Differentiating the derivative of a backward pass would need one derivative more than some torch operations
        compute correctly (layer normalisation).
        """

        def compute(x: Inputs, V: Tensor) -> Tensor:
            tangents, rows = self.engines.model.selection.split(V), GraphRows(self.engines, x)
            if (last := rows.features()) is not None:
                return torch.cat([features.times(tangents).flatten(1) for features in last], 1).mT
            ((_, count, groups),) = rows.jacobian_rows()
            pushed = [group.push(tangents).flatten(1) for group in groups]
            return torch.stack([V.new_zeros(V.shape[1], count), *pushed]).sum(0).mT

        return through_inputs(self.engines.model, self.inputs, compute, block)

    def pull(self, block: Float[Tensor, "nC K"]) -> Float[Tensor, "D K"]:
        """Return Jᵀ U."""
        model = self.engines.model

        def compute(x: Inputs, U: Tensor) -> Tensor:
            recorded = record_graph(model, x, model.selection.names)
            return model.selection.join(recorded.pull(U.mT.unflatten(1, recorded.outputs.shape), graph=True))

        return through_inputs(model, self.inputs, compute, block)

    def followed_by(self, other: InputGraph) -> InputGraph:
        """Return the points of both, concatenated."""
        inputs = join([self.inputs, other.inputs])
        names = tuple(name for name, tensor in components(inputs) if tensor.requires_grad)
        return InputGraph(self.engines, inputs, names)

    def by_rows(self, compute: Callable[..., Tensor], chunk_bytes: int, *vectors: Tensor) -> Tensor:
        """Return `compute` of the rows of J and of vectors."""

        def run(x: Inputs, *values: Tensor) -> Tensor:
            return compute(GraphRows(self.engines, x, chunk_bytes), *values)

        return through_inputs(self.engines.model, self.inputs, run, *vectors)


def require_input_gradients(engines: Engines, inputs: Inputs) -> None:
    """Raise ValueError unless the rows of J have derivatives in the inputs that are certain to be right.

    This is tried on two points, once for each set of inputs that require a gradient.
    """
    model, few = engines.model, first_of(inputs)
    input_names = frozenset(name for name, tensor in components(inputs) if tensor.requires_grad)
    if input_names in engines.differentiated:
        return

    def refusal(why: str) -> ValueError:
        return ValueError(
            f"an input requires a gradient, but J has no derivative in the inputs: {why}. Pass x.detach(), or call "
            "this under torch.no_grad()."
        )

    with model.differentiating():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in components(few) if tensor.requires_grad}
        leaf_inputs = replace_tensors(few, leaves)
        outputs = model(model.leaves(), leaf_inputs)
        if names := custom_functions(outputs):
            raise refusal(f"the second derivatives of {names} are not known to be right")
        rows = GraphRows(engines, leaf_inputs)
        try:
            sums = [
                row.sum() for _, _, groups in rows.jacobian_rows() for group in groups for row in group.rows().values()
            ]
            if sums and (total := torch.stack(sums).sum()).requires_grad:
                with model.holding(model.leaves()):
                    torch.autograd.grad(total, [*leaves.values()], allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            raise refusal(f"the model has no second derivatives ({str(error).splitlines()[0]})") from error
    engines.differentiated.add(input_names)
