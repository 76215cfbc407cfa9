"""Function space: K = J A⁻¹ Jᵀ of the outputs, and the inverses and determinants that follow by Woodbury's identity.

Under the prior N(m, A⁻¹) the outputs at the training points are a Gaussian process with the mean f₀ = f* + J(m − θ*)
and the covariance K. With the output Fisher H = L Lᵀ and S = Jᵀ L, the GGN is G = S Sᵀ, and Lᵀ K L = Sᵀ A⁻¹ S has the
non-zero eigenvalues of A⁻¹G. G + A is solved by (I + LᵀKL)⁻¹ (Rasmussen & Williams 2006, section 3.4).

| what is formed                 | class             | used by                                                      |
|--------------------------------|-------------------|--------------------------------------------------------------|
| K, (N·C, N·C)                  | `FunctionSpace`   | a posterior's solves, draws, evidence, mode; Laplace's GP    |
| a factor of I + LᵀKL           | `DualInverse`     | predictions of Laplace's GP                                  |
| B below, of fewer weights, D×D | `WeightSpaceForm` | the tangent kernel plus a noise: exact Gaussian processes    |

With Φ = J A^-½ and the noise N = diag(d): (Φ Φᵀ + N)⁻¹ = N⁻¹ − N⁻¹Φ B⁻¹ΦᵀN⁻¹ and det(Φ Φᵀ + N) = det N det B for the
symmetric B = I + ΦᵀN⁻¹Φ (Woodbury's and Sylvester's identities). The sum JᵀN⁻¹J is streamed over the rows of J, and
its derivative is, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current
from curvops.linalg import Estimate, Inverse, Reason, solve
from curvops.linalg.core.algorithm import holding, keep
from curvops.linalg.core.solve_routes import FORMED_COPIES, KERNEL_COPIES, MOST_OUTPUTS, RESOLVED
from curvops.linalg.core.structure import eigh_in_place
from curvops.linalg.core.vectors import check_finite
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, rounding_of_eigenvalues
from curvops.linalg.operators.base import UnaryOperator, by_columns
from curvops.linalg.operators.closed_form import ClosedForm, not_definite
from curvops.linalg.operators.draws import draw
from curvops.linalg.spectra.apply_function import inverse_root_product
from curvops.network import Exact, Passes, linear, move
from curvops.operators.curvatures.ggn import CurvatureRoot
from curvops.operators.function_space.gram_matrix import gram_matrix
from curvops.operators.linearized.linearization import Linearization
from curvops.operators.linearized.network_operator import Jacobian

EPS = torch.finfo(torch.float64).eps
NAME = "J Jᵀ"
GRAM, LAST, WEIGHTED = "JᵀJ", "1 / noise", "JᵀN⁻¹J"
"""The names under which quantities of the inputs are stored."""


@dataclass(eq=False)
class FunctionSpace:
    """K = J Jᵀ of the training outputs of one linearisation, for every prior precision α.

    Rows of J add up in float64, whatever their dtype: I + LᵀKL/α is then positive definite, and what follows from it
    has √(λ/α) units of the rows' rounding, for the largest eigenvalue λ of LᵀKL. In the rows' own dtype it would have
    λ/α units. With a `metric` A₀, 0-d or (D,), it is J A₀⁻¹ Jᵀ, and has only factors. Only the vectors Jᵀu have the
    size of the weights.
    """

    lin: Linearization
    of_data: dict[str, Any] = field(default_factory=dict)
    """The store of K, shared by all likelihoods of these data."""
    metric: Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.float64))
    _last: tuple[float, Tensor, Tensor] | None = None
    """The last α, with the factor of I + LᵀKL/α and L."""

    @cached_property
    def batches(self) -> list[tuple[Any, Tensor]]:
        """The labels and the outputs f* of each batch, in float64. One pass over the data."""

        def in_float64(batch: Any) -> Any:
            return replace(batch, any_targets=move(batch.any_targets, None, torch.float64))

        return [(in_float64(batch), J.outputs.detach().double()) for batch, J in self.lin.gathered().passes.each(0)]

    @property
    def likelihood(self) -> Any:
        """The likelihood with its tensors in float64, since torch's Huber loss takes outputs of its targets' dtype."""
        return self.lin.likelihood.to(dtype=torch.float64)

    @property
    def outputs(self) -> Float[Tensor, "N C"]:
        """The outputs f* of all points."""
        return torch.cat([outputs for _, outputs in self.batches])

    def outputs_at(self, theta: Float[Tensor, " D"]) -> Float[Tensor, "N C"]:
        """Return the linear model's outputs f* + J(θ − θ*). A product with J."""
        return self.outputs + self.lin.push(theta - self.lin.theta).double()

    def root(self, f: Float[Tensor, "N C"]) -> Float[Tensor, "N C R"]:
        """Return L of each point at these outputs."""
        fisher = Exact(self.likelihood)
        columns = fisher.num_columns(self.lin.num_outputs)
        parts = self._by_batch(lambda batch, at: fisher.columns(at, batch, 0, columns), f)
        return torch.cat(parts, 1).permute(1, 2, 0)

    def loss(self, f: Float[Tensor, "N C"]) -> tuple[Tensor, Float[Tensor, " NC"]]:
        """Return −log p(y | f) and its gradient."""
        likelihood = self.likelihood
        logs = self._by_batch(lambda b, at: likelihood.log_prob(at, b.targets, b.weights).sum(), f)
        gradients = self._by_batch(lambda b, at: likelihood.residual(at, b.targets, b.weights), f)
        return -torch.stack(logs).sum(), torch.cat(gradients).flatten()

    def _by_batch(self, function: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        sizes = [len(outputs) for _, outputs in self.batches]
        parts = zip(*(tensor.split(sizes) for tensor in tensors))
        return [function(batch, *arguments) for (batch, _), arguments in zip(self.batches, parts)]

    @property
    def kernel(self) -> Float[Tensor, "NC NC"]:
        """K = J Jᵀ, formed on first access."""
        if NAME not in self.of_data:
            J = self.lin.jacobian()
            self._take(gram_matrix(J, J, self.metric.to(J.device, torch.float64)))
        return self.of_data[NAME]

    def keep(self) -> None:
        """Read K from the checkpoint in force, or form it and save it there."""
        run = current().whole
        if not run or run.held.get("kernel") is self:
            return
        run.held["kernel"] = self
        saved = run.step("kernel", self.lin.theta.device)
        if not saved.done:
            saved.finish(self.kernel)
        elif NAME not in self.of_data or not torch.equal(self.kernel, saved.outcome):
            # Use the bits with which the run began, whatever another run has formed.
            self._take(saved.outcome)
            self._last = None
            for name in ("spectrum", "size"):
                self.__dict__.pop(name, None)

    def _take(self, K: Float[Tensor, "NC NC"]) -> None:
        """Store K, counted against the budget, so that other posteriors find it."""
        check_finite(K, "J Jᵀ")
        keep(self.lin.jacobian(), K, K.nbytes)
        self.of_data[NAME] = K

    def _dual(self, L: Float[Tensor, "N C R"]) -> Float[Tensor, "NR NR"]:
        """Return Lᵀ K L. Memory: that matrix and Lᵀ K."""
        n, c, r = L.shape
        if c == r == 1:  # as products of batches of numbers, this would take ten times as long
            scale = L.flatten()
            return (scale.unsqueeze(1) * self.kernel).mul_(scale)
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
        return DenseSpectrum(values, vectors, 0.0, EPS, self._eps_of_rows)

    @property
    def _eps_of_rows(self) -> float:
        """The relative rounding of the rows of J."""
        return torch.finfo(self.lin.theta.dtype).eps

    @cached_property
    def size(self) -> float:
        """A bound on the largest eigenvalue of LᵀKL."""
        with torch.no_grad(), holding(self.lin.jacobian(), (KERNEL_COPIES - 3) * self.kernel.nbytes):
            return float(self._dual(self.root(self.outputs)).norm())

    @property
    def rounding(self) -> float:
        """A bound on the rounding of the sums in LᵀKL, in units of a prior precision."""
        return EPS * self.size

    def resolves(self, prior: float) -> bool:
        """Return whether α is far enough above the rounding of K for solves with it."""
        return prior >= RESOLVED * self.rounding

    def may_resolve(self, prior: float) -> bool:
        """Return whether α `resolves`, or whether K was not looked at yet."""
        return "size" not in vars(self) or self.resolves(prior)

    def factor_under(self, prior: float) -> tuple[Float[Tensor, "NR NR"], Float[Tensor, "N C R"]]:
        """Return the Cholesky factor of I + LᵀKL/α at the network's outputs, and L; those of the last α are kept."""
        last = self._last
        if last is None or last[0] != prior:
            self._last, J = None, self.lin.jacobian()
            with torch.no_grad(), holding(J, (KERNEL_COPIES - 2) * self.kernel.nbytes):
                L = self.root(self.outputs)
                factor = self.factor(L, prior)
            keep(J, factor, factor.nbytes)
            self._last = last = prior, factor, L
        return last[1:]

    def log_ratio(self, prior: float, rtol: float, many: bool = False) -> Estimate:
        """Return log det(G + α) − log det α = log det(I + SᵀS/α).

        It is found by Cholesky, whose bias bound is that of `DenseSpectrum` with a norm for its largest eigenvalue, and
        for each of the others the one that rounding changes most. Where rounding may matter, the spectrum bounds it
        better, for fifteen times the work; it serves every α, and so `many` of them.
        """
        if not many and self.resolves(prior):
            factor, _ = self.factor_under(prior)
            at_zero, of_roots = rounding_of_eigenvalues(self.size, EPS, self._eps_of_rows)
            # 2ησ / (σ² + α) is at most η / √α.
            bias = len(factor) * (math.log1p(at_zero / prior + of_roots / math.sqrt(prior)) + EPS)
            estimate = Estimate.rounded(2 * factor.diagonal().log().sum(), bias, rtol, len(factor))
            if estimate.reason is Reason.CONVERGED:
                return estimate
        spectrum = self.spectrum
        return spectrum.logdet(prior, rtol) + spectrum.values.new_tensor(-len(spectrum.values) * math.log(prior))

    def inverse(self, prior: float) -> Callable[[Tensor], Tensor]:
        """Return (I + SᵀS/α)⁻¹ as a function of blocks (N·R, k)."""
        return partial(_solve_by, self.factor_under(prior)[0])

    def factor(self, L: Float[Tensor, "N C R"], prior: float) -> Float[Tensor, "NR NR"]:
        """Return the Cholesky factor of I + LᵀKL/α for a root L of each point's output Fisher."""
        inner = self._dual(L).div_(prior)
        inner.diagonal().add_(1)
        return torch.linalg.cholesky(inner, out=inner)


def _solve_by(factor: Float[Tensor, "NR NR"], block: Float[Tensor, "NR k"]) -> Float[Tensor, "NR k"]:
    """Return (C Cᵀ)⁻¹ B, computed in float64."""
    return torch.cholesky_solve(block.to(factor), factor).to(block)


class DualInverse(Inverse):
    """P⁻¹ for P = S Sᵀ + A, S = Jᵀ L: A⁻¹ − A⁻¹S (I + SᵀA⁻¹S)⁻¹ SᵀA⁻¹ with the smaller matrix factorised.

    Covariances J' P⁻¹ J'ᵀ at other points are K'' − K'L (I + LᵀKL)⁻¹ LᵀK'ᵀ, from Gram matrices alone (see
    `point_covariances`). Products solve with P itself and use this form as the preconditioner, so that they do not have
    its rounding, that of a difference.
    """

    # The stored form has P, C with C Cᵀ = I + SᵀA⁻¹S and L (N, C, R), both in float64, and rtol.

    def __init__(
        self,
        base: LinearOperator,
        factor: Float[Tensor, "NR NR"],
        output_root: Float[Tensor, "N C R"],
        rtol: float | None = None,
    ) -> None:
        UnaryOperator.__init__(self, base, factor, output_root, rtol=rtol)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return by_columns(self._solve_columns, rhs)

    def _solve_columns(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        return solve(self.base, block, rtol=self._kwargs["rtol"], preconditioner=self._by_factor)

    def _by_factor(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        """Return A⁻¹ (B − S (I + SᵀA⁻¹S)⁻¹ SᵀA⁻¹B), in the memory of the products with S."""
        S, A = CurvatureRoot.of(self.base.base), self.base.shift
        A = A if A.ndim == 0 else A.unsqueeze(-1)
        pulled = S._t_matmul(block) / A if A.ndim == 0 else S._t_matmul(block / A)
        return S._matmul(_solve_by(self._args[1], pulled)).neg_().add_(block).div_(A)

    def explained(self, jacobian: Jacobian, outputs: int) -> Iterator[Float[Tensor, "m r NR"]] | None:
        """Yield W with W Wᵀ = J' (A⁻¹ − P⁻¹) J'ᵀ, in blocks of `outputs` rows; None if memory is insufficient."""
        factor, L = self._args[1:]
        memory, train, precision = jacobian.passes.memory, self.base.base.lin.jacobian(), self.base.shift
        # Three numbers in float64 for each of the cross-covariance: itself, L applied to it, and the solution.
        row = 3 * 8 * max(factor.shape[0], L.shape[:2].numel())
        width = jacobian.passes.engines.plan.num_outputs
        together, rows = max(1, outputs // width), memory.room() // row
        if rows < max(outputs, width):
            return None

        def walk() -> Iterator[Tensor]:
            for some in jacobian.by_points(max(together, rows // width // together * together), together):
                with memory.holding(some.shape[0] * row), torch.no_grad():
                    cross = gram_matrix(some, train, precision.detach().double())
                    lifted = torch.einsum("mnc,ncr->nrm", cross.unflatten(1, L.shape[:2]), L).flatten(0, 1)
                    half = torch.linalg.solve_triangular(factor, lifted, upper=False)
                    yield half.mT.unflatten(0, (-1, outputs))

        return walk()


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
        store: dict[str, Tensor] | None = self.base._kwargs.get("store")
        return {} if store is None else store

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
        return linear(weights, self._information_for, partial(_forms, self._walk))

    @property
    def _unit_information(self) -> Float[Tensor, "D D"]:
        """JᵀJ, which is stored."""
        if GRAM not in self._store:
            self._store[GRAM] = _sum(self._walk, self._roots.new_ones(self.base.shape[-1]))
            keep(self.base, self._store[GRAM], self._store[GRAM].nbytes)
        return self._store[GRAM]

    def _information_for(self, weights: Float[Tensor, " NC"]) -> Float[Tensor, "D D"]:
        """Return JᵀN⁻¹J for a vector of noises: equal noises use JᵀJ, and the last result is stored."""
        if bool((weights == weights[0]).all()):
            return self._unit_information * weights[0]
        if not torch.equal(self._store.get(LAST, weights[:0]), weights):
            self._store[LAST], self._store[WEIGHTED] = weights.clone(), _sum(self._walk, weights)
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
        solution = self._solve_once(block)
        return solution + self._solve_once(block - self.base._matmul(solution) - self._noise * solution)

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
        explained = linear(half.mT @ half, partial(_forms, self._walk), partial(_sum, self._walk))
        noise = self.shift.double()
        return ((1 - explained / noise) / noise).to(self.base.dtype)

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return draw(self.base, k, generator) + self._noise.sqrt() * self._normal(k, generator)

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.solve(self.draw(k, generator))

    def inverse_root(self, block: Tensor) -> Tensor:
        return inverse_root_product(self.base.add_diagonal(self.shift), block, float(self.shift.detach().min()))


def _sum(walk: Passes, weights: Float[Tensor, " NC"]) -> Float[Tensor, "D D"]:
    """Return Σ_i w_i J_i J_iᵀ over the rows of J; each rank adds up its own."""
    D, start = len(walk.model.theta), walk.own_rows.start
    total = weights.new_zeros(D, D)
    for rows in walk.selected_rows():
        J = rows.to(weights)
        total, start = total + J.mT @ (weights[start : start + len(J), None] * J), start + len(J)
    return walk.add_up(total)


def _forms(walk: Passes, matrix: Float[Tensor, "D D"]) -> Float[Tensor, " NC"]:
    """Return J_iᵀ M J_i for each row of J: the adjoint of `_sum`."""
    forms = [((J := rows.to(matrix)) @ matrix * J).sum(1) for rows in walk.selected_rows()]
    return walk.line_up(forms)
