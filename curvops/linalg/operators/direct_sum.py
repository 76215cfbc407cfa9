"""A direct sum of operators on disjoint sets of positions: a block-diagonal matrix, and that plus a diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import carries_graph, check_shape, refuse
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import Sources, Space, scale_sources
from curvops.linalg.core.partition import Partition, partition
from curvops.linalg.core.vectors import is_psd, is_symmetric
from curvops.linalg.operators.base import Operator, joined
from curvops.linalg.operators.closed_form import ClosedForm, Eigenbasis, closed_form
from curvops.linalg.operators.draws import draw
from curvops.linalg.operators.given_matrix import DenseForm


class DirectSumForm(ClosedForm):
    """The closed forms of all blocks: each block's own, otherwise Cholesky up to `DENSE_BLOCK` rows; all or none."""

    @property
    def holds(self) -> bool:
        return len(self.forms) == len(self.base.blocks)

    @cached_property
    def forms(self) -> list[ClosedForm]:
        """The closed form of each block that has one."""
        base, d = self.base, self.shift
        shifts = [d] * len(base.blocks) if d.ndim == 0 else base.partition.split(d)
        forms = [_form(block.add_diagonal(shift)) for block, shift in zip(base.blocks, shifts)]
        return [form for form in forms if form is not None]

    @cached_property
    def decomposed(self) -> list[ClosedForm]:
        """The forms to compute with; a subclass prepares all blocks at once here if that is cheaper."""
        return self.forms

    def require_definite(self) -> None:
        for form in self.decomposed:
            form.require_definite()

    def solve(self, block: Tensor) -> Tensor:
        return self.base.partition.map_columns([form.solve for form in self.decomposed], block)

    def logdet(self) -> Tensor:
        return torch.stack([form.logdet() for form in self.decomposed]).sum()

    def logdet_error(self) -> float:
        return sum(form.logdet_error() for form in self.decomposed)

    def inverse_diagonal(self) -> Tensor:
        return self.base.partition.join([form.inverse_diagonal() for form in self.decomposed])

    def inverse_diagonal_error(self) -> Tensor:
        return self.base.partition.join([form.inverse_diagonal_error() for form in self.decomposed])

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.base.partition.join_columns([form.draw(k, generator) for form in self.decomposed])

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.base.partition.join_columns([form.draw_inverse(k, generator) for form in self.decomposed])

    def inverse_root(self, block: Tensor) -> Tensor:
        return self.base.partition.map_columns([form.inverse_root for form in self.decomposed], block)

    def eigenbasis(self) -> Eigenbasis | None:
        eigenbases = [form.eigenbasis() for form in self.decomposed]
        bases = [basis for basis in eigenbases if basis is not None]
        if len(bases) < len(eigenbases):
            return None
        sizes = [len(basis.values) for basis in bases]  # eigenvectors are ordered block by block

        def rotate(block: Tensor) -> Tensor:
            parts = zip(bases, block.split(sizes))
            return self.base.partition.join_columns([basis.rotate(rows) for basis, rows in parts])

        def rotate_back(block: Tensor) -> Tensor:
            parts = self.base.partition.split_columns(block)
            return torch.cat([basis.rotate_back(rows).mT for basis, rows in zip(bases, parts)], 1).mT

        return Eigenbasis(torch.cat([basis.values for basis in bases]), rotate, rotate_back)


def _form(damped: Any) -> ClosedForm | None:
    form = closed_form(damped.base, damped.shift)
    if form is not None and form.holds:
        return form
    small = damped.shape[-1] <= routes.DENSE_BLOCK and is_symmetric(damped.base)
    return DenseForm(damped.base, damped.shift) if small else None


