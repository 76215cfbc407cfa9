"""The options of a sampler's steps: schedules of step size and temperature, and the preconditioner D.

D enters as D g in the drift, D^½ ξ in the noise and D⁻¹ m in kinetic energies.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import check_kind, check_like, check_shape, checked_number, checked_whole
from curvops.linalg import Diagonal, Inverse, Operator
from curvops.linalg.core.spaces import spaces_of
from curvops.linalg.core.symmetry import is_psd
from curvops.linalg.operators.closed_form import Eigenbasis
from curvops.linalg.operators.draws import draw
from curvops.network import TangentSpace
from curvops.sampling.state import NoiseSource, Structure
from curvops.summary import Summarised

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class Constant:
    """A schedule with the same value at every step.

    Args:
        value: the value at every step.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, co.sampling.Constant(1e-3))  # as sgld(density, 1e-3)
    """

    value: float

    def __call__(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class RobbinsMonro:
    """The schedule a (b + t)^−γ: for γ in (½, 1] steps sum to ∞, but their squares do not (Robbins & Monro 1951).

    Args:
        a: a > 0, the scale.
        b: b > 0, the offset of the step.
        gamma: γ, the exponent.

    Raises:
        TypeError, ValueError: a number is of another kind or out of range.

    Examples:
        >>> schedule = co.sampling.RobbinsMonro(a=1e-2, b=10.0)
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, schedule)
    """

    a: float
    b: float = 1.0
    gamma: float = 0.55

    def __post_init__(self) -> None:
        checked_number("a", self.a)
        checked_number("b", self.b)
        if not 0.5 < checked_number("gamma", self.gamma) <= 1:
            raise ValueError(
                f"gamma must lie in (½, 1], got {self.gamma}: at ½ or below, the squared steps add up to ∞."
            )

    def __call__(self, step: int) -> float:
        return self.a * (self.b + step) ** -self.gamma


@dataclass(frozen=True)
class Cosine:
    """A schedule from `first` to `last` along half a cosine, restarted every `period` steps (Zhang et al. 2020).

    Args:
        first: the value at the start of each period.
        period: the number of steps of a period.
        last: the value towards its end.

    Examples:
        >>> schedule = co.sampling.Cosine(first=1e-2, period=100)
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> sampler = co.sampling.sgld(density, schedule)
    """

    first: float
    period: int
    last: float = 0.0

    def __post_init__(self) -> None:
        checked_number("first", self.first)
        checked_number("last", self.last, "[0, inf)")
        checked_whole("period", self.period, kind="a whole number of steps")

    def __call__(self, step: int) -> float:
        share = (1 + math.cos(math.pi * (step % self.period) / self.period)) / 2
        return self.last + (self.first - self.last) * share


def as_schedule(name: str, value: Any, zero: bool = False) -> Schedule:
    """Return the schedule for a number, which is checked, or for a function of the step, whose values `at` checks."""
    if callable(value) and not isinstance(value, type):
        return value
    kind = "a number or a function of the step, such as RobbinsMonro(a)"
    return Constant(checked_number(name, value, "[0, inf)" if zero else "(0, inf)", kind))


def at(name: str, schedule: Schedule, step: int) -> float:
    """Return the schedule's value at a step, 0 or more; the value is checked unless the schedule is constant."""
    if isinstance(schedule, Constant):
        return schedule.value
    return checked_number(f"{name} at step {step}", schedule(step), "[0, inf)")


