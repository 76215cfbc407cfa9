"""J Jᵀ of the training points, formed once if there are few outputs compared with weights, for every prior precision α.

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
from curvops.linalg.core.memory import holding, keep
from curvops.linalg.core.results import Reason
from curvops.linalg.core.solve_routes import KERNEL_COPIES, RESOLVED
from curvops.linalg.core.symmetry import eigh_in_place
from curvops.linalg.core.vectors import check_finite
from curvops.linalg.estimators.brackets import ROUNDING_UNITS, single
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, definite_logdet
from curvops.operators import GGN
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.posterior.solves.function_space import FunctionSpace, TrainingOutputs, find_dual_mode

NAME = "J Jᵀ"
MOST_STEPS = 50


@dataclass(eq=False)
class FormedKernel(TrainingOutputs):
    """K = J Jᵀ of one linearisation, in float64, with the spectrum, solves and mode that follow from it.

    With a `metric` A₀, 0-d or (D,), it is J A₀⁻¹ Jᵀ, and has only solves and the mode.
    """

    of_data: dict[str, Any] = field(default_factory=dict)
    """The store of K, shared by all likelihoods of these data."""
    metric: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    asked: bool = False
    """Whether a determinant was asked for before."""

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
            # Use the bits with which the run began, whatever another run has formed.
            self._take(kept.outcome)
            self.__dict__.pop("spectrum", None)

    def _formed(self, kept: Checkpoint) -> Float[Tensor, "NC NC"]:
        J = self.lin.jacobian()
        return self._take(gram_matrix(J, J, self.metric.to(J.theta), kept))

    def _take(self, found: Tensor) -> Float[Tensor, "NC NC"]:
        """Store K in float64, counted against the budget, so that other posteriors find it."""
        K = found.double()
        check_finite(K, "J Jᵀ")
        keep(self.lin.jacobian(), K, K.nbytes)
        self.of_data[NAME] = K
        return K

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
            values, vectors = eigh_in_place(self._dual(self.root(self.outputs)))
        keep(J, vectors, beside)
        return DenseSpectrum(values, vectors, 0.0, torch.finfo(self.lin.theta.dtype).eps)

    def resolves(self, prior: float) -> bool:
        """Return whether α is far enough above the rounding of K for solves with it."""
        spectrum = self.spectrum
        return prior >= RESOLVED * spectrum.eps * float(spectrum.values[-1])

    def log_ratio(self, prior: float, rtol: float) -> Estimate:
        """Return log det(G + α) − log det α = log det(I + SᵀS/α).

        The first is found by Cholesky, a tenth of the work, if its bound on rounding suffices; later ones by the
        spectrum, which serves every prior.
        """
        first, self.asked = not self.asked and not current(), True  # a resumed run must give the same bits
        if first and "spectrum" not in self.__dict__ and (found := self._first_log_ratio(prior, rtol)) is not None:
            return found
        spectrum = self.spectrum
        return single(spectrum.logdet([prior], rtol)) + spectrum.values.new_tensor(
            -len(spectrum.values) * math.log(prior)
        )

    def _first_log_ratio(self, prior: float, rtol: float) -> Estimate | None:
        """Return log det(I + SᵀS/α) by Cholesky, or None where rounding may matter, to it or to solves.

        The bias bound is that of `DenseSpectrum` with a norm for its largest eigenvalue, and 0 for every other.
        """
        with torch.no_grad(), holding(self.lin.jacobian(), (KERNEL_COPIES - 2) * self.kernel.nbytes):
            inner = self._dual(self.root(self.outputs))
            noise = torch.finfo(self.lin.theta.dtype).eps * float(inner.norm())
            if not prior >= RESOLVED * noise:
                return None
            inner.div_(prior).diagonal().add_(1)
            value = definite_logdet(inner)
        found = Estimate.rounded(value, len(inner) * math.log1p(ROUNDING_UNITS * noise / prior), rtol, len(inner))
        return found if found.reason is Reason.CONVERGED else None

    def inverse(self, prior: float) -> Callable[[Tensor], Tensor]:
        """Return (I + SᵀS/α)⁻¹ as a function of blocks (N·R, k)."""
        spectrum = self.spectrum
        weights = 1 / (1 + spectrum.values.clamp_min(0) / prior)

        def apply(block: Tensor) -> Tensor:
            return (spectrum.vectors @ (weights[:, None] * (spectrum.vectors.mT @ block.double()))).to(block)

        return apply

    def inverse_of_weights(self, prior: float) -> Callable[[Tensor], Tensor]:
        """Return P⁻¹ = (I − S (I + SᵀS/α)⁻¹ Sᵀ/α)/α as a function of blocks (D, k), which takes one product with P."""
        root, inner = CurvatureRoot.of(GGN(self.lin)), self.inverse(prior)

        return lambda block: _by_woodbury(root, inner, prior, block)

    def newton_step(self, displaced: DisplacedGGN, prior: float, gradient: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return −(G + α)⁻¹ g with G at other outputs; beside g it takes two vectors, where CG takes a dozen."""
        _, factor = self.factor(self.outputs + displaced.shift, prior)

        def inner(block: Tensor) -> Tensor:
            return torch.cholesky_solve(block.double(), factor).to(block)

        return _by_woodbury(CurvatureRoot.of(displaced), inner, prior, gradient.unsqueeze(1)).squeeze(1).neg_()

    def mode(self, prior: float, mean: Tensor, rtol: float) -> tuple[Float[Tensor, " D"], int]:
        """Approximate the linear model's mode m + Jᵀu/α; return it with the products taken.

        Cost: a factorisation per step, and one product at the end.
        """
        space = FormedSpace(self, prior)
        found = find_dual_mode(space, mean, rtol, MOST_STEPS)
        return found.theta, space.matvecs + 1

    def factor(self, f: Float[Tensor, "N C"], prior: float) -> tuple[Float[Tensor, "N C R"], Float[Tensor, "NR NR"]]:
        """Return L of each point at these outputs, and the Cholesky factor of I + LᵀKL/α."""
        L = self.root(f)
        inner = self._dual(L).div_(prior)
        inner.diagonal().add_(1)
        return L, torch.linalg.cholesky(inner, out=inner)


class FormedSpace(FunctionSpace):
    """The prior covariance K/α of a formed kernel."""

    points: FormedKernel
    is_formed = True

    def __init__(self, kernel: FormedKernel, prior: float) -> None:
        self.points, self._prior = kernel, prior
        self.precision = (kernel.metric * prior).to(kernel.lin.theta)

    def product(self, v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
        return self.points.kernel @ v / self._prior

    def step(self, f: Float[Tensor, "N C"], gap: Float[Tensor, " NC"], rtol: float) -> Float[Tensor, " NC"]:
        L, factor = self.points.factor(f, self._prior)
        image = torch.einsum("ncr,nc->nr", L, self.product(gap).view_as(f)).reshape(-1, 1)
        solved = torch.cholesky_solve(image, factor).view(len(L), -1)
        return torch.einsum("ncr,nr->nc", L, solved).flatten() - gap


def _by_woodbury(
    root: CurvatureRoot, inner: Callable[[Tensor], Tensor], prior: float, block: Float[Tensor, "D k"]
) -> Float[Tensor, "D k"]:
    """Return (SSᵀ + α)⁻¹ B = (B − S (I + SᵀS/α)⁻¹ SᵀB/α)/α, in the memory of the product with S."""
    return root._matmul(inner(root._t_matmul(block))).div_(-prior).add_(block).div_(prior)
