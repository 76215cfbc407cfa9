"""A given matrix as an operator: dense, and plus a diagonal by Cholesky, or diagonal, where all is elementwise."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, ClassVar

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checks import check_tensor
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.matrix_identity import Sources, Space, scale_sources
from curvops.linalg.functions.apply_function import inverse_root
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import (
    ClosedForm,
    DiagonalPlusRoot,
    Spectral,
    not_definite,
    warn_of_rounding,
)
from curvops.linalg.operators.draws import normal, require_not_negative


class DenseForm(ClosedForm):
    """The Cholesky form of an operand that may be formed, in float64 if small or if its `rest` is known."""

    @property
    def holds(self) -> bool:
        return bool(self.base.symmetric)

    @cached_property
    def dense(self) -> Tensor:
        """The matrix P, (n, n), in float64 up to `DENSE_BLOCK` rows."""
        dense, n = self.base.to_dense(), self.base.shape[-1]
        rest = self.base.rest if isinstance(self.base, Dense) else None
        if rest is not None or n <= routes.DENSE_BLOCK:
            dense = dense.double() if rest is None else dense.double() + rest
        return dense.diagonal_scatter(dense.diagonal() + self.shift.to(dense.dtype))

    @cached_property
    def chol(self) -> Tensor:
        """The Cholesky factor L with P = L Lᵀ."""
        L, info = torch.linalg.cholesky_ex(self.dense)
        if bool(info != 0) or self._has_lost_pivot(L):
            raise not_definite(self.base, float(torch.linalg.eigvalsh(self.dense.detach()).min()))
        warn_of_rounding(self.base, self._error)
        return L

    def _has_lost_pivot(self, L: Tensor) -> bool:
        """Return whether a pivot consists of rounding and is not dominated by a shift, so that its sign is random."""
        diagonal = self.dense.detach().diagonal()
        exact = isinstance(self.base, Dense) and self.base.rest is not None
        level = 2 * len(L) * torch.finfo(diagonal.dtype if exact else self.base.dtype).eps * diagonal
        return bool(((L.detach().diagonal().square() <= level) & (self.shift.detach() <= level)).any())

    @property
    def _error(self) -> float:
        """The largest error of P's eigenvalues, relative to the smallest shift; 0 if it was formed in float64."""
        if self.dense.dtype == torch.float64:
            return 0.0
        largest = float(torch.linalg.matrix_norm(self.dense.detach(), ord=torch.inf))
        least = float(self.shift.detach().min())
        return torch.finfo(self.dense.dtype).eps * largest / least if least > 0 else 0.0

    def logdet_error(self) -> float:
        return len(self.dense) * math.log1p(self._error)

    def require_definite(self) -> None:
        _ = self.chol

    def solve(self, block: Tensor) -> Tensor:
        return torch.cholesky_solve(block.to(self.chol.dtype), self.chol).to(block.dtype)

    def logdet(self) -> Tensor:
        return (2 * self.chol.diagonal().log().sum()).to(self.base.dtype)

    def inverse_diagonal(self) -> Tensor:
        eye = torch.eye(len(self.chol), dtype=self.chol.dtype, device=self.chol.device)
        return torch.linalg.solve_triangular(self.chol, eye, upper=False).square().sum(0).to(self.base.dtype)

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.chol.to(self.base.dtype) @ self._normal(k, generator)

    def draw_inverse(self, k: int, generator: torch.Generator | None) -> Tensor:
        noise = self._normal(k, generator)
        return torch.linalg.solve_triangular(self.chol.mT, noise.to(self.chol.dtype), upper=True).to(noise.dtype)

    def inverse_root(self, block: Tensor) -> Tensor:
        self.require_definite()
        return self.root @ block

    @cached_property
    def root(self) -> Tensor:
        """The symmetric root P^-½."""
        return inverse_root((self.dense + self.dense.mT) / 2).to(self.base.dtype)


class Dense(Operator):
    """A tensor (..., m, n) as an operator: one matrix, or a batch of small ones.

    Args:
        tensor: the matrix, (..., m, n).
        psd: a promise that the matrix is symmetric positive semi-definite.
        space: the space of its rows and columns; None means plain vectors.
        rest: the part of the matrix that rounding to its dtype removed, of the same shape: products ignore it,
            factorisations add it in float64.
        sources: the record of the data behind the matrix.

    Raises:
        ValueError: the tensor has fewer than two dimensions.

    Examples:
        >>> A = co.linalg.Dense(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), psd=True)
        >>> A @ torch.ones(2), A.add_diagonal(1.0).solve(torch.ones(2)).shape
        (tensor([3., 4.]), torch.Size([2]))
    """

    _shown = ("tensor",)
    _damped_form: ClassVar[type[ClosedForm] | None] = DenseForm

    def __init__(
        self,
        tensor: Tensor,
        psd: bool = False,
        space: Space | None = None,
        *,
        rest: Tensor | None = None,
        sources: Sources | None = None,
    ) -> None:
        check_tensor("tensor", tensor)
        if tensor.ndim < 2:
            raise ValueError(f"tensor must be a matrix (m, n) or a batch of them, got {tuple(tensor.shape)}.")
        super().__init__(tensor, psd=psd, space=space, rest=rest, sources=sources)

    @property
    def at_hand(self) -> bool:
        return True

    @property
    def tensor(self) -> Tensor:
        """The matrix, (..., m, n)."""
        return self._args[0]

    @property
    def rest(self) -> Tensor | None:
        """The part of the matrix that rounding to its dtype removed, if it is known."""
        return self._kwargs["rest"]

    @property
    def psd(self) -> bool:
        return self._kwargs["psd"]

    @property
    def symmetric(self) -> bool:
        if self.psd or not self.is_square or self.tensor.numel() == 0:
            return self.is_square
        slack = 4 * torch.finfo(self.dtype).eps * self.tensor.abs().max()
        return bool(((self.tensor - self.tensor.mT).abs() <= slack).all())

    def _size(self) -> torch.Size:
        return self.tensor.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        return Dense(self.tensor.mT, psd=self.psd, space=self.spaces[0], sources=self.sources)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.tensor @ rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.tensor.mT @ rhs

    def to_dense(self) -> Tensor:
        """Return the tensor itself."""
        return self.tensor

    def _diagonal(self) -> Tensor:
        return self.tensor.diagonal(dim1=-2, dim2=-1)

    def _times(self, factor: Tensor) -> LinearOperator:
        rest = None if self.rest is None else self.rest * factor
        psd, sources = self.psd and bool(factor >= 0), scale_sources(self.sources, factor)
        return Dense(self.tensor * factor, psd=psd, space=self.spaces[0], rest=rest, sources=sources)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        return Dense(self.tensor[(*batch_indices, row_index, slice(None))][..., col_index])

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        return self.tensor[(*batch_indices, row_index, col_index)]

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        return Dense(self.tensor.expand(*batch_shape, *self.matrix_shape))

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return Dense(self.tensor.unsqueeze(dim))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return Dense(self.tensor.permute(*dims, -2, -1))


def round_with_rest(matrix: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Round a matrix to another dtype; return it and the part that rounding removed."""
    rounded = matrix.to(dtype)
    return rounded, None if matrix.dtype == dtype else (matrix - rounded).to(dtype)


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