@dataclass(frozen=True, eq=False, repr=False)
class Isotropic(Summarised):
    """The metric D = scale · I, for vectors (d,) or (k, d)."""

    scale: float = 1.0

    def check(self, structure: Structure, theta: Tensor) -> None:
        """Raise ValueError unless D is a matrix (d, d) on these parameters."""

    def product(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Return D v; v itself if D is the identity."""
        return v if self.scale == 1 else v * self.scale

    def solve(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Return D⁻¹ v; v itself if D is the identity."""
        return v if self.scale == 1 else v / self.scale

    def noise(self, source: NoiseSource, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        """Draw D^½ ξ for standard normal ξ, in new memory."""
        drawn = source.normal(like)
        return drawn if self.scale == 1 else drawn.mul_(self.scale**0.5)

    def kick(self, target: Tensor, g: Float[Tensor, "*k d"], drift: float, spread: float, source: NoiseSource) -> None:
        """Add drift · D g + spread · D^½ ξ to target, in place; nothing is drawn if spread is 0."""
        target.add_(g, alpha=drift * self.scale)
        if spread:
            target.add_(source.normal(g), alpha=spread * self.scale**0.5)


@dataclass(frozen=True, eq=False, repr=False)
class OperatorMetric(Isotropic):
    """A metric D given by an operator, constant between two refreshes: terms with its derivative are not needed."""

    D: Operator = field(kw_only=True)

    def check(self, structure: Structure, theta: Tensor) -> None:
        kind, d = type(self.D).__name__, structure.size
        check_shape(f"preconditioner {kind}", self.D, (d, d))
        check_like(f"preconditioner {kind}", self.D, theta, "params")
        space = spaces_of(self.D)[0]
        if isinstance(space, TangentSpace) and space.index is None and structure.shapes != space.shapes:
            raise ValueError(f"preconditioner {kind} and params have the parameters in different orders.")

    @cached_property
    def _basis(self) -> Eigenbasis | None:
        """The eigenbasis of D, if its closed form has one: drift and noise then share one rotation back."""
        inverse = isinstance(self.D, Inverse)
        form = (self.D.base if inverse else self.D)._closed_form()
        basis = None if form is None else form.eigenbasis()
        if form is None or basis is None or not inverse:
            return basis
        form.require_definite()
        return replace(basis, values=basis.values.reciprocal())

    @cached_property
    def _root(self) -> Tensor:
        """The square roots of the eigenvalues."""
        assert self._basis is not None
        return self._basis.values.clamp_min(0).sqrt()

    def product(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        return self.D._matmul(torch.atleast_2d(v).mT).mT.reshape(v.shape)

    def solve(self, v: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        return self.D.inverse()._matmul(torch.atleast_2d(v).mT).mT.reshape(v.shape)

    def noise(self, source: NoiseSource, like: Float[Tensor, "*k d"]) -> Float[Tensor, "*k d"]:
        return source.per_chain(lambda generator: draw(self.D, 1, generator).squeeze(-1))

    def kick(self, target: Tensor, g: Float[Tensor, "*k d"], drift: float, spread: float, source: NoiseSource) -> None:
        basis = self._basis
        if basis is None:
            target.add_(self.product(g), alpha=drift)
            if spread:
                target.add_(self.noise(source, g), alpha=spread)
            return
        rotated = basis.rotate_back(g.reshape(-1, g.shape[-1]).mT).mT.mul(basis.values).mul_(drift)
        if spread:
            rotated.addcmul_(source.normal(g).reshape(rotated.shape), self._root, value=spread)
        target.add_(basis.rotate(rotated.mT).mT.reshape(g.shape))


def as_metric(D: Any, name: str = "preconditioner") -> Isotropic:
    """Return the metric for None, a number, a vector (d,) or an operator known to be positive semidefinite."""
    if D is None:
        return Isotropic()
    if isinstance(D, numbers.Real) and not isinstance(D, bool):
        return Isotropic(checked_number(name, D))
    if isinstance(D, Tensor) and D.ndim == 1:
        D = Diagonal(D.detach().clone())
    check_kind(name, D, Operator, "a number, a vector or an operator, such as co.linalg.Dense(matrix, psd=True)")
    if not is_psd(D):
        raise ValueError(f"{name} must be positive semidefinite: pass co.linalg.Dense(matrix, psd=True).")
    return OperatorMetric(D=D)
