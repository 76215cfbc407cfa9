"""Columns, the diagonal and the dense matrix of an operator that is known by its products."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.errors import ManyProductsWarning, warn
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.memory import holding, memories_of, solve_width
from curvops.linalg.core.spaces import spaces_of
from curvops.linalg.core.vectors import unit_columns

# To read single entries or the diagonal, unit vectors are multiplied in blocks of this many columns.
COLUMN_BLOCK = 64
MANY_PRODUCTS = 1000
"""A call whose name does not show that it takes more products than this says so before it starts."""


class EntriesByProducts(LinearOperator):
    """An operator's entries, by products with unit vectors, as many at a time as the memory budget allows."""

    def _columns(self, index: Tensor) -> Tensor:
        """Return the columns A[:, index], (m, len(index)), by one product each."""
        return self.matmul(unit_columns(index.to(self.device), self.shape[-1], self.dtype))

    def _by_columns(self, index: Tensor, most: int = COLUMN_BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (positions, A[:, positions]), at most ``most`` columns at a time, fewer if memory is short."""
        width, beside = solve_width(self, min(most, len(index)))
        for part in index.split(width):
            with holding(self, beside):
                found = self._columns(part)
            yield part, found

    def diagonal(self, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        """Return the exact diagonal, (n,): without a product if it is known, otherwise by n products.

        `co.linalg.diagonal(A)` estimates it from 128 products, with an error bar. Above 1,000 products the call warns
        before it starts (`ManyProductsWarning`).

        Args:
            offset: 0; linear_operator's signature.
            dim1: −2, as above.
            dim2: −1, as above.

        Returns:
            The diagonal, (n,).

        Raises:
            RuntimeError: A is not square.
        """
        found: Tensor = super().diagonal(offset, dim1, dim2)
        return found

    def _warn_of_products(self, count: int, what: str, instead: str) -> None:
        if count > MANY_PRODUCTS:
            warn(
                f"{what} of this {type(self).__name__} takes {count:,} products: {instead}.",
                ManyProductsWarning,
            )

    def _diagonal(self) -> Tensor:
        positions = torch.arange(min(self.matrix_shape), device=self.device)
        instead = "co.linalg.diagonal(A) estimates it from 128, with an error bar"
        self._warn_of_products(len(positions), "the exact diagonal", instead)
        return torch.cat([found[part].diagonal() for part, found in self._by_columns(positions)])

    def to_dense(self) -> Tensor:
        """Form the matrix, (..., m, n), by one product per column, as many at a time as the memory budget allows.

        A small matrix is kept for further calls as long as the operator's tensors are unchanged; each call returns a
        copy. Above 1,000 products with a curvature of a network the call warns before it starts.
        """
        if max(self.matrix_shape) > routes.DENSE_SIZE:
            products = min(self.matrix_shape) if memories_of(self) and all(spaces_of(self)) else 0
            instead = "the solvers, eigenpairs and estimates of co.linalg take fewer"
            self._warn_of_products(products, "the dense matrix", instead)
            return self._form_dense()
        tensors = self.representation()
        watched = [tensor for tensor in tensors if tensor.numel() <= routes.DENSE_SIZE**2]
        cache: Cache = self.__dict__.setdefault("_dense_cache", Cache())
        return cache.get_or_compute("dense", tensors, self._form_dense, watched).clone()

    def _form_dense(self) -> Tensor:
        m, n = self.matrix_shape
        if self.batch_shape or solve_width(self, n)[0] >= n:
            operator, size = (self.mT, m) if m < n else (self, n)
            unit = torch.eye(size, dtype=self.dtype, device=self.device).expand(*self.batch_shape, size, size)
            found = operator.matmul(unit)
            return (found.mT if m < n else found).contiguous()
        positions = torch.arange(n, device=self.device)
        return torch.cat([found for _, found in self._by_columns(positions, n)], 1)

    @property
    def diagonal_matvecs(self) -> int:
        """The number of products that the diagonal takes: n for classes without a cheaper way, and for foreign ones."""
        if type(self)._diagonal is EntriesByProducts._diagonal:
            return min(self.matrix_shape)
        parts = (part for part in self._args if isinstance(part, LinearOperator))
        return sum(getattr(part, "diagonal_matvecs", self.shape[-1]) for part in parts)
