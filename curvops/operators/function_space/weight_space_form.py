"""J A⁻¹ Jᵀ plus a diagonal by a D × D matrix, if there are fewer weights than rows and J itself is not kept.

With Φ = J A^-½ and the noise N = diag(d): (Φ Φᵀ + N)⁻¹ = N⁻¹ − N⁻¹Φ B⁻¹ΦᵀN⁻¹ and det(Φ Φᵀ + N) = det N det B for the
symmetric B = I + ΦᵀN⁻¹Φ (Woodbury's and Sylvester's identities). The sum JᵀN⁻¹J is streamed over the rows of J, and
its derivative is, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.linalg.core.cache import require_first_derivative
from curvops.linalg.core.memory import keep
from curvops.linalg.core.solve_routes import FORMED_COPIES, MOST_OUTPUTS
from curvops.linalg.functions.root_gradients import inverse_root_product
from curvops.linalg.operators.closed_form import ClosedForm, not_definite
from curvops.linalg.operators.draws import draw
from curvops.network import Passes

GRAM, LAST, WEIGHTED = "JᵀJ", "1 / noise", "JᵀN⁻¹J"
"""The names under which quantities of the inputs are stored."""


class WeightSpaceForm(ClosedForm):
    """The closed form of a tangent kernel of one set of inputs plus a positive diagonal, with fewer weights than rows.

    Solves are refined once, at the cost of two products with the kernel, because Woodbury's difference loses digits.
    """

    @property
    def holds(self) -> bool:
        base = self.base
        (left, _, _), (rows, weights) = base._args, (base.shape[-1], base._args[0].shape[-1])
        small = weights < rows and weights <= MOST_OUTPUTS and self.shift.ndim < 2
        if not small or not base.psd or left.is_recorded or not bool((self.shift > 0).all()):
            return False
        return bool(GRAM in self._store or FORMED_COPIES * 8 * weights**2 <= left.passes.memory.room())

    @cached_property
    def _store(self) -> dict[str, Tensor]:
        """The store that keeps JᵀJ for other priors and noises at the same inputs."""
        found: dict[str, Tensor] | None = self.base._kwargs.get("store")
        return {} if found is None else found

    @property
    def _walk(self) -> Passes:
        walk: Passes = self.base._args[0].passes
        return walk

    @cached_property
    def _roots(self) -> Float[Tensor, " D"]:
        """A^-½, in float64."""
        prior: Tensor = self.base.prior
        return prior.double().rsqrt().expand(self.base._args[0].shape[-1])

    @cached_property
    def information(self) -> Float[Tensor, "D D"]:
        """JᵀN⁻¹J, in float64, with its gradient in the noise."""
        weights = self.shift.double().reciprocal()
        if weights.ndim == 0:
            return self._unit_information * weights
        return _Streamed.apply(weights, self._walk, self._information_for)  # type: ignore[no-untyped-call]

    @property
    def _unit_information(self) -> Float[Tensor, "D D"]:
        """JᵀJ, which is stored."""
        if GRAM not in self._store:
            self._store[GRAM] = _sum(self._roots.new_ones(self.base.shape[-1]), self._walk)
            keep(self.base, self._store[GRAM], self._store[GRAM].nbytes)
        return self._store[GRAM]

    def _information_for(self, weights: Float[Tensor, " NC"], walk: Passes) -> Float[Tensor, "D D"]:
        """Return JᵀN⁻¹J for a vector of noises: equal noises use JᵀJ, and the last result is stored."""
        if bool((weights == weights[0]).all()):
            return self._unit_information * weights[0]
        if not torch.equal(self._store.get(LAST, weights[:0]), weights):
            self._store[LAST], self._store[WEIGHTED] = weights.clone(), _sum(weights, walk)
        return self._store[WEIGHTED].clone()

    @cached_property
    def chol(self) -> Float[Tensor, "D D"]:
        """The Cholesky factor of B."""
        inner = self._roots.unsqueeze(1) * self.information * self._roots
        L, info = torch.linalg.cholesky_ex(inner.diagonal_scatter(inner.diagonal() + 1))
        if bool(info != 0):
            raise not_definite(self.base, float(self.shift.detach().min()))
        return L

    @property
    def _noise(self) -> Tensor:
        """The diagonal as a column, (n, 1) or 0-d."""
        return self.shift if self.shift.ndim == 0 else self.shift.unsqueeze(-1)

    def solve(self, block: Tensor) -> Tensor:
        found = self._solve_once(block)
        return found + self._solve_once(block - self.base._matmul(found) - self._noise * found)

    def _solve_once(self, block: Tensor) -> Tensor:
        J, roots = self.base._args[0], self._roots.unsqueeze(1)
        pulled = roots * J._t_matmul(block / self._noise).double()
        inner = roots * torch.cholesky_solve(pulled, self.chol)
        return (block - J._matmul(inner.to(block.dtype))) / self._noise

    def logdet(self) -> Tensor:
        noise = self.shift.double().log().expand(self.base.shape[-1]).sum()
        return (noise + 2 * self.chol.diagonal().log().sum()).to(self.base.dtype)

    def inverse_diagonal(self) -> Tensor:
        eye = torch.eye(len(self.chol), dtype=self.chol.dtype, device=self.chol.device)
        half = torch.linalg.solve_triangular(self.chol, eye, upper=False) * self._roots
        explained = _Streamed.apply(half.mT @ half, self._walk, _forms)  # type: ignore[no-untyped-call]
        noise = self.shift.double()
        return ((1 - explained / noise) / noise).to(self.base.dtype)

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return draw(self.base, k, generator) + self._noise.sqrt() * self._normal(k, generator)

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.solve(self.draw(k, generator))

    def inverse_root(self, block: Tensor) -> Tensor:
        return inverse_root_product(self.base.add_diagonal(self.shift), block, float(self.shift.detach().min()))


def _sum(weights: Float[Tensor, " NC"], walk: Passes) -> Float[Tensor, "D D"]:
    """Return Σ_i w_i J_i J_iᵀ over the rows of J; each rank adds up its own."""
    D, start = len(walk.model.theta), walk.first_own * walk.engines.plan.num_outputs
    total = weights.new_zeros(D, D)
    for rows in walk.selected_rows():
        J = rows.to(weights)
        total, start = total + J.mT @ (weights[start : start + len(J), None] * J), start + len(J)
    return walk.add_up([total])


def _forms(matrix: Float[Tensor, "D D"], walk: Passes) -> Float[Tensor, " NC"]:
    """Return J_iᵀ M J_i for each row of J: the adjoint of `_sum`."""
    found = [((J := rows.to(matrix)) @ matrix * J).sum(1) for rows in walk.selected_rows()]
    return walk.line_up(found)


class _Streamed(Function):
    """Either `_sum` or `_forms`, with the other as its derivative; J itself is never kept."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, walk: Passes, apply: Callable[..., Tensor]) -> Tensor:
        ctx.walk, ctx.adjoint = walk, _sum if apply is _forms else _forms
        return apply(argument, walk)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        require_first_derivative()
        return ctx.adjoint(gradient, ctx.walk), None, None
