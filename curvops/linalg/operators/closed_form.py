"""Closed forms of P = A + diag(d), the part shared by all with a known eigenbasis, and preconditioners made of them.

Each operand's file contains its closed form, which the operand's class names as its `_damped_form`. The form is built
from (A, d), with d a number or a vector, and factorises once, on first use. All results are exact and consist of
differentiable operations, with one exception: the eigenvectors of a Kronecker product have no gradient if eigenvalues
of a factor coincide (its solves, through `linalg.solve`, and its log-determinants do have one).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.errors import NotPositiveSemidefiniteError, PrecisionWarning, warn
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.vectors import ROUNDING_SEEN, Matrix, ScalarFunction, describe_square
from curvops.linalg.operators.draws import normal
from curvops.linalg.preconditioners.factored import FactoredPreconditioner, FilteredPreconditioner
from curvops.linalg.preconditioners.jacobi import block_jacobi
from curvops.summary import name_of


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """The decomposition P = U diag(values) Uᵀ, for functions of P that share rotations of blocks (n, K)."""

    values: Tensor
    rotate: Callable[[Tensor], Tensor]
    """The map B -> U B."""
    rotate_back: Callable[[Tensor], Tensor]
    """The map B -> Uᵀ B."""


class DiagonalPlusRoot(NamedTuple):
    """A matrix diag(w) ± (V M)(V M)ᵀ by its parts: w alone, or with V (n, r), M (r, s) and the sign."""

    weights: Tensor
    vectors: Tensor | None = None
    mixing: Tensor | None = None
    sign: int = 1


class ClosedForm(ABC):
    """Exact solves, determinants, draws and roots of P = A + diag(d); blocks are (n, K)."""

    def __init__(self, base: Any, shift: Tensor) -> None:
        self.base, self.shift = base, shift

    @property
    def holds(self) -> bool:
        """Whether this form holds for the operand and the shift; otherwise P is treated like any other matrix."""
        return True

    def require_definite(self) -> None:  # noqa: B027 - some hold only for definite P
        """Raise NotPositiveSemidefiniteError (a ValueError) if P is singular or indefinite."""

    @abstractmethod
    def solve(self, block: Tensor) -> Tensor:
        """Return P⁻¹ B."""

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return log det P in nats, 0-d."""

    def logdet_error(self) -> float:
        """Return the largest change of `logdet`, in nats, that rounding of the operand's eigenvalues can cause."""
        return 0.0

    def logdet_estimate(self, rtol: float) -> Estimate:
        """Return `logdet` in float64; its rounding is compared with rtol of log det P − log det diag(d)."""
        value = self.logdet().double()
        size, shift = value.detach(), self.shift.detach().double()
        # The eigenvalues are added to the shift, and the sum of their logarithms is in the operand's dtype.
        error = self.logdet_error() + torch.finfo(self.base.dtype).eps * (self.base.shape[-1] + abs(float(size)))
        if bool((shift > 0).all()):
            size = size - shift.log().expand(self.base.shape[-1]).sum()
        return Estimate.rounded(value, error, rtol, size=size)

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of P⁻¹, (n,)."""

    def inverse_diagonal_error(self) -> Tensor:
        """Return the largest change of `inverse_diagonal`, (n,), that this rounding can cause."""
        return self.inverse_diagonal().detach() * math.expm1(min(self.logdet_error(), 50.0))  # an unbounded error

    def inverse_parts(self) -> DiagonalPlusRoot | None:
        """Return P⁻¹ as a diagonal plus a term of low rank, if it has this form."""
        return None

    @abstractmethod
    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Draw k columns of N(0, P), (n, k)."""

    @abstractmethod
    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Draw k columns of N(0, P⁻¹), (n, k)."""

    @abstractmethod
    def inverse_root(self, block: Tensor) -> Tensor:
        """Return P^-½ B with the symmetric root; raise ValueError if it is not cheap."""

    def eigenbasis(self) -> Eigenbasis | None:
        """Return all eigenvectors and eigenvalues of P, if this form has them."""
        return None

    def _normal(self, k: int, generator: torch.Generator | None) -> Tensor:
        return normal(self.base.shape[-1], k, self.shift.dtype, self.shift.device, generator)


def closed_form(base: Any, shift: Tensor) -> ClosedForm | None:
    """Return the form that A's class names for A + diag(d), whether it holds or not; None if the class names none."""
    form_class: type[ClosedForm] | None = getattr(base, "_damped_form", None)
    return None if form_class is None else form_class(base, shift)


