"""A matrix in the form that randomised algorithms use, and how many products an estimate takes.

It has products, random vectors of its size, and limits. An estimator spends a whole budget, or more and more products
until its error bar meets a tolerance.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import columns_at_a_time, current_run, remark
from curvops.checkpoint import derive_generator
from curvops.checks import check_choice, check_generator, check_options, checked_number
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import Multiply, working
from curvops.linalg.core.results import Estimate, Reason
from curvops.linalg.core.solve_routes import DENSE_SIZE
from curvops.linalg.core.structure import may_be_formed
from curvops.linalg.core.vectors import Description, Matrix, Vectors

ProbeKind: TypeAlias = Literal["signs", "spherical"]

EXACT = "exact"
ESTIMATE_VECTORS = 12
"""Vectors that the fewest products with an error bar take, of the estimator that keeps most."""
PROBES_AT_ONCE = 32
"""The number of streamed probes that run at once if memory allows."""


@dataclass(frozen=True)
class Limits:
    """The tolerance of an estimate, its largest number of products, and the bytes of its vectors, set by `probing`."""

    rtol: float | None = None
    matvecs: int | None = None
    memory: int | None = None

    def check(self, least: int) -> None:
        """Raise ValueError for a tolerance that is not positive, or for a budget too small for an error bar."""
        check_options(rtol=self.rtol, max_matvecs=self.matvecs)
        if self.matvecs is not None and self.matvecs < least:
            raise ValueError(f"max_matvecs must be at least {least} for an error bar, got {self.matvecs}.")

    @property
    def tolerance(self) -> float:
        """The rtol of an estimator that needs one; raises TypeError if it is None."""
        return checked_number("rtol", self.rtol)

    @property
    def products(self) -> int:
        """The largest number of products."""
        return sys.maxsize if self.matvecs is None else self.matvecs

    def allow_dense(self, n: int) -> bool:
        """Return whether n is small enough, and memory large enough, to form and decompose the matrix."""
        few = n <= (DENSE_SIZE if self.matvecs is None else self.matvecs)
        memory = current_run().memory_budget
        return few and (memory is None or 16 * n * n <= memory)


@dataclass(frozen=True, eq=False)
class Probed:
    """The product with a matrix, its shape, the source of random vectors, and the limits of an estimate."""

    multiply: Multiply
    facts: Description
    generator: torch.Generator | None = None
    limits: Limits = Limits()
    formable: bool = False

    def probes(self, k: int, kind: ProbeKind = "signs") -> Float[Vectors, "n k"]:
        """Draw random signs, or Gaussian columns scaled to length √n, which lowers the variance.

        The j-th column is the same however many are drawn at a time.
        """
        if kind == "signs":
            return vec.random_block(self.facts, k, generator=self.generator)
        Z = vec.random_block(self.facts, k, "separate", self.generator)
        return Z * (math.sqrt(self.facts.columns) / vec.norm(Z)).to(Z)

    def apart(self) -> Probed:
        """Return the matrix with a separate source of random numbers, so that a sketch does not change the probes."""
        return replace(self, generator=derive_generator(self.generator))

    def after(self, matvecs: int) -> Probed:
        """Return the matrix with the limits that remain after ``matvecs`` products."""
        return replace(self, limits=replace(self.limits, matvecs=self.limits.products - matvecs))

    def worth(self, spent: int) -> float | int:
        """Return the further products beyond which the matrix is formed instead; infinite if that is not possible.

        How many are missing is a guess, good to a factor of a few.
        """
        n = self.facts.rows
        return 4 * n if self.formable and spent + n <= self.limits.products else math.inf

    def with_half_memory(self) -> Probed:
        """Return the matrix with half of its memory; the other half is used elsewhere."""
        memory = self.limits.memory
        return self if memory is None else replace(self, limits=replace(self.limits, memory=memory // 2))

    @property
    def block(self) -> int:
        """The number of streamed probes that run at once."""
        # A probe takes six vectors.
        return columns_at_a_time(PROBES_AT_ONCE, 6 * self.facts.vector_bytes, self.limits.memory)

    def stream(self, count: int) -> Iterator[Float[Vectors, "n k"]]:
        """Draw random signs, ``count`` columns in total, one block at a time."""
        for start in range(0, count, self.block):
            yield self.probes(min(self.block, count - start))

    def capacity(self, vectors: float) -> int | None:
        """Return how many times ``vectors`` vectors fit into memory; None for any number."""
        if self.limits.memory is None or not vectors:
            return None
        return int(self.limits.memory / (vectors * self.facts.vector_bytes))


@contextmanager
def probing(
    A: Matrix, generator: torch.Generator | None, limits: Limits, least: int = 0, multiply: Multiply | None = None
) -> Iterator[Probed]:
    """Yield A, or ``multiply`` instead of its product, within the given bytes or those that `working` finds."""
    check_generator(generator)
    with working(A, least, multiply) as (multiply, room):
        formable = may_be_formed(A, limits.products, room)
        yield Probed(multiply, vec.describe(A), generator, replace(limits, memory=room), formable)


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
        vec.check_finite(vec.largest(result))
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
    whole, most = vec.describe(A).columns, limits.matvecs
    if limits.rtol is None:
        most = 128 if most is None else most
        limits = replace(limits, matvecs=most)
    total = whole if method == EXACT else most if limits.rtol is not None or most is None else min(most, whole)
    current_run().expect(total)
    with (
        torch.no_grad(),
        probing(A, generator, limits, ESTIMATE_VECTORS, require_finite(vec.product(A))) as probed,
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
    if (max_matvecs is None or max_matvecs >= whole) and (rtol is None or whole <= 16):
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
                return replace(exact_result := exact(probed), matvecs=exact_result.matvecs + result.matvecs)
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
