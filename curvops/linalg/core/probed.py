"""A matrix in the form that randomised algorithms use: its products, random vectors of its size, and their cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float

from curvops.ambient import current_run
from curvops.checkpoint import derive_generator
from curvops.checks import check_generator, check_limits
from curvops.linalg.core.memory import Multiply, columns_at_a_time, vector_bytes, working
from curvops.linalg.core.rounding import ROUNDING_SEEN
from curvops.linalg.core.solve_routes import EXACT_SIZE
from curvops.linalg.core.vectors import (
    Description,
    Matrix,
    Vectors,
    describe,
    multiply_adds_of,
    norm,
    random_block,
)

ProbeKind: TypeAlias = Literal["signs", "spherical"]

UNLIMITED = 10**12
BLOCK = 32
"""The number of streamed probes that run at once if memory allows."""
STREAMED = 6
"""The number of vectors that each streamed probe takes."""


@dataclass(frozen=True)
class Limits:
    """The tolerance of an estimate, its largest number of products, and the bytes of its vectors, set by `probing`."""

    rtol: float | None = None
    matvecs: int | None = None
    memory: int | None = None

    def check(self, least: int) -> None:
        """Raise ValueError for a tolerance that is not positive, or for a budget too small for an error bar."""
        check_limits(self.rtol, None, self.matvecs, sampled=True)
        if self.matvecs is not None and self.matvecs < least:
            raise ValueError(f"max_matvecs must be at least {least} for an error bar, got {self.matvecs}.")

    @property
    def tolerance(self) -> float:
        """The rtol of an estimator that needs one; raises ValueError if it is None."""
        if self.rtol is None:
            raise ValueError("rtol must be positive and finite, got None.")
        return float(self.rtol)

    @property
    def tolerated(self) -> float:
        """The relative error that rounding may leave in an exact value: rtol if it was given."""
        return ROUNDING_SEEN if self.rtol is None else float(self.rtol)

    @property
    def products(self) -> int:
        """The largest number of products."""
        return UNLIMITED if self.matvecs is None else self.matvecs

    def allow_dense(self, n: int) -> bool:
        """Return whether n is small enough, and memory large enough, to form and decompose the matrix."""
        few = n <= (EXACT_SIZE if self.matvecs is None else self.matvecs)
        memory = current_run().memory_budget
        return few and (memory is None or 16 * n * n <= memory)


@dataclass(frozen=True, eq=False)
class Probed:
    """The product with a matrix, its shape, the source of random vectors, and the limits of an estimate."""

    multiply: Multiply
    facts: Description
    generator: torch.Generator | None = None
    limits: Limits = Limits()
    matrix: Matrix | None = None
    """The matrix behind the product."""

    @property
    def multiply_adds(self) -> float | int:
        """The multiply-adds of a product with one vector, as far as they are known."""
        return 0 if self.matrix is None else multiply_adds_of(self.matrix)

    def probes(self, k: int, kind: ProbeKind = "signs") -> Float[Vectors, "n k"]:
        """Draw random signs, or Gaussian columns scaled to length √n, which lowers the variance.

        The j-th column is the same however many are drawn at a time.
        """
        if kind == "signs":
            return random_block(self.facts, k, generator=self.generator)
        Z = random_block(self.facts, k, "separate", self.generator)
        return Z * (math.sqrt(self.facts.columns) / norm(Z)).to(Z)

    def apart(self) -> Probed:
        """Return the matrix with a separate source of random numbers, so that a sketch does not change the probes."""
        return replace(self, generator=derive_generator(self.generator))

    def after(self, matvecs: int) -> Probed:
        """Return the matrix with the limits that remain after ``matvecs`` products."""
        return replace(self, limits=replace(self.limits, matvecs=self.limits.products - matvecs))

    def with_half_memory(self) -> Probed:
        """Return the matrix with half of its memory; the other half is used elsewhere."""
        memory = self.limits.memory
        return self if memory is None else replace(self, limits=replace(self.limits, memory=memory // 2))

    @property
    def block(self) -> int:
        """The number of streamed probes that run at once."""
        return columns_at_a_time(BLOCK, STREAMED * vector_bytes(self.facts), self.limits.memory)

    def stream(self, count: int) -> Iterator[Float[Vectors, "n k"]]:
        """Draw random signs, ``count`` columns in total, one block at a time."""
        for start in range(0, count, self.block):
            yield self.probes(min(self.block, count - start))

    def capacity(self, vectors: float) -> int | None:
        """Return how many times ``vectors`` vectors fit into memory; None for any number."""
        if self.limits.memory is None or not vectors:
            return None
        return int(self.limits.memory / (vectors * vector_bytes(self.facts)))


@contextmanager
def probing(
    A: Matrix, generator: torch.Generator | None, limits: Limits, least: int = 0, multiply: Multiply | None = None
) -> Iterator[Probed]:
    """Yield A, or ``multiply`` instead of its product, within the given bytes or those that `working` finds."""
    check_generator(generator)
    with working(A, least, multiply) as (multiply, room):
        yield Probed(multiply, describe(A), generator, replace(limits, memory=room), A)
