"""The Jacobian of the network's outputs with respect to its parameters, at given inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.linalg.core.memory import Memories
from curvops.linalg.core.spaces import Spaces
from curvops.network.data.inputs import Inputs, move, replaced
from curvops.network.model.parameters import Blocks
from curvops.network.model.tangent_space import TangentSpace
from curvops.network.walks.input_graphs import outputs_at, pull_at, push_at
from curvops.network.walks.layer_roots import Group, JacobianRows
from curvops.network.walks.passes import Passes
from curvops.operators.layers.moments import as_matrix
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.progress import Progress


class Jacobian(NetworkOperator):
    """J (n·C, D): row n·C + c holds ∂f_c(x_n)/∂θ. Made by `lin.jacobian(x)`.

    J @ V and J.mT @ U cost about half a GGN product each (`lin.plan`); nothing of its size is ever formed. The tensors
    `differentiated` are those of the inputs, by their names, in which products and outputs have a gradient.
    """

    def __init__(
        self,
        theta: Tensor,
        *differentiated: Tensor,
        passes: Passes | None = None,
        rows: int = 0,
        space: Any = None,
        inputs: Inputs | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__(theta, *differentiated, passes=passes, rows=rows, space=space, inputs=inputs, names=names)

    @property
    def passes(self) -> Passes:
        """The walk over the inputs."""
        return self._kwargs["passes"]

    @property
    def spaces(self) -> Spaces:
        return None, self.space

    @property
    def is_recorded(self) -> bool:
        """Whether what is computed from it now has a gradient in its inputs."""
        return recorded(self._args[1:])

    @property
    def inputs(self) -> Inputs:
        """The inputs of the Jacobian with their graph, where `is_recorded`."""
        return replaced(self._kwargs["inputs"], dict(zip(self._kwargs["names"], self._args[1:])))

    def _tangent_space(self) -> TangentSpace:
        return self.passes.model.tangent_space

    @property
    def memories(self) -> Memories:
        return frozenset((self.passes.memory,))

    @property
    def progress(self) -> Progress:
        return self.passes.progress

    def by_points(self, count: int) -> Iterator[Jacobian]:
        """The Jacobians of so many points at a time, and of fewer at the end of a batch."""
        for passes, points in self.passes.by_points(count):
            yield Jacobian(self.theta, passes=passes, rows=points * self._num_outputs)

    @property
    def _num_outputs(self) -> int:
        return self.passes.engines.plan.num_outputs

    def outputs(self) -> Float[Tensor, "n C"]:
        """f(θ*) at its inputs. One forward pass, which of a last layer is the only one that J ever takes."""
        if self.is_recorded:
            return outputs_at(self.passes.model, self.inputs, self.passes.model.values)
        if (found := self.passes.recorded_outputs()) is not None:
            return found
        return self.passes.rows(lambda _, J: J.outputs.unsqueeze(0), 0).reshape(-1, self._num_outputs)

    @torch.no_grad()
    def formed(self) -> Float[Tensor, "D NC"]:
        """Jᵀ itself, for few points: its columns from each layer's rows, at C backward passes.

        A product with unit vectors takes C backward passes for each point. Memory: D·N·C numbers.
        """
        rows = list(selected_rows(self.passes)) or [self.theta.new_zeros(0, len(self.theta))]
        return self.passes.line_up(rows).mT

    def _size(self) -> torch.Size:
        return torch.Size((self._kwargs["rows"], self.theta.shape[-1]))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NC K"]:
        if self.is_recorded:
            return push_at(self.passes.engines, self.inputs, block)
        return self.passes.rows(lambda _, J: J.push(block), block.shape[1])

    def _transposed_product(self, block: Float[Tensor, "NC K"]) -> Float[Tensor, "D K"]:
        if self.is_recorded:
            return pull_at(self.passes.engines, self.inputs, block)
        if not len(block):
            return block.new_zeros(block.shape[1], len(self.theta)).mT
        return self.passes.pull(block, self._num_outputs)

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        passes, inputs = self.passes.cast(dtype, device), self._kwargs["inputs"]
        changed = {"passes": passes, "inputs": None if inputs is None else move(inputs, device, dtype)}
        return Jacobian(passes.model.theta, *hyperparameters, **self._kwargs | changed)


def selected_rows(walk: JacobianRows) -> Iterator[Float[Tensor, "r D"]]:
    """The rows of J, some points at a time; of a subnetwork its S columns alone."""
    selection, theta = walk.model.selection, walk.model.theta
    positions = selection.positions()
    for _, count, groups in walk.jacobian_rows():
        found: dict[str, list[Tensor]] = {name: [] for name in selection.names}
        columns: dict[str, Tensor] = {}
        for group in groups:
            for name, places, rows in _columns(group, positions, selection.index is not None):
                found.setdefault(name, []).append(rows.flatten(0, 1))
                columns[name] = places
        present = {name: torch.cat(parts) for name, parts in found.items() if parts}
        if selection.index is None:
            sizes = dict(zip(selection.names, selection.shapes))
            zeros = (theta.new_zeros(()).expand(count, size.numel()) for size in sizes.values())
            yield torch.cat([present.get(name, zero) for name, zero in zip(sizes, zeros)], 1)
        else:
            total = theta.new_zeros(count, len(theta))
            index = torch.cat([columns[name] for name in present]) if present else theta.new_zeros(0, dtype=torch.long)
            yield total.index_copy(1, index.to(theta.device), torch.cat([*present.values()], 1)) if present else total


def _columns(group: Group, positions: Blocks, some: bool) -> Iterator[tuple[str, Tensor, Float[Tensor, "n r s"]]]:
    """The group's columns by tensor: where they stand in the vector, and the rows there; `some` are left out.

    Few entries of a layer's matrix are products of its two sides, of which no others are formed.
    """
    matrices = group.matrices() if some else None
    if matrices is not None and all(right.is_floating_point() for _, right in matrices):
        assert group.layer is not None
        places = as_matrix(group.layer, positions)
        g, i, j = (places >= 0).nonzero().unbind(1)
        if len(g) * sum(right.shape[2] for _, right in matrices) <= places.numel():
            device = matrices[0][0].device
            index, first, second = (part.to(device) for part in (g, i, j))
            pairs = ((left[:, :, index, :, first], right[:, index, :, second]) for left, right in matrices)
            rows = torch.stack([(a * b.unsqueeze(2)).sum(-1) for a, b in pairs]).sum(0).movedim(0, -1)
            yield group.names[0], places[g, i, j], rows
            return
    for name, rows in group.rows().items():
        places, flat = positions[name].flatten(), rows.reshape(*rows.shape[:2], -1)
        if some:
            inside = (places >= 0).nonzero().squeeze(1)
            places, flat = places[inside], flat[..., inside.to(flat.device)]
        yield name, places, flat
