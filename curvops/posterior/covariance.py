"""Covariance of the outputs at each point, lazily: nothing is solved before an entry is asked for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Dense, Operator
from curvops.linalg.core.cache import recorded
from curvops.linalg.core.memory import holding, solved_at_a_time
from curvops.linalg.core.vectors import unit_block
from curvops.operators.jacobian import Jacobian
from curvops.operators.point_covariance import point_covariances

# Rows of J solved for at a time, where memory has room for them.
BLOCK = 128


@dataclass(eq=False)
class Blocks:
    """Where a `PointCovariance` keeps its blocks once they are computed. Dropped by pickling and copying."""

    value: Tensor | None = None
    lock: Any = field(default_factory=threading.RLock)

    def __reduce__(self) -> tuple[type[Blocks], tuple[()]]:
        return Blocks, ()


class PointCovariance(Operator):
    """The C × C diagonal blocks of T J P⁻¹ Jᵀ, one a point: (N, C, C); points are treated as independent.

    The first use solves N·C systems with P, in blocks (for structured P none, see `operators.point_covariance`); the
    result takes N·C² numbers and is kept, unless a gradient for the prior precision or the likelihood's
    hyperparameters is asked for.
    """

    def __init__(
        self, jacobian: Jacobian, inverse: LinearOperator, outputs: int, blocks: Blocks, temperature: float = 1.0
    ) -> None:
        super().__init__(jacobian, inverse, outputs=outputs, blocks=blocks, temperature=temperature)

    @property
    def psd(self) -> bool:
        return True

    def _size(self) -> torch.Size:
        c: int = self._kwargs["outputs"]
        return torch.Size((self._args[0].shape[-2] // c, c, c))

    def blocks(self) -> Float[Tensor, "N C C"]:
        """All blocks, solved for on the first call."""
        if recorded(self.representation()):
            return self._solve_blocks()
        store: Blocks = self._kwargs["blocks"]
        with store.lock:
            if store.value is None:
                store.value = self._solve_blocks()
            return store.value

    def _solve_blocks(self) -> Tensor:
        blocks = self._untempered()
        return (blocks + blocks.mT) * (self._kwargs["temperature"] / 2)

    def _untempered(self) -> Tensor:
        jacobian, inverse = self._args
        c = self.shape[-1]
        of_layers = None if recorded(self.representation()) else point_covariances(jacobian, inverse, c)
        if of_layers is not None:
            return of_layers
        return torch.cat([self._solve_points(part) for part in jacobian.by_points(self._points_at_a_time())])

    def _points_at_a_time(self) -> int:
        """As many as have `BLOCK` rows, fewer where memory is short; one at least."""
        jacobian, _ = self._args
        rows = jacobian.passes.engines.plan.num_outputs
        return max(1, solved_at_a_time(jacobian, max(BLOCK, rows))[0] // rows)

    def _solve_points(self, jacobian: Jacobian) -> Float[Tensor, "m C C"]:
        """The blocks of some points: their rows of J, solved for and multiplied with each other.

        Where the rows of one point are more than memory has room for, or a gradient is recorded, they are made by
        products with unit vectors, and what was solved for is pushed through J again.
        """
        inverse, c, rows = self._args[1], self.shape[-1], jacobian.shape[-2]
        differentiated = recorded(self.representation())
        width, beside = solved_at_a_time(jacobian, rows)
        if width >= rows and not differentiated and not jacobian.passes.engines.plan.others:
            with holding(jacobian, beside), torch.no_grad():
                formed = jacobian.formed()
                solved = inverse._matmul(formed).mT.unflatten(0, (-1, c))
                return formed.mT.unflatten(0, (-1, c)) @ solved.mT
        found = []
        for start in range(0, rows, width):
            units = unit_block(rows, start, min(width, rows - start), dtype=self.dtype, device=self.device)
            with holding(jacobian, beside), torch.set_grad_enabled(differentiated):
                found.append(jacobian._matmul(inverse._matmul(jacobian._t_matmul(units))))
        block = torch.cat(found, 1).unflatten(0, (-1, c)).unflatten(2, (-1, c))
        return torch.diagonal(block, dim1=0, dim2=2).permute(2, 0, 1)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.blocks() @ rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.blocks() @ rhs

    def to_dense(self) -> Tensor:
        """All blocks."""
        return self.blocks()

    def _diagonal(self) -> Tensor:
        return self.blocks().diagonal(dim1=-2, dim2=-1)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return Dense(self.blocks())._getitem(row_index, col_index, *batch_indices)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.blocks()[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return Dense(self.blocks())._expand_batch(batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return Dense(self.blocks())._unsqueeze_batch(dim)

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return Dense(self.blocks())._permute_batch(*dims)
