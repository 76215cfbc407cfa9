"""Function space: K = J A⁻¹ Jᵀ of the training outputs, and the solves, determinants and modes that follow from it.

Under the prior N(m, A⁻¹) the outputs at the training points are a Gaussian process with the mean f₀ = f* + J(m − θ*)
and the covariance K. With the output Fisher H = L Lᵀ and S = Jᵀ L, the GGN is G = S Sᵀ, and Lᵀ K L = Sᵀ A⁻¹ S has the
non-zero eigenvalues of A⁻¹G. `woodbury` solves with G + A by (I + LᵀKL)⁻¹ (Rasmussen & Williams 2006, section 3.4).

The mode of the outputs is f = f₀ + K u, and the weights' m + A⁻¹Jᵀu, where u is the gradient of log p(y | f): as many
numbers as there are outputs. A Newton step is −(I + HK)⁻¹(u + r), r = −∇ log p: by Woodbury's identity −(u + r) +
L (I + LᵀKL)⁻¹ LᵀK (u + r), which takes no inverse of K or of H, and no jitter (algorithms 3.1 and 3.3 there, for any
likelihood with a root of its output Fisher).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import NOTHING, Checkpoint, current, part_of_whole
from curvops.linalg import Estimate, Reason
from curvops.linalg.core.memory import PRODUCT_VECTORS, holding, keep, vector_bytes
from curvops.linalg.core.solve_routes import KERNEL_COPIES, RESOLVED
from curvops.linalg.core.symmetry import eigh_in_place
from curvops.linalg.core.vectors import check_finite, describe
from curvops.linalg.estimators.dense_spectrum import ROUNDING_UNITS, DenseSpectrum, definite_logdet
from curvops.network import Batch, Exact
from curvops.operators import GGN, Linearization
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.operators.curvatures.ggn import DisplacedGGN
from curvops.operators.function_space.dual_inverse import woodbury
from curvops.operators.function_space.gram_matrix import gram_matrix

REMEDIES = {
    Reason.ITERATION_LIMIT: (
        "The iterations of an inner solve were spent before its tolerance was reached. A larger prior precision, "
        "weights nearer to a mode, or float64 make it shorter."
    ),
    Reason.STAGNATION: (
        "The residual stopped shrinking far above the rounding level. A larger prior precision, or float64, "
        "improves the conditioning; a curvature made from random draws must give the same product each time."
    ),
    Reason.NOT_POSITIVE_DEFINITE: (
        "Curvature plus prior is not positive definite. Use a larger prior precision, or co.GGN as curvature."
    ),
    Reason.SINGULAR: "Curvature plus prior is singular in this dtype. Use a larger prior precision, or float64.",
}
"""The remedies for solves inside posteriors and their tuning, where callers cannot pass options to the solvers."""
MOST_HALVINGS = 30
ROUNDINGS = 10
"""The units of rounding by which a loss may be wrong."""
SUFFICIENT = 1e-4
"""The share of the decrease predicted by a Newton step that a step must achieve (Armijo)."""


class Point(ABC):
    """A point of the search, with the loss and its derivatives there."""

    relative: float
    """The gradient's norm, relative to the norms of its summands."""
    eps: float
    """The rounding of the dtype in which the loss is computed."""

    @property
    @abstractmethod
    def loss(self) -> float:
        """The loss at this point."""

    @property
    def rounding(self) -> float:
        """The rounding error of the loss."""
        return ROUNDINGS * self.eps * abs(self.loss)

    @abstractmethod
    def slope(self, step: Tensor) -> float:
        """Return the loss's derivative along a step."""

    @abstractmethod
    def losses(self, step: Tensor) -> Callable[[float], float]:
        """Return the loss after a fraction of the step."""

    @abstractmethod
    def move(self, step: Tensor, share: float) -> Point:
        """Return the point after a fraction of the step whose loss was computed before."""


At = TypeVar("At", bound=Point)


