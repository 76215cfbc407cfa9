"""The common part of block Lanczos and block Golub–Kahan: a growing basis, a pending block, locked pairs.

The basis grows by blocks: two-pass Gram–Schmidt drops dependent directions, and fresh ones are drawn.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.orthogonal import tall_qr
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import (
    Vectors,
    as_block,
    axpy,
    combine,
    empty_block,
    gram,
    join,
    norm,
    part,
    put,
    random_block,
    rotate,
)
from curvops.records import restore, state_of

# Directions of a residual below this many units of rounding are dropped.
DROPPED = 10
# A fresh direction counts as orthogonal once a pass of Gram–Schmidt leaves this share of it.
KEPT_SHARE = 0.7
MOST_PASSES = 4
COUNTED = ("matvecs", "failure")


def within_zeros(block: Tensor, rows: int, columns: int, first: int = 0) -> Tensor:
    """Return zeros with the block in their first rows, from a column on (torch 2.7 cannot pad an empty matrix)."""
    whole = block.new_zeros(rows, columns)
    whole[: block.shape[0], first : first + block.shape[1]] = block
    return whole


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

    The residual of a Ritz pair is P C y. All are in units of ``scale``; the small matrices T and C are on the CPU. The
    first ``locked`` columns of the basis are settled: everything is orthogonal to them, and T and C do not contain
    them. Random directions replace dropped ones, so that the search continues past an invariant subspace and finds
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
        """Multiply the pending block and project; ``failed`` is set if a product contained NaN or Inf."""

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
        """Lock some of the locked columns and some Ritz vectors; drop the rest of the basis and the pending block."""
        self._rotate(old, found)
        self.locked = self.basis.width
        self.T = self.C = torch.zeros(0, 0, dtype=torch.float64)
        self.pending = part(self.pending, 0, 0)
        self.degree = 0

    def refill(self, width: int) -> None:
        """Add random directions to the pending ones, up to ``width``."""
        self.pending = self.basis.fresh(width, self.pending)
        self.C = within_zeros(self.C, self.pending_columns, self.C.shape[1])

    @property
    def width(self) -> int:
        """The dimension of the search space."""
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
        """Whether nothing is left to multiply: the basis spans the whole space, or an invariant part of it."""
        return not self.pending_columns

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
        """Return a copy of a product in units of ``scale``, which the first non-zero product sets."""
        W = as_block(W)
        image = float(norm(W).amax())
        if not math.isfinite(image):
            self.failed = True
            return W
        if self.size == 0 and image > 0:
            self.scale = 2.0 ** round(math.log2(image))  # a power of two, so that dividing by it is exact
        self.size = max(self.size, image / self.scale)
        W /= self.scale
        return W

    def _advance(self, R: Tensor) -> None:
        """Store the residual's coefficients on the new pending block."""
        self.C = within_zeros(R, len(R), self.width, self.width - R.shape[1])
        self.degree += 1
        self.refill(self.block_size)


class Basis:
    """An orthonormal basis in one piece of memory, n × capacity, of which ``width`` columns are in use."""

    def __init__(self, like: Float[Vectors, "n k"], capacity: int, generator: torch.Generator | None) -> None:
        self.n = like.shape[0]
        self.store = empty_block(like, capacity)
        self.width = 0
        self.generator = generator

    @property
    def columns(self) -> Float[Vectors, "n m"]:
        """The columns in use, sharing memory."""
        return part(self.store, 0, self.width)

    def append(self, V: Float[Vectors, "n b"]) -> None:
        """Add orthonormal columns that are orthogonal to those in use."""
        put(self.store, self.width, V)
        self.width += V.shape[1]

    def rotate(self, old: Tensor, Y: Float[Tensor, "m k"]) -> None:
        """Replace the basis by its columns ``old`` and its last m times Y (on the CPU), which is orthonormal."""
        C = torch.zeros(self.width, len(old) + Y.shape[1], dtype=torch.float64)
        C[old, torch.arange(len(old))] = 1.0
        C[self.width - len(Y) :, len(old) :] = Y
        rotate(self.columns, C)
        self.width = C.shape[1]

    def expand(
        self, W: Float[Vectors, "n b"], floor: float
    ) -> tuple[Float[Tensor, "m b"], Float[Vectors, "n r"], Float[Tensor, "r b"]]:
        """Return H, V, R with W = Q H + V R, V orthonormal and orthogonal to Q; W is overwritten.

        H and R are on the CPU. Directions of W − Q H of size at most ``floor`` are dropped, so that r ≤ b. Cost: 8 n
        m b operations.
        """
        Q = self.columns
        H = gram(Q, W)
        V = axpy(W, Q, -H)
        R = torch.eye(V.shape[1], dtype=torch.float64)
        H = H.cpu()
        for turn in range(MOST_PASSES):
            V, R, share = _trim(V, R, floor, self.n - self.width)
            if not V.shape[1] or (turn and share > KEPT_SHARE):
                break
            again = gram(Q, V)
            V = axpy(V, Q, -again)
            H += again.cpu() @ R
        return H, V, R

    def fresh(self, width: int, beside: Float[Vectors, "n r"]) -> Float[Vectors, "n b"]:
        """Add random directions to ``beside``, orthogonal to it and to the basis, up to ``width`` columns or all."""
        missing = min(width, self.n - self.width) - beside.shape[1]
        if missing <= 0:
            return beside
        drawn = random_block(beside, missing, "gaussian", self.generator)
        for _ in range(2):
            drawn = axpy(drawn, self.columns, -gram(self.columns, drawn))
            drawn, _ = tall_qr(axpy(drawn, beside, -gram(beside, drawn)))
        return join(beside, drawn)


def _trim(V: Vectors, R: Tensor, floor: float, most: int) -> tuple[Vectors, Tensor, float]:
    """Return V's orthonormal basis without directions of V R up to ``floor``, its R, and V's least singular value."""
    Q, S = tall_qr(V)
    S = S.cpu()
    share = float(torch.linalg.svdvals(S)[-1]) if S.numel() else 0.0
    total = S @ R
    U, sizes, Wt = torch.linalg.svd(total, full_matrices=False)
    kept = min(int((sizes > floor).sum()), most)
    if kept == len(sizes):
        return Q, total, share
    return combine(Q, U[:, :kept].to(Q.device)), sizes[:kept, None] * Wt[:kept], share
