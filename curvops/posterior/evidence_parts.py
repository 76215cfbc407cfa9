"""The log evidence with the parts that it is the sum of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Estimate


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
    mode: str = field(default="map", kw_only=True)
    """Which these are: "map", the network's own θ*, or "linear", the mode of its linear model."""
    power: float = field(default=1.0, kw_only=True)
    """1/T of a tempered likelihood, by which `log_likelihood` is multiplied."""

    @classmethod
    def of(
        cls,
        theta: Tensor,
        log_likelihood: Tensor,
        scatter: Tensor,
        log_ratio: Estimate,
        count: Callable[[], Estimate],
        mode: str = "map",
        power: float = 1.0,
    ) -> Evidence:
        """The sum of the parts."""
        whole = log_ratio * -0.5 + (log_likelihood - 0.5 * scatter)
        return cls(
            **_numbers(whole),
            log_likelihood=log_likelihood,
            scatter=scatter,
            log_determinant_ratio=log_ratio,
            count=count,
            theta=theta,
            mode=mode,
            power=power,
        )

    @cached_property
    def effective_parameters(self) -> Estimate:
        """γ = tr(P⁻¹G), counted when first asked for: `post.effective_parameters` with the same tolerance."""
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