def minimise(
    point: At,
    step_at: Callable[[At, int], Tensor],
    rtol: float,
    most_steps: int,
    steps: int = 0,
    reached: Callable[[At, int], None] = lambda point, steps: None,
) -> tuple[At, Reason, int]:
    """Search for a point with a gradient of at most rtol; return it, the reason why the search ended, and all steps.

    Args:
        point: the starting point.
        step_at: a function of a point and the number of steps so far that returns Newton's step.
        rtol: the tolerance of the gradient.
        most_steps: the maximum number of steps.
        steps: the number of steps that led to the starting point.
        reached: called with each point except the last.
    """
    while point.relative > rtol:
        if steps == most_steps:
            return point, Reason.ITERATION_LIMIT, steps
        step = step_at(point, steps)
        steps += 1
        slope, share = point.slope(step), 1.0
        # The decrease that a Newton step predicts can still be gained, unless it is less than the loss's rounding.
        promised, losses = -0.5 * slope, point.losses(step)
        for _ in range(MOST_HALVINGS):
            if losses(share) <= point.loss + SUFFICIENT * share * slope + point.rounding:
                break
            share /= 2
        else:
            limited = point.relative < math.sqrt(point.eps) or promised <= point.rounding
            return point, Reason.PRECISION_LIMIT if limited else Reason.STAGNATION, steps
        before, rounding, nothing = point.relative, point.rounding, promised <= ROUNDINGS * point.eps * abs(point.loss)
        point = point.move(step, share)  # type: ignore[assignment]
        stuck = point.relative > 0.5 * before and (point.relative < math.sqrt(point.eps) or promised <= rounding)
        if stuck or nothing:
            return point, Reason.CONVERGED if point.relative <= rtol else Reason.PRECISION_LIMIT, steps
        reached(point, steps)
    return point, Reason.CONVERGED, steps


BESIDE = PRODUCT_VECTORS + 2
"""The number of vectors of the size of the weights that finding a mode takes: a product's, θ and θ − θ*."""
NAME = "J Jᵀ"


@dataclass(frozen=True, eq=False)
class DualMode:
    """The mode f₀ + K u of the outputs."""

    u: Float[Tensor, " NC"]
    theta: Float[Tensor, " D"]
    """The weights m + A⁻¹Jᵀu."""
    outputs: Float[Tensor, "N C"]
    log_likelihood: Tensor
    gradient: float
    """The relative gradient ‖u + r‖ / ‖r‖."""
    reason: Reason
    steps: int
    matvecs: int
    """The number of products with J A⁻¹ Jᵀ by passes over the data."""


