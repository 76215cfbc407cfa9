"""Repriorisation of all weights at once, by the empirical tangent kernel, and its exact log-determinant."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev, vmap

from curvops.errors import ConvergenceError
from curvops.linalg import Estimate, Operator, eigsh, logdet, minres
from curvops.network import Blocks
from curvops.sampling.readout_map import Change, MappedWeights, factor, solve_triangle


class Tangents(NamedTuple):
    """The linearisation at φ: J (m, D), the Cholesky factor L of JJᵀ + λI, α = (JJᵀ + λI)⁻¹(y − f), and Jᵀα."""

    J: Float[Tensor, "m D"]
    L: Float[Tensor, "m m"]
    alpha: Float[Tensor, " m"]
    step: Float[Tensor, " D"]


class CurvedIdentity(Operator):
    """The operator I + Σ_i α_i ∇²f_i (D, D) at φ, symmetric and possibly indefinite, by double backward passes."""

    symmetric = True

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]), len(self._args[0])))

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return block + self._kwargs["product"](block)


class SquaredIdentity(CurvedIdentity):
    """The operator (I + Σ_i α_i ∇²f_i)², positive semidefinite."""

    psd = True

    def _product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return super()._product(super()._product(block))


@dataclass(frozen=True, eq=False)
class TangentMap(Change):
    """The change of variables T(φ) = φ + Jᵀ(JJᵀ + λI)⁻¹(y − f(φ)) of all white weights, with J at φ.

    For large λ it is close to the identity and one to one. For small λ it may fold: two φ have the same image, and a
    chain in φ would count that θ twice. `inverse(map(φ))` then finds another φ.

    The derivative needs second derivatives of the network, and the gradient of its determinant needs third ones, in
    reverse mode.
    """

    level: float

    def forward(self, phi: Mapping[str, Tensor]) -> MappedWeights:
        """Return T(φ), its exact log-determinant and the outputs; forms J (N·C, D) and a matrix (D, D)."""
        v = self._flat(phi)
        at = self._tangents(v, self.level)
        white = self._blocks(v + at.step)
        outputs = self.problem.outputs(white)
        return MappedWeights(white, self._logdet(v, at), outputs)

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return T(φ), at the cost of a forward pass and J."""
        return self._blocks(self._map_vector(self._flat(phi), self.level))

    @torch.no_grad()
    def inverse(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return φ, by Newton's method from a large λ down to its actual value; raise ValueError if this fails."""
        goal = self._flat(white)
        level = max(self.level, float(self._tangents(goal, self.level).J.square().sum()))
        v, gap = goal, 0.0
        enough = 1e-2 * math.sqrt(torch.finfo(goal.dtype).eps) * (1 + float(goal.abs().max()))
        while gap <= enough:
            v, gap = self._newton(goal, v, level)
            if gap <= enough and level == self.level:
                return self._blocks(v)
            level = max(self.level, level / 4)
        raise ValueError(
            f"no φ with T(φ) equal to these weights was found: Newton's method leaves a gap of {gap:.2e}. Raise reg, "
            "use a wider network, start from a φ (normal(1)) instead of weights, or use the readout's form."
        )

    def _newton(self, goal: Tensor, v: Tensor, level: float) -> tuple[Tensor, float]:
        """Take damped Newton steps towards T(φ) = goal; return φ and the largest entry of the gap."""
        gap = goal - self._map_vector(v, level)
        for _ in range(20):
            step = torch.linalg.solve(jacrev(lambda w: self._map_vector(w, level))(v), gap)
            share, left = 1.0, gap
            while share > 1e-4:
                left = goal - self._map_vector(v + share * step, level)
                if bool(left.norm() < gap.norm()):
                    break
                share /= 2
            else:
                break
            v, gap = v + share * step, left
        return v, float(gap.abs().max())

    def estimated_logdet(
        self,
        phi: Mapping[str, Tensor],
        rtol: float,
        max_matvecs: int | None,
        generator: torch.Generator | None,
    ) -> Estimate:
        """Estimate log|det ∂T/∂φ|: log|det(I + H_α)| from products, and its other terms, m × m, exactly."""
        v = self._flat(phi).detach()
        at = Tangents(*(tensor.detach() for tensor in self._tangents(v, self.level)))
        product = self._curvature_product(v, at.alpha)
        curved = CurvedIdentity(v, product=product)
        accuracy = 1e-2 * math.sqrt(torch.finfo(v.dtype).eps)
        solution = minres(curved, at.J.mT, rtol=accuracy)
        if not solution.accepted:
            raise ConvergenceError(solution, accuracy)
        mixed = self._identity(at) - self._mixed_rows(v, at) @ solution.x / self.level
        exact = self._kernel_term(at) + _log_size(torch.linalg.qr(mixed)[1])
        return _by_quadrature(v, product, rtol, max_matvecs, generator) + exact

    def _flat(self, blocks: Mapping[str, Tensor]) -> Float[Tensor, " D"]:
        return torch.cat([blocks[name].flatten() for name in self.problem.model.selection.names])

    def _blocks(self, v: Float[Tensor, " D"]) -> Blocks:
        return self.problem.model.selection.unflatten(v)

    def _outputs(self, v: Float[Tensor, " D"]) -> Float[Tensor, " m"]:
        return self.weigh(self.problem.outputs(self._blocks(v))).flatten()

    def _tangents(self, v: Float[Tensor, " D"], level: float) -> Tangents:
        J: Tensor = jacrev(self._outputs)(v)
        L = factor(J @ J.mT, level)
        gap = (self.weigh(self.targets).flatten() - self._outputs(v)).unsqueeze(1)
        alpha = solve_triangle(L.mT, solve_triangle(L, gap), upper=True).squeeze(1)
        return Tangents(J, L, alpha, J.mT @ alpha)

    def _map_vector(self, v: Float[Tensor, " D"], level: float) -> Float[Tensor, " D"]:
        return v + self._tangents(v, level).step

    def _logdet(self, v: Float[Tensor, " D"], at: Tangents) -> Float[Tensor, ""]:
        """Return −log det(I + JJᵀ/λ) + log|det(I + H_α)| + log|det(I − R(I + H_α)⁻¹Jᵀ/λ)|, in float64."""

        def weighted_outputs(w: Float[Tensor, " D"]) -> Float[Tensor, ""]:
            return self._outputs(w) @ at.alpha

        H: Tensor = jacrev(grad(weighted_outputs))(v)
        curved = H + torch.eye(len(v), dtype=v.dtype, device=v.device)
        Q, R = torch.linalg.qr(curved)  # not LU, which torch computes wrongly for many chains on several threads
        mixed = (
            self._identity(at) - self._mixed_rows(v, at) @ solve_triangle(R, Q.mT @ at.J.mT, upper=True) / self.level
        )
        return self._kernel_term(at) + _log_size(R) + _log_size(torch.linalg.qr(mixed)[1])

    def _kernel_term(self, at: Tangents) -> Float[Tensor, ""]:
        return len(at.L) * math.log(self.level) - 2 * at.L.diagonal().double().log().sum()

    def _mixed_rows(self, v: Float[Tensor, " D"], at: Tangents) -> Float[Tensor, "m D"]:
        """Return R, whose rows are (∇²f_i Jᵀα)ᵀ."""
        R: Tensor = jacrev(lambda w: jacrev(self._outputs)(w) @ at.step)(v)
        return R

    def _identity(self, at: Tangents) -> Tensor:
        return torch.eye(len(at.L), dtype=at.L.dtype, device=at.L.device)

    def _curvature_product(self, v: Float[Tensor, " D"], alpha: Float[Tensor, " m"]) -> Callable[[Tensor], Tensor]:
        slope = grad(lambda w: self._outputs(w) @ alpha)
        return vmap(lambda vector: grad(lambda w: slope(w) @ vector)(v), in_dims=1, out_dims=1)


def _log_size(R: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return log|det R| of a triangular matrix, in float64."""
    return R.diagonal().double().abs().log().sum()


def _by_quadrature(
    v: Float[Tensor, " D"],
    product: Callable[[Tensor], Tensor],
    rtol: float,
    max_matvecs: int | None,
    generator: torch.Generator | None,
) -> Estimate:
    """Estimate log|det(I + H)| by quadrature of I + H if that is positive definite, otherwise of its square."""
    for operator, share in ((CurvedIdentity(v, product=product), 1.0), (SquaredIdentity(v, product=product), 0.5)):
        lowest = eigsh(operator, 1, which="SA", rtol=0.05, generator=generator)
        bound = float(lowest.values - lowest.residuals)
        if bound > 0:
            estimate = share * logdet(
                operator, lower_bound=0.9 * bound, rtol=rtol, max_matvecs=max_matvecs, generator=generator
            )
            return replace(estimate, matvecs=estimate.matvecs + lowest.matvecs)
    raise ValueError(f"I + H is singular to the accuracy of {lowest.matvecs} products: raise reg.")
