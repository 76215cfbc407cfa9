"""The number of products of an estimator: a whole budget, or more until its error bar meets a tolerance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar, runtime_checkable

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
"""Vectors that the fewest products with an error bar take, of the estimator that keeps most."""


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


Family = TypeVar("Family", bound=Estimator)


def require_finite(multiply: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a product so that it raises ValueError if a result is not finite, at one small transfer per block."""

    def apply(V: Tensor) -> Tensor:
        result = multiply(V)
        check_finite(largest(result))
        return result

    return apply


def estimate(
    A: Matrix,
    method: str,
    families: Mapping[str, Callable[[Probed], Family]],
    exact: Callable[[Probed], Estimate],
    limits: Limits,
    generator: torch.Generator | None,
) -> tuple[Estimate, Family | None]:
    """Return an estimate and its estimator, or None in its place if the exact value was computed.

    Raises:
        ValueError: the method is unknown, rtol is not positive, or the budget or the memory is too small for an error
            bar.
    """
    check_choice("method", method, (*families, EXACT))
    check_limits(limits.rtol, None, limits.matvecs, sampled=True)
    whole, most = describe(A).columns, limits.matvecs
    if limits.rtol is None:
        most = DEFAULT_MATVECS if most is None else most
        limits = replace(limits, matvecs=most)
    total = whole if method == EXACT else most if limits.rtol is not None or most is None else min(most, whole)
    current_run().expect(total)
    with (
        torch.no_grad(),
        probing(A, generator, limits, LEAST_VECTORS, require_finite(product(A))) as probed,
    ):
        if method == EXACT:
            return exact(probed), None
        estimator = families[method](probed)
        result = _spend(estimator, exact, probed)
    return result, estimator if result.samples else None


def _spend(estimator: Estimator, exact: Callable[[Probed], Estimate], probed: Probed) -> Estimate:
    """Spend the budget or, with ``rtol``, grow until the error bar meets it.

    The exact value is computed if it costs no more: with a budget of as many products as A has columns, or when growth
    reaches that number. With rtol and no budget there is no other limit.
    """
    whole, (rtol, max_matvecs) = probed.facts.columns, (probed.limits.rtol, probed.limits.matvecs)
    probed.limits.check(min(estimator.least, whole))
    if (max_matvecs is None or max_matvecs >= whole) and (rtol is None or whole <= FIRST_MATVECS):
        return exact(probed)
    room = probed.capacity(estimator.held)
    if room is not None and room < estimator.least:
        raise ValueError(f"memory_budget has room for the vectors of {room} products; {estimator.least} are needed.")
    most = min((limit for limit in (max_matvecs, room) if limit is not None), default=math.inf)
    target = most if rtol is None else min(estimator.first, most)
    while True:
        estimator.spend(int(target))
        result = estimator.estimate()
        size, spread = _size(result.value), result.inflation * _size(result.stderr)
        remark(lambda: f"standard error {spread:.1e} of {size:.1e}")  # noqa: B023
        if rtol is not None:
            if result.within(rtol):
                return replace(result, reason=Reason.CONVERGED)
            following = more_products(int(target), spread / (rtol * size) if size else math.inf)
            if following >= whole and (max_matvecs is None or target + whole <= max_matvecs):
                return replace(known := exact(probed), matvecs=known.matvecs + result.matvecs)
        if target >= most:
            ended = Reason.BUDGET_SPENT if rtol is None else Reason.MATVEC_LIMIT
            return replace(result, reason=ended if most == max_matvecs else Reason.RANK_CAPPED)
        target = min(following, most)


def _size(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value))


def more_products(spent: int, error: float) -> int:
    """Return the next number of products, at most twice this one, from the rate of one over the square root.

    ``error`` is the present error bar in units of the tolerance.
    """
    return min(2 * spent, max(spent + 8, math.ceil(min(1.1 * spent * error**2, 1e12))))
