"""What posteriors with one curvature share, whatever their priors: each part computes when it is first asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator.operators import LinearOperator

from curvops.operators import Linearization
from curvops.posterior.likelihood_terms import LikelihoodTerms
from curvops.posterior.solving import Solving
from curvops.posterior.spectrum import Spectrum


@dataclass(frozen=True, eq=False)
class Shared:
    """The likelihood at the weights, the curvature's spectrum, and what its systems are solved with."""

    terms: LikelihoodTerms
    spectrum: Spectrum
    solving: Solving

    @classmethod
    def of(cls, lin: Linearization, curvature: LinearOperator, generator: torch.Generator | None = None) -> Shared:
        """Nothing computed yet; `generator` is the source of sketches that are asked for without one."""
        spectrum = Spectrum(LikelihoodTerms(lin, curvature))
        return cls(spectrum.terms, spectrum, Solving(spectrum, generator))

    def state(self) -> dict[str, Any]:
        """What tuning draws at one prior and uses at the next, as plain values and tensors: sketches, a quadrature."""
        return {"sketches": self.solving.state(), "range": self.spectrum.state()}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Take what was drawn for the same curvature."""
        self.solving.recall(state["sketches"])
        self.spectrum.recall(state["range"])
