"""The common base of the GGN and the Fishers, Jᵀ H J with H on the outputs of each point, and its square root."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg.core.column_noise import ColumnNoise
from curvops.linalg.core.sharded import Sharded
from curvops.linalg.core.solve_routes import FEWER_OUTPUTS
from curvops.linalg.core.spaces import Spaces
from curvops.network import Batch, BatchMap, OutputFisher, Passes, Plan, Sampled
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.user_operator import UserOperator


class Curvature(UserOperator, NetworkOperator):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D), symmetric positive semi-definite; a subclass defines H in `output`.

    If H = L Lᵀ has few columns, products use the rows of Lᵀ J, which `rows` walks over. Products carry gradients
    through the vectors and the likelihood's hyperparameters.
    """

    _shown = ()
    psd = True
    STORED = "lin"
    CARRIED = True

    @property
    def output(self) -> OutputFisher:
        """H, the curvature of each point's outputs."""
        raise TypeError(f"{type(self).__name__} does not define H: override `output`.")

    @property
    def rows(self) -> Passes | None:
        """Return the walk over Lᵀ J that products may use, or None if they use J itself."""
        return None

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan of engines for the products, as `lin.plan`; for linear systems see `(G + prior).plan()`."""
        return (self.rows or self.lin).plan

    @property
    def narrow_root(self) -> CurvatureRoot | None:
        lin = self.lin
        columns = lin.num_data * self.output.num_columns(lin.num_outputs)
        kind = type(self)
        own = kind._product is Curvature._product and kind._matmul is Curvature._matmul
        if FEWER_OUTPUTS * columns > len(self.theta) or not own:
            return None
        return CurvatureRoot.of(self)

    def _product(self, block: Float[Tensor, "D K"], own: bool = False) -> Float[Tensor, "D K"]:
        """Return the product as a sum over all points, or over this rank's own."""
        rows, output = self.rows, self.output
        walk = rows or self.lin.passes
        V = walk.replicated(block)

        def term(batch: Batch, J: BatchMap) -> Tensor:
            u = J.push(V)  # before the outputs, which a push gives, too
            return J.pull(u if rows is not None else output.product(J.outputs, u, batch))

        return walk.total(term, V.shape[1], own=own)

    def _times_sharded(self, rhs: Sharded) -> Sharded:
        if self.passes.shard is None or type(self)._product is not Curvature._product:
            return super()._times_sharded(rhs)
        return rhs.multiplied(partial(self._product, own=True), partial=True)

    def _diagonal(self) -> Float[Tensor, " D"]:
        """Compute the diagonal from the rows of Lᵀ J, or by products if a hyperparameter's gradient is recorded."""
        if carries_graph(self._args[1:]):
            return super()._diagonal()
        return self.lin.curvature_diagonal(self.output)

    @property
    def diagonal_matvecs(self) -> int:
        return self.shape[-1] if carries_graph(self._args[1:]) else 0

    def _draw(self, k: int, generator: torch.Generator | None) -> Float[Tensor, "D k"]:
        """Draw k exact samples of N(0, A) as Jᵀ L z with H = L Lᵀ, at the cost of one pull of J per draw.

        Equal seeds give equal draws, however the data are batched.
        """
        per_point = self.output.num_columns(self.lin.num_outputs)
        noise = ColumnNoise.of(generator, k, self.device)
        if (rows := self.rows) is not None:
            return rows.draw(noise.columns, per_point, noise.key)
        return self.lin.passes.draw(noise.columns, per_point, noise.key, self.output)


class CurvatureRoot(NetworkOperator):
    """The square root S = Jᵀ L (D, N·R) of a GGN or Fisher S Sᵀ, with R columns per point in the order of the points.

    S Z and Sᵀ V each cost half a product of the curvature.
    """

    _shown = ()

    # The stored form has θ, `lin`, the `walk`, its number of `points`, the `output`, and whether the walk is `reduced`
    # to Lᵀ J.

    @classmethod
    def of(cls, curvature: Curvature) -> CurvatureRoot:
        """Return the root of a curvature, over all of its data."""
        lin, rows = curvature.lin, curvature.rows
        walk, reduced = rows or lin.passes, rows is not None
        return cls(lin.theta, lin=lin, walk=walk, output=curvature.output, points=lin.num_data, reduced=reduced)

    @property
    def output(self) -> OutputFisher:
        """H = L Lᵀ of each point."""
        return self._kwargs["output"]

    @property
    def columns_a_point(self) -> int:
        """R, the number of columns of L per point."""
        return self.output.num_columns(self.lin.num_outputs)

    @property
    def spaces(self) -> Spaces:
        return self.lin.tangent_space, None

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]), self._kwargs["points"] * self.columns_a_point))

    def _product(self, block: Float[Tensor, "NR K"]) -> Float[Tensor, "D K"]:
        walk: Passes = self._kwargs["walk"]
        return walk.pull(block, self.columns_a_point, root=self._root)

    def _transposed_product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NR K"]:
        walk: Passes = self._kwargs["walk"]
        return walk.rows(lambda _, S: S.push(block), block.shape[1], self._root)

    @property
    def _root(self) -> OutputFisher | None:
        return None if self._kwargs["reduced"] else self.output

    def minibatches(
        self, size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Int[Tensor, " n"], CurvatureRoot]]:
        """Yield (positions of some points, their columns of S) in random order until every point has come once.

        Points are shuffled within each batch, and the batches come in their own order. Data given as tensors are one
        batch, shuffled as a whole.
        """
        if isinstance(self.output, Sampled):
            raise ValueError("minibatches need the exact root: use co.GGN(lin) or method='cg'.")
        if self.lin.passes.shard is not None:
            raise ValueError("minibatches are not available for data of a process group: use method='cg' or 'dual'.")
        for chosen, walk in self.lin.passes.minibatches(size, generator):
            kept = {"walk": walk, "points": len(chosen), "reduced": False}
            yield chosen, CurvatureRoot(self.theta, **self._kwargs | kept)


def root_of(operator: Any) -> CurvatureRoot | None:
    """Return the root of a GGN or Fisher, computed from its data; None for any other operator."""
    return CurvatureRoot.of(operator) if isinstance(operator, Curvature) else None
