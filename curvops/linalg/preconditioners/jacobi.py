"""Jacobi's preconditioner: the diagonal of a positive semidefinite matrix.

>>> import torch
>>> from curvops.linalg import diagonal_preconditioner
>>> P = diagonal_preconditioner(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), shift=1.0)
>>> P @ torch.ones(2)
tensor([0.3333, 0.2500])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import checked_number
from curvops.linalg.core.entries import diagonal_of
from curvops.linalg.core.results import INDEFINITE_REMEDY, NotPositiveSemidefinite
from curvops.linalg.core.vectors import Matrix, ScalarFunction, describe_square
from curvops.linalg.preconditioners.factored import FilteredPreconditioner


@dataclass(frozen=True, eq=False)
class DiagonalPreconditioner(FilteredPreconditioner):
    """The preconditioner P = diag(entries), all positive."""

    entries: Float[Tensor, " n"]
    matvecs: int = 0

    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P, exact."""
        return self.entries.double().log().sum()

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest entry."""
        return float(self.entries.amin()), float(self.entries.amax())

    def _filtered(self, function: ScalarFunction, V: Tensor) -> Tensor:
        if function is torch.reciprocal:
            return V / self.entries.unsqueeze(-1)  # rounded once
        return V * function(self.entries).unsqueeze(-1)


def diagonal_preconditioner(A: Matrix | Float[Tensor, " n"], shift: float | int = 0.0) -> DiagonalPreconditioner:
    """Make P = diag(A) + shift I for a matrix or operator A (n, n) or its diagonal (n,), maybe an estimate.

    Its cost is that of A's diagonal: n products for an operator without a cheaper way, which are counted.

    Raises:
        ValueError: A is neither square nor a vector, or an entry is not finite.
        NotPositiveSemidefinite: an entry of P is not positive.
    """
    checked_number("shift", shift, "[0, inf)")
    if isinstance(A, Tensor) and A.ndim == 1:
        diagonal, spent = A.detach(), 0
    else:
        describe_square(A)
        diagonal, spent = diagonal_of(A)
    entries = diagonal + shift
    if not bool(torch.isfinite(entries).all()):
        raise ValueError("the diagonal of A holds NaN or Inf; check the parameters and the data.")
    if not bool((entries > 0).all()):
        worst = int(entries.argmin())
        raise NotPositiveSemidefinite(
            f"entry {worst} of the diagonal is {float(entries[worst]):.3e}, not positive. {INDEFINITE_REMEDY}"
        )
    return DiagonalPreconditioner(entries, spent)
