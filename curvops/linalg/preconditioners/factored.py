"""Preconditioners P ≈ A + μI with P⁻¹, a square root, a log-determinant and bounds of the spectrum.

``cg`` needs only ``P @ V``; a preconditioned log-determinant needs the rest. ``nystrom``, ``cholesky``,
``block_jacobi`` and ``diagonal_preconditioner`` make them, and ``as_preconditioner`` turns an operator or a small
matrix into one.

>>> import torch
>>> from curvops.linalg import Diagonal, as_preconditioner
>>> P = as_preconditioner(Diagonal(torch.tensor([1.0, 4.0])))
>>> P @ torch.ones(2), P.sqrt_inverse(torch.ones(2)), round(float(P.logdet()), 4)
(tensor([1.0000, 0.2500]), tensor([1.0000, 0.5000]), 1.3863)
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.vectors import ScalarFunction, Vectors, as_columns, combine, gram, shaped_as
from curvops.ranks.process_group import is_dtensor
from curvops.ranks.sharded_vectors import Sharded, exchanged, is_block, unwrapped, wrapped
from curvops.summary import Summarised

P = ParamSpec("P")
R = TypeVar("R")


def blockwise(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method for one block, of an object that may hold blocks, accept sharded vectors and DTensors."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if "torch.distributed.tensor" not in sys.modules:
            return method(*args, **options)
        owner, block = exchanged(args, is_dtensor, unwrapped)
        apply = partial(cast(Any, method), owner)
        whole = isinstance(block, Sharded) and not any(map(is_block, vars(owner).values()))
        image = block.multiplied(apply) if whole else apply(block)
        return cast(R, wrapped(image) if is_dtensor(args[1]) else image)

    return call


@runtime_checkable
class FactoredPreconditioner(Protocol):
    """A symmetric positive definite P with its symmetric root, for vectors (n,) or blocks (n, k).

    Examples:
        >>> P = co.linalg.diagonal_preconditioner(torch.tensor([4.0, 16.0]))
        >>> isinstance(P, co.linalg.FactoredPreconditioner), P @ torch.ones(2), P.sqrt_inverse(torch.ones(2))
        (True, tensor([0.2500, 0.0625]), tensor([0.5000, 0.2500]))
    """

    @property
    def matvecs(self) -> int:
        """The number of products with A spent on making P."""

    def __matmul__(self, V: Vectors, /) -> Vectors:
        """Return P⁻¹V."""

    def sqrt_inverse(self, V: Vectors, /) -> Vectors:
        """Return P^-½V, by the symmetric root."""

    def sqrt(self, V: Vectors, /) -> Vectors:
        """Return P^½V, by the symmetric root."""

    def logdet(self) -> Tensor:
        """Return log det P in nats, exact."""

    def bounds(self) -> tuple[float, float]:
        """Return a lower and an upper bound of the eigenvalues of P."""

    def floor(self, level: float) -> float:
        """Return a positive c with P^-½ B P^-½ ≥ c I for the matrix B ≥ level · I that P was made for."""


class FilteredPreconditioner(Summarised, ABC):
    """A preconditioner whose P⁻¹, P^-½ and P^½ are filters of P's eigenvalues, for vectors or blocks."""

    matvecs: int

    @blockwise
    def __matmul__(self, V: Float[Vectors, "n *k"]) -> Float[Vectors, "n *k"]:
        """Return P⁻¹V for a vector or a block."""
        return shaped_as(self._filtered(torch.reciprocal, as_columns(V)), V)

    @blockwise
    def sqrt_inverse(self, V: Float[Vectors, "n *k"]) -> Float[Vectors, "n *k"]:
        """Return P^-½V for a vector or a block."""
        return shaped_as(self._filtered(torch.rsqrt, as_columns(V)), V)

    @blockwise
    def sqrt(self, V: Float[Vectors, "n *k"]) -> Float[Vectors, "n *k"]:
        """Return P^½V for a vector or a block."""
        return shaped_as(self._filtered(torch.sqrt, as_columns(V)), V)

    def floor(self, level: float) -> float:
        """Return level over the largest eigenvalue of P, since nothing but B ≥ level is known about B itself."""
        return level / self.bounds()[1]

    @abstractmethod
    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P, exact."""

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Return a lower and an upper bound of the eigenvalues of P, attained if they are known."""

    @abstractmethod
    def _filtered(self, function: ScalarFunction, V: Float[Vectors, "n k"]) -> Float[Vectors, "n k"]:
        """Return function(P) V for function one of torch.reciprocal, rsqrt and sqrt."""


@dataclass(frozen=True, eq=False, repr=False)
class LowRankPreconditioner(FilteredPreconditioner):
    """A preconditioner P = U diag(values) Uᵀ + level (I − UUᵀ), from Â = U diag(eigenvalues) Uᵀ ≤ A.

    Rank 0 is a multiple of the identity.

    Examples:
        >>> A = torch.diag(torch.tensor([100.0, 1.0, 1.0]))
        >>> P = co.linalg.nystrom(A, 1, shift=1.0, generator=torch.Generator().manual_seed(0)).preconditioner()
        >>> type(P).__name__, (P @ torch.ones(3)).shape
        ('LowRankPreconditioner', torch.Size([3]))
    """

    U: Float[Vectors, "n r"]
    eigenvalues: Float[Tensor, " r"]
    values: Float[Tensor, " r"]
    level: float
    matvecs: int = 0

    def shifted(self, shift: float) -> LowRankPreconditioner:
        """Return (Â + shift)/shift: the same approximation plus another multiple of the identity."""
        return replace(self, values=(self.eigenvalues + shift) / shift, level=1.0)

    @property
    def condition(self) -> float:
        """The condition number that P leaves by its smallest value, 1 + tail/μ; ∞ if the rank is 0."""
        return float(self.values.amin()) / self.level if len(self.values) else math.inf

    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P."""
        return self.values.log().sum() + (self.U.shape[0] - len(self.values)) * math.log(self.level)

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of P."""
        every = [self.level] if len(self.values) < self.U.shape[0] else []
        if len(self.values):
            every += [float(self.values.amin()), float(self.values.amax())]
        return min(every), max(every)

    def floor(self, level: float) -> float:
        """Return a c with B ≥ c P, from B ≥ (Â + level)/2, which follows from B ≥ Â and B ≥ level."""
        # U diagonalises (Â + level)/2 as it does P.
        ratios = [level / (2 * self.level)] if len(self.values) < self.U.shape[0] else []
        if len(self.values):
            ratios.append(float(((self.eigenvalues + level) / (2 * self.values)).amin()))
        return min(ratios)

    def _filtered(self, function: ScalarFunction, V: Vectors) -> Vectors:
        outside = float(function(torch.tensor(self.level, dtype=torch.float64)))
        scaled = V if outside == 1 else V * outside
        if not len(self.values):
            return scaled
        weights = function(self.values) - outside
        return scaled + combine(self.U, weights[:, None] * gram(self.U, V))
