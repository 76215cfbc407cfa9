"""The Gaussian prior of the weights, N(m, A⁻¹), and its sum with a curvature, a posterior's precision P = G + A.

A is a number, a number per layer or weight, an operator, or an earlier posterior's precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import identify
from curvops.checks import carries_graph
from curvops.linalg import Damped, Estimate, Operator
from curvops.linalg.core.matrix_identity import form_of
from curvops.linalg.core.symmetry import is_psd
from curvops.linalg.operators.base import as_part, number_of
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.network import Model, read_mean, read_precision
from curvops.operators import Linearization
from curvops.operators.kfac.kfac_sum import has_kronecker_blocks, kfac_sum
from curvops.posterior.core.arguments import check_operator
from curvops.posterior.core.curvature_cache import CurvatureCache
from curvops.summary import size_of

PART = 2**18
"""Weights that are converted to double precision at a time."""


class WithCurvature(NamedTuple):
    """The sum P = G + A as an operator, and ‖C − Ĉ‖_F / ‖C‖_F if its curvature C is stored as Ĉ; otherwise None."""

    precision: Any
    error: Estimate | None = None


@dataclass(frozen=True, eq=False)
class Prior:
    """A Gaussian prior N(m, A⁻¹): `precision` A, 0-d, a diagonal (D,) or an operator; `mean`, 0-d or (D,)."""

    precision: Tensor | LinearOperator
    mean: Float[Tensor, ""] | Float[Tensor, " D"]
    chosen_by: str = ""
    """What chose the precision, "the evidence" or "held-out data"; empty if it was given."""

    @property
    def printed(self) -> str:
        """The precision in a few words, with what chose it."""
        A = self.precision
        value = number_of(A, size_of(A)) if isinstance(A, Tensor) else as_part(A)
        return f"{value} by {self.chosen_by}" if self.chosen_by else value

    def facts(self) -> dict[str, Any]:
        """Return by name what must be equal on all ranks; operators are told by their kinds and numbers alone."""
        A = self.precision
        precision = identify(A) if isinstance(A, Tensor) else form_of(A)
        return {"the prior's precision": precision, "the prior's mean": identify(self.mean)}

    @property
    def diagonal(self) -> Tensor | None:
        """Return A as a 0-d tensor or its diagonal (D,); None for an operator."""
        return self.precision if isinstance(self.precision, Tensor) else None

    def plus(self, curvature: LinearOperator) -> WithCurvature:
        """Return G + A, with A's own shift on the outside."""
        if self.diagonal is not None:
            return WithCurvature(curvature.add_diagonal(self.diagonal))
        return WithCurvature(curvature + self.precision)

    def product(self, vector: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return A v."""
        if isinstance(self.precision, Tensor):
            return self.precision * vector
        product: Tensor = self.precision._matmul(vector.unsqueeze(-1)).squeeze(-1)
        return product

    def quadratic(self, theta: Float[Tensor, " D"]) -> Float[Tensor, ""]:
        """Return (θ − m)ᵀ A (θ − m) in float64, minus twice the log density without its constant."""
        # In double precision, since the result may be as large as 1e6 nats; in parts, since copies are twice as large.
        if self.diagonal is not None:
            parts = zip(*(v.expand_as(theta).split(PART) for v in (theta, self.mean, self.diagonal)))
            return torch.stack([(A.double() * (t.double() - m.double()).square()).sum() for t, m, A in parts]).sum()
        gap = theta.double() - self.mean.double()
        return gap @ self.product(gap.to(theta.dtype)).double()

    def gradient(self, theta: Float[Tensor, " D"]) -> Float[Tensor, " D"]:
        """Return A (θ − m), the gradient of the negative log density."""
        with torch.no_grad():
            return self.product(theta - self.mean)


@dataclass(frozen=True, eq=False)
class KroneckerPrior(Prior):
    """A prior of Kronecker blocks plus a diagonal; its sum with a KFAC has the same form."""

    def plus(self, curvature: LinearOperator) -> WithCurvature:
        """Return G + A, for a KFAC with one Kronecker product per block (the nearest to the sum)."""
        if not has_kronecker_blocks(curvature):
            return super().plus(curvature)
        assert isinstance(self.precision, Damped)
        blocks, error = kfac_sum(self.precision.base, curvature)
        return WithCurvature(blocks.add_diagonal(self.precision.shift), error)


@dataclass(frozen=True, eq=False)
class PrecisionTerms:
    """The terms of a posterior's precision P = G + A: the curvature, with its cache, and the prior."""

    cache: CurvatureCache
    prior: Prior

    @property
    def lin(self) -> Linearization:
        """The linearisation of the posterior's weights."""
        return self.cache.lin

    @property
    def curvature(self) -> LinearOperator:
        """The curvature G."""
        return self.cache.curvature

    @property
    def A(self) -> Tensor | None:
        """The prior precision as a 0-d tensor or its diagonal (D,); None for an operator."""
        return self.prior.diagonal

    @cached_property
    def sum(self) -> WithCurvature:
        """The sum P and its error, computed once: all methods of a posterior share the factorisation."""
        return self.prior.plus(self.curvature)

    @property
    def precision(self) -> Any:
        """The operator P."""
        return self.sum.precision

    @property
    def closed_form(self) -> ClosedForm | None:
        """The closed form of P, if it has a valid one."""
        form: ClosedForm | None = self.precision._closed_form()
        return form


def read_prior(prior_precision: Any, prior_mean: Any, network: Model, posterior: bool = False) -> Prior:
    """Return the prior that a user's arguments describe; `posterior` means that an earlier one gave the precision.

    Raises TypeError for an argument of another kind. Raises ValueError for a wrong size, a precision that is not
    positive and finite, a mapping that does not name each parameter once, or an operator that is not known to be
    positive semidefinite or that belongs to other parameters or other weights.
    """
    if isinstance(prior_precision, LinearOperator):
        return Prior(_checked_operator(prior_precision, network, posterior), read_mean(prior_mean, network))
    precision = read_precision("prior_precision", prior_precision, network, ", an operator or an earlier posterior")
    return Prior(precision, read_mean(prior_mean, network))


def _checked_operator(given: LinearOperator, network: Model, definite: bool) -> LinearOperator:
    """Return a precision operator (D, D), after checking that it belongs to these weights or to none."""
    kind = type(given).__name__
    if not isinstance(given, Operator):
        raise TypeError(f"prior_precision is a {kind}; pass an operator of curvops, or co.linalg.Dense(matrix).")
    check_operator("prior_precision", given, network)
    if not (definite or is_psd(given)):
        raise ValueError(
            f"prior_precision {kind} is not known to be positive semidefinite; pass co.linalg.Dense(matrix, psd=True), "
            "a curvature plus a number, or a subclass of co.linalg.Operator with psd = True."
        )
    if carries_graph(given.representation()):
        raise ValueError(
            f"prior_precision {kind} has tensors that require a gradient, and a prior given as an operator carries "
            "none: detach them, or pass a number or a vector."
        )
    return given
