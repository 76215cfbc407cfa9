"""Results of algorithms: answers with their reasons, residuals and error bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.checks import check_options
from curvops.errors import (
    ConvergenceError,
    FunctionConvergenceError,
    NotPositiveDefiniteError,
    NotPositiveSemidefiniteError,
    PrecisionWarning,
    warn,
)
from curvops.linalg.core.vectors import ROUNDING_SEEN, Vectors
from curvops.summary import Summarised, Table, Tabular, by_columns_of, cells_of, summary


class Reason(Enum):
    """The reason why an algorithm stopped; the value is the remedy, in plain sentences."""

    __hash__ = object.__hash__  # Enum hashes the name in Python, which is slow for the reasons of thousands of columns

    CONVERGED = "Converged: the true residual is within the tolerance. Nothing needs to be done."
    ZERO_RIGHT_HAND_SIDE = "The right-hand side is zero, so the solution is zero. No product was spent on it."
    PRECISION_LIMIT = (
        "The result is as accurate as rounding in this dtype allows. "
        "Compute in float64, accept a larger rtol, or take residuals in float64: refine=True (cg)."
    )
    ITERATION_LIMIT = (
        "The iteration limit was reached before the tolerance. "
        "Raise maxiter, or steps (spectral_density), or accept the accuracy reached; solves converge faster with a "
        "larger prior (add_diagonal) or a preconditioner (cg, minres) such as curvops.linalg.nystrom."
    )
    STAGNATION = (
        "The residual stopped shrinking far above the rounding level. Check that the operator is deterministic and "
        "symmetric (for lsmr and svds, that its transposed product is the adjoint). A larger prior (add_diagonal) "
        "or a preconditioner (cg, minres) improves the conditioning."
    )
    NOT_POSITIVE_DEFINITE = (
        "The operator is not positive definite: a direction p with p'Ap <= 0 was met. "
        "Use minres, or add a prior (add_diagonal) larger than the most negative eigenvalue."
    )
    NOT_SYMMETRIC = (
        "The operator is not symmetric: u'Av and v'Au differ by more than rounding explains. "
        "Use lsmr, or symmetrise the operator."
    )
    SINGULAR = (
        "The operator is singular to working precision and the right-hand side leaves its range. Add a prior, or a "
        "larger one (add_diagonal), compute in float64, or project the right-hand side; minres and lsmr return a "
        "least-squares solution."
    )
    NON_FINITE = (
        "A right-hand side, a product or a solution holds NaN or Inf, or lies below the dtype's smallest numbers. "
        "Check the parameters and the data, or use a dtype with a wider range."
    )
    BREAKDOWN = (
        "The Krylov space became invariant: the basis is complete for this start vector and results from it are exact. "
        "For more directions, use another start vector."
    )
    RANK_CAPPED = (
        "The memory or product budget limited the rank or depth before the goal was reached. Raise memory_budget, "
        "max_rank (nystrom) or max_matvecs (eigsh, svds, apply_function, trace, diagonal, logdet) where they were "
        "set; or accept the smaller basis."
    )
    UNVERIFIED = (
        "The error estimate is within the tolerance, but an assumption behind it was not confirmed: that no better "
        "pair was missed (eigsh, svds), the course of f between Ritz values (apply_function), or an estimated bound "
        "(logdet). Raise max_matvecs or maxiter (eigsh, svds, apply_function), or give a known lower_bound "
        "(apply_function, logdet)."
    )
    MATVEC_LIMIT = (
        "All products of max_matvecs were spent before the error bar met rtol. "
        "Raise max_matvecs, or accept the present error bar."
    )
    BUDGET_SPENT = (
        "No tolerance was set: the whole budget was spent, and the error bar shows the accuracy reached. "
        "For a given accuracy, set rtol."
    )


ACCEPTED = frozenset({Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE, Reason.PRECISION_LIMIT})


def join_histories(histories: Sequence[Tensor]) -> Float[Tensor, "steps K"]:
    """Put the columns of several histories side by side, repeating the last row of shorter ones."""
    steps = max(map(len, histories))
    return torch.cat([torch.cat([one, one[-1:].expand(steps - len(one), -1)]) for one in histories], 1)


class Reasoned(Tabular):
    """A result of several columns, each with its reason."""

    reasons: tuple[Reason, ...]

    def _tables(self) -> list[Table]:
        numbers = {name: cells_of(vector) for name, vector in self._numbers().items()}
        return [by_columns_of({**numbers, "reason": [reason.name for reason in self.reasons]}, [repr(self)])]

    def _numbers(self) -> dict[str, Tensor]:
        """Return what a table shows of each column."""
        return {}

    @property
    def accepted(self) -> bool:
        """Whether each column converged, or is as accurate as the dtype allows."""
        return ACCEPTED.issuperset(self.reasons)

    def failures(self, kind: str, measure: str, errors: Tensor, remedies: Mapping[Reason, str] | None = None) -> str:
        """Describe how many columns failed, the worst of their errors, and the remedy of each reason.

        `remedies` replace the texts of reasons that name options which users of the caller cannot set.
        """
        remedies = remedies or {}
        failed = [j for j, reason in enumerate(self.reasons) if reason not in ACCEPTED]
        worst = max((float(errors[j].nan_to_num(math.inf, math.inf)) for j in failed), default=0.0)
        counts = Counter(self.reasons[j] for j in failed)
        return "\n".join(
            [f"{len(failed)} of {len(self.reasons)} {kind} did not converge; worst {measure.format(f'{worst:.2e}')}."]
            + [
                f"{reason.name} ({count} {kind}): {remedies.get(reason, reason.value)}"
                for reason, count in counts.items()
            ]
        )


class ByColumn(Reasoned):
    """A result whose columns converge one by one."""

    @property
    def converged(self) -> Bool[Tensor, " K"]:
        """Whether each column reached the tolerance."""
        reached = Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE
        return torch.tensor([reason in reached for reason in self.reasons], dtype=torch.bool)


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Summarised, ByColumn):
    """The solution of A x = b, with one reason, flag and residual per column of b.

    ``relative_residuals`` are true residuals ‖b − Ax‖/‖b‖, recomputed by a product, not those of the recursion.
    ``backward_errors`` are ‖b − Ax‖/(‖A‖‖x‖ + ‖b‖), with ‖A‖ estimated from the products made.
    ``history`` holds the recursion's relative residuals, a first row for the start and one row per iteration.
    ``matvecs`` counts products of A (and of Aᵀ, for lsmr) with one vector, including those of checks.
    ``exact_matvecs`` counts those of them that iterative refinement made in float64.
    ``groups`` is the number of groups of columns, solved one after another, into which the memory budget split them.
    ``normal_residuals`` are ‖Aᵀr‖/(‖A‖‖r‖) by true products for least-squares problems (lsmr; minres for columns that
    are SINGULAR, NaN otherwise): if they are at rounding level, r is as small as possible.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 2.0]))
        >>> solution = co.linalg.cg(A, torch.ones(2))
        >>> solution.x, solution.reasons[0].name, bool(solution.relative_residuals[0] < 1e-6)
        (tensor([0.2500, 0.5000]), 'CONVERGED', True)
    """

    x: Vectors
    reasons: tuple[Reason, ...]
    relative_residuals: Float[Tensor, " K"]
    backward_errors: Float[Tensor, " K"]
    iterations: int
    matvecs: int
    history: Float[Tensor, "steps K"] = field(repr=False)
    normal_residuals: Float[Tensor, " K"] | None = None
    exact_matvecs: int = 0
    groups: int = 1

    def _numbers(self) -> dict[str, Tensor]:
        return {"relative residual": self.relative_residuals, "backward error": self.backward_errors}

    def raise_if_failed(self, rtol: float, remedies: Mapping[Reason, str] | None = None) -> Solution:
        """Return self if every column is accepted.

        Args:
            rtol: the tolerance of the solve.
            remedies: texts by reason, for callers whose users cannot set the options that a reason names.

        Raises:
            NotPositiveDefiniteError: a column failed because the operator is not positive definite.
            ConvergenceError: a column failed for any other reason.
        """
        if self.accepted:
            return self
        indefinite = Reason.NOT_POSITIVE_DEFINITE in self.reasons
        raise (NotPositiveDefiniteError if indefinite else ConvergenceError)(self, rtol, remedies)


def default_rtol(dtype: torch.dtype) -> float:
    """Return the relative residual that solves reach by default: 1e-6, tightened towards √eps in float64."""
    return min(1e-6, math.sqrt(torch.finfo(dtype).eps))


def accept(solution: Solution, rtol: float | None) -> Vectors:
    """Return x if every column is accepted, else raise an error; warn if accuracy is limited by the dtype.

    Where no `rtol` was asked for, half of the dtype's digits deserve no warning.
    """
    dtype = solution.x.dtype
    goal, enough = (default_rtol(dtype), math.sqrt(torch.finfo(dtype).eps)) if rtol is None else (rtol, rtol)
    worst = max(solution.relative_residuals.tolist(), default=0.0)
    if Reason.PRECISION_LIMIT in solution.reasons and worst > enough:
        reached = f"The largest true relative residual is {worst:.1e}"
        warn(f"{Reason.PRECISION_LIMIT.value} {reached}, where rtol={goal:.1e}.", PrecisionWarning)
    return solution.raise_if_failed(goal).x


def indefinite(finding: str) -> NotPositiveSemidefiniteError:
    """Return the error that reports why a matrix is indefinite, with the remedy."""
    return NotPositiveSemidefiniteError(
        f"{finding} Add a prior precision (add_diagonal, or shift= where a call has it) that is large enough, or use "
        "a positive semidefinite approximation of the matrix."
    )


def caution(samples: int) -> float:
    """Return the factor that widens Student's t for few probes, whose zᵀAz are skewed.

    In the worst case, one dominant direction, zᵀAz is χ² with one degree of freedom. Student's t of K such samples
    covers 82 % at K = 3, 86 % at 10 and 88 % at 16, and its error falls as 1/K; widened by this factor it covers 93 %
    at every K. Sampling that ends at a tolerance needs the factor twice: it ends earlier if the samples happen to be
    small, because their mean and their spread are then small together.
    """
    return 1 + 6 / max(samples, 1)


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Summarised):
    """A stochastic number, or an array of numbers, with its error bar.

    ``stderr`` is the standard error from ``samples`` probes; ``samples == 0`` means a value without probes, exact up
    to rounding: its ``stderr`` is 0, or at PRECISION_LIMIT its bias bound. ``bias_bound`` bounds the error that more
    probes would not remove. The interval multiplies the standard error by ``inflation`` if it is known to be too small,
    as for leave-one-out estimates of diagonals, and multiplies Student's t by ``widening`` for few, skewed samples
    (`caution`), for xdiag also by the jackknife of each entry. Value, stderr and bias_bound share units and shape.
    ``matvecs`` counts products of the operator with one vector. ``reason`` is CONVERGED if rtol was met or the value is
    exact, otherwise the limit that ended the sampling, with its remedy.

    Examples:
        >>> trace = co.linalg.trace(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])))
        >>> float(trace), trace.samples, trace.reason.name
        (10.0, 0, 'CONVERGED')
        >>> low, high = trace.interval()
    """

    value: Float[Tensor, "*shape"]
    stderr: Float[Tensor, "*shape"]
    samples: int
    matvecs: int
    bias_bound: Float[Tensor, "*shape"] | float = 0.0
    reason: Reason = Reason.CONVERGED
    inflation: float = 1.0
    widening: Float[Tensor, "*shape"] | float = 1.0

    @classmethod
    def exact(cls, value: Tensor) -> Estimate:
        """Make an estimate from a value without probes or an error."""
        return cls(value, torch.zeros_like(value), 0, 0)

    @classmethod
    def rounded(
        cls,
        value: Tensor,
        error: Tensor | float,
        rtol: float | None = None,
        matvecs: int = 0,
        size: Tensor | float | None = None,
    ) -> Estimate:
        """Make an estimate from a value without probes that rounding may have changed by `error`.

        Its reason is PRECISION_LIMIT if the error exceeds rtol of `size`, by default `ROUNDING_SEEN` of the value
        (2-norms); the error is then the standard error, too.
        """
        error, aim = torch.as_tensor(error).detach().to(value).expand_as(value), ROUNDING_SEEN if rtol is None else rtol
        small = _norm(error) <= aim * _norm(value if size is None else size)
        stderr = torch.zeros_like(error) if small else error
        return cls(value, stderr, 0, matvecs, error, Reason.CONVERGED if small else Reason.PRECISION_LIMIT)

    def __float__(self) -> float:
        """Return the value of a single number; torch raises an error for an array."""
        return float(self.value)

    def __repr__(self) -> str:
        if self.value.ndim and self.samples:
            return super().__repr__()
        if not self.samples:
            bound = float(torch.as_tensor(self.bias_bound).max()) if self.value.numel() else 0.0
            exact = f"error at most {bound:.2g}" if bound else "exact"
            number = summary(self.value) if self.value.ndim else self.number
            return f"Estimate({number}, {exact}, matvecs={self.matvecs}, {self.reason.name})"
        low, high = self.interval()
        return (
            f"Estimate({self.number}, 95 % in [{float(low):.6g}, {float(high):.6g}], samples={self.samples}, "
            f"matvecs={self.matvecs}, {self.reason.name})"
        )

    @property
    def number(self) -> str:
        """The value of a single number as text, with its standard error if it has one."""
        error = f" ± {float(self.stderr):.2g}" if float(self.stderr) else ""
        return f"{float(self.value):.6g}{error}"

    def interval(self, level: float = 0.95) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
        """Return the interval of Student's t with samples − 1 degrees of freedom, widened, plus the bias bound.

        A single sample shows no spread, so its interval is the whole line.

        Args:
            level: the probability that the interval contains the true value.

        Returns:
            The lower and the upper end, each of the shape of the value.

        Raises:
            ValueError: ``level`` is not strictly between 0 and 1.
        """
        from scipy.special import stdtrit  # a slow import that few calls need

        check_options(level=level)
        half = torch.as_tensor(self.bias_bound, dtype=self.value.dtype, device=self.value.device)
        if self.samples == 1:
            half = torch.full_like(self.value, math.inf)
        elif self.samples > 1:
            quantile = float(stdtrit(self.samples - 1, 0.5 + level / 2))
            half = half + self.widening * self.inflation * quantile * self.stderr
        return self.value - half, self.value + half

    def within(self, rtol: float) -> bool:
        """Return whether inflated standard error and bias bound are each at most rtol of the value (2-norms)."""
        goal, bias = rtol * _norm(self.value), torch.as_tensor(self.bias_bound).expand_as(self.value)
        return self.inflation * _norm(self.stderr) <= goal and _norm(bias) <= goal

    def __add__(self, constant: float | Tensor) -> Estimate:
        """Shift the estimate by a known constant, with the same error bar."""
        return replace(self, value=self.value + constant)

    def __mul__(self, factor: float) -> Estimate:
        """Multiply the estimate and its error bar by a known factor."""
        size = abs(factor)
        product = replace(self, value=self.value * factor, stderr=self.stderr * size)
        return replace(product, bias_bound=self.bias_bound * size)

    __radd__ = __add__
    __rmul__ = __mul__


def _norm(value: Tensor | float) -> float:
    """Return the 2-norm of a tensor, the absolute value of a number."""
    if isinstance(value, Tensor):
        return float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64))
    return abs(value)


def add_estimates(one: Estimate, other: Estimate) -> Estimate:
    """Add two independent estimates: variances add up, and the smaller number of probes sets the degrees of freedom."""
    samples = [estimate.samples for estimate in (one, other) if estimate.samples]
    failed = [estimate.reason for estimate in (one, other) if estimate.reason is not Reason.CONVERGED]
    return Estimate(
        one.value + other.value,
        torch.hypot(one.inflation * one.stderr, other.inflation * other.stderr.to(one.stderr)),
        min(samples, default=0),
        one.matvecs + other.matvecs,
        torch.as_tensor(one.bias_bound) + torch.as_tensor(other.bias_bound),
        failed[0] if failed else Reason.CONVERGED,
        widening=torch.maximum(torch.as_tensor(one.widening), torch.as_tensor(other.widening)),
    )


AnyPairs = TypeVar("AnyPairs", bound="Pairs")


class Pairs(ByColumn):
    """A result of pairs of vectors, each with its true residual."""

    values: Float[Tensor, " k"]
    residuals: Float[Tensor, " k"]

    def _numbers(self) -> dict[str, Tensor]:
        return {"value": self.values, "residual": self.residuals}

    def raise_if_failed(self: AnyPairs) -> AnyPairs:
        """Return self if every pair converged or is as accurate as the dtype allows, otherwise raise RuntimeError."""
        if self.accepted:
            return self
        raise RuntimeError(self.failures("pairs", "true residual {}", self.residuals))


@dataclass(frozen=True, eq=False, repr=False)
class Eigenpairs(Summarised, Pairs):
    """Eigenvalues and eigenvectors as columns, with the residual ‖Av − λv‖ and a reason for each pair.

    ``history`` holds the recursion's residuals of the wanted pairs, best first, one row per check until all were found
    (in the interior, the residuals of the inverse), with inf for pairs that the space did not yet contain.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> pairs = co.linalg.eigsh(A, 2)
        >>> pairs.values.round(decimals=6), pairs.reasons[0].name
        (tensor([4., 3.], dtype=torch.float64), 'CONVERGED')
    """

    values: Float[Tensor, " k"]
    vectors: Float[Vectors, "n k"]
    residuals: Float[Tensor, " k"]
    reasons: tuple[Reason, ...]
    matvecs: int
    history: Float[Tensor, "looks k"] = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield the values and the vectors: ``values, vectors = eigsh(A, k)``."""
        return iter((self.values, self.vectors))


