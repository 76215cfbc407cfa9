"""A diagonal matrix, and that matrix plus a diagonal: every operation is elementwise."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_tensor
from curvops.linalg.core.sharded import Sharded
from curvops.linalg.core.sources import Sources, scale_sources
from curvops.linalg.core.spaces import Space
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import ClosedForm, DiagonalPlusRoot, Spectral, not_definite
from curvops.linalg.operators.draws import normal, require_not_negative


class DiagonalForm(Spectral):
    """The closed form of diag(a) + diag(d)."""

    @property
    def spectrum(self) -> Tensor:
        return self.base.entries + self.shift

    def rotate(self, block: Tensor) -> Tensor:
        return block

    def rotate_back(self, block: Tensor) -> Tensor:
        return block

    def solve(self, block: Tensor) -> Tensor:
        if bool((self.spectrum == 0).any()):
            raise not_definite(self.base, 0.0)
        return block / self.spectrum.unsqueeze(-1)  # entries may have any sign

    def inverse_diagonal(self) -> Tensor:
        return self.definite_spectrum.reciprocal()

    def inverse_parts(self) -> DiagonalPlusRoot:
        return DiagonalPlusRoot(self.inverse_diagonal())


class Diagonal(Operator):
    """The diagonal matrix diag(d) for a vector d (n,); every operation is elementwise.

    Args:
        entries: d, a vector (n,).
        space: the space of its rows and columns; None means plain vectors.
        sources: the record of the data behind the matrix.

    Raises:
        ValueError: the entries are not a vector.

    Examples:
        >>> D = co.linalg.Diagonal(torch.tensor([4.0, 2.0]))
        >>> D @ torch.ones(2), D.solve(torch.ones(2))
        (tensor([4., 2.]), tensor([0.2500, 0.5000]))
    """

    symmetric = True
    _damped_form: ClassVar[type[ClosedForm] | None] = DiagonalForm

    def __init__(self, entries: Tensor, space: Space | None = None, *, sources: Sources | None = None) -> None:
        check_tensor("entries", entries)
        if entries.ndim != 1:
            raise ValueError(f"entries must be a vector (n,), got {tuple(entries.shape)}.")
        super().__init__(entries, space=space, sources=sources)

    @property
    def entries(self) -> Tensor:
        """The diagonal d, (n,)."""
        return self._args[0]

    @property
    def psd(self) -> bool:
        return bool((self.entries >= 0).all())

    def _size(self) -> torch.Size:
        return torch.Size((len(self.entries), len(self.entries)))

    def _product(self, block: Tensor) -> Tensor:
        return self.entries.unsqueeze(-1) * block

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self._product(rhs) if isinstance(rhs, Sharded) and rhs.ndim == 2 else super()._matmul(rhs)

    def _diagonal(self) -> Tensor:
        return self.entries

    def _times(self, factor: Tensor) -> LinearOperator:
        return Diagonal(self.entries * factor, self.spaces[0], sources=scale_sources(self.sources, factor))

    def _closed_form(self) -> Any:
        return self.add_diagonal(0.0)._closed_form()

    def diagonal_plus_root(self) -> DiagonalPlusRoot:
        return DiagonalPlusRoot(self.entries)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        require_not_negative(self.entries)
        return self.entries.sqrt().unsqueeze(-1) * normal(len(self.entries), k, self.dtype, self.device, generator)
