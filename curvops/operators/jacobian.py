"""The Jacobian of the network's outputs with respect to its parameters, at given inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.memory import Memories
from curvops.linalg.core.spaces import Spaces
from curvops.network.model.tangent_space import TangentSpace
from curvops.network.walks.passes import Passes, accumulate
from curvops.operators.network_operator import NetworkOperator
from curvops.progress import Progress


class Jacobian(NetworkOperator):
    """J (n·C, D): row n·C + c holds ∂f_c(x_n)/∂θ. Made by `lin.jacobian(x)`.

    J @ V and J.mT @ U cost about half a GGN product each (`lin.plan`); nothing of its size is ever formed.
    """

    def __init__(self, theta: Tensor, passes: Passes | None = None, rows: int = 0, space: Any = None) -> None:
        super().__init__(theta, passes=passes, rows=rows, space=space)

    @property
    def passes(self) -> Passes:
        """The walk over the inputs."""
        return self._kwargs["passes"]

    @property
    def spaces(self) -> Spaces:
        return None, self.space

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
            yield Jacobian(self.theta, passes=passes, rows=points * passes.engines.plan.num_outputs)

    @torch.no_grad()
    def formed(self) -> Float[Tensor, "D NC"]:
        """Jᵀ itself, for few points: its columns from each layer's rows, at C backward passes.

        A product with unit vectors takes C backward passes for each point. Memory: D·N·C numbers.
        """
        selection = self.passes.model.selection
        whole = replace(selection, index=None)
        total = self.theta.new_zeros(self.shape[0], whole.size)
        views = whole.split(total.mT)
        for first, groups in self.passes.jacobian_rows():
            for group in groups:
                start = first + group.first_row
                for name, rows in group.rows().items():
                    views[name][start : start + group.num_rows] = rows.flatten(0, 1)
        return (total if selection.index is None else total[:, selection.index]).mT

    def _size(self) -> torch.Size:
        return torch.Size((self._kwargs["rows"], self.theta.shape[-1]))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NC K"]:
        parts = [J.push(block).flatten(1) for _, J in self.passes.each(block.shape[1])]
        return torch.cat(parts, 1).mT

    def _transposed_product(self, block: Float[Tensor, "NC K"]) -> Float[Tensor, "D K"]:
        total: Tensor | None = None
        start = 0
        for _, J in self.passes.each(block.shape[1]):
            n, num_outputs = J.outputs.shape
            rows = block[start : start + n * num_outputs]
            total = accumulate(total, J.pull(rows.mT.unflatten(1, (n, num_outputs))))
            start += n * num_outputs
        assert total is not None
        return total

    def _converted(
        self, hyperparameters: list[Tensor], dtype: torch.dtype | None, device: torch.device | None
    ) -> LinearOperator:
        passes = self.passes.cast(dtype, device)
        return Jacobian(passes.model.theta, passes=passes, rows=self._kwargs["rows"])
