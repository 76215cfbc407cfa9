"""What linear_operator asks of its subclasses, in terms of an `Operator`'s own methods; nothing else knows its names.

linear_operator's own CG, Lanczos and Cholesky are never called on large matrices. A closed form comes first. Without
one, a matrix of at most `DENSE_SIZE` rows is formed and factorised, which costs no more than iterating and has every
gradient. Larger matrices are only multiplied, and an iteration that does not converge raises an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from linear_operator import settings
from linear_operator.operators import (
    CholLinearOperator,
    LinearOperator,
    RootLinearOperator,
    TriangularLinearOperator,
    to_linear_operator,
)
from torch import Tensor

from curvops.checks import carries_graph
from curvops.errors import ManyProductsWarning, warn
from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.algorithm import holding, memories_of, solve_width
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.matrix_identity import spaces_of
from curvops.linalg.core.partition import Partition
from curvops.linalg.core.results import default_rtol, indefinite
from curvops.linalg.core.structure import clearly_indefinite
from curvops.linalg.core.vectors import require_precision, unit_columns
from curvops.linalg.estimators.dense_spectrum import definite_logdet
from curvops.linalg.estimators.logdet import logdet
from curvops.linalg.operators.draws import draw
from curvops.linalg.solvers.solve import solve
from curvops.linalg.spectra.apply_function import inverse_root, inverse_root_product
from curvops.linalg.spectra.eigsh import eigsh
from curvops.linalg.spectra.lanczos import lanczos

COLUMN_BLOCK = 64
"""The number of unit vectors multiplied at once to read single entries or the diagonal."""


class LinearOperatorContract(LinearOperator):
    """The methods by which linear_operator and gpytorch slice, batch, solve, decompose, draw from and convert A."""

    @property
    def _memoize_cache(self) -> dict[str, Any]:
        """An empty store for linear_operator's roots and dense matrices, which ignore later changes of the tensors.

        Values to be kept go through `Cache`, which detects such changes.
        """
        return {}

    @_memoize_cache.setter
    def _memoize_cache(self, _: dict[str, Any]) -> None:
        pass

    def add_low_rank(self, low_rank_mat: Any, *args: Any, **kwargs: Any) -> LinearOperator:
        """Return A + B Bᵀ for B (n, r), as a lazy sum; no root is computed."""
        root = to_linear_operator(low_rank_mat)
        return self + root.to_dense() @ root.to_dense().mT

    def __getitem__(self, index: Any) -> Any:
        """Return A[index] as for a tensor, negative indices included; raise IndexError out of range."""
        return super().__getitem__(full_index(index, self.shape))

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        rows, columns, *_ = torch.broadcast_tensors(row_index, col_index, *batch_indices)
        wanted, position = columns.unique(return_inverse=True)
        blocks = [columns[rows.flatten()] for _, columns in self._by_columns(wanted)]
        return torch.cat(blocks, 1).gather(1, position.reshape(-1, 1)).reshape(rows.shape)

    def _columns(self, index: Tensor) -> Tensor:
        """Return the columns A[:, index], (m, len(index)), by one product each."""
        return self.matmul(unit_columns(index.to(self.device), self.shape[-1], self.dtype))

    def _by_columns(self, index: Tensor, most: int = COLUMN_BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (positions, A[:, positions]), at most ``most`` columns at a time, fewer if memory is short."""
        width, beside = solve_width(self, min(most, len(index)))
        for positions in index.split(width):
            with holding(self, beside):
                columns = self._columns(positions)
            yield positions, columns

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
        diagonal: Tensor = super().diagonal(offset, dim1, dim2)
        return diagonal

    def _warn_of_products(self, count: int, what: str, instead: str) -> None:
        if count > 1000:
            warn(
                f"{what} of this {type(self).__name__} takes {count:,} products: {instead}.",
                ManyProductsWarning,
            )

    def _diagonal(self) -> Tensor:
        positions = torch.arange(min(self.matrix_shape), device=self.device)
        instead = "co.linalg.diagonal(A) estimates it from 128, with an error bar"
        self._warn_of_products(len(positions), "the exact diagonal", instead)
        return torch.cat([columns[indices].diagonal() for indices, columns in self._by_columns(positions)])

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
        if m < n:
            return self.mT._form_dense().mT.contiguous()
        if self.batch_shape or solve_width(self, n)[0] >= n:
            unit = torch.eye(n, dtype=self.dtype, device=self.device).expand(*self.batch_shape, n, n)
            return self.matmul(unit).contiguous()
        positions = torch.arange(n, device=self.device)
        return torch.cat([columns for _, columns in self._by_columns(positions, n)], 1)

    @property
    def diagonal_matvecs(self) -> int:
        """The number of products that the diagonal takes: n for classes without a cheaper way, and for foreign ones."""
        if type(self)._diagonal is LinearOperatorContract._diagonal:
            return min(self.matrix_shape)
        arguments = (argument for argument in self._args if isinstance(argument, LinearOperator))
        return sum(getattr(argument, "diagonal_matvecs", self.shape[-1]) for argument in arguments)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._expand_batch((*self.batch_shape[:dim], 1, *self.batch_shape[dim:]))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._expand_batch([self.batch_shape[dim] for dim in dims])

    def repeat(self, *sizes: Any) -> LinearOperator:
        """Repeat the operator over leading batch dimensions, like torch.Tensor.repeat with trailing (1, 1)."""
        sizes = tuple(sizes[0]) if len(sizes) == 1 else sizes
        batch = [1] * (len(sizes) - 2 - len(self.batch_shape)) + list(self.batch_shape)
        return self._expand_batch([repeat * size for repeat, size in zip(sizes, batch)])

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Tensor:
        return solve(self, rhs)

    def inv_quad(self, inv_quad_rhs: Tensor, reduce_inv_quad: bool = True) -> Tensor:
        """Return bᵀ A⁻¹ b per column (…, K), or summed over columns."""
        columns = inv_quad_rhs.unsqueeze(-1) if inv_quad_rhs.ndim == 1 else inv_quad_rhs
        terms = (columns * self.solve(columns)).sum(-2)
        return terms.sum(-1) if reduce_inv_quad else terms

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """Return the pair (bᵀ A⁻¹ b, log det A); a term that is not requested is an empty or zero tensor."""
        zero = torch.zeros(self.batch_shape, dtype=self.dtype, device=self.device)
        quadratic = zero if inv_quad_rhs is None else self.inv_quad(inv_quad_rhs, bool(reduce_inv_quad))
        return quadratic, self.logdet() if logdet else zero

    def logdet(self) -> Tensor:
        """Return log det A in nats, (...,), as a tensor: the value of `co.linalg.logdet(A)`, which has its error bar.

        It is exact by a closed form, or by a dense Cholesky factor up to 256 rows; otherwise it is estimated. Raises
        NotPositiveSemidefiniteError if A is not positive definite.
        """
        require_precision(self.dtype, self.device)
        form = self._exact_form()
        if form is not None:
            return form.logdet()
        if self._is_formed:
            return definite_logdet(self._dense())
        if self.batch_shape:
            return torch.stack([one.logdet() for one in self._members()]).reshape(self.batch_shape)
        return logdet(self).value

    def _members(self) -> list[Any]:
        """Return the operators of a batch in a list."""
        return [self[index] for index in itertools.product(*map(range, self.batch_shape))]

    def _cholesky(self, upper: bool | None = False) -> TriangularLinearOperator:
        L = cholesky_factor(self, strict=self._is_regularised)
        return TriangularLinearOperator(L.mT if upper else L, upper=bool(upper))

    def root_decomposition(self, method: str | None = None) -> RootLinearOperator:
        """Return R with R Rᵀ ≈ A: Cholesky if A is small, otherwise Lanczos of rank `_root_decomposition_size()`."""
        require_precision(self.dtype, self.device)
        if self._is_formed:
            self._require_psd()
            if self._is_regularised and method in (None, "cholesky", "lanczos") and self.shape[-1] > 1:
                return CholLinearOperator(TriangularLinearOperator(cholesky_factor(self)))
            return super().root_decomposition(method="cholesky" if method in (None, "lanczos") else method)
        values, vectors = self._ritz_pairs()
        return RootLinearOperator(vectors * values.clamp_min(0).sqrt())

    def _ritz_pairs(self) -> tuple[Tensor, Tensor]:
        """Return all Ritz values and vectors of Lanczos with as many steps as linear_operator allows for a root."""
        result = lanczos(self, min(self.shape[-1], self._root_decomposition_size()))
        values, rotation = torch.linalg.eigh(result.T)
        return values.to(result.Q.dtype), result.Q @ rotation.to(result.Q.dtype)

    def root_inv_decomposition(
        self, initial_vectors: Tensor | None = None, test_vectors: Tensor | None = None, method: str | None = None
    ) -> RootLinearOperator:
        """Return R with R Rᵀ ≈ A⁻¹: Cholesky if A is small, otherwise from the Ritz pairs of Lanczos."""
        require_precision(self.dtype, self.device)
        if self._is_small:
            self._require_psd()
            method = "cholesky" if method in (None, "lanczos") else method
            return super().root_inv_decomposition(initial_vectors, test_vectors, method=method)
        values, vectors = self._ritz_pairs()
        return RootLinearOperator(vectors * values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt())

    def _require_psd(self) -> None:
        """Raise NotPositiveSemidefiniteError if a small A has a negative eigenvalue, which a jitter would hide."""
        if not self.psd and clearly_indefinite(self._dense().detach()):
            raise indefinite(f"a root of this {type(self).__name__} does not exist: it has a negative eigenvalue.")

    def sqrt_inv_matmul(self, rhs: Tensor, lhs: Tensor | None = None) -> Any:
        """Return A^-½ B, or the pair (L A^-½ B, diag(L A⁻¹ Lᵀ)), with the symmetric root.

        Differentiable in A, B and L. It is computed densely if A is small, otherwise by the closed form or by Lanczos
        (`co.linalg.inverse_sqrt`).

        Args:
            rhs: B, (n,) or (n, K).
            lhs: L, (m, n), or None.

        Returns:
            A^-½ B, or the pair.

        Raises:
            FunctionConvergenceError: the tolerance was not reached.
            NotPositiveSemidefiniteError: A is indefinite.
        """
        require_precision(self.dtype, self.device)
        columns = rhs.unsqueeze(-1) if rhs.ndim == 1 else rhs
        if self.batch_shape and not self._is_small:
            batch = self.batch_shape
            blocks = [B.expand(*batch, *B.shape[-2:]).flatten(0, -3) for B in (columns, lhs) if B is not None]
            members = [one.sqrt_inv_matmul(*sides) for one, *sides in zip(self._members(), *blocks)]
            if lhs is not None:
                return tuple(torch.stack(results).unflatten(0, batch) for results in zip(*members))
            product = torch.stack(members).unflatten(0, batch)
            return product.squeeze(-1) if rhs.ndim == 1 else product
        if self._is_small:
            root: Callable[[Tensor], Tensor] = inverse_root(self._dense()).matmul
        elif (form := self._closed_form()) is not None:
            root = form.inverse_root
        else:
            root = partial(inverse_root_product, self, lower_bound=self._lower_bound())
        if lhs is None:
            return root(columns).squeeze(-1) if rhs.ndim == 1 else root(columns)
        rows = root(lhs.mT).mT
        return rows @ rhs, rows.square().sum(-1)

    def diagonalization(self, method: str | None = None) -> tuple[Tensor, LinearOperator]:
        """Return eigenvalues (m,) and vectors (n, m), all of them if A is small or `method` is "symeig".

        Otherwise m = `_root_decomposition_size()` (at most n), and the pairs are those of largest absolute value, by
        `eigsh`; a RuntimeError names pairs that did not converge.
        """
        if self._is_small or method == "symeig":
            return self._symeig(eigenvectors=True)
        m = min(self.shape[-1], self._root_decomposition_size())
        pairs = eigsh(self, m, "LM", rtol=default_rtol(self.dtype)).raise_if_failed()
        return pairs.values.to(self.dtype), to_linear_operator(pairs.vectors)

    def _symeig(
        self, eigenvectors: bool = False, return_evals_as_lazy: bool | None = False
    ) -> tuple[Tensor, LinearOperator | None]:
        self.require_small("the eigendecomposition", "use .eigsh(k) for some of it, or ")
        require_precision(self.dtype, self.device)
        values, vectors = torch.linalg.eigh(self.to_dense())  # keeps negative values, which clamping would hide
        return values, to_linear_operator(vectors) if eigenvectors else None

    def _svd(self) -> tuple[LinearOperator, Tensor, LinearOperator]:
        longer = self if self.shape[-1] >= self.shape[-2] else self.mT
        longer.require_small("the singular value decomposition", "use .svds(k) for some of it, or ")
        U, values, Vt = torch.linalg.svd(self.to_dense(), full_matrices=False)
        return to_linear_operator(U), values, to_linear_operator(Vt.mT)

    def zero_mean_mvn_samples(self, num_samples: int) -> Tensor:
        """Draw `num_samples` rows of N(0, A), (num_samples, ..., n)."""
        form = None if carries_graph(self.representation()) and self._is_small else self._closed_form()
        if form is not None:
            return form.draw(num_samples, None).mT
        if not self._is_formed and self.batch_shape:
            draws = [one.zero_mean_mvn_samples(num_samples) for one in self._members()]
            return torch.stack(draws, 1).unflatten(1, self.batch_shape)
        if not self._is_formed:
            return draw(self, num_samples).mT  # exact or an error, since a truncated root would lose variance
        root = self.root_decomposition().root
        noise = torch.randn(*self.batch_shape, root.shape[-1], num_samples, dtype=self.dtype, device=self.device)
        return (root @ noise).movedim(-1, 0)

    def to(self, *args: Any, **kwargs: Any) -> LinearOperator:
        """Convert the operator to another dtype or device; index tensors keep their dtype."""
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        converted = [convert(arg, device, dtype) for arg in self._args]
        options = {key: convert(value, device, dtype) for key, value in self._kwargs.items()}
        return self.__class__(*converted, **options)

    def type(self, dtype: torch.dtype) -> LinearOperator:
        """Convert the operator to another dtype."""
        return self.to(dtype=dtype)

    def cpu(self) -> LinearOperator:
        """Move the operator to the CPU."""
        return self.to(device=torch.device("cpu"))

    def cuda(self, device_id: int | None = None) -> LinearOperator:
        """Move the operator to a CUDA device."""
        return self.to(device=torch.device("cuda", device_id) if device_id is not None else torch.device("cuda"))

    @property
    def _is_regularised(self) -> bool:
        """Whether a diagonal was added, so that a Cholesky factor needs no further jitter."""
        return False

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator` of these products on NumPy arrays (copied to the CPU)."""

        from scipy.sparse.linalg import LinearOperator as ScipyOperator  # a slow import that few calls need

        def wrap(matmul: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            return lambda x: matmul(torch.as_tensor(x, dtype=self.dtype, device=self.device)).detach().cpu().numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        forward, adjoint = wrap(self._matmul), wrap(self._t_matmul)
        return ScipyOperator(
            shape=tuple(self.shape), matvec=forward, matmat=forward, rmatvec=adjoint, rmatmat=adjoint, dtype=dtype
        )


def convert(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Convert a tensor or operator (floating-point ones to another dtype); empty a cache, return other values."""
    if isinstance(value, LinearOperator):
        return value.to(device=device, dtype=dtype)
    if isinstance(value, Cache):
        return Cache()
    if isinstance(value, Partition):
        return value.to(device)
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    return value


def cholesky_factor(operator: LinearOperator, strict: bool = False) -> Tensor:
    """Return the Cholesky factor L; a matrix singular to rounding gets the smallest jitter that makes it definite.

    With `strict` no jitter is added, as for densities, which the jitter would determine; a matrix that needs one is an
    error.

    The jitter is relative to the largest entry of the diagonal (linear_operator's is absolute, and could be the whole
    variance of small targets), from n eps up to a hundred times linear_operator's. Raises NotPositiveSemidefiniteError
    if that is not enough.
    """
    dense: Tensor = operator._dense()
    if not dense.numel():
        return dense
    largest = dense.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    unit = dense / torch.where(largest > 0, largest, 1.0)
    eye, of_unit = torch.eye(dense.shape[-1], dtype=dense.dtype, device=dense.device), unit.detach().diagonal(0, -2, -1)
    added, rounding = 0.0, len(eye) * torch.finfo(dense.dtype).eps
    most = 0.0 if strict else max(100 * settings.cholesky_jitter.value(dense.dtype), rounding)
    while added <= most:
        L, info = torch.linalg.cholesky_ex(unit + added * eye if added else unit)
        lost = L.detach().diagonal(dim1=-2, dim2=-1).square() <= 2 * rounding * of_unit
        if not bool(info.any() | (lost.any() & strict)):
            return L * largest.sqrt()
        added = max(10 * added, rounding)
    beyond = "to working precision, and no jitter is added" if strict else "beyond what rounding explains"
    raise indefinite(f"this {type(operator).__name__} has no Cholesky factor: it is not positive definite, {beyond}.")


def full_index(index: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return an index without an ellipsis, its integers counted from the first entry; IndexError out of range."""
    indices = index if isinstance(index, tuple) else (index,)
    at = next((i for i, entry in enumerate(indices) if entry is Ellipsis), None)
    if at is not None:
        indices = (*indices[:at], *(slice(None),) * (len(shape) + 1 - len(indices)), *indices[at + 1 :])
    if len(indices) > len(shape):
        raise IndexError(f"{len(indices)} indices for an operator of shape {tuple(shape)}.")
    return tuple(map(_from_start, indices, shape))


def _from_start(index: Any, size: int) -> Any:
    """Return integers as counted from the first entry, and a mask as the integers that it selects.

    linear_operator takes neither negative integers nor masks.
    """
    index = int(index) if isinstance(index, np.integer) else index
    if isinstance(index, int) and not isinstance(index, bool):
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for a dimension of size {size}.")
        return index % size
    if isinstance(index, list | range | np.ndarray):
        array = np.asarray(index)
        whole = array.dtype.kind in "iu" or not array.size
        index = torch.from_numpy(np.array(array, dtype=np.int64 if whole else None, order="C"))
    if isinstance(index, Tensor) and index.dtype == torch.bool:
        if index.shape != (size,):
            raise IndexError(f"the mask has shape {tuple(index.shape)}, but the dimension has size {size}.")
        return index.nonzero().squeeze(1)
    if isinstance(index, Tensor) and not index.is_floating_point():
        return torch.where(index < 0, index + size, index)
    return index


def positions(index: Any, size: int, device: torch.device) -> Tensor | None:
    """Return a row or column index as a tensor of positions, None for all; raise IndexError out of range."""
    everything = isinstance(index, slice) and index == slice(None)
    return None if everything else torch.arange(size, device=device)[index].reshape(-1)
