"""Repriorisation of all weights at once, by the empirical tangent kernel, and its exact log-determinant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jacrev

from curvops.network import Blocks
from curvops.sampling.repriorisation.readout_map import Change, MappedWeights, factor, solve_triangle


class Tangents(NamedTuple):
    """The linearisation at φ: J (m, D), the Cholesky factor L of JJᵀ + λI, α = (JJᵀ + λI)⁻¹(y − f), and Jᵀα."""

    J: Float[Tensor, "m D"]
    L: Float[Tensor, "m m"]
    alpha: Float[Tensor, " m"]
    step: Float[Tensor, " D"]


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
        """Return −log det(I + JJᵀ/λ) + log|det(I + H_α)| + log|det(I − R(I + H_α)⁻¹Jᵀ/λ)|, in float64.

        H_α is Σ_i α_i ∇²f_i, and the rows of R are (∇²f_i Jᵀα)ᵀ.
        """

        def weighted_outputs(w: Float[Tensor, " D"]) -> Float[Tensor, ""]:
            return self._outputs(w) @ at.alpha

        H: Tensor = jacrev(grad(weighted_outputs))(v)
        R: Tensor = jacrev(lambda w: jacrev(self._outputs)(w) @ at.step)(v)
        Q, triangle = torch.linalg.qr(H + torch.eye(len(v)).to(v))  # torch's LU is wrong for many chains on threads
        mixed = torch.eye(len(R)).to(v) - R @ solve_triangle(triangle, Q.mT @ at.J.mT, upper=True) / self.level
        kernel = len(at.L) * math.log(self.level) - 2 * _log_size(at.L)
        return kernel + _log_size(triangle) + _log_size(torch.linalg.qr(mixed)[1])


def _log_size(R: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return log|det R| of a triangular matrix, in float64."""
    return R.diagonal().double().abs().log().sum()
