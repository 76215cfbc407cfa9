"""The base class of every operator: its properties, its products, and an algebra that stays within our classes."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from linear_operator.operators import (
    ConstantDiagLinearOperator,
    DiagLinearOperator,
    IdentityLinearOperator,
    LinearOperator,
    ZeroLinearOperator,
    to_linear_operator,
)
from torch import Tensor

from curvops.linalg.core import solve_routes as routes
from curvops.linalg.core.cache import Cache
from curvops.linalg.core.memory import Memories, holding, memories_of, solved_at_a_time
from curvops.linalg.core.partition import Partition
from curvops.linalg.core.sources import Sources
from curvops.linalg.core.spaces import Spaces
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.contract import SolverContract
from curvops.linalg.operators.draws import draw, draw_by_products, draw_dense
from curvops.progress import Progress, progress_of

# Unit vectors are multiplied in blocks of this many columns where single entries or the diagonal are asked for.
COLUMN_BLOCK = 64


def by_columns(product: Callable[[Tensor], Tensor], rhs: Tensor) -> Tensor:
    """Apply a product defined on (n, K) blocks to a vector (n,) or to a batch (..., n, K), as further columns."""
    if rhs.ndim == 1:
        return product(rhs.unsqueeze(-1)).squeeze(-1)
    if rhs.ndim == 2:
        return product(rhs)
    *batch, rows, columns = rhs.shape
    block = product(rhs.movedim(-2, 0).reshape(rows, -1))
    return block.reshape(-1, *batch, columns).movedim(0, -2)


class Operator(SolverContract, LinearOperator):
    """A matrix known by its products: (m, n), usually far too large to be formed.

    A subclass stores tensors positionally (the first gives dtype and device) and everything else by keyword, does no
    work in `__init__` (linear_operator rebuilds an operator from its arguments at every product), and defines
    `_size`, `_product` on (n, K) blocks and, unless it is symmetric, `_transposed_product` on (m, K) blocks.

    Solvers rely on its tags `symmetric` and `psd` (positive semi-definite).
    """

    @property
    def _memoize_cache(self) -> dict[str, Any]:
        """An empty place for linear_operator's roots and dense matrices, which ignore later changes of the tensors.

        Values to be kept go through `Cache`, which watches the tensors.
        """
        return {}

    @_memoize_cache.setter
    def _memoize_cache(self, _: dict[str, Any]) -> None:
        pass

    _damped_form: ClassVar[type[ClosedForm] | None] = None
    """The closed form of A + diag(d) for operators of this class, where there is one."""

    @property
    def symmetric(self) -> bool:
        """Whether A = Aᵀ is known to hold."""
        return self.psd

    @property
    def psd(self) -> bool:
        """Whether A is known to be symmetric positive semi-definite."""
        return False

    @property
    def spaces(self) -> Spaces:
        """The spaces of rows and columns, from the keyword `space`, which conversions and rebuilds keep."""
        space = self._kwargs.get("space")
        return space, space

    @property
    def sources(self) -> Sources | None:
        """The data that the operator sums over, from the keyword `sources`; None where unknown."""
        return self._kwargs.get("sources")

    @property
    def low_rank_root(self) -> Tensor | None:
        """The root W (n, r) with A = W Wᵀ, for an operator stored as such with a small r; else None."""
        return None

    def detached_from_weights(self) -> LinearOperator:
        """Return the matrix as a constant, which may be added to operators linearised at other weights.

        Sums across weights are refused, since they are the curvature of neither network; call this where one is
        intended (yesterday's curvature as a prior, merged Fishers). Costs nothing; shares tensors and caches.
        """
        parts = [part.detached_from_weights() if isinstance(part, Operator) else part for part in self._args]
        space, sources = self._kwargs.get("space"), self._kwargs.get("sources")
        changed: dict[str, Any] = {} if space is None else {"space": space.detached()}
        changed |= {} if sources is None else {"sources": sources.detach()}
        return self.__class__(*parts, **self._kwargs | changed)

    @property
    def memories(self) -> Memories:
        """The memory budgets of the networks in A, from which algorithms on A take their vectors."""
        return frozenset().union(*(memories_of(part) for part in self._args))

    @property
    def progress(self) -> Progress:
        """The setting of progress bars for algorithms on A, from the first network in A that has one."""
        return next((asked for part in self._args if (asked := progress_of(part)) is not None), None)

    # Products

    def _product(self, block: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} defines neither _product nor _matmul; an Operator needs one of them.")

    def _transposed_product(self, block: Tensor) -> Tensor:
        if not self.symmetric:
            raise TypeError(f"{type(self).__name__} is not symmetric and defines no _transposed_product.")
        return self._product(block)

    def _matmul(self, rhs: Tensor) -> Tensor:
        return by_columns(self._product, rhs)

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return by_columns(self._transposed_product, rhs)

    def _transpose_nonbatch(self) -> LinearOperator:
        return self if self.symmetric else algebra.Transposed(self)

    def matmul(self, other: Tensor | LinearOperator) -> Tensor | LinearOperator:
        """Multiply a vector (n,), a block (n, K), a batch (..., n, K), or another operator (a lazy product).

        Raises ValueError where dtype, device or size do not fit. One product with A per column.
        """
        if isinstance(other, LinearOperator):
            return algebra.Product(self, other)
        if not isinstance(other, Tensor):
            named = " lin.flatten(mapping) makes a vector of named tensors." if isinstance(other, Mapping) else ""
            raise TypeError(
                f"{type(self).__name__} multiplies a tensor (n,) or (n, K) or an operator, got {type(other).__name__}."
                f"{named}"
            )
        if other.dtype != self.dtype or other.device != self.device:
            raise ValueError(
                f"{type(self).__name__} holds {self.dtype} on {self.device}, the right-hand side {other.dtype} on "
                f"{other.device}; convert one of them with .to(...)."
            )
        if other.shape[-1 if other.ndim == 1 else -2] != self.shape[-1]:
            raise ValueError(f"cannot multiply an operator of shape {tuple(self.shape)} by {tuple(other.shape)}.")
        return super().matmul(other)

    # The algebra: every spelling returns an Operator

    def __add__(self, other: Any) -> LinearOperator:
        if isinstance(other, ZeroLinearOperator) or (isinstance(other, int | float) and other == 0):
            return self
        if isinstance(other, numbers.Number) or (isinstance(other, Tensor) and other.ndim < 2):
            raise TypeError(
                f"{type(self).__name__} + a {'number' if isinstance(other, numbers.Number) else 'vector'} would add to "
                "every entry of the matrix; for the diagonal use add_diagonal("
                f"{other if isinstance(other, numbers.Number) else 'v'})."
            )
        if isinstance(other, ConstantDiagLinearOperator | IdentityLinearOperator | DiagLinearOperator):
            return self.add_diagonal(other._diagonal())
        if isinstance(other, Tensor):
            if other.shape[-2:] != self.matrix_shape:
                raise ValueError(f"cannot add a matrix of shape {tuple(other.shape)} to one of {tuple(self.shape)}.")
            other = dense.Dense(other)
        if not isinstance(other, LinearOperator):
            raise TypeError(f"cannot add {type(other).__name__} to {type(self).__name__}; expected an operator.")
        return other._add_to(self) if isinstance(other, Operator) else self._plus(other)

    def _add_to(self, left: Operator) -> LinearOperator:
        """Return B + A for an operator B: a diagonal and a damped operator are no further terms of a sum."""
        return left._plus(self)

    def _plus(self, other: LinearOperator) -> LinearOperator:
        """Return A + B for an operator B that is not a diagonal."""
        return algebra.Sum(self, other)

    def _plus_diagonal(self, entries: Tensor, sources: Sources | None) -> LinearOperator:
        """Return A + diag(d), where d has these sources."""
        total = self.add_diagonal(entries)
        return total.with_sources(sources) if isinstance(total, damped.Damped) else total

    def __radd__(self, other: Any) -> LinearOperator:
        return self + other

    def __neg__(self) -> LinearOperator:
        return self.mul(-1.0)

    def __sub__(self, other: Any) -> LinearOperator:
        return self + (-other)

    def __rsub__(self, other: Any) -> LinearOperator:
        return (-self) + other

    def _mul_constant(self, other: Any) -> LinearOperator:
        factor = torch.as_tensor(other, dtype=self.dtype, device=self.device)
        return algebra.Scaled(self, factor) if factor.ndim else self._times(factor)

    def _times(self, factor: Tensor) -> LinearOperator:
        """Return c A for a number c, 0-d; a class whose multiples are of its own kind overrides it."""
        return algebra.Scaled(self, factor)

    def _mul_matrix(self, other: Any) -> LinearOperator:
        self.require_small("an elementwise product")
        return dense.Dense(self.to_dense() * other.to_dense())

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        """Return A + diag(d), as `Damped`: d a number, a 0-d tensor, or a vector (n,) (a batch (..., n) broadcasts).

        Raises ValueError where the sizes do not fit or A is not square. Costs nothing until it is used.
        """
        if not self.is_square:
            raise ValueError(f"add_diagonal needs a square operator, got {tuple(self.shape)}.")
        shift = torch.as_tensor(diag, dtype=self.dtype, device=self.device)
        shift = shift.squeeze(-1) if shift.ndim and shift.shape[-1] == 1 and self.shape[-1] != 1 else shift
        if shift.ndim and shift.shape[-1] != self.shape[-1]:
            raise ValueError(f"the diagonal has {shift.shape[-1]} entries, the operator {self.shape[-1]}.")
        return damped.Damped(self, shift)

    def add_jitter(self, jitter_val: float = 1e-3) -> LinearOperator:
        """Return A + jitter · I (linear_operator's name for a scalar `add_diagonal`)."""
        return self.add_diagonal(jitter_val)

    def add_low_rank(self, low_rank_mat: Any, *args: Any, **kwargs: Any) -> LinearOperator:
        """Return A + B Bᵀ for B (n, r), as a lazy sum; no root is computed."""
        root = to_linear_operator(low_rank_mat)
        return self + dense.Dense(root.to_dense() @ root.to_dense().mT)

    def inverse(self, rtol: float | None = None) -> LinearOperator:
        """Return A⁻¹ as a lazy operator, a solve per product: J @ A.inverse() @ J.mT composes. `rtol` as in `cg`."""
        return damped.Inverse(self, rtol=rtol)

    # Entries, slices, batches

    def __getitem__(self, index: Any) -> Any:
        """Return A[index] as for a tensor, negative indices included; raise IndexError out of range."""
        given = index if isinstance(index, tuple) else (index,)
        at = next((i for i, part in enumerate(given) if part is Ellipsis), None)
        if at is not None:
            given = (*given[:at], *(slice(None),) * (len(self.shape) + 1 - len(given)), *given[at + 1 :])
        if len(given) > len(self.shape):
            raise IndexError(f"{len(given)} indices for an operator of shape {tuple(self.shape)}.")
        return super().__getitem__(tuple(map(_from_start, given, self.shape)))

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        if batch_indices and any(not _is_all(index) for index in batch_indices):
            raise ValueError(f"{type(self).__name__} has no batch dimension to index with {batch_indices}.")
        rows, columns = (_positions(i, n, self.device) for i, n in zip((row_index, col_index), self.matrix_shape))
        return self if rows is None and columns is None else algebra.Sliced(self, rows=rows, columns=columns)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(row_index.shape, col_index.shape, *(i.shape for i in batch_indices))
        rows, columns = row_index.expand(shape).reshape(-1), col_index.expand(shape).reshape(-1)
        wanted, position = columns.unique(return_inverse=True)
        blocks = [found[rows] for _, found in self._by_columns(wanted)]
        return torch.cat(blocks, 1).gather(1, position.unsqueeze(1)).squeeze(1).reshape(shape)

    def _columns(self, index: Tensor) -> Tensor:
        """Return the columns A[:, index], (m, len(index)): one product each."""
        units = torch.zeros(len(index), self.shape[-1], dtype=self.dtype, device=self.device)
        units.scatter_(1, index.unsqueeze(1), 1.0)
        return self.matmul(units.mT)

    def _by_columns(self, index: Tensor, most: int = COLUMN_BLOCK) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (positions, A[:, positions]), at most ``most`` columns at a time, fewer where memory is short."""
        width, beside = solved_at_a_time(self, min(most, len(index)))
        for part in index.split(width):
            with holding(self, beside):
                found = self._columns(part)
            yield part, found

    def _diagonal(self) -> Tensor:
        positions = torch.arange(min(self.matrix_shape), device=self.device)
        return torch.cat([found[part].diagonal() for part, found in self._by_columns(positions)])

    def to_dense(self) -> Tensor:
        """Form the matrix, (..., m, n): one product a column, as many at a time as the memory budget allows.

        A small matrix is kept for further calls, each of which returns a copy, as long as the operator's tensors are
        unchanged.
        """
        if max(self.matrix_shape) > routes.DENSE_SIZE:
            return self._form_dense()
        tensors = self.representation()
        watched = [tensor for tensor in tensors if tensor.numel() <= routes.DENSE_SIZE**2]
        cache: Cache = self.__dict__.setdefault("_dense_cache", Cache())
        return cache.get_or_compute("dense", tensors, self._form_dense, watched).clone()

    def _form_dense(self) -> Tensor:
        m, n = self.matrix_shape
        if self.batch_shape or solved_at_a_time(self, n)[0] >= n:
            operator, size = (self.mT, m) if m < n else (self, n)
            unit = torch.eye(size, dtype=self.dtype, device=self.device).expand(*self.batch_shape, size, size)
            found = operator.matmul(unit)
            return (found.mT if m < n else found).contiguous()
        positions = torch.arange(n, device=self.device)
        return torch.cat([found for _, found in self._by_columns(positions, n)], 1)

    @property
    def diagonal_matvecs(self) -> int:
        """The number of products the diagonal takes: n for a class without a cheaper way, ours or not."""
        if type(self)._diagonal is Operator._diagonal:
            return min(self.matrix_shape)
        parts = (part for part in self._args if isinstance(part, LinearOperator))
        return sum(getattr(part, "diagonal_matvecs", self.shape[-1]) for part in parts)

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        batch_shape = torch.Size(batch_shape)
        return self if batch_shape == self.batch_shape else algebra.Expanded(self, batch=batch_shape)

    def _unsqueeze_batch(self, dim: int) -> LinearOperator:
        return self._expand_batch((*self.batch_shape[:dim], 1, *self.batch_shape[dim:]))

    def _permute_batch(self, *dims: int) -> LinearOperator:
        return self._expand_batch([self.batch_shape[dim] for dim in dims])

    def repeat(self, *sizes: Any) -> LinearOperator:
        """Repeat the operator over leading batch dimensions, as torch.Tensor.repeat with trailing (1, 1)."""
        sizes = tuple(sizes[0]) if len(sizes) == 1 else sizes
        if len(sizes) < 2 or tuple(sizes[-2:]) != (1, 1):
            raise ValueError(f"only batch dimensions can be repeated: the last two sizes must be 1, got {sizes}.")
        batch = [1] * (len(sizes) - 2 - len(self.batch_shape)) + list(self.batch_shape)
        return self._expand_batch([repeat * size for repeat, size in zip(sizes, batch)])

    # Draws

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        """Draw k columns of N(0, A), (n, k), all together; `draw` keeps to the memory budget.

        A class with a root overrides it. Otherwise a small matrix is factorised, and noise is multiplied by the square
        root of a large one tagged as positive semidefinite; any other raises ValueError.
        """
        if self._is_formed:
            return draw_dense(self, k, generator)
        if self.psd and not self.batch_shape:
            return draw_by_products(self, k, generator)
        raise ValueError(
            f"this {type(self).__name__} of shape {tuple(self.shape)} is not known to be positive semidefinite, and no "
            "exact square root of it is known; draw from its parts, or from operator.inverse() of a Damped one."
        )

    def _exact_draws(self, k: int) -> Tensor:
        """Draw k columns of N(0, A), (n, k), from known roots; raise ValueError where none is known."""
        return draw(self, k)

    # Conversions

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

    def to_scipy(self) -> Any:
        """Return a `scipy.sparse.linalg.LinearOperator` of these products on NumPy arrays (copied to the CPU)."""

        from scipy.sparse.linalg import LinearOperator as ScipyOperator  # a slow import, which few calls need

        def wrap(matmul: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
            return lambda x: matmul(torch.as_tensor(x, dtype=self.dtype, device=self.device)).detach().cpu().numpy()

        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        forward, adjoint = wrap(self._matmul), wrap(self._t_matmul)
        return ScipyOperator(
            shape=tuple(self.shape), matvec=forward, matmat=forward, rmatvec=adjoint, rmatmat=adjoint, dtype=dtype
        )


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)


def _from_start(index: Any, size: int) -> Any:
    """Return an integer or integer tensor as counted from the first entry, which linear_operator requires."""
    if isinstance(index, int) and not isinstance(index, bool):
        if not -size <= index < size:
            raise IndexError(f"index {index} is out of range for a dimension of size {size}.")
        return index % size
    if isinstance(index, list):
        index = torch.tensor(index)
    if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool:
        return torch.where(index < 0, index + size, index)
    return index


def _positions(index: Any, size: int, device: torch.device) -> Tensor | None:
    """Return a row or column index as a tensor of positions, None for all; raise IndexError out of range."""
    if _is_all(index):
        return None
    positions = torch.arange(size, device=device)[index]
    return positions.reshape(-1)


def convert(value: Any, device: torch.device | None, dtype: torch.dtype | None) -> Any:
    """Convert a tensor or operator, floating ones to another dtype; return an empty cache, or the value itself."""
    if isinstance(value, LinearOperator):
        return value.to(device=device, dtype=dtype)
    if isinstance(value, Cache):
        return Cache()
    if isinstance(value, Partition):
        return value.to(device)
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)
    return value


# The algebra's classes derive from Operator, and Operator's methods return them: the cycle is closed here, once.
from curvops.linalg.operators import algebra, damped, dense  # noqa: E402
