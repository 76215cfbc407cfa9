"""An operator that is formed in float64 when it is first solved with a diagonal added."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg.core.algorithm import keep
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.results import accept
from curvops.linalg.core.solve_routes import FORMED_COPIES
from curvops.linalg.operators.algebra import UnaryOperator
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.given_matrix import DenseForm
from curvops.linalg.solvers.solve import certify_dense, default_rtol
from curvops.operators.curvatures.subnetwork import principal_block


class FormedCholesky(DenseForm):
    """Cholesky factorisation of a formed operand; tensors inside the operand get no gradients."""

    @property
    def holds(self) -> bool:
        return super().holds and not carries_graph(self.base.representation())

    @cached_property
    def dense(self) -> Tensor:
        """P as a dense matrix (n, n)."""
        dense = self.base.formed()
        return dense.diagonal_scatter(dense.diagonal() + self.shift.to(dense.dtype))

    @cached_property
    def chol(self) -> Tensor:
        """The Cholesky factor, certified by solving for a right-hand side with one of the largest residuals.

        This right-hand side is close to the lowest eigenvector of P. As in every other solve, a residual above the
        default tolerance warns or raises.
        """
        L = super().chol
        with torch.no_grad():
            b = L.new_ones(len(L), 1)
            for _ in range(4):  # inverse iterations towards the lowest eigenvector
                b = torch.cholesky_solve(b / b.norm(), L)
            rtol = default_rtol(self.base.dtype)
            accept(certify_dense(self.dense, torch.cholesky_solve(b, L), b, torch.zeros(()), rtol), rtol)
        return L


class Formed(UnaryOperator):
    """An operator A with few enough rows to be formed for repeated solves with a diagonal added.

    Products are those of A. The first solve, draw or log-determinant, with any diagonal, costs as much as a
    `Subnetwork` of all weights; each further diagonal costs a factorisation.
    """

    _damped_form: ClassVar[type[ClosedForm] | None] = FormedCholesky

    def __init__(self, base: LinearOperator, cache: Cache | None = None) -> None:
        super().__init__(base, cache=Cache() if cache is None else cache)

    def _product(self, block: Tensor) -> Tensor:
        product: Tensor = self.base._matmul(block)
        return product

    def formed(self) -> Tensor:
        """Return A (n, n) in float64, formed once and kept while its tensors are unchanged."""
        cache: Cache = self._kwargs["cache"]
        return cache.get_or_compute("formed", self.representation(), self._formed_now)

    def _formed_now(self) -> Tensor:
        dense = principal_block(self.base, torch.arange(self.shape[-1], device=self.device)).double()
        dense = (dense + dense.mT) / 2
        keep(self, dense, FORMED_COPIES * 8 * len(dense) ** 2)
        return dense
