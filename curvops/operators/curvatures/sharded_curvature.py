"""The GGN and the empirical Fisher of a network whose parameters are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops.linalg import Diagonal, Operator
from curvops.linalg.core.column_noise import ColumnNoise
from curvops.linalg.core.memory import Memories
from curvops.linalg.core.sharded import Layouts, Sharded
from curvops.linalg.core.sources import Sources
from curvops.linalg.core.spaces import Spaces
from curvops.network import OutputFisher
from curvops.operators.linearized.sharded_linearization import ShardedLinearization


class ShardedCurvature(Operator):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D) of a network sharded by `fully_shard`, on DTensors; see `co.GGN`.

    For each layer, a product gathers that layer's part of the vectors, and sums its part of the result over the ranks.
    Cost: that of a product, and 2·D numbers sent per vector. `to_dense` is for small networks only.
    """

    _shown = ("lin",)
    psd = True

    # The stored form has this rank's slices of θ, `lin`, the `output` H, and whether products are `by_rows` of Lᵀ J.

    @classmethod
    def of(cls, lin: ShardedLinearization, output: OutputFisher, by_rows: bool) -> ShardedCurvature:
        """Return the curvature with the given H."""
        return cls(lin.local_theta, lin=lin, output=output, by_rows=by_rows)

    @property
    def lin(self) -> ShardedLinearization:
        """The linearisation that the operator belongs to."""
        return self._kwargs["lin"]

    @property
    def output(self) -> OutputFisher:
        """H, the curvature of each point's outputs."""
        return self._kwargs["output"]

    def _made_of(self) -> str:
        return f"of {self.lin.likelihood.kind} on {self.lin.num_data} points"

    @property
    def layouts(self) -> Layouts:
        return self.lin.layout, self.lin.layout

    @property
    def memories(self) -> Memories:
        return frozenset((self.lin.memory,))

    @property
    def spaces(self) -> Spaces:
        space = self._kwargs.get("space") or self.lin.model.tangent_space
        return space, space

    @property
    def sources(self) -> Sources | None:
        return Sources({self.lin.source: 1.0})

    def _size(self) -> torch.Size:
        return torch.Size((self.lin.num_parameters, self.lin.num_parameters))

    def _matmul(self, rhs: Any) -> Any:
        if not isinstance(rhs, Sharded):
            self.lin.rows_of(rhs)  # raises
        block = rhs.unsqueeze(1) if rhs.ndim == 1 else rhs
        local = self.lin.passes.product(block.local, self.output, self._kwargs["by_rows"])
        found = block.like(local)
        return found.squeeze(1) if rhs.ndim == 1 else found

    def _t_matmul(self, rhs: Any) -> Any:
        return self._matmul(rhs)

    def _diagonal(self) -> Tensor:
        return Sharded(self.lin.passes.diagonal(self.output), self.lin.layout).whole()

    def _draw(self, k: int, generator: torch.Generator | None) -> Any:
        noise = ColumnNoise.of(generator, k, self.device)
        found = self.lin.passes.draw(noise.columns, self.output, noise.key)
        return Sharded(found, self.lin.layout)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if dtype in (None, self.dtype) and device in (None, self.device):
            return self
        raise ValueError("a curvature of a sharded model cannot be converted: convert the model before fully_shard.")


def diagonal_of(
    lin: ShardedLinearization, fisher: str = "exact", mc_samples: int = 1, generator: torch.Generator | None = None
) -> Operator:
    """Return the diagonal of the curvature named by `fisher`, an operator on sharded vectors, whole on each rank."""
    curvature = ShardedCurvature.of(lin, lin.output_fisher(fisher, mc_samples, generator), by_rows=True)
    entries = Diagonal(curvature.diagonal(), space=curvature.spaces[0], sources=curvature.sources)
    return entries.sharded(lin.model.shards.mesh)
