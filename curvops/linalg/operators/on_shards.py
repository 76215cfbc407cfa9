"""An operator on vectors that are sharded over the ranks of a device mesh."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.memory import Memories, Memory, memories_of
from curvops.linalg.core.sharded import Layouts, RowLayout, Sharded, layouts_of, over_ranks
from curvops.linalg.core.vectors import product, transposed_product
from curvops.linalg.operators.algebra import UnaryOperator
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import ClosedForm, closed_form
from curvops.linalg.operators.dense import Dense
from curvops.process_group import Ranks


def form_on_shards(A: OnShards, shift: Tensor) -> ClosedForm | None:
    """Return the closed form of A + diag(d) for whole vectors, applied to sharded ones some columns at a time."""
    form = closed_form(A.base, shift)
    if form is not None:
        for name in ("solve", "inverse_root"):
            setattr(form, name, partial(_applied, getattr(form, name)))
    return form


def _applied(function: Callable[[Tensor], Tensor], block: Tensor) -> Tensor:
    return block.multiplied(function) if isinstance(block, Sharded) else function(block)


class OnShards(UnaryOperator):
    """The matrix A on sharded vectors: for each product some columns are gathered, and each rank keeps its rows.

    `op.sharded(mesh)` makes it. Operators built from it (sums, multiples, with a prior) take sharded vectors, too.
    """

    _damped_form: ClassVar[Any] = staticmethod(form_on_shards)

    def __init__(self, base: LinearOperator, row_layout: RowLayout, column_layout: RowLayout) -> None:
        super().__init__(base, row_layout=row_layout, column_layout=column_layout)

    @property
    def layouts(self) -> Layouts:
        return self._kwargs["row_layout"], self._kwargs["column_layout"]

    @property
    def memories(self) -> Memories:
        known, layout = memories_of(self.base), self._kwargs["row_layout"]
        return frozenset(memory if memory.of_ranks else Agreed(memory, layout) for memory in known)

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed, rows, columns = self.base.mT, self._kwargs["row_layout"], self._kwargs["column_layout"]
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
    def _is_formed(self) -> bool:
        return self.base._is_formed if isinstance(self.base, Operator) else self._is_small

    def to_dense(self) -> Tensor:
        """Form the matrix on each rank."""
        return self.base.to_dense()

    def exact_solver(self) -> Callable[[Tensor], Tensor] | None:
        solver = self.base.exact_solver() if isinstance(self.base, Operator) else None
        return None if solver is None else partial(_applied, solver)

    def promises(self) -> Any:
        return self.base.promises() if isinstance(self.base, Operator) else super().promises()

    def _lower_bound(self) -> float | None:
        return self.base._lower_bound() if isinstance(self.base, Operator) else None


@dataclass(frozen=True)
class Agreed:
    """A budget that each rank has its own share of; the bytes left are the least over all ranks."""

    memory: Memory
    layout: RowLayout
    of_ranks: Ranks | None = None

    @property
    def budget(self) -> int:
        """All bytes of this rank's budget."""
        return self.memory.budget

    def room(self) -> int:
        """Return the bytes left on every rank. One all-reduce."""
        own = torch.tensor([self.memory.room()], dtype=torch.float64, device=self.layout.mesh.device_type)
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
def _(A: LinearOperator, layout: RowLayout) -> LinearOperator:
    known = layouts_of(A)
    if known is not None:
        for own in known:
            if own.length == layout.length:
                own.require(layout)
        return A
    rows, columns = (layout.beside(size) for size in A.shape[-2:])
    return A.on_layouts(rows, columns) if isinstance(A, Operator) else OnShards(A, rows, columns)


@over_ranks.register
def _(A: Tensor, layout: RowLayout) -> LinearOperator:
    return over_ranks(Dense(A.detach()), layout)
