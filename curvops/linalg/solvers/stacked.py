"""[A; damp I]: a damped least-squares problem as a plain one, its long vectors in two parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.linalg.core.vectors import columns, norm
from curvops.linalg.solvers.systems import Block


@dataclass(frozen=True, eq=False)
class Stacked:
    """A block of A's rows and, with damping, one of the rows below it."""

    top: Float[Tensor, "m k"]
    below: Float[Tensor, "n k"] | None

    def norm(self) -> Float[Tensor, " k"]:
        """2-norm of each column, over both parts."""
        return norm(self.top) if self.below is None else torch.hypot(norm(self.top), norm(self.below))

    def less(self, other: Stacked, weights: Float[Tensor, " k"]) -> Stacked:
        """This minus other times a number per column."""
        below = None if self.below is None or other.below is None else self.below - other.below * weights
        return Stacked(self.top - other.top * weights, below)

    def over(self, weights: Float[Tensor, " k"]) -> Stacked:
        """Each column divided by a number."""
        return Stacked(self.top / weights, None if self.below is None else self.below / weights)

    def select(self, index: Int[Tensor, " j"]) -> Stacked:
        """Some of the columns."""
        return Stacked(columns(self.top, index), None if self.below is None else columns(self.below, index))

    def place(self, index: Int[Tensor, " j"], other: Stacked) -> None:
        """Write other over some of the columns."""
        where = index.to(self.top.device)
        self.top.mT[where] = other.top.mT
        if self.below is not None and other.below is not None:
            self.below.mT[where] = other.below.mT


@dataclass(frozen=True, eq=False)
class Augmented:
    """[A; damp I] by its products and those of its transpose."""

    multiply: Block
    transposed: Block
    damp: float

    def push(self, V: Float[Tensor, "n k"]) -> Stacked:
        """The product with V."""
        return Stacked(self.multiply(V), self.damp * V if self.damp else None)

    def pull(self, U: Stacked) -> Float[Tensor, "n k"]:
        """The transposed product with U."""
        pulled = self.transposed(U.top)
        return pulled if U.below is None else pulled + self.damp * U.below

    def residual(self, B: Float[Tensor, "m k"], X: Float[Tensor, "n k"]) -> Stacked:
        """[B; 0] − [A; damp I] X."""
        image = self.push(X)
        return Stacked(B - image.top, None if image.below is None else -image.below)