@dataclass(frozen=True, eq=False, repr=False)
class SingularTriplets(Summarised, Pairs):
    """Singular triplets of A ≈ U diag(values) Vᵀ, descending for the largest, ascending for the smallest.

    ``residuals`` are (‖Av − σu‖² + ‖Aᵀu − σv‖²)^½, recomputed by products; ``matvecs`` counts products of A and of Aᵀ;
    ``history`` is as in `Eigenpairs`.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0]).double())
        >>> triplets = co.linalg.svds(A, 2)
        >>> triplets.values.round(decimals=6), triplets.U.shape
        (tensor([4., 3.], dtype=torch.float64), torch.Size([3, 2]))
    """

    U: Float[Vectors, "m k"]
    values: Float[Tensor, " k"]
    V: Float[Vectors, "n k"]
    residuals: Float[Tensor, " k"]
    reasons: tuple[Reason, ...]
    matvecs: int
    history: Float[Tensor, "looks k"] = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield U, the values and V: ``U, values, V = svds(A, k)``."""
        return iter((self.U, self.values, self.V))


@dataclass(frozen=True, eq=False, repr=False)
class FunctionProduct(Summarised, ByColumn):
    """The columns f(A) b, with an estimate of the relative error ‖value − f(A) b‖/‖f(A) b‖ of each.

    ``error_estimates`` adds the truncation error of the method and the effect of rounding in A's dtype; it is ``inf``
    if neither can be estimated. ``reasons`` has one per column; ``matvecs`` counts products of A with one vector.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 9.0]).double())
        >>> product = co.linalg.sqrt(A, torch.ones(2).double())
        >>> product.value.round(decimals=6), product.reasons[0].name
        (tensor([2., 3.], dtype=torch.float64), 'CONVERGED')
    """

    value: Vectors
    error_estimates: Float[Tensor, " K"]
    reasons: tuple[Reason, ...]
    iterations: int
    matvecs: int

    def _numbers(self) -> dict[str, Tensor]:
        return {"estimate of the relative error": self.error_estimates}

    def raise_if_failed(self, rtol: float) -> FunctionProduct:
        """Return self if every column is accepted, otherwise raise FunctionConvergenceError."""
        if self.accepted:
            return self
        raise FunctionConvergenceError(self, rtol)