class DirectSum(Operator):
    """The matrix with blocks[i] on the entries positions[i] and zeros elsewhere; (n, n), n the number of positions.

    Positions are LongTensors (p_i,) or ranges that together cover 0..n − 1; ranges are sliced, others gathered. A
    product costs one with each block.

    Args:
        *blocks: the blocks, square operators (p_i, p_i).
        positions: for each block its positions, LongTensors (p_i,) or ranges, or a Partition.
        cache: results shared with another operator of the same matrix.
        space: the space of its rows and columns; None means plain vectors.
        sources: the record of the data behind the matrix.

    Examples:
        >>> one, two = co.linalg.Diagonal(torch.tensor([1.0])), co.linalg.Dense(torch.ones(2, 2), psd=True)
        >>> co.linalg.DirectSum(one, two, positions=[range(1), range(1, 3)]).to_dense()
        tensor([[1., 0., 0.],
                [0., 1., 1.],
                [0., 1., 1.]])
    """

    _shown: ClassVar[tuple[str, ...]] = ("blocks",)
    _damped_form: ClassVar[type[ClosedForm] | None] = DirectSumForm

    def __init__(
        self,
        *blocks: Operator,
        positions: Sequence[Tensor | range] | Partition,
        cache: Cache | None = None,
        space: Space | None = None,
        sources: Sources | None = None,
    ) -> None:
        self._store(blocks, positions, cache, space=space, sources=sources)

    def _store(self, blocks: Sequence[Operator], positions: Any, cache: Cache | None, **extra: Any) -> None:
        """Store the blocks, and the keywords of a subclass."""
        if not isinstance(positions, Partition):
            positions = check_blocks(blocks, positions)
        self.blocks, self.partition, self.cache = tuple(blocks), positions, Cache() if cache is None else cache
        LinearOperator.__init__(self, *blocks, positions=positions, cache=self.cache, **extra)

    @property
    def symmetric(self) -> bool:
        return all(is_symmetric(block) for block in self.blocks)

    @property
    def psd(self) -> bool:
        return all(is_psd(block) for block in self.blocks)

    def _size(self) -> torch.Size:
        return torch.Size((self.partition.size, self.partition.size))

    def _made_of(self) -> str:
        return joined(self.blocks, "⊕")

    def _transpose_nonbatch(self) -> LinearOperator:
        if self.symmetric and not carries_graph(self.representation()):
            return self
        transposed = (block.mT for block in self.blocks)
        return DirectSum(*transposed, positions=self.partition, space=self.spaces[0], sources=self.sources)

    def _product(self, block: Tensor) -> Tensor:
        return self.partition.map_columns([op._matmul for op in self.blocks], block)

    def _transposed_product(self, block: Tensor) -> Tensor:
        return self.partition.map_columns([op._t_matmul for op in self.blocks], block)

    def _diagonal(self) -> Tensor:
        return self.partition.join([block._diagonal() for block in self.blocks])

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.partition.join_columns([draw(block, k, generator) for block in self.blocks])

    def _times(self, factor: Tensor) -> LinearOperator:
        blocks, sources = (block._mul_constant(factor) for block in self.blocks), scale_sources(self.sources, factor)
        return DirectSum(*blocks, positions=self.partition, space=self.spaces[0], sources=sources)

    def _closed_form(self) -> Any:
        def undamped() -> Any:  # of a copy, since a cached value must not refer to the cache
            return DirectSum(*self.blocks, positions=self.partition).add_diagonal(0.0)

        return self.cache.get_or_compute("undamped", self.representation(), undamped)._closed_form()


def check_blocks(blocks: Sequence[LinearOperator], positions: Sequence[Tensor | range]) -> Partition:
    """Return the partition for these blocks; raise ValueError if sizes differ."""
    unequal = len(blocks) != len(positions)
    refuse(unequal, f"{len(blocks)} blocks need as many sets of positions, got {len(positions)}.")
    parts = partition(positions, blocks[0].device if blocks else None)
    for i, (block, size) in enumerate(zip(blocks, parts.sizes)):
        check_shape(f"block {i}", block, (size, size), "It has as many rows as positions.")
    return parts
