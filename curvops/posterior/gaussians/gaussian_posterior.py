"""A Gaussian over the weights that does not come from Laplace's approximation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Dense, Estimate, Inverse, Operator, logdet
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.operators.draws import draw
from curvops.operators import Linearization
from curvops.posterior.core.arguments import check_accuracy, check_linearization, check_operator, checked_count
from curvops.posterior.gaussians.gaussian_weights import GaussianWeights
from curvops.posterior.gaussians.posterior_record import OF_GAUSSIANS, record_of_gaussian
from curvops.posterior.predictions.outputs import DrawnOutputs, NormalOutputs


@dataclass(frozen=True, eq=False)
class GaussianPosterior(GaussianWeights):
    """A Gaussian N(θ*, Σ) at the weights of a linearisation, as variational inference and Kalman filters give it.

    It predicts, is saved and serves as the prior of the next data as a `Laplace` does, and has no evidence: nothing
    says which prior and which likelihood it came from. Predictions are those of the linearised network.
    """

    lin: Linearization
    covariance: LinearOperator
    """Σ, (D, D)."""
    precision: LinearOperator
    """Σ⁻¹, (D, D)."""
    temperature: float = 1.0

    @classmethod
    def of(
        cls, lin: Linearization, covariance: LinearOperator | None = None, precision: LinearOperator | None = None
    ) -> GaussianPosterior:
        """Make the posterior of a covariance, a precision, or both where each has a form of its own.

        Raises TypeError or ValueError for operators of another size, dtype or other parameters, or none.
        """
        check_linearization(lin)
        for name, operator in (("covariance", covariance), ("precision", precision)):
            if operator is not None:
                check_operator(name, operator, lin.model)
        if covariance is not None:
            return cls(lin, covariance, covariance.inverse() if precision is None else precision)
        if precision is None:
            raise ValueError("a Gaussian needs its covariance or its precision.")
        return cls(lin, precision.inverse(), precision)

    def deviations(self, k: int, generator: torch.Generator | None = None) -> Float[Tensor, "k D"]:
        """Draw from N(0, Σ), the posterior less its mean; draws are rows.

        Raises TypeError or ValueError for a k that is no whole number of draws, or a generator that is none.
        """
        return self._deviations(k, generator, 1e-3)

    def _deviations(self, k: int, generator: torch.Generator | None, rtol: float) -> Float[Tensor, "k D"]:
        check_accuracy(rtol, generator)
        return draw(self.covariance, checked_count(k), generator, frozenset((self.lin.memory,))).mT

    def _outputs(self) -> NormalOutputs:
        return NormalOutputs(self.lin, lambda rows, rtol: self.covariance, self.temperature)

    def _outputs_at(self, weights: Float[Tensor, "k D"]) -> DrawnOutputs:
        return DrawnOutputs(self.lin, weights)

    def _logdet(self, rtol: float, generator: torch.Generator | None) -> Estimate:
        """Return log det P, from the operator that is not the lazy inverse of the other."""
        known, sign = (self.precision, 1.0) if isinstance(self.covariance, Inverse) else (self.covariance, -1.0)
        exact = len(self.mean) <= routes.WHOLE or isinstance(known, Dense)
        estimate = known._logdet_estimate if isinstance(known, Operator) else partial(logdet, known)
        return estimate(rtol=rtol, max_matvecs=len(self.mean) if exact else None, generator=generator) * sign

    def prior_for(
        self,
        lin: Linearization,
        form: str | None = None,
        rank: int | None = None,
        generator: torch.Generator | None = None,
    ) -> tuple[LinearOperator, Estimate | None]:
        if lin.source == self.lin.source:
            raise ValueError(
                "the earlier posterior is of the data of this linearisation, which would count twice: linearise at the "
                "new data alone."
            )
        return super().prior_for(lin, form, rank, generator)

    def _record(self, inputs: Any) -> tuple[int, dict[str, Any]]:
        return OF_GAUSSIANS, record_of_gaussian(self.lin, self.covariance, self.precision, inputs)
