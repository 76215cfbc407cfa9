"""A given matrix as an operator, by its entries (dense or diagonal) or by its products (a function, SciPy's operators).

A dense one plus a diagonal is factorised by Cholesky; for a diagonal one all is elementwise.

>>> import torch
>>> from curvops.linalg import as_operator, cg, trace
>>> decay = torch.arange(1.0, 6.0)
>>> A = as_operator(lambda v: decay * v, like=torch.ones(5))
>>> cg(A, torch.ones(5)).x
tensor([1.0000, 0.5000, 0.3333, 0.2500, 0.2000])
>>> trace(A, method="exact").value
tensor(15., dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor, nn

from curvops.checks import check_like, check_shape, check_tensor
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.matrix_identity import Sources, Space, scale_sources
from curvops.linalg.core.vectors import as_matrix, describe
from curvops.linalg.operators.base import Operator
from curvops.linalg.operators.closed_form import (
    ClosedForm,
    DiagonalPlusRoot,
    Spectral,
    not_definite,
    not_finite,
    warn_of_rounding,
)
from curvops.linalg.operators.draws import normal, require_not_negative
from curvops.linalg.spectra.apply_function import inverse_root

NO_ADJOINT = "this call, lsmr for example, needs products with Aᵀ"


class DenseForm(ClosedForm):
    """The Cholesky form of an operand that may be formed, in float64 if small or if its `rest` is known."""

    @property
    def holds(self) -> bool:
        return bool(self.base.symmetric)

    @property
    def dtype_of_entries(self) -> torch.dtype:
        """The dtype whose rounding the entries of the operand have."""
        whole = isinstance(self.base, Dense) and self.base.rest is not None
        return torch.float64 if whole else self.base.dtype

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
            dense = self.dense.detach()
            if not bool(dense.isfinite().all()):
                raise not_finite(f"{type(self.base).__name__} {tuple(self.base.shape)}", self.base.dtype)
            raise not_definite(self.base, float(torch.linalg.eigvalsh(dense).min()))
        warn_of_rounding(self.base, self._error)
        return L

    def _has_lost_pivot(self, L: Tensor) -> bool:
        """Return whether a pivot consists of rounding and is not dominated by a shift, so that its sign is random."""
        diagonal = self.dense.detach().diagonal()
        level = 2 * len(L) * torch.finfo(self.dtype_of_entries).eps * diagonal
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
        self.tensor, self.rest = tensor, rest

    @property
    def at_hand(self) -> bool:
        return True

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

    _shown = ("entries",)
    symmetric = True
    _damped_form: ClassVar[type[ClosedForm] | None] = DiagonalForm

    def __init__(self, entries: Tensor, space: Space | None = None, *, sources: Sources | None = None) -> None:
        check_tensor("entries", entries)
        if entries.ndim != 1:
            raise ValueError(f"entries must be a vector (n,), got {tuple(entries.shape)}.")
        super().__init__(entries, space=space, sources=sources)
        self.entries = entries

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


class GivenProducts(Operator):
    """A matrix known by its products alone; made by `as_operator`.

    Args:
        like: a tensor of its dtype, on its device.
        size: its size (m, n).
        multiply: the function V (n, K) -> A V.
        adjoint: the function U (m, K) -> Aᵀ U; None if it is not known.
        vectors: whether the functions take vectors (n,), a column at a time.
    """

    def __init__(
        self,
        like: Tensor,
        *,
        size: tuple[int, int],
        multiply: Callable[[Tensor], Any],
        adjoint: Callable[[Tensor], Any] | None = None,
        vectors: bool = False,
    ) -> None:
        super().__init__(like, size=size, multiply=multiply, adjoint=adjoint, vectors=vectors)

    def _size(self) -> torch.Size:
        return torch.Size(self._kwargs["size"])

    def _product(self, block: Float[Tensor, "n K"]) -> Float[Tensor, "m K"]:
        multiply, rows = self._kwargs["multiply"], self.shape[0]
        if self._kwargs["vectors"]:
            return torch.stack([_checked(multiply(v), v, rows) for v in block.unbind(1)], 1)
        return _checked(multiply(block), block, rows)

    def _transposed_product(self, block: Float[Tensor, "m K"]) -> Float[Tensor, "n K"]:
        adjoint = self._kwargs["adjoint"]
        if adjoint is None:
            raise TypeError(f"{NO_ADJOINT}: pass a SciPy LinearOperator with an rmatvec, or a subclass of Operator.")
        return _checked(adjoint(block), block, self.shape[1])


def _checked(image: Any, argument: Tensor, rows: int) -> Tensor:
    """Return the result of a function; raise TypeError or ValueError if it is not what a product with `given` is."""
    check_tensor("the result of the function of A", image)
    check_shape("the result of the function of A", image, (rows, *argument.shape[1:]))
    check_like("the result of the function of A", image, argument, "its argument")
    return image


def as_operator(A: Any, like: Tensor | None = None) -> LinearOperator:
    """Make an operator of a matrix known by a function V -> A V, by a SciPy LinearOperator, or by its entries.

    The solvers and the functions of a matrix (`cg`, `minres`, `solve`, `apply_function`, ...) call this with their
    right-hand sides. Products of a SciPy operator pass through NumPy, on the CPU. No gradient passes through either.
    A tensor (m, n) becomes a `Dense`; operators are returned as they are.

    Args:
        A: a function, for a square matrix; or a `scipy.sparse.linalg.LinearOperator` of any shape, whose
            ``rmatvec`` or ``rmatmat`` serves those who need Aᵀ (`lsmr`, `svds`); or a matrix, as a tensor or an
            operator.
        like: a vector (n,) or a block (n, K), which gives size, dtype and device, and says what the function takes:
            vectors, or blocks of any number of columns. A SciPy operator has its own shape,
            and without ``like`` its own dtype (float64 if that is not a floating-point dtype), on the CPU.

    Returns:
        The operator. The symmetry of products is not known: `cg` takes the caller's word, `solve` tests it.

    Raises:
        TypeError: A is none of these, is complex, or is a function without ``like``.
        ValueError: A is a tensor that is not a matrix.

    Examples:
        >>> A = co.linalg.as_operator(lambda V: 2 * V, like=torch.ones(3))
        >>> A.shape, co.linalg.solve(A, torch.ones(3))
        (torch.Size([3, 3]), tensor([0.5000, 0.5000, 0.5000]))
    """
    if isinstance(A, type | nn.Module) or hasattr(A, "jacobian") or not callable(A):
        describe(A)  # raises an error that says what a matrix is, unless A is one
        return Dense(A) if isinstance(A, Tensor) else A
    if like is not None:
        check_tensor("B or like", like)
    if not hasattr(A, "rmatmat"):
        if like is None:
            raise TypeError("the size of a function's matrix is unknown: as_operator(function, like=v).")
        rows = like.shape[-2] if like.ndim > 1 else len(like)
        return GivenProducts(like.detach().new_empty(0), size=(rows, rows), multiply=A, vectors=like.ndim == 1)
    kind = np.dtype(A.dtype or float)
    if kind.kind == "c":
        raise TypeError(f"A must have a real floating-point dtype, got {kind}.")
    dtype = torch.float32 if kind == np.float32 else torch.float64
    empty = torch.empty(0, dtype=dtype) if like is None else like.detach().new_empty(0)

    def adjoint(block: Any) -> Any:
        try:
            return A.rmatmat(block)
        except (NotImplementedError, TypeError) as error:  # SciPy calls None if there is no rmatvec
            raise TypeError(f"{NO_ADJOINT}: give the SciPy LinearOperator an rmatvec.") from error

    size = int(A.shape[0]), int(A.shape[1])
    return GivenProducts(empty, size=size, multiply=_through_numpy(A.matmat), adjoint=_through_numpy(adjoint))


as_matrix.register(cast("type[Any]", Callable), as_operator)  # SciPy's operators can be called, too


def _through_numpy(multiply: Callable[[Any], Any]) -> Callable[[Tensor], Tensor]:
    return lambda block: torch.as_tensor(multiply(block.detach().cpu().numpy())).to(block)