class ScaledForm(ClosedForm):
    """The closed form of c A + diag(d) = c (A + diag(d / c)), c > 0, by the form of A, whose factors serve every c."""

    @property
    def holds(self) -> bool:
        return not self.factor.ndim and bool(self.factor > 0) and self.inner is not None and self.inner.holds

    @cached_property
    def inner(self) -> Any:
        """The closed form of A + diag(d / c), or None."""
        return closed_form(self.base.base, self.shift / self.factor)

    @property
    def factor(self) -> Tensor:
        """The number c."""
        factor: Tensor = self.base.factor
        return factor

    def require_definite(self) -> None:
        self.inner.require_definite()

    def solve(self, block: Tensor) -> Tensor:
        return self.inner.solve(block) / self.factor

    def logdet(self) -> Tensor:
        return self.inner.logdet() + self.base.shape[-1] * self.factor.log()

    def logdet_error(self) -> float:
        return self.inner.logdet_error()

    def inverse_diagonal(self) -> Tensor:
        return self.inner.inverse_diagonal() / self.factor

    def inverse_diagonal_error(self) -> Tensor:
        return self.inner.inverse_diagonal_error() / self.factor.detach()

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.inner.draw(k, generator) * self.factor.sqrt()

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.inner.draw_inverse(k, generator) * self.factor.rsqrt()

    def inverse_root(self, block: Tensor) -> Tensor:
        return self.inner.inverse_root(block) * self.factor.rsqrt()

    def eigenbasis(self) -> Eigenbasis | None:
        basis = self.inner.eigenbasis()
        return None if basis is None else replace(basis, values=basis.values * self.factor)


class Spectral(ClosedForm):
    """A closed form P = U diag(p) Uᵀ with U known by its products: everything is a function of p."""

    @property
    @abstractmethod
    def spectrum(self) -> Tensor:
        """The eigenvalues p, (n,)."""

    @abstractmethod
    def rotate(self, block: Tensor) -> Tensor:
        """Return U B."""

    @abstractmethod
    def rotate_back(self, block: Tensor) -> Tensor:
        """Return Uᵀ B."""

    @cached_property
    def definite_spectrum(self) -> Tensor:
        """The eigenvalues, all positive; NotPositiveSemidefiniteError if one is not."""
        smallest = self.spectrum.detach().min()
        if not bool(smallest > 0):
            raise not_definite(self.base, float(smallest))
        return self.spectrum

    def require_definite(self) -> None:
        _ = self.definite_spectrum

    def eigenbasis(self) -> Eigenbasis | None:
        return Eigenbasis(self.spectrum, self.rotate, self.rotate_back)

    def solve(self, block: Tensor) -> Tensor:
        return self._filtered(self.definite_spectrum.reciprocal(), block)

    def logdet(self) -> Tensor:
        return self.definite_spectrum.double().log().sum().to(self.base.dtype)

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        if bool((self.spectrum < 0).any()):
            raise not_definite(self.base, float(self.spectrum.min()))
        return self._filtered(self.spectrum.sqrt(), self._normal(k, generator))

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self._filtered(self.definite_spectrum.rsqrt(), self._normal(k, generator))

    def inverse_root(self, block: Tensor) -> Tensor:
        return self._filtered(self.definite_spectrum.rsqrt(), block)

    def _filtered(self, weights: Tensor, block: Tensor) -> Tensor:
        return self.rotate(weights.unsqueeze(-1) * self.rotate_back(block))


def warn_of_rounding(base: LinearOperator, error: float) -> None:
    """Warn with `PrecisionWarning` if relative errors of results may exceed `ROUNDING_SEEN`."""
    if error > ROUNDING_SEEN:
        warn(
            f"{type(base).__name__} {tuple(base.shape)} + diag(d): rounding of {base.dtype} may have changed the "
            f"smallest eigenvalues of the sum by up to {error:.2g} of their size, and variances and solutions by as "
            "much. "
            "Compute in float64 (lin.cast(torch.float64)), or choose a larger prior precision.",
            PrecisionWarning,
        )


