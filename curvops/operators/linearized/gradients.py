"""The gradient of each training point's negative log-likelihood, as the rows of an operator."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.spaces import Spaces
from curvops.network import Empirical, Passes
from curvops.operators.linearized.network_operator import NetworkOperator


class Gradients(NetworkOperator):
    """Per-example gradients (N, D): row n is g_n = J_nᵀ r_n, the gradient of −log p(y_n | f(x_n, θ)) at θ*.

    Use `lin.gradients()` to make it; the constructor takes the stored form. Rows are in the order of the data and add
    up to `lin.gradient()`. The sign is that of a loss: a step along −g_n makes point n more likely. Class and sample
    weights multiply a row once. A sequence is one row, the sum over its tokens; with `per_token=True` the operator is
    (N·T, D), and token t of sequence n is row n·T + t. Products carry gradients through the vectors and the
    likelihood's hyperparameters.

    Influence functions (Koh & Liang 2017): how much would the loss at a test point change if point n were left out?

        P = co.GGN(lin).add_diagonal(prior_precision)
        # The gradient of the test loss, (D,), and its increase to first order, (N,).
        g = co.linearize(model, (x_test, y_test), likelihood).gradient()
        influence = lin.gradients() @ P.solve(g)

    `G @ P.inverse() @ G.mT`, with G = lin.gradients(), is the influence of all points on one another. `G.mT @ G` is the
    empirical Fisher (sample weights enter it squared: for data with weights use `co.EmpiricalFisher`).

    Cost to build: nothing; the first product computes the rows layer by layer, for 2/3 of a gradient whatever C is
    (per token (1 + T) / 3). A product is one matrix product per layer, 0.25–0.5 gradients per vector, and a transposed
    product costs the same. Memory: what `print(lin.gradients().plan)` lists, within the rest of the budget; only
    `to_dense` forms the N × D numbers. Choose it for influence and gradient noise; for the curvature itself use
    `co.EmpiricalFisher`.

    Examples:
        >>> rows = lin.gradients()
        >>> rows, torch.allclose(rows.mT @ torch.ones(8), lin.gradient(), atol=1e-5)
        (Gradients(8 × 17, of Categorical on 8 points, float32, cpu), True)
    """

    OPTIONS = ("per_token",)

    @property
    def plan(self) -> Any:
        """The plan of engines for the products, as `lin.plan`."""
        return (self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"]) or self.lin).plan

    @property
    def spaces(self) -> Spaces:
        return None, self.space

    @property
    def _positions(self) -> int:
        positions: int = self.lin.positions_apart(self._kwargs["per_token"])
        return positions

    def _size(self) -> torch.Size:
        return torch.Size((self.lin.num_data * self._positions, self.theta.shape[-1]))

    def _walk(self) -> tuple[Passes, Empirical, Empirical | None]:
        """Return the walk over the rows, the root that it multiplies by, and the root that is applied separately."""
        rows = self.lin.gradient_rows(self.likelihood, self._kwargs["per_token"])
        output = Empirical(self.likelihood, self._positions)
        return rows or self.lin.passes, output, output if rows is None else None

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "NT K"]:
        walk, output, root = self._walk()
        return walk.rows(lambda batch, G: output.weigh(G.push(block), batch), block.shape[1], root)

    def _transposed_product(self, block: Float[Tensor, "NT K"]) -> Float[Tensor, "D K"]:
        walk, output, root = self._walk()
        return walk.pull(block, self._positions, lambda batch, G, z: G.pull(output.weigh(z, batch)), root)
