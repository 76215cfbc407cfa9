"""The GGN and the empirical Fisher of a network whose parameters are sharded over ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from linear_operator import LinearOperator
from torch import Tensor

from curvops.checks import check_flag
from curvops.linalg import Diagonal
from curvops.network.likelihoods.output_fisher import Empirical, Exact, OutputFisher, Sampled
from curvops.operators.curvatures.ggn import GGN, Curvature, DiagonalGGN, EmpiricalFisher
from curvops.operators.linearized.user_operator import builds_sharded
from curvops.ranks.sharded_linearization import ShardedLinearization
from curvops.ranks.sharded_vectors import Layouts, Sharded


class ShardedCurvature(Curvature):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D) of a network sharded by `fully_shard`, on DTensors; see `co.GGN`.

    For each layer, a product gathers that layer's part of the vectors, and sums its part of the result over the ranks.
    Cost: that of a product, and 2·D numbers sent per vector. `to_dense` is for small networks only.
    """

    _shown: ClassVar[tuple[str, ...]] = ("lin",)

    # The stored form has this rank's slices of θ, `lin`, the `output` H, and the walk over `rows` of Lᵀ J, or None.

    @classmethod
    def with_output(cls, lin: ShardedLinearization, output: OutputFisher, by_rows: bool = True) -> ShardedCurvature:
        """Return the curvature with the given H, whose products are by rows of Lᵀ J or by J."""
        return cls(lin.model.theta, lin=lin, output=output, rows=lin.passes.with_root(output) if by_rows else None)

    @property
    def output(self) -> OutputFisher:
        return self._kwargs["output"]

    @property
    def rows(self) -> Any:
        return self._kwargs["rows"]

    @property
    def layouts(self) -> Layouts:
        return self.lin.layout, self.lin.layout

    def _size(self) -> torch.Size:
        return torch.Size((self.lin.num_parameters, self.lin.num_parameters))

    @torch.no_grad()
    def _matmul(self, rhs: Any) -> Any:
        if not isinstance(rhs, Sharded):
            self.lin.rows_of(rhs)  # raises
        if rhs.ndim == 1:
            return self._matmul(rhs.unsqueeze(1)).squeeze(1)
        return rhs.like(self._product(rhs.local))

    def _t_matmul(self, rhs: Any) -> Any:
        return self._matmul(rhs)

    def _diagonal(self) -> Tensor:
        return Sharded(self.lin.passes.with_root(self.output).squared_rows(), self.lin.layout).whole()

    @torch.no_grad()
    def _draw(self, k: int, generator: torch.Generator | None) -> Any:
        return Sharded(super()._draw(k, generator), self.lin.layout)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        if dtype in (None, self.dtype) and device in (None, self.device):
            return self
        raise ValueError("a curvature of a sharded model cannot be converted: convert the model before fully_shard.")


@builds_sharded(GGN)
def _ggn(
    lin: ShardedLinearization, mc_samples: int | None = None, generator: torch.Generator | None = None
) -> LinearOperator:
    if mc_samples is None:
        return ShardedCurvature.with_output(lin, Exact(lin.likelihood), by_rows=False)
    return ShardedCurvature.with_output(lin, Sampled(lin.likelihood, lin.draw_residuals(mc_samples, generator)))


@builds_sharded(EmpiricalFisher)
def _empirical_fisher(lin: ShardedLinearization, per_token: bool = False) -> LinearOperator:
    check_flag("per_token", per_token)
    lin.require_labels("the empirical Fisher")
    return ShardedCurvature.with_output(lin, Empirical(lin.likelihood, lin.positions_apart(per_token)))


@builds_sharded(DiagonalGGN)
def _diagonal(
    lin: ShardedLinearization, fisher: str = "exact", mc_samples: int = 1, generator: torch.Generator | None = None
) -> LinearOperator:
    """Return the diagonal of the curvature named by `fisher`, an operator on sharded vectors, whole on each rank."""
    curvature = ShardedCurvature.with_output(lin, lin.output_fisher(fisher, mc_samples, generator))
    entries = Diagonal(curvature.diagonal(), space=curvature.spaces[0], sources=curvature.sources)
    return entries.sharded(lin.model.shards.mesh)