@dataclass(eq=False)
class FunctionSpace:
    """K = J Jᵀ of the training outputs of one linearisation, formed in float64, for every prior precision α.

    With a `metric` A₀, 0-d or (D,), it is J A₀⁻¹ Jᵀ, and has only solves and the mode. Only the vectors Jᵀu have the
    size of the weights.
    """

    lin: Linearization
    of_data: dict[str, Any] = field(default_factory=dict)
    """The store of K, shared by all likelihoods of these data."""
    metric: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    asked: bool = False
    """Whether a determinant was asked for before."""

    @cached_property
    def batches(self) -> list[tuple[Batch, Tensor]]:
        """The labels and the outputs f* of each batch. One pass over the data."""
        return [(batch, J.outputs.detach().double()) for batch, J in self.lin.gathered().passes.each(0)]

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """The outputs f* of all points."""
        return torch.cat([own for _, own in self.batches])

    def outputs_at(self, theta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """Return the linear model's outputs f* + J(θ − θ*). A product with J."""
        return self.outputs + self.lin.push(theta - self.lin.theta).double()

    def root(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "N C R"]:
        """Return L of each point at these outputs."""
        fisher = Exact(self.lin.likelihood)
        columns = fisher.num_columns(self.lin.num_outputs)
        parts = self._by_batch(lambda batch, at: fisher.columns(at, batch, 0, columns), f)
        return torch.cat(parts, 1).permute(1, 2, 0)

    def loss(self, f: Float[Tensor, "N C"]) -> tuple[Tensor, Float[Tensor, " NC"]]:
        """Return −log p(y | f) and its gradient."""
        likelihood = self.lin.likelihood
        logs = self._by_batch(lambda b, at: likelihood.log_prob(at, b.targets, b.weights).sum(), f)
        gradients = self._by_batch(lambda b, at: likelihood.residual(at, b.targets, b.weights), f)
        return -torch.stack(logs).sum(), torch.cat(gradients).flatten()

    def _by_batch(self, function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        sizes = [len(own) for _, own in self.batches]
        parts = zip(*(tensor.split(sizes) for tensor in tensors))
        return [function(batch, *each) for (batch, _), each in zip(self.batches, parts)]

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
        return spectrum.logdet(prior, rtol) + spectrum.values.new_tensor(-len(spectrum.values) * math.log(prior))

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

        return lambda block: woodbury(root, root.theta.new_tensor(prior), inner, block)

    def newton_step(self, displaced: DisplacedGGN, prior: float, gradient: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return −(G + α)⁻¹ g with G at other outputs; beside g it takes two vectors, where CG takes a dozen."""
        _, factor = self.factor(self.outputs + displaced.shift, prior)

        def inner(block: Tensor) -> Tensor:
            return torch.cholesky_solve(block.double(), factor).to(block)

        root, A = CurvatureRoot.of(displaced), gradient.new_tensor(prior)
        return woodbury(root, A, inner, gradient.unsqueeze(1)).squeeze(1).neg_()

    def factor(self, f: Float[Tensor, "N C"], prior: float) -> tuple[Float[Tensor, "N C R"], Float[Tensor, "NR NR"]]:
        """Return L of each point at these outputs, and the Cholesky factor of I + LᵀKL/α."""
        L = self.root(f)
        inner = self._dual(L).div_(prior)
        inner.diagonal().add_(1)
        return L, torch.linalg.cholesky(inner, out=inner)

    @torch.no_grad()
    def mode(self, prior: float, mean: Tensor, rtol: float, most_steps: int) -> DualMode:
        """Find the mode by Newton's method with a line search, from u = 0.

        The gradient at the weights m + A⁻¹Jᵀu is Jᵀ(u + r). The outputs of K are used first and then those of J itself,
        so that the mode does not have K's rounding.

        Cost: a factorisation per step, and a product with J for each of the last steps.
        """
        lin, J = self.lin, self.lin.jacobian()
        mean, precision = mean.expand_as(lin.theta), (self.metric * prior).to(lin.theta)
        start, steps, matvecs = self.outputs_at(mean), 0, 0
        u = start.new_zeros(start.numel())

        def product(v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
            return self.kernel @ v / prior

        def step_of_weights(v: Float[Tensor, " NC"]) -> Float[Tensor, " D"]:
            return J._t_matmul(v.to(J.theta).unsqueeze(1)).squeeze(1) / precision

        def by_passes(v: Float[Tensor, " NC"]) -> Float[Tensor, " NC"]:
            nonlocal matvecs
            matvecs += 1
            return lin.push(step_of_weights(v)).double().flatten()

        def step_at(point: DualPoint, steps: int) -> Tensor:
            L, factor = self.factor(point.outputs, prior)
            image = torch.einsum("ncr,nc->nr", L, product(point.gap).view_as(point.outputs)).reshape(-1, 1)
            solved = torch.cholesky_solve(image, factor).view(len(L), -1)
            return torch.einsum("ncr,nr->nc", L, solved).flatten() - point.gap

        with holding(J, BESIDE * vector_bytes(describe(J))):
            for multiply in (product, by_passes):
                point = DualPoint(self, multiply, start, u)
                point, reason, steps = minimise(point, step_at, rtol, most_steps, steps)
                u = point.u
            theta = mean + step_of_weights(u)
        return DualMode(u, theta, point.outputs, -point.misfit, point.relative, reason, steps, matvecs)


class DualPoint(Point):
    """−log p(y | f₀ + K u) + ½ uᵀK u at one u, with its gradient u + r in the metric of K."""

    def __init__(
        self,
        space: FunctionSpace,
        product: Callable[[Tensor], Tensor],
        start: Float[Tensor, "N C"],
        u: Float[Tensor, " NC"],
        image: Float[Tensor, " NC"] | None = None,
    ) -> None:
        self._given, self.u = (space, product, start), u
        self._image = product(u) if image is None else image
        self.outputs = start + self._image.view_as(start)
        self.misfit, residual = space.loss(self.outputs)
        self.gap, self.eps = u + residual, torch.finfo(space.lin.theta.dtype).eps
        self._value = float(self.misfit + 0.5 * u @ self._image)
        self._tried: dict[float, DualPoint] = {}
        self._moved: tuple[Tensor, Tensor] | None = None
        scale = float(residual.norm())
        self.relative = float(self.gap.norm()) / scale if scale else math.inf if bool(self.gap.any()) else 0.0

    @property
    def loss(self) -> float:
        return self._value

    def slope(self, step: Tensor) -> float:
        return float(self.gap @ self._image_of(step))

    def losses(self, step: Tensor) -> Callable[[float], float]:
        moved = self._image_of(step)

        def after(share: float) -> float:
            self._tried = {share: DualPoint(*self._given, self.u + share * step, self._image + share * moved)}
            return self._tried[share].loss

        return after

    def _image_of(self, step: Tensor) -> Tensor:
        """Return K times a step, once for the slope and the losses along it."""
        if self._moved is None or self._moved[0] is not step:
            self._moved = step, self._given[1](step)
        return self._moved[1]

    def move(self, step: Tensor, share: float) -> DualPoint:
        return self._tried[share]
