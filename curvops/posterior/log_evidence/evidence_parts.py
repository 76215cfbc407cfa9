"""The log evidence with the parts that add up to it."""

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
from curvops.summary import Table, Tabular


@dataclass(frozen=True, eq=False, repr=False)
class Evidence(Estimate, Tabular):
    """The log evidence log p(data) = log_likelihood − ½ (scatter + log_determinant_ratio) in nats, with its parts.

    `post.log_evidence()` returns it. Under a tempered likelihood it is log ∫ p(data | θ)^power p(θ) dθ.

    It is an `Estimate` with the error bar of the log-determinants; the other parts are exact. Sums with a constant and
    multiples have no such parts, and are plain Estimates.

    Examples:
        >>> evidence = post.log_evidence()
        >>> parts = evidence.log_likelihood - 0.5 * (evidence.scatter + evidence.log_determinant_ratio.value)
        >>> torch.allclose(evidence.value, parts)
        True
    """

    log_likelihood: Float[Tensor, ""] = field(kw_only=True)
    """The sum Σ_n log p(y_n | x_n, θ) in nats at the weights θ, times `power`."""
    scatter: Float[Tensor, ""] = field(kw_only=True)
    """The form (θ − m)ᵀA(θ − m) around the prior's mean m: twice the cost of θ under the prior, in nats."""
    log_determinant_ratio: Estimate = field(kw_only=True)
    """The difference log det P − log det A: twice the information about the weights in the data, in nats."""
    count: Callable[[], Estimate] = field(kw_only=True)
    theta: Float[Tensor, " D"] = field(kw_only=True)
    """The weights θ at which likelihood and scatter are evaluated."""
    mode: str = field(kw_only=True)
    """The kind of these weights: "map" for the network's own θ*, "linear" for the mode of its linear model."""
    power: float = field(kw_only=True)
    """The power 1/T of a tempered likelihood, the factor in `log_likelihood`."""

    @cached_property
    def effective_parameters(self) -> Estimate:
        """The number γ = tr(P⁻¹G), computed on first access: `post.effective_parameters` with the same tolerance."""
        return self.count()

    @property
    def estimate(self) -> Estimate:
        """The number with its error bar, without the parts."""
        return Estimate(**_numbers(self))

    def __add__(self, constant: float | Tensor) -> Estimate:
        return self.estimate + constant

    def __mul__(self, factor: float) -> Estimate:
        return self.estimate * factor

    __radd__ = __add__
    __rmul__ = __mul__

    def _tables(self) -> list[Table]:
        ratio = self.log_determinant_ratio
        parts = [
            ("log evidence", self.number),
            ("log likelihood", f"{float(self.log_likelihood):.6g}"),
            ("scatter", f"{float(self.scatter):.6g}"),
            ("log determinant ratio", ratio.number),
        ]
        return [Table(("", "nats"), parts, [f"At the weights of mode={self.mode!r}; {self.reason.name}."])]

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
    """Compute the log evidence with its parts; the search for the linear model's mode starts at `start`."""
    cache, theta = terms.cache, terms.lin.theta
    cache.require_gradients()
    if mode == "map":  # rejects unknown data before products are spent
        log_likelihood, reason = cache.log_likelihood(), None
    else:
        found = find_mode(terms, start)
        theta, log_likelihood = found.theta, linear_log_likelihood(cache, found.theta)
        reason = None if found.converged else found.reason
    ratio = log_ratio(terms, rtol, generator)
    ratio = ratio if reason is None else replace(ratio, reason=reason)
    count = partial(count_parameters, terms, rtol, generator)
    return add_up(log_likelihood, terms.prior.quadratic(theta), ratio, count, theta, mode, cache.power)


def add_up(
    log_likelihood: Tensor,
    scatter: Tensor,
    ratio: Estimate,
    count: Callable[[], Estimate],
    theta: Float[Tensor, " D"],
    mode: str,
    power: float = 1.0,
) -> Evidence:
    """Return the evidence as the sum of its parts."""
    return Evidence(
        **_numbers(ratio * -0.5 + (log_likelihood - 0.5 * scatter)),
        log_likelihood=log_likelihood,
        scatter=scatter,
        log_determinant_ratio=ratio,
        count=count,
        theta=theta,
        mode=mode,
        power=power,
    )
