"""An operator with a closed form, or a small matrix, as a preconditioner with a root and a log-determinant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from linear_operator import LinearOperator
from torch import Tensor

from curvops.linalg.core.vectors import Matrix, ScalarFunction, describe_square
from curvops.linalg.preconditioners.factored import FactoredPreconditioner, FilteredPreconditioner
from curvops.linalg.preconditioners.jacobi import block_jacobi

METHODS = ("__matmul__", "sqrt_inverse", "sqrt", "logdet", "bounds", "floor", "matvecs")


@dataclass(frozen=True, eq=False, repr=False)
class ClosedFormPreconditioner(FilteredPreconditioner):
    """An operator P whose solves, symmetric inverse root and log-determinant have a closed form.

    `least` is a lower bound of the eigenvalues of P⁻¹B for the matrix B that P was made for, if one is known.

    Examples:
        >>> P = co.linalg.as_preconditioner(co.linalg.Diagonal(torch.tensor([1.0, 4.0])))
        >>> P @ torch.ones(2), round(float(P.logdet()), 4)
        (tensor([1.0000, 0.2500]), 1.3863)
    """

    operator: LinearOperator
    form: Any
    extremes: tuple[float, float]
    matvecs: int = 0
    least: float | None = None

    def floor(self, level: float) -> float:
        """Return the known lower bound, or ``level`` over the largest eigenvalue of P."""
        return super().floor(level) if self.least is None else self.least

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
    if not isinstance(P, LinearOperator):
        if isinstance(P, FactoredPreconditioner):
            return P
        raise TypeError(
            f"a preconditioner must be an operator, a tensor, or have {', '.join(METHODS)}; got {type(P).__name__}."
        )
    n = describe_square(P).rows
    form = (P._closed_form() or P.add_diagonal(0.0)._closed_form()) if hasattr(P, "_closed_form") else None
    if form is None:
        raise TypeError(
            f"no closed form of this {type(P).__name__} of {n} rows is known (a low rank needs add_diagonal(shift)); "
            "sketch it with nystrom or cholesky instead, or pass its tensor if it is small."
        )
    form.require_definite()
    spectrum = getattr(form, "spectrum", None)
    with torch.no_grad():
        if spectrum is None:
            extremes = 0.0, float(P._diagonal().sum())
        else:
            extremes = float(spectrum.min()), float(spectrum.max())
    return ClosedFormPreconditioner(P, form, extremes)
