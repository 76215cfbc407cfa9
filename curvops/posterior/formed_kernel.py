"""Few outputs in all beside many weights: J Jᵀ of the training points formed once, for every scalar prior precision α.

With K = J Jᵀ and G = S Sᵀ, S = Jᵀ L, the matrix SᵀS = Lᵀ K L has the eigenvalues of G that are not zero; (I + SᵀS/α)⁻¹
solves in function space; and the linear model's mode is m + Jᵀu/α, u of as many numbers as there are outputs
(Rasmussen & Williams 2006, section 3.4). All that is of the size of the weights are the vectors Jᵀu.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint, current, named_part
from curvops.linalg import Estimate
from curvops.linalg.core.memory import OF_PRODUCT, holding, keep, vector_bytes
from curvops.linalg.core.vectors import describe
from curvops.linalg.estimators.brackets import single
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum
from curvops.network.data.batches import Batch
from curvops.network.likelihoods.output_fisher import Exact
from curvops.network.walks.passes import Passes
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.curvature_root import CurvatureRoot
from curvops.operators.curvatures.displaced_ggn import pushed
from curvops.operators.function_space.gram_matrix import gram_cost, gram_matrix

MOST_OUTPUTS = 6144
"""So many outputs in all are decomposed in minutes, in five matrices of 300 MB."""
FEWER = 4
"""So many times fewer outputs than weights: else neither space is the smaller one."""
COPIES = 5
"""Matrices (N·C, N·C) in float64: K, SᵀS, its eigenvectors and the two that LAPACK works in; later K and these vectors,
and two in a step of Newton's method."""
MOST_GRADIENTS = 200.0
"""What K may cost: a log-determinant by probes takes 300 to 500 products, for one prior precision."""
GRADIENTS_A_SOLVE = 16.0
"""What solving for one draw takes at least."""
RESOLVED = 1000
"""Units of K's rounding that a prior precision must be for what is solved for to be right to three digits."""
BESIDE = OF_PRODUCT + 2
"""Vectors of the size of the weights that a mode is found with: a product's, θ and θ − θ*."""
FORMED: weakref.WeakKeyDictionary[Passes, weakref.ref[Tensor]] = weakref.WeakKeyDictionary()
"""The K that posteriors now hold, by the walk over their data."""
MOST_STEPS, MOST_HALVINGS, SUFFICIENT, ROUNDINGS = 50, 30, 1e-4, 10


def fits(curvature: Any, lin: Linearization, most_gradients: float) -> bool:
    """Whether the curvature is the GGN of these data, and K of few enough outputs and cheap enough beside products."""
    if not isinstance(curvature, GGN) or curvature.asked != {} or curvature.lin is not lin:
        return False
    outputs = lin.num_data * lin.num_outputs
    if outputs > MOST_OUTPUTS or FEWER * outputs > lin.num_parameters:
        return False
    if COPIES * 8 * outputs**2 > lin.memory_budget // 2:
        return False
    return gram_cost(lin.plan, lin.num_data) <= most_gradients


