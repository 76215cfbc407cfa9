"""An operator on vectors that are sharded over the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.memory import Memories, Memory, memories_of
from curvops.linalg.core.sharded import Layout, Layouts, Sharded, is_dtensor, layouts_of, over_ranks, unwrapped
from curvops.linalg.core.vectors import product, transposed_product
from curvops.linalg.operators.algebra import UnaryOperator
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.dense import Dense


class OnShards(UnaryOperator):
    """The matrix A on sharded vectors: for each product some columns are gathered, and each rank keeps its rows.

    `op.sharded(mesh)` makes it. What is built from it (sums, multiples, a prior) takes sharded vectors, too.
    """

    def __init__(self, base: LinearOperator, row_layout: Layout, column_layout: Layout) -> None:
        if len(base.shape) != 2:
            raise ValueError(f"an operator on sharded vectors is a single matrix, got shape {tuple(base.shape)}.")
        super().__init__(base, row_layout=row_layout, column_layout=column_layout)

    @property
    def layouts(self) -> Layouts:
        return self._kwargs["row_layout"], self._kwargs["column_layout"]

    @property
    def memories(self) -> Memories:
        return frozenset(
            memory if memory.of_ranks else Agreed(memory, self._kwargs["row_layout"])
            for memory in memories_of(self.base)
        )

    def _with(self, base: LinearOperator) -> LinearOperator:
        """Return another operator of the same size, on vectors that lie as these."""
        return OnShards(base, **self._kwargs)

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed, (rows, columns) = self.base.mT, self._kwargs.values()
        return self if transposed is self.base else OnShards(transposed, columns, rows)

    def _matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(self.base, Operator) or not isinstance(rhs, Sharded):
            return self.base._matmul(rhs)
        return rhs.multiplied(product(self.base), layout=self._kwargs["row_layout"])

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        if isinstance(self.base, Operator) or not isinstance(rhs, Sharded):
            return self.base._t_matmul(rhs)
        return rhs.multiplied(transposed_product(self.base), layout=self._kwargs["column_layout"])

    def _diagonal(self) -> Tensor:
        return self.base._diagonal()

    @property
    def diagonal_matvecs(self) -> int:
        return getattr(self.base, "diagonal_matvecs", self.shape[-1])

    # The algebra goes on within, so that closed forms are found.

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        """Return A + diag(d), d a number, a plain vector or a DTensor, which is gathered."""
        return self._with(self.base.add_diagonal(unwrapped(diag).whole() if is_dtensor(diag) else diag))

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, OnShards):
            self._kwargs["row_layout"].require(other._kwargs["row_layout"])
            return self._with(self.base + other.base)
        return super().__add__(other)

    def _times(self, factor: Tensor) -> LinearOperator:
        return self._with(self.base._mul_constant(factor))

    def inverse(self, rtol: float | None = None) -> LinearOperator:
        if not self._is_closed:
            return super().inverse(rtol)
        return self._with(self.base.inverse(rtol))

    @property
    def _is_closed(self) -> bool:
        return isinstance(self.base, Operator) and self.base._closed_form() is not None

    def _closed_form(self) -> Any:
        return self.base._closed_form() if isinstance(self.base, Operator) else None

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        solver = self.base.exact_solver() if isinstance(self.base, Operator) else None
        return None if solver is None else lambda block: block.multiplied(solver)  # type: ignore[attr-defined]

    def promises(self) -> Any:
        return self.base.promises() if isinstance(self.base, Operator) else super().promises()

    def _lower_bound(self) -> float | None:
        return self.base._lower_bound() if isinstance(self.base, Operator) else None


@dataclass(frozen=True)
class Agreed:
    """A budget of which each rank has its own: what is left is the least of all."""

    memory: Memory
    layout: Layout
    of_ranks = True

    def room(self) -> int:
        """Return the bytes left on each rank. One all-reduce."""
        own = torch.tensor([self.memory.room()], dtype=torch.float64)
        return int(self.layout.stacked(own).min())

    def holding(self, nbytes: int) -> AbstractContextManager[None]:
        """Count bytes as used on this rank."""
        return self.memory.holding(nbytes)

    def keep(self, owner: object, nbytes: int) -> None:
        """Count bytes as used on this rank."""
        self.memory.keep(owner, nbytes)

    def expect_many(self) -> None:
        """Announce many products."""
        self.memory.expect_many()


@over_ranks.register
def _(A: LinearOperator, layout: Layout) -> LinearOperator:
    known = layouts_of(A)
    if known is not None:
        known[0 if len(layout.counts) and layout.length == A.shape[-2] else 1].require(layout)
        return A
    sides = (Layout.even(layout.ranks, size, layout.mesh) if size != layout.length else layout for size in A.shape[-2:])
    return OnShards(A, *sides)


@over_ranks.register
def _(A: Tensor, layout: Layout) -> LinearOperator:
    return over_ranks(Dense(A), layout)
