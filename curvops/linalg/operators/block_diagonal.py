"""A block-diagonal matrix: operators on disjoint sets of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.cache import Cache, recorded
from curvops.linalg.core.partition import Partition, partition
from curvops.linalg.core.sources import Sources, scaled
from curvops.linalg.core.spaces import Space
from curvops.linalg.operators.algebra import is_psd, is_symmetric
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.structured import draw


class BlockDiagonal(Operator):
    """blocks[i] on the vector's entries positions[i], zero between blocks; (n, n), n the number of positions.

    Positions are LongTensors (p_i,) or ranges that together cover 0..n − 1; ranges are sliced, others gathered. A
    product costs one with each block. `space` says what the rows stand for, `sources` which data the matrix is of.
    """

    def __init__(
        self,
        *blocks: Operator,
        positions: Sequence[Tensor | range] | Partition,
        cache: Cache | None = None,
        space: Space | None = None,
        sources: Sources | None = None,
    ) -> None:
        self._store(blocks, positions, cache, space=space, sources=sources)

    def _store(self, blocks: Sequence[Operator], positions: Any, cache: Cache | None, **kept: Any) -> None:
        """Keep the blocks, and a subclass's own keywords."""
        if not isinstance(positions, Partition):
            positions = checked(blocks, positions)
        LinearOperator.__init__(self, *blocks, positions=positions, cache=Cache() if cache is None else cache, **kept)

    @property
    def blocks(self) -> tuple[Operator, ...]:
        """The operators on the diagonal."""
        return self._args

    @property
    def partition(self) -> Partition:
        """Which entries each block acts on."""
        return self._kwargs["positions"]

    @property
    def cache(self) -> Cache:
        """Where the factorisations are kept."""
        return self._kwargs["cache"]

    @property
    def symmetric(self) -> bool:
        return all(is_symmetric(block) for block in self.blocks)

    @property
    def psd(self) -> bool:
        return all(is_psd(block) for block in self.blocks)

    def _size(self) -> torch.Size:
        return torch.Size((self.partition.size, self.partition.size))

    def _transpose_nonbatch(self) -> LinearOperator:
        if self.symmetric and not recorded(self.representation()):
            return self
        transposed = (block.mT for block in self.blocks)
        return BlockDiagonal(*transposed, positions=self.partition, space=self.spaces[0], sources=self.sources)

    def _product(self, block: Tensor) -> Tensor:
        parts = self.partition.split(block.mT)
        return self.partition.join([b._matmul(part.mT).mT for b, part in zip(self.blocks, parts)]).mT

    def _transposed_product(self, block: Tensor) -> Tensor:
        parts = self.partition.split(block.mT)
        return self.partition.join([b._t_matmul(part.mT).mT for b, part in zip(self.blocks, parts)]).mT

    def _diagonal(self) -> Tensor:
        return self.partition.join([block._diagonal() for block in self.blocks])

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.partition.join([draw(block, k, generator).mT for block in self.blocks]).mT

    def _mul_constant(self, other: Any) -> LinearOperator:
        if torch.as_tensor(other).ndim:
            return super()._mul_constant(other)
        blocks, sources = (block._mul_constant(other) for block in self.blocks), scaled(self.sources, other)
        return BlockDiagonal(*blocks, positions=self.partition, space=self.spaces[0], sources=sources)

    def _closed_form(self) -> Any:
        return self.cache.kept("undamped", self.representation(), self._undamped)._closed_form()

    def _undamped(self) -> LinearOperator:
        # Of a copy: what the cache keeps must not refer back to it.
        return BlockDiagonal(*self.blocks, positions=self.partition).add_diagonal(0.0)


def checked(blocks: Sequence[LinearOperator], positions: Sequence[Tensor | range]) -> Partition:
    """The partition for these blocks; ValueError where sizes do not fit, TypeError for what is not an Operator."""
    for block in blocks:
        if not isinstance(block, Operator):
            raise TypeError(f"a block must be an Operator, got {type(block).__name__}; wrap a tensor in Dense(tensor).")
    if len(blocks) != len(positions):
        raise ValueError(f"{len(blocks)} blocks need as many sets of positions, got {len(positions)}.")
    parts = partition(positions, blocks[0].device if blocks else None)
    for i, (block, size) in enumerate(zip(blocks, parts.sizes)):
        if tuple(block.shape) != (size, size):
            raise ValueError(f"block {i} has shape {tuple(block.shape)} but {size} positions.")
    return parts
