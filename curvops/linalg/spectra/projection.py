"""The common part of block Lanczos and block Golub–Kahan: a growing basis, a pending block, locked pairs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import Vectors, as_block, norm, part
from curvops.linalg.spectra.basis import Basis
from curvops.records import restore, state_of

# Directions of a residual below this many units of rounding are dropped.
DROPPED = 10
COUNTED = ("matvecs", "failure")


class CountedProduct:
    """A product with blocks that counts the vectors it multiplies."""

    failure: Reason | None = None

    def __init__(self, multiply: Callable[[Vectors], Vectors]) -> None:
        self.multiply, self.matvecs = multiply, 0

    def __call__(self, V: Vectors) -> Vectors:
        """Multiply a block."""
        self.matvecs += V.shape[1]
        return self.multiply(V)


class Projection(ABC):
    """A projection T of A on a space that grows by blocks, with the pending block P to be multiplied next.

    The residual of a Ritz pair is P C y. All are in units of ``scale``; the small matrices T and C are on the host. The
    first ``locked`` columns of the basis are settled: everything is orthogonal to them, and T and C leave them out.
    Random directions take the place of dropped ones, so that the search continues past an invariant subspace and finds
    each copy of a multiple eigenvalue.
    """

    STATE: ClassVar[tuple[str, ...]] = ("pending", "T", "C", "Y", "locked", "degree", "scale", "size", "failed")

    def __init__(
        self, multiply: CountedProduct, start: Float[Vectors, "n b"], capacity: int, generator: torch.Generator | None
    ) -> None:
        self.multiply = multiply
        self.n, self.block_size = start.shape
        self.eps = torch.finfo(start.dtype).eps
        self.basis = Basis(start, min(capacity, self.n), generator)
        self.locked = self.degree = 0
        self.scale, self.size = 1.0, 0.0
        self.failed = False
        self.T = self.C = self.Y = torch.zeros(0, 0, dtype=torch.float64)
        longest = float(norm(start).amax())
        _, independent, _ = self.basis.expand(as_block(start), DROPPED * self.eps * longest)
        self.pending = self.basis.fresh(self.block_size, independent)
        self.C = torch.zeros(self.pending_columns, 0, dtype=torch.float64)

    def state(self) -> dict[str, Any]:
        """Return the state from which a run continues, without the source of random directions."""
        return state_of(self, self.STATE) | state_of(self.multiply, COUNTED) | {"basis": self.basis.columns}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        restore(self, self.STATE, state)
        restore(self.multiply, COUNTED, state)
        self.basis.width = 0
        self.basis.append(state["basis"])

    @abstractmethod
    def step(self) -> None:
        """Multiply the pending block and project; ``failed`` says that a product held NaN or Inf."""

    @abstractmethod
    def ritz(self) -> tuple[Tensor, Tensor]:
        """Return the values, ascending, and the residual norm of each, in units of ``scale``."""

    @abstractmethod
    def restart(self, kept: Tensor) -> None:
        """Continue from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""

    @abstractmethod
    def _rotate(self, old: Tensor, found: Tensor) -> None:
        """Keep some locked columns and some Ritz vectors as the basis."""

    def lock(self, old: Tensor, found: Tensor) -> None:
        """Settle some of the locked columns and some Ritz vectors; drop the rest of the basis and the pending block."""
        self._rotate(old, found)
        self.locked = self.basis.width
        self.T = self.C = torch.zeros(0, 0, dtype=torch.float64)
        self.pending = part(self.pending, 0, 0)
        self.degree = 0

    def refill(self, width: int) -> None:
        """Add random directions beside the pending ones, up to ``width``."""
        self.pending = self.basis.fresh(width, self.pending)
        missing = self.pending.shape[1] - len(self.C)
        self.C = torch.cat([self.C, torch.zeros(missing, self.width, dtype=torch.float64)])

    @property
    def width(self) -> int:
        """Dimension of the search space."""
        return len(self.T)

    @property
    def pending_columns(self) -> int:
        """The number of columns to be multiplied next."""
        return self.pending.shape[1]

    @property
    def cost(self) -> int:
        """The number of products of the next step."""
        return self.pending_columns

    @property
    def matvecs(self) -> int:
        """The number of products spent, of one vector each."""
        return self.multiply.matvecs

    @property
    def complete(self) -> bool:
        """Whether nothing is left to multiply: the whole space is spanned, or an invariant part of it."""
        return not self.pending.shape[1]

    @property
    def noise(self) -> float:
        """The part of a residual that is rounding, in units of ``scale``."""
        return self.eps * self.size

    @property
    def settled(self) -> Float[Vectors, "n k"]:
        """The locked columns."""
        return part(self.basis.store, 0, self.locked)

    def krylov_value(self, value: float) -> float:
        """Return a value's eigenvalue in the operator whose powers make the Krylov space (a bound may be negative)."""
        return value

    def _in_units(self, W: Vectors) -> Vectors:
        """Return a copy of a product in units of ``scale``, which is set by the first product that is not zero."""
        W = as_block(W)
        image = float(norm(W).amax())
        if not math.isfinite(image):
            self.failed = True
            return W
        if self.size == 0 and image > 0:
            self.scale = 2.0 ** round(math.log2(image))  # a power of two: dividing by it is exact
        self.size = max(self.size, image / self.scale)
        W /= self.scale
        return W

    def _advance(self, R: Tensor) -> None:
        """Take the residual's coefficients on the new pending block."""
        self.C = torch.cat([torch.zeros(len(R), self.width - R.shape[1], dtype=torch.float64), R], 1)
        self.degree += 1
        self.refill(self.block_size)


def rotation(width: int, old: Tensor, Y: Float[Tensor, "m k"]) -> Float[Tensor, "w j"]:
    """Return the matrix from a basis of ``width`` columns to those of ``old`` and its last m ones times Y."""
    C = torch.zeros(width, len(old) + Y.shape[1], dtype=torch.float64)
    C[old, torch.arange(len(old))] = 1.0
    C[width - len(Y) :, len(old) :] = Y
    return C
