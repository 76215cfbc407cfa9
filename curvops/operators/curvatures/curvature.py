"""The base of the GGN and the Fishers: Jᵀ H J with an H that acts on the outputs of each point."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.cache import carries_graph
from curvops.network import OutputFisher, Passes, Plan, likelihoods
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import NetworkOperator
from curvops.operators.linearized.reading import OfLinearization


class Curvature(OfLinearization, NetworkOperator):
    """A curvature Σ_n J_nᵀ H_n J_n (D, D), symmetric positive semi-definite; a subclass defines H in `output`.

    Where H = L Lᵀ has few columns it is the Gram matrix of the rows Lᵀ J, which `rows` walks over.
    Products carry gradients through the vectors and the likelihood's hyperparameters.
    """

    STORED = "lin"
    CARRIED = True

    @property
    def lin(self) -> Linearization:
        """The linearisation."""
        return self._kwargs["lin"]

    @property
    def psd(self) -> bool:
        return True

    @property
    def likelihood(self) -> likelihoods.Likelihood:
        """The likelihood, at this operator's hyperparameters."""
        return self.lin.likelihood.with_hyperparameters(self._args[1:])

    @property
    def output(self) -> OutputFisher:
        """H, the curvature of each point's outputs."""
        raise TypeError(f"{type(self).__name__} does not say what H is.")

    def _size(self) -> torch.Size:
        return torch.Size((self.theta.shape[-1], self.theta.shape[-1]))

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
