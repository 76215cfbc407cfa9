"""The base of the GGN and the Fishers, Jᵀ H J with an H that acts on the outputs of each point, and its square root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.linalg.core.cache import carries_graph
from curvops.linalg.core.spaces import Spaces
from curvops.network import OutputFisher, Passes, Plan, Sampled
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.user_operator import UserOperator


class Curvature(UserOperator, NetworkOperator):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D), symmetric positive semi-definite; a subclass defines H in `output`.

    Where H = L Lᵀ has few columns it is the Gram matrix of the rows Lᵀ J, which `rows` walks over.
    Products carry gradients through the vectors and the likelihood's hyperparameters.
    """

    STORED = "lin"
    CARRIED = True

    @property
    def psd(self) -> bool:
        return True

    @property
    def output(self) -> OutputFisher:
        """H, the curvature of each point's outputs."""
        raise TypeError(f"{type(self).__name__} does not say what H is.")

    @property
    def rows(self) -> Passes | None:
        """The walk over Lᵀ J that this product may use, None where it takes J itself."""
        return None

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan of engines that serve the products, as `lin.plan`; for systems ask `(G + prior).plan()`."""
        return (self.rows or self.lin).plan

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        if (rows := self.rows) is not None:
            return rows.total(lambda _, S: S.pull(S.push(block)), block.shape[1])
        return self.lin.passes.curvature_product(block, self.output)

    def _diagonal(self) -> Float[Tensor, " D"]:
        """From the rows of Lᵀ J; by products, which have gradients, where one for a hyperparameter is recorded."""
        if carries_graph(self._args[1:]):
            return super()._diagonal()
        return self.lin.curvature_diagonal(self.output)

    def _draw(self, k: int, generator: torch.Generator | None) -> Float[Tensor, "D k"]:
        """k exact draws of N(0, A): Jᵀ L z with H = L Lᵀ, at one pull of J a draw.

        Equal seeds draw alike, however the data are batched.
        """
        columns = self.output.num_columns(self.lin.num_outputs)
        if (rows := self.rows) is not None:
            return rows.draw(k, columns, generator)
        return self.lin.passes.draw(k, columns, generator, self.output)


class CurvatureRoot(NetworkOperator):
    """S = Jᵀ L (D, N·R) of a GGN or Fisher S Sᵀ, R columns a point, those of a point together.

    S Z and Sᵀ V cost half a product of the curvature each.
    """

    # Stored are θ, `lin`, the `walk` over so many `points`, the `output`, and whether the walk is `reduced` to Lᵀ J.

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
        """R."""
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
        """(positions of some points among all, their columns of S), all points once, in a random order.

        Points are shuffled within each batch of the data, which are read in their own order: one of all points, as
        tensors are, is shuffled as a whole.
        """
        if isinstance(self.output, Sampled):
            raise ValueError("minibatches of a Monte-Carlo GGN are not known: take co.GGN(lin), or method='cg'.")
        for chosen, walk in self.lin.passes.minibatches(size, generator):
            kept = {"walk": walk, "points": len(chosen), "reduced": False}
            yield chosen, CurvatureRoot(self.theta, **self._kwargs | kept)


def root_of(operator: Any) -> CurvatureRoot | None:
    """Return the root that the data give; None of what is no GGN and no Fisher."""
    return CurvatureRoot.of(operator) if isinstance(operator, Curvature) else None
