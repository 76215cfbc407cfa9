"""The number of products of an estimator: a whole budget, or more until its error bar meets a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from curvops.ambient import current_run
from curvops.checks import check_choice, check_limits
from curvops.linalg.core.probed import Limits, Probed, probing
from curvops.linalg.core.results import Estimate, Reason
from curvops.linalg.core.vectors import Matrix, check_finite, describe, largest, product
from curvops.progress import remark

EXACT = "exact"
DEFAULT_MATVECS = 128
FIRST_MATVECS = 16
LEAST_VECTORS = 12
"""Vectors kept by the smallest number of products with an error bar, for the estimator that keeps most."""


@runtime_checkable
class Estimator(Protocol):
    """An estimator that can continue with more products and keeps the earlier ones.

    ``least`` products are needed for an error bar; ``first`` are spent before a tolerance is tested; ``held`` is the
    number of vectors of length n that it keeps per product.
    """

    least: int
    first: int
    held: float

    def spend(self, matvecs: int) -> None:
        """Continue until at most ``matvecs`` products have been spent in total."""

    def estimate(self) -> Estimate:
        """Return the estimate from the products spent, without a reason yet."""


def require_finite(multiply: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a product so that it raises ValueError if a result is not finite, at one small transfer per block."""

    def apply(V: Tensor) -> Tensor:
        result = multiply(V)
        check_finite(largest(result))
        return result

    return apply


Family = TypeVar("Family", bound=Estimator)


@dataclass(frozen=True, eq=False)
class Quantity(Generic[Family]):
    """A number that estimators compute for a matrix: its methods and its exact computation."""

    families: Mapping[str, Callable[[Probed], Family]]
    exact: Callable[[Probed], Estimate]

    def estimate(
        self, A: Matrix, method: str, limits: Limits, generator: torch.Generator | None
    ) -> tuple[Estimate, Family | None]:
        """Return the estimate and its estimator, or None in its place if the exact value was computed."""
        check_choice("method", method, (*self.families, EXACT))
        check_limits(limits.rtol, None, limits.matvecs, limits.memory, sampled=True)
        current_run().expect(_most(method, describe(A).columns, limits))
        with (
            torch.no_grad(),
            probing(A, generator, limits, LEAST_VECTORS, require_finite(product(A))) as probed,
        ):
            if method == EXACT:
                return self.exact(probed), None
            estimator = self.families[method](probed)
            found = spend_budget(estimator, self.exact, probed)
        return found, estimator if found.samples else None


def _most(method: str, whole: int, limits: Limits) -> int | None:
    """Return the largest number of products of an estimate; None if only its tolerance ends it."""
    if method == EXACT:
        return whole
    if limits.rtol is None:
        return min(DEFAULT_MATVECS if limits.matvecs is None else limits.matvecs, whole)
    return limits.matvecs


def spend_budget(estimator: Estimator, exact: Callable[[Probed], Estimate], probed: Probed) -> Estimate:
    """Spend the budget (128 products by default) or, with ``rtol``, grow until the error bar meets it.

    The exact value is computed if it costs no more: with a budget of as many products as A has columns, or when growth
    reaches that number. With rtol and no budget there is no other limit.

    Raises:
        ValueError: rtol is not positive, or the budget or the memory is too small for an error bar.
    """
    whole, limits = probed.facts.columns, probed.limits
    if limits.rtol is None and limits.matvecs is None:
        limits = replace(limits, matvecs=DEFAULT_MATVECS)
    rtol, max_matvecs = limits.rtol, limits.matvecs
    limits.check(min(estimator.least, whole))
    if max_matvecs is not None and max_matvecs >= whole and (rtol is None or whole <= FIRST_MATVECS):
        return exact(probed)
    if max_matvecs is None and whole <= FIRST_MATVECS:
        return exact(probed)
    room = probed.capacity(estimator.held)
    if room is not None and room < estimator.least:
        raise ValueError(f"memory_budget has room for the vectors of {room} products; {estimator.least} are needed.")
    if rtol is None:
        assert max_matvecs is not None
        budget = max_matvecs if room is None else min(max_matvecs, room)
        estimator.spend(budget)
        return replace(estimator.estimate(), reason=_stop_reason(budget, room, max_matvecs, Reason.BUDGET_SPENT))
    most = min((m for m in (max_matvecs, room) if m is not None), default=None)
    target = estimator.first
    while True:
        target = target if most is None else min(target, most)
        estimator.spend(target)
        found = estimator.estimate()
        remark(partial(_error_bar, found))
        if found.within(rtol):
            return replace(found, reason=Reason.CONVERGED)
        following = _next(target, found, rtol)
        if following >= whole and (max_matvecs is None or target + whole <= max_matvecs):
            return replace(known := exact(probed), matvecs=known.matvecs + found.matvecs)
        if most is not None and target >= most:
            return replace(found, reason=_stop_reason(target, room, max_matvecs, Reason.MATVEC_LIMIT))
        target = following


def _stop_reason(spent: int, room: int | None, max_matvecs: int | None, otherwise: Reason) -> Reason:
    capped = room is not None and spent >= room and (max_matvecs is None or room < max_matvecs)
    return Reason.RANK_CAPPED if capped else otherwise


def _next(target: int, found: Estimate, rtol: float) -> int:
    """Return the next number of products, at most twice this one, from the rate of one over the square root."""
    goal = rtol * float(torch.linalg.vector_norm(found.value))
    ratio = found.inflation * float(torch.linalg.vector_norm(found.stderr)) / goal if goal else math.inf
    return min(2 * target, max(target + 8, math.ceil(min(1.1 * target * ratio**2, 1e12))))


def _error_bar(found: Estimate) -> str:
    spread, size = torch.stack([torch.linalg.vector_norm(part) for part in (found.stderr, found.value)]).tolist()
    return f"standard error {spread:.1e} of {size:.1e}"
