"""The log evidence and the parts that add up to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Estimate
from curvops.posterior.core.priors import PrecisionTerms
from curvops.posterior.log_evidence.determinants import count_parameters, log_ratio
from curvops.posterior.solves.linear_mode import find_mode, linear_log_likelihood


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Estimate):
    """log p(data) = log_likelihood − ½ (scatter + log_determinant_ratio), in nats, by `post.log_evidence()`.

    Of a tempered likelihood it is log ∫ p(data | θ)^power p(θ) dθ.

    An `Estimate`: its error bar is that of the log-determinants, the other parts are exact. A sum with a constant or a
    multiple has no such parts, and is a plain Estimate.
    """

    log_likelihood: Float[Tensor, ""] = field(kw_only=True)
    """Σ_n log p(y_n | x_n, θ) in nats, at θ, times `power`."""
    scatter: Float[Tensor, ""] = field(kw_only=True)
    """(θ − m)ᵀA(θ − m) around the prior's mean m: twice what the prior costs θ, in nats."""
    log_determinant_ratio: Estimate = field(kw_only=True)
    """log det P − log det A: twice the nats that the data gain on the weights."""
    count: Callable[[], Estimate] = field(kw_only=True)
    theta: Float[Tensor, " D"] = field(kw_only=True)
    """The weights θ at which likelihood and scatter are taken."""
    mode: str = field(kw_only=True)
    """Which these are: "map", the network's own θ*, or "linear", the mode of its linear model."""
    power: float = field(kw_only=True)
    """1/T of a tempered likelihood, by which `log_likelihood` is multiplied."""

    @cached_property
    def effective_parameters(self) -> Estimate:
        """γ = tr(P⁻¹G), computed when first asked for: `post.effective_parameters` with the same tolerance."""
        return self.count()

    @property
    def estimate(self) -> Estimate:
        """The number with its error bar alone."""
        return Estimate(**_numbers(self))

    def __add__(self, constant: float | Tensor) -> Estimate:
        return self.estimate + constant

    def __mul__(self, factor: float) -> Estimate:
        return self.estimate * factor

    __radd__ = __add__
    __rmul__ = __mul__

    def __repr__(self) -> str:
        whole = super().__repr__().removeprefix("Estimate(").removesuffix(")")
        parts = (
            f"log_likelihood={float(self.log_likelihood):.6g}, scatter={float(self.scatter):.6g}, "
            f"log_determinant_ratio={float(self.log_determinant_ratio.value):.6g}, mode={self.mode!r}"
        ) + ("" if self.power == 1 else f", power={self.power:.6g}")
        return f"Evidence({whole}, {parts})"


def _numbers(estimate: Estimate) -> dict[str, Any]:
    return {each.name: getattr(estimate, each.name) for each in fields(Estimate)}


def find_evidence(
    terms: PrecisionTerms,
    start: Float[Tensor, " D"] | None,
    rtol: float,
    generator: torch.Generator | None,
    mode: str,
) -> Evidence:
    """Compute the log evidence with its parts; the search for the linear model's mode begins at `start`."""
    cache, theta = terms.cache, terms.lin.theta
    cache.require_gradients()
    if mode == "map":  # refuses data that are not known, before products are spent
        log_likelihood, reason = cache.log_likelihood(), None
    else:
        found = find_mode(terms, start)
        theta, log_likelihood = found.theta, linear_log_likelihood(cache, found.theta)
        reason = None if found.converged else found.reason
    ratio = log_ratio(terms, rtol, generator)
    ratio = ratio if reason is None else replace(ratio, reason=reason)
    scatter = terms.prior.quadratic(theta)
    return Evidence(
        **_numbers(ratio * -0.5 + (log_likelihood - 0.5 * scatter)),
        log_likelihood=log_likelihood,
        scatter=scatter,
        log_determinant_ratio=ratio,
        count=partial(count_parameters, terms, rtol, generator),
        theta=theta,
        mode=mode,
        power=cache.power,
    )