@dataclass(eq=False)
class FormedKernel:
    """K of one linearisation, in float64, and what follows from it under its likelihood."""

    lin: Linearization

    @cached_property
    def kernel(self) -> Float[Tensor, "NC NC"]:
        """K = J Jᵀ, formed once."""
        return self._formed(NOTHING)

    def keep(self) -> None:
        """In a run with a checkpoint: take K from that, or form it now and keep it there, as far as it came."""
        run = current()
        if not run or run.held.get("kernel") is self:
            return
        run.held["kernel"] = self
        kept, known = named_part("kernel", self.lin.theta.device), self.__dict__.get("kernel")
        if not kept.done:
            self.kernel = self._formed(kept) if known is None else known
            kept.finish(self.kernel.to(self.lin.theta))
        elif known is None or not torch.equal(known.to(kept.outcome), kept.outcome):
            # The bits that the run began with, whatever was formed in another one.
            self.kernel = self._checked(kept.outcome)
            self.__dict__.pop("spectrum", None)

    def under_another_likelihood(self) -> FormedKernel:
        """The same K, if it is formed, and nothing of what followed from it."""
        new = FormedKernel(self.lin)
        if "kernel" in self.__dict__:
            new.kernel = self.kernel
        return new

    def _formed(self, kept: Checkpoint) -> Float[Tensor, "NC NC"]:
        """K, or that of another posterior of these data, whatever its prior and likelihood."""
        J = self.lin.jacobian()
        known = FORMED[J.passes]() if J.passes in FORMED else None
        return self._checked(gram_matrix(J, J, J.theta.new_ones(()), kept)) if known is None else known

    def _checked(self, found: Tensor) -> Float[Tensor, "NC NC"]:
        """In float64, counted by the budget, and for other posteriors to find."""
        K, J = found.double(), self.lin.jacobian()
        if not bool(K.isfinite().all()):
            raise ValueError("J Jᵀ holds NaN or Inf; check the parameters and the data.")
        keep(J, K, K.nbytes)
        FORMED[J.passes] = weakref.ref(K)
        return K

    @cached_property
    def _batches(self) -> list[tuple[Batch, Tensor]]:
        """The labels and the outputs f* of each batch, float64. One pass over the data."""
        return [(batch, J.outputs.detach().double()) for batch, J in self.lin.passes.each(0)]

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """f* of all points."""
        return torch.cat([own for _, own in self._batches])

    def _by_batch(self, f: Float[Tensor, "N C"], function: Callable[[Tensor, Batch], Tensor]) -> list[Tensor]:
        return [
            function(part, batch)
            for part, (batch, _) in zip(f.split([len(own) for _, own in self._batches]), self._batches)
        ]

    def _root(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "N C R"]:
        """L of each point at these outputs."""
        fisher = Exact(self.lin.likelihood)
        columns = fisher.num_columns(self.lin.num_outputs)
        parts = self._by_batch(f, lambda at, batch: fisher.columns(at, batch, 0, columns))
        return torch.cat(parts, 1).permute(1, 2, 0)

    def _dual(self, L: Float[Tensor, "N C R"]) -> Float[Tensor, "NR NR"]:
        """Lᵀ K L. Memory: itself and Lᵀ K."""
        n, c, r = L.shape
        half = torch.bmm(L.mT, self.kernel.view(n, c, -1)).view(n * r, n, c)
        dual = L.new_empty(n * r, n, r)
        torch.bmm(half.transpose(0, 1), L, out=dual.transpose(0, 1))
        return dual.flatten(1)

    @cached_property
    def spectrum(self) -> DenseSpectrum:
        """Eigenvalues and eigenvectors of SᵀS."""
        J, beside = self.lin.jacobian(), (COPIES - 1) * self.kernel.nbytes
        with torch.no_grad(), holding(J, beside):
            values, vectors = torch.linalg.eigh(self._dual(self._root(self.outputs)))
        keep(J, vectors, beside)
        return DenseSpectrum(values, vectors, 0.0, torch.finfo(self.lin.theta.dtype).eps)

    def resolves(self, prior: float) -> bool:
        """Whether α is far enough above the rounding of K for what is solved with it."""
        spectrum = self.spectrum
        return prior >= RESOLVED * spectrum.eps * float(spectrum.values[-1])

    def log_ratio(self, prior: float, rtol: float) -> Estimate:
        """log det(G + α) − log det α = log det(I + SᵀS/α)."""
        spectrum = self.spectrum
        return single(spectrum.logdet([prior], rtol)) + spectrum.values.new_tensor(
            -len(spectrum.values) * math.log(prior)
        )

    def inverse(self, prior: float) -> Callable[[Tensor], Tensor]:
        """(I + SᵀS/α)⁻¹ on blocks (N·R, k)."""
        spectrum = self.spectrum
        weights = 1 / (1 + spectrum.values.clamp_min(0) / prior)

        def apply(block: Tensor) -> Tensor:
            return (spectrum.vectors @ (weights[:, None] * (spectrum.vectors.mT @ block.double()))).to(block)

        return apply

    def inverse_of_weights(self, prior: float) -> Callable[[Tensor], Tensor]:
        """P⁻¹ = (I − S (I + SᵀS/α)⁻¹ Sᵀ/α)/α on blocks (D, k), to K's rounding (Woodbury). Cost: a product."""
        root, inner = CurvatureRoot.of(GGN(self.lin)), self.inverse(prior)

        def apply(block: Tensor) -> Tensor:
            return (block - root._matmul(inner(root._t_matmul(block))) / prior) / prior

        return apply

    @torch.no_grad()
    def mode(self, prior: float, mean: Tensor, rtol: float) -> tuple[Float[Tensor, " D"], int]:
        """About the linear model's mode m + Jᵀu/α, and the products with J Jᵀ that it took: Newton's method for u.

        The gradient at θ = m + Jᵀu/α is Jᵀ(u + r), r the residuals at f* + J(θ − θ*). Outputs are those of K first, and
        then J's own, so that K's rounding is not the mode's. Cost: a factorisation a step, in the end a product.
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
                u = self._newton(u, start, outputs, prior, rtol)
            return weights(u), products

    def _outputs_at(self, theta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """The linear model's outputs."""
        return self.outputs + pushed(self.lin, theta - self.lin.theta).double()

    def _newton(
        self,
        u: Float[Tensor, " NC"],
        start: Float[Tensor, "N C"],
        outputs: Callable[[Tensor], Tensor],
        prior: float,
        rtol: float,
    ) -> Float[Tensor, " NC"]:
        """The minimiser of −log p(y | f(u)) + ½uᵀ(f(u) − f(0)), to rtol or to the rounding of the outputs."""

        def at(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            f = outputs(u)
            loss, residual = self._loss(f)
            return f, loss + 0.5 * u @ (f - start).flatten(), u + residual

        f, loss, gap = at(u)
        for _ in range(MOST_STEPS):
            if float(gap.norm()) <= rtol * float((gap - u).norm()):
                break
            step = self._step(f, gap, prior)
            slope, length = float(gap @ (self.kernel @ step)) / prior, 1.0
            rounding = ROUNDINGS * torch.finfo(self.lin.theta.dtype).eps * abs(float(loss))
            for _ in range(MOST_HALVINGS):
                moved = at(u + length * step)
                if float(moved[1] - loss) <= SUFFICIENT * length * slope + rounding:
                    break
                length /= 2
            if float(moved[2].norm()) > 0.5 * float(gap.norm()) and slope > -rounding:
                break
            u = u + length * step
            f, loss, gap = moved
        return u

    def _loss(self, f: Float[Tensor, "N C"]) -> tuple[Tensor, Float[Tensor, " NC"]]:
        """−log p(y | f) and its gradient, float64."""
        likelihood = self.lin.likelihood
        logs = self._by_batch(f, lambda at, b: likelihood.log_prob(at, b.targets, b.weights).sum())
        gradients = self._by_batch(f, lambda at, b: likelihood.residual(at, b.targets, b.weights))
        return -torch.stack(logs).sum(), torch.cat(gradients).flatten()

    def _step(self, f: Float[Tensor, "N C"], gap: Float[Tensor, " NC"], prior: float) -> Float[Tensor, " NC"]:
        """−(I + HK/α)⁻¹ gap, as −gap + L (I + LᵀKL/α)⁻¹ LᵀK gap/α."""
        L = self._root(f)
        n, _, r = L.shape
        inner = self._dual(L).div_(prior)
        inner.diagonal().add_(1)
        image = torch.einsum("ncr,nc->nr", L, (self.kernel @ gap / prior).view(n, -1)).reshape(-1, 1)
        solved = torch.cholesky_solve(image, torch.linalg.cholesky(inner, out=inner)).view(n, r)
        return torch.einsum("ncr,nr->nc", L, solved).flatten() - gap