def not_definite(base: LinearOperator, smallest: float) -> NotPositiveSemidefiniteError:
    """Return the error that names the operand, its smallest eigenvalue and the remedy."""
    return NotPositiveSemidefiniteError(
        f"{type(base).__name__} {tuple(base.shape)} + diag(d) is singular or indefinite: its smallest eigenvalue is "
        f"{smallest:.3g}, at most 0 to the rounding of {base.dtype}. Add a prior precision or a noise (add_diagonal) "
        "that is large enough, compute in float64, or use the pseudo-inverse."
    )


def not_finite(what: str, dtype: torch.dtype) -> ValueError:
    """Return the error that names a matrix which holds NaN or Inf, and the remedy."""
    return ValueError(
        f"{what} holds NaN or Inf: if the inputs are finite, their squares leave the range of {name_of(dtype)}. Scale "
        "them, or use a dtype with a wider range."
    )


@dataclass(frozen=True, eq=False, repr=False)
class ClosedFormPreconditioner(FilteredPreconditioner):
    """An operator P whose solves, symmetric inverse root and log-determinant have a closed form.

    Examples:
        >>> P = co.linalg.as_preconditioner(co.linalg.Diagonal(torch.tensor([1.0, 4.0])))
        >>> P @ torch.ones(2), round(float(P.logdet()), 4)
        (tensor([1.0000, 0.2500]), 1.3863)
    """

    operator: LinearOperator
    form: Any
    extremes: tuple[float, float]
    matvecs: int = 0

    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P, exact."""
        return self.form.logdet().detach()

    def bounds(self) -> tuple[float, float]:
        """Return the extreme eigenvalues if the form has its spectrum, otherwise 0 and the trace of P."""
        return self.extremes

    def _filtered(self, function: ScalarFunction, V: Tensor) -> Tensor:
        with torch.no_grad():
            if function is torch.reciprocal:
                return self.form.solve(V)
            root = self.form.inverse_root(V)
            return root if function is torch.rsqrt else self.operator._matmul(root)


def as_preconditioner(P: FactoredPreconditioner | Matrix) -> FactoredPreconditioner:
    """Make P ≈ A + μI, such as ``KFAC(lin).add_diagonal(μ)``, a preconditioner for any solver and for ``logdet``.

    P is an operator with a closed form (a damped KFAC, EKFAC, LowRank, DirectSum or Dense; Diagonal), a positive
    definite tensor, which is factorised, or a preconditioner, which is returned. An operator passed to a solver as
    ``preconditioner`` is multiplied by, and must then be P⁻¹; here the operator is P.

    Args:
        P: (n, n), an operator with a closed form, a positive definite tensor, or a preconditioner.

    Returns:
        A FactoredPreconditioner, which multiplies by P⁻¹ and has P's root and log-determinant.

    Raises:
        TypeError: no closed form of P is known.
        NotPositiveSemidefiniteError: P is not positive definite.

    Examples:
        >>> P = co.linalg.as_preconditioner(co.KFAC(lin).add_diagonal(1.0))
        >>> co.linalg.cg(co.GGN(lin).add_diagonal(1.0), torch.ones(17), preconditioner=P).reasons[0].name
        'CONVERGED'
    """
    if isinstance(P, Tensor):
        return block_jacobi(P, describe_square(P).rows)
    if isinstance(P, FactoredPreconditioner) and not isinstance(P, LinearOperator):
        return P
    describe_square(P)
    form = (P._closed_form() or P.add_diagonal(0.0)._closed_form()) if hasattr(P, "_closed_form") else None
    if form is None:
        hint = "use nystrom or cholesky, and for a low rank add_diagonal(shift)"
        raise TypeError(f"no closed form of this {type(P).__name__} is known: {hint}.")
    form.require_definite()
    spectrum = getattr(form, "spectrum", None)
    with torch.no_grad():
        if spectrum is None:
            extremes = 0.0, float(P._diagonal().sum())
        else:
            extremes = float(spectrum.min()), float(spectrum.max())
    return ClosedFormPreconditioner(P, form, extremes)
