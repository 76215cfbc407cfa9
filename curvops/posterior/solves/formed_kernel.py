"""J Jᵀ of the training points, formed once if outputs are few beside weights, for every prior precision α.

With K = J Jᵀ and G = S Sᵀ, S = Jᵀ L, the matrix SᵀS = Lᵀ K L has the non-zero eigenvalues of G; (I + SᵀS/α)⁻¹ solves in
function space; and the linear model's mode is m + Jᵀu/α, with as many numbers in u as there are outputs (Rasmussen &
Williams 2006, section 3.4). Only the vectors Jᵀu have the size of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint, current, part_of_whole
from curvops.linalg import Estimate
from curvops.linalg.core.memory import PRODUCT_VECTORS, holding, keep, vector_bytes
from curvops.linalg.core.solve_routes import KERNEL_COPIES, RESOLVED
from curvops.linalg.core.vectors import check_finite, describe
from curvops.linalg.estimators.brackets import single
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum
from curvops.network import Batch, Exact
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.posterior.solves.newton import Point, minimise

NAME = "J Jᵀ"
BESIDE = PRODUCT_VECTORS + 2
"""Vectors of the size of the weights that the search for a mode needs: a product's, θ and θ − θ*."""
MOST_STEPS = 50


@dataclass(eq=False)
class FormedKernel:
    """K = J Jᵀ of one linearisation, in float64, with its spectrum, solves and mode."""

    lin: Linearization

    of_data: dict[str, Any] = field(default_factory=dict)
    """The store of K, shared by all likelihoods of these data."""

    @property
    def kernel(self) -> Float[Tensor, "NC NC"]:
        """K = J Jᵀ, formed on first access."""
        known = self.of_data.get(NAME)
        return self._formed(NOTHING) if known is None else known

    def keep(self) -> None:
        """Read K from the checkpoint in force, or form it and save it there as it grows."""
        run = current().whole
        if not run or run.held.get("kernel") is self:
            return
        run.held["kernel"] = self
        kept, known = part_of_whole("kernel", self.lin.theta.device), self.of_data.get(NAME)
        if not kept.done:
            kept.finish((self._formed(kept) if known is None else known).to(self.lin.theta))
        elif known is None or not torch.equal(known.to(kept.outcome), kept.outcome):
            # The bits with which the run began, whatever another run has formed.
            self._take(kept.outcome)
            self.__dict__.pop("spectrum", None)

    def _formed(self, kept: Checkpoint) -> Float[Tensor, "NC NC"]:
        J = self.lin.jacobian()
        return self._take(gram_matrix(J, J, J.theta.new_ones(()), kept))

    def _take(self, found: Tensor) -> Float[Tensor, "NC NC"]:
        """Store K in float64, counted against the budget, where other posteriors find it."""
        K = found.double()
        check_finite(K, "J Jᵀ")
        keep(self.lin.jacobian(), K, K.nbytes)
        self.of_data[NAME] = K
        return K

    @cached_property
    def _batches(self) -> list[tuple[Batch, Tensor]]:
        """The labels and the outputs f* of each batch, in float64; one pass over the data."""
        return [(batch, J.outputs.detach().double()) for batch, J in self.lin.passes.each(0)]

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """The outputs f* of all points."""
        return torch.cat([own for _, own in self._batches])

    def _by_batch(self, f: Float[Tensor, "N C"], function: Callable[[Tensor, Batch], Tensor]) -> list[Tensor]:
        return [
            function(part, batch)
            for part, (batch, _) in zip(f.split([len(own) for _, own in self._batches]), self._batches)
        ]

    def _root(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "N C R"]:
        """Return L of each point at these outputs."""
        fisher = Exact(self.lin.likelihood)
        columns = fisher.num_columns(self.lin.num_outputs)
        parts = self._by_batch(f, lambda at, batch: fisher.columns(at, batch, 0, columns))
        return torch.cat(parts, 1).permute(1, 2, 0)

    def _dual(self, L: Float[Tensor, "N C R"]) -> Float[Tensor, "NR NR"]:
        """Return Lᵀ K L. Memory: that matrix and Lᵀ K."""
        n, c, r = L.shape
        half = torch.bmm(L.mT, self.kernel.view(n, c, -1)).view(n * r, n, c)
        dual = L.new_empty(n * r, n, r)
        torch.bmm(half.transpose(0, 1), L, out=dual.transpose(0, 1))
        return dual.flatten(1)

    @cached_property
    def spectrum(self) -> DenseSpectrum:
        """Eigenvalues and eigenvectors of SᵀS."""
        J, beside = self.lin.jacobian(), (KERNEL_COPIES - 1) * self.kernel.nbytes
        with torch.no_grad(), holding(J, beside):
            values, vectors = torch.linalg.eigh(self._dual(self._root(self.outputs)))
        keep(J, vectors, beside)
        return DenseSpectrum(values, vectors, 0.0, torch.finfo(self.lin.theta.dtype).eps)

    def resolves(self, prior: float) -> bool:
        """Return whether α is far enough above the rounding of K for solves with it."""
        spectrum = self.spectrum
        return prior >= RESOLVED * spectrum.eps * float(spectrum.values[-1])

    def log_ratio(self, prior: float, rtol: float) -> Estimate:
        """Return log det(G + α) − log det α = log det(I + SᵀS/α)."""
        spectrum = self.spectrum
        return single(spectrum.logdet([prior], rtol)) + spectrum.values.new_tensor(
            -len(spectrum.values) * math.log(prior)
        )

    def inverse(self, prior: float) -> Callable[[Tensor], Tensor]:
        """Return (I + SᵀS/α)⁻¹ as a function of blocks (N·R, k)."""
        spectrum = self.spectrum
        weights = 1 / (1 + spectrum.values.clamp_min(0) / prior)

        def apply(block: Tensor) -> Tensor:
            return (spectrum.vectors @ (weights[:, None] * (spectrum.vectors.mT @ block.double()))).to(block)

        return apply

    def inverse_of_weights(self, prior: float) -> Callable[[Tensor], Tensor]:
        """Return P⁻¹ = (I − S (I + SᵀS/α)⁻¹ Sᵀ/α)/α as a function of blocks (D, k), at one product with P."""
        root, inner = CurvatureRoot.of(GGN(self.lin)), self.inverse(prior)

        def apply(block: Tensor) -> Tensor:
            return (block - root._matmul(inner(root._t_matmul(block))) / prior) / prior

        return apply

    @torch.no_grad()
    def mode(self, prior: float, mean: Tensor, rtol: float) -> tuple[Float[Tensor, " D"], int]:
        """Approximate the linear model's mode m + Jᵀu/α by Newton's method for u; return it and the products it took.

        The gradient at θ = m + Jᵀu/α is Jᵀ(u + r), r the residuals at f* + J(θ − θ*). Outputs first come from K and
        then from J itself, so that the mode is free of K's rounding. Cost: a factorisation per step, and at the end a
        product.
        """
        mean, J = mean.expand_as(self.lin.theta), self.lin.jacobian()
        products = 1
        start = self._outputs_at(mean)
        u = torch.zeros(len(self.kernel), dtype=torch.float64, device=self.kernel.device)

        def by_kernel(u: Tensor) -> Tensor:
            return start + (self.kernel @ u / prior).view_as(start)

        def weights(u: Tensor) -> Tensor:
            return mean + (J._t_matmul(u.to(mean).unsqueeze(1)) / prior).squeeze(1)

        def by_passes(u: Tensor) -> Tensor:
            nonlocal products
            products += 1
            return self._outputs_at(weights(u))

        with holding(J, BESIDE * vector_bytes(describe(J))):
            for outputs in (by_kernel, by_passes):
                point = _DualPoint(self, prior, start, outputs, u)
                u = minimise(point, lambda at, _: self._step(at.outputs, at.gap, prior), rtol, MOST_STEPS)[0].u
            return weights(u), products

    def _outputs_at(self, theta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """Return the linear model's outputs."""
        return self.outputs + self.lin.push(theta - self.lin.theta).double()

    def loss(self, f: Float[Tensor, "N C"]) -> tuple[Tensor, Float[Tensor, " NC"]]:
        """Return −log p(y | f) and its gradient, in float64."""
        likelihood = self.lin.likelihood
        logs = self._by_batch(f, lambda at, b: likelihood.log_prob(at, b.targets, b.weights).sum())
        gradients = self._by_batch(f, lambda at, b: likelihood.residual(at, b.targets, b.weights))
        return -torch.stack(logs).sum(), torch.cat(gradients).flatten()

    def _step(self, f: Float[Tensor, "N C"], gap: Float[Tensor, " NC"], prior: float) -> Float[Tensor, " NC"]:
        """Return −(I + HK/α)⁻¹ gap, as −gap + L (I + LᵀKL/α)⁻¹ LᵀK gap/α."""
        L = self._root(f)
        n, _, r = L.shape
        inner = self._dual(L).div_(prior)
        inner.diagonal().add_(1)
        image = torch.einsum("ncr,nc->nr", L, (self.kernel @ gap / prior).view(n, -1)).reshape(-1, 1)
        solved = torch.cholesky_solve(image, torch.linalg.cholesky(inner, out=inner)).view(n, r)
        return torch.einsum("ncr,nr->nc", L, solved).flatten() - gap


class _DualPoint(Point):
    """The dual objective −log p(y | f(u)) + ½uᵀ(f(u) − f(0)) at one u, with its gradient in the metric of K/α."""

    def __init__(
        self,
        kernel: FormedKernel,
        prior: float,
        start: Float[Tensor, "N C"],
        outputs_of: Callable[[Tensor], Tensor],
        u: Float[Tensor, " NC"],
    ) -> None:
        self._given, self.u, self.outputs = (kernel, prior, start, outputs_of), u, outputs_of(u)
        loss, residual = kernel.loss(self.outputs)
        self.gap, self.eps = u + residual, torch.finfo(kernel.lin.theta.dtype).eps
        self._value = float(loss + 0.5 * u @ (self.outputs - start).flatten())
        self._tried: dict[float, _DualPoint] = {}
        scale = float(residual.norm())
        self.relative = float(self.gap.norm()) / scale if scale else math.inf if bool(self.gap.any()) else 0.0

    @property
    def loss(self) -> float:
        return self._value

    def slope(self, step: Tensor) -> float:
        kernel, prior, *_ = self._given
        return float(self.gap @ (kernel.kernel @ step)) / prior

    def losses(self, step: Tensor) -> Callable[[float], float]:
        def after(share: float) -> float:
            self._tried = {share: _DualPoint(*self._given, self.u + share * step)}
            return self._tried[share].loss

        return after

    def move(self, step: Tensor, share: float) -> _DualPoint:
        return self._tried[share]
