"""The few primitives through which every algorithm touches long vectors, and what it asks of a matrix.

Algorithms import the module as `vec`. A block of K vectors of length n has shape (n, K) and is stored as
``(K, n).mT``, so that a column is contiguous. Small results (scalars per column, K × K matrices) are float64 tensors
whatever the vectors' dtype.

Other storage, such as blocks sharded over devices, changes no algorithm. Each primitive is a `functools.singledispatch`
function whose default is for tensors. Register yours for your type of block (``inner.register(Sharded, ...)``), the
primitives that create blocks (``like``) also for a subclass of `Description`. For your operators register
`described_for_ranks`, which returns that subclass. A block has ``shape, dtype, device, ndim, to(dtype), detach()`` and
``+ - * /`` with a block, a number, or a tensor of K numbers, one per column. `Vectors` annotates arguments that may be
blocks of any type.
`ranks/sharded_vectors.py` is an example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial, singledispatch
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import CACHE_BYTES, as_step
from curvops.checks import check_generator, drawn_seed, refuse_modes, refuse_tangents

Matrix: TypeAlias = Tensor | LinearOperator
Given: TypeAlias = Callable[[Any], Any]
"""A function V -> A V on blocks, or a SciPy LinearOperator, which can be called, too."""
NoiseKind: TypeAlias = Literal["rademacher", "gaussian", "separate"]
ScalarFunction: TypeAlias = Callable[[Tensor], Tensor]
"""A function applied to each entry on its own, for example to eigenvalues."""
NEAR_ZERO = 100.0
"""Eigenvalues within this many eps ‖A‖ of zero count as zero."""
ROUNDING_SEEN = 1e-3
"""Without a tolerance, relative errors from rounding alone are reported above this level."""
ROUNDINGS = 10.0
"""The largest error of an entry of a product, in units of rounding of the sum of the magnitudes of its terms."""
CHUNK = 1 << 20
DRAWN_AT_ONCE = ("cpu",)
"""The types of device that draw a normal block by one call; on others, pieces differ, so they draw by vectors."""

if TYPE_CHECKING:
    Vectors: TypeAlias = Tensor
else:

    @runtime_checkable
    class Vectors(Protocol):
        """A block of long vectors, or a single one: a tensor, or any type for which the primitives are registered."""

        shape: Any
        dtype: torch.dtype
        device: torch.device


class Description(NamedTuple):
    """The facts about a matrix that an algorithm needs before it multiplies: size, dtype and device."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def vector_bytes(self) -> int:
        """The bytes of a vector on the longer side."""
        return max(self.rows, self.columns) * self.dtype.itemsize

    @property
    def pair_bytes(self) -> int:
        """The bytes of a vector on each side."""
        return (self.rows + self.columns) * self.dtype.itemsize


@singledispatch
def as_matrix(A: Any, like: Any = None) -> Matrix:
    """Return a matrix as it is, and a function or a SciPy LinearOperator as an operator (`as_operator`)."""
    return cast(Matrix, A)


def describe(A: Matrix) -> Description:
    """Return size, dtype and device of a dense or lazy matrix.

    Raises:
        TypeError: A is neither a tensor nor a LinearOperator, or does not have a floating dtype of 32 bits or more.
        ValueError: A is not a matrix (batches are not supported), or is empty.
        RuntimeError: the call is inside a transform of `torch.func`, or A has a tangent.
    """
    if not isinstance(A, (Tensor, LinearOperator)):
        hint = "; pass torch.as_tensor(A)" if isinstance(A, np.ndarray | list) else ""
        hint = "; pass scipy.sparse.linalg.aslinearoperator(A)" if hasattr(A, "tocsr") else hint
        hint = "; pass an operator made from it, such as co.GGN(lin)" if hasattr(A, "jacobian") else hint
        raise TypeError(f"A must be a tensor or a linear_operator.LinearOperator, got {type(A).__name__}{hint}.")
    if len(A.shape) != 2:
        raise ValueError(f"A must be a single matrix, got shape {tuple(A.shape)}.")
    if not A.shape.numel():
        raise ValueError(f"A must have at least one row and one column, got {A.shape[0]} x {A.shape[1]}.")
    if not A.dtype.is_floating_point:
        raise TypeError(f"A must have a real floating-point dtype, got {A.dtype}.")
    require_precision(A.dtype, torch.device(A.device))
    refuse_tangents((A,))
    facts = Description(int(A.shape[0]), int(A.shape[1]), A.dtype, torch.device(A.device))
    return described_for_ranks(A, facts) if dist.is_available() and dist.is_initialized() else facts


@singledispatch
def described_for_ranks(A: Matrix, facts: Description) -> Description:
    """Return the description of a matrix that processes of a group multiply together, or these facts alone."""
    return facts


def require_precision(dtype: torch.dtype, device: torch.device) -> None:
    """Raise TypeError for half precision, in which matrices can only be multiplied; ValueError under autocast."""
    refuse_modes(dtype, device)
    if torch.finfo(dtype).bits < 32:
        raise TypeError(f"{dtype} is too coarse to solve or factorise with: convert with op.to(torch.float32).")


def check_finite(values: Tensor, what: str = "a product of A") -> None:
    """Raise ValueError if one of these numbers is not finite."""
    if not bool(torch.isfinite(values).all()):
        raise ValueError(f"{what} holds NaN or Inf; check the parameters and the data.")


def rounding_level(dtype: torch.dtype, n: int) -> float:
    """Return the backward error, or the share of ‖A‖, that rounding alone causes in vectors of length n."""
    return ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(n)


def describe_square(A: Matrix) -> Description:
    """Return ``describe(A)``; raise ValueError if A is not square."""
    facts = describe(A)
    if facts.rows != facts.columns:
        raise ValueError(f"A must be square, got {facts.rows} x {facts.columns}.")
    return facts


def is_symmetric(A: Any) -> bool:
    """Return whether A is tagged as symmetric; tensors and foreign operators have no tag."""
    return bool(getattr(A, "symmetric", False))


def is_psd(A: Any) -> bool:
    """Return whether A is tagged as positive semidefinite; tensors and foreign operators have no tag."""
    return bool(getattr(A, "psd", False))


def known_diagonal(A: Any) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]] | None:
    """Return the diagonal of an operator that knows it without products, and the change of its entries by rounding."""
    return A._diagonal_and_error() if getattr(A, "diagonal_matvecs", None) == 0 else None


def product(A: Matrix) -> Callable[[Tensor], Tensor]:
    """Return the map V -> A V on blocks (n, K), which counts its columns as products and records no graph."""
    return partial(_multiplied, A.detach().matmul if isinstance(A, Tensor) else A._matmul, A.shape[0])


def transposed_product(A: Matrix) -> Callable[[Tensor], Tensor]:
    """Return the map U -> Aᵀ U on blocks (m, K), as ``product`` does for A."""
    return partial(_multiplied, A.detach().mT.matmul if isinstance(A, Tensor) else A._t_matmul, A.shape[1])


def _multiplied(multiply: Callable[[Tensor], Tensor], rows: int, block: Tensor) -> Tensor:
    if not block.shape[1]:
        return block.new_empty(rows, 0)
    with torch.no_grad():
        return as_step(block.shape[1], multiply, block).detach()


def as_columns(B: Vectors) -> Vectors:
    """Return a vector (n,) as a block of one column, and a block unchanged."""
    return B.unsqueeze(1) if B.ndim == 1 else B


def has_rows(B: Vectors, n: int) -> bool:
    """Return whether B has n rows, as a vector (n,), a block (n, K) or a batch (..., n, K)."""
    return B.ndim > 0 and B.shape[-1 if B.ndim == 1 else -2] == n


def shaped_as(X: Float[Vectors, "*batch n k"], B: Vectors) -> Vectors:
    """Return X, or its only column as a vector (..., n) if B is one."""
    return X.squeeze(-1) if B.ndim == 1 else X


def _length(like: Vectors | Description) -> int:
    return like.columns if isinstance(like, Description) else like.shape[0]


def column_bytes(like: Vectors | Description) -> int:
    """Return the bytes of a vector that this process holds: of a block, or on the longer side of a matrix."""
    nbytes: int | None = getattr(like, "vector_bytes", None)
    return _length(like) * like.dtype.itemsize if nbytes is None else nbytes


@singledispatch
def empty_block(like: Vectors | Description, k: int) -> Float[Vectors, "n k"]:
    """Return an uninitialised block of k contiguous columns, like those of a block or the arguments of a matrix."""
    return torch.empty(k, _length(like), dtype=like.dtype, device=like.device).mT


@singledispatch
def zero_block(like: Vectors | Description, k: int) -> Float[Vectors, "n k"]:
    """Return a block of k zero columns; ``like`` as for `empty_block`."""
    return torch.zeros(k, _length(like), dtype=like.dtype, device=like.device).mT


@singledispatch
def part(X: Float[Tensor, "n k"], start: int, stop: int) -> Float[Tensor, "n j"]:
    """Return columns start..stop of X, sharing its memory."""
    return X[:, start:stop]


@singledispatch
def put(X: Float[Tensor, "n k"], start: int, V: Float[Tensor, "n j"]) -> None:
    """Write V over the columns of X that begin at start."""
    X[:, start : start + V.shape[1]] = V


@singledispatch
def rotate(X: Float[Tensor, "n j"], C: Float[Tensor, "j k"]) -> None:
    """Write X C over the first k ≤ j columns of X, using little memory."""
    small = C.to(X)
    rows = max(1, CHUNK // max(1, X.shape[1]))
    for i in range(0, len(X), rows):
        X[i : i + rows, : C.shape[1]] = combine(X[i : i + rows], small)


@singledispatch
def as_block(X: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return a copy of X with contiguous columns."""
    return empty_block(X, X.shape[1]).copy_(X)


@singledispatch
def random_block(
    like: Vectors | Description,
    k: int,
    kind: NoiseKind = "rademacher",
    generator: torch.Generator | None = None,
) -> Float[Vectors, "n k"]:
    """Draw k independent vectors of independent entries, with mean 0 and variance 1; ``like`` as for `empty_block`.

    "separate" is also normal, with one call for each vector: a block then has the numbers of its parts, as signs do.
    """
    check_generator(generator)
    home = like.device if generator is None else generator.device
    rows = torch.empty(k, _length(like), dtype=like.dtype, device=home)
    if kind == "gaussian" and home.type in DRAWN_AT_ONCE:
        rows.normal_(generator=generator)
    else:
        for row in rows:
            _fill(row, kind, generator)
    return rows.to(like.device).mT


def random_columns(
    facts: Description, k: int, kind: NoiseKind, generator: torch.Generator | None
) -> Iterator[Float[Tensor, " n"]]:
    """Yield the columns of a `random_block`, the same numbers, one at a time."""
    n, home = facts.columns, facts.device if generator is None else generator.device
    together = 16  # torch makes so many numbers normal together on a CPU: pieces of this size equal those of one call
    if n < 2 * together:
        yield from random_block(facts, k, kind, generator).mT
        return
    like, rest = torch.empty(0, dtype=facts.dtype, device=home), torch.empty(0, dtype=facts.dtype, device=home)
    for j in range(k):
        more = n - len(rest)
        if kind == "gaussian" and home.type in DRAWN_AT_ONCE and j < k - 1:
            more = -(-more // together) * together
        drawn = torch.cat([rest, _fill(like.new_empty(more), kind, generator)])
        rest = drawn[n:]
        yield drawn[:n].to(facts.device)


def _fill(row: Tensor, kind: str, generator: torch.Generator | None) -> Tensor:
    if kind == "rademacher":
        return row.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return row.normal_(generator=generator)


def spawn_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return a generator, seeded by the given one, that shares no numbers with another one of the same seed.

    Probes that are correlated with a sketch are biased, and a caller may pass both the same seed.
    """
    if generator is None:
        return None
    seed = drawn_seed(generator)
    return torch.Generator(generator.device).manual_seed(seed)


@singledispatch
def columns(X: Float[Tensor, "n k"], index: Int[Tensor, " j"]) -> Float[Tensor, "n j"]:
    """Return the chosen columns of X, contiguous; the index may stay on the CPU."""
    return X.mT[index.to(X.device)].mT


@singledispatch
def put_columns(X: Float[Tensor, "n k"], index: Int[Tensor, " j"], V: Float[Tensor, "n j"]) -> None:
    """Write V over the chosen columns of X; the index may stay on the CPU."""
    X.mT[index.to(X.device)] = V.mT


@singledispatch
def join(first: Float[Tensor, "n _"], *others: Float[Tensor, "n _"]) -> Float[Tensor, "n k"]:
    """Return the blocks side by side, contiguous by columns."""
    return torch.cat([block.mT for block in (first, *others)]).mT


def unit_blocks(facts: Description, width: int) -> Iterator[Float[Tensor, "n k"]]:
    """Yield the identity of the size of A, ``width`` columns at a time."""
    for first in range(0, facts.columns, width):
        E = zero_block(facts, k := min(width, facts.columns - first))
        ones = torch.eye(k, dtype=facts.dtype, device=facts.device)
        put_entries(E, torch.arange(first, first + k, device=facts.device), ones)
        yield E


def unit_columns(index: Int[Tensor, " j"], n: int, dtype: torch.dtype) -> Float[Tensor, "n j"]:
    """Return the unit vectors of these positions as columns."""
    rows = torch.zeros(len(index), n, dtype=dtype, device=index.device)
    return rows.scatter_(1, index.unsqueeze(1), 1.0).mT


@singledispatch
def entries(X: Float[Tensor, "n k"], index: Int[Tensor, "*i"]) -> Float[Tensor, "*i k"]:
    """Return the rows of X at the given positions."""
    return X[index]


@singledispatch
def put_entries(X: Float[Tensor, "n k"], index: Int[Tensor, "*i"], rows: Float[Tensor, "*i k"]) -> None:
    """Write rows of X at the given positions, in place."""
    X[index] = rows


def draw_positions(weights: Float[Tensor, " n"], k: int, generator: torch.Generator | None = None) -> Int[Tensor, " j"]:
    """Draw k positions in proportion to non-negative weights, not all zero; return the distinct ones."""
    home = weights.device if generator is None else generator.device
    cumulative = weights.double().cumsum(0)
    levels = torch.rand(k, dtype=torch.float64, device=home, generator=generator).to(weights.device) * cumulative[-1]
    return torch.searchsorted(cumulative, levels, right=True).clamp_max(len(weights) - 1).unique()


@singledispatch
def by_rows(
    first: Float[Tensor, "n _"], *others: Float[Tensor, "n _"], function: Callable[..., Float[Tensor, "m j"]]
) -> Float[Tensor, "n j"]:
    """Return ``function(first, *others)``, which treats each row separately, some rows at a time; a plain tensor."""
    rows = max(1, CHUNK // max(1, first.shape[1]))
    return torch.cat([function(*blocks) for blocks in zip(*(X.split(rows) for X in (first, *others)))])


def _chunks(X: Tensor) -> Iterator[slice]:
    """Yield slices of rows of X whose temporaries stay small compared with a vector, for any number of columns.

    On a CPU a slice and what it becomes in float64 stay in its cache.
    """
    step = max(2**12, (CHUNK if X.is_cuda else CACHE_BYTES // 16) // max(1, X.shape[1]))
    for start in range(0, max(len(X), 1), step):
        yield slice(start, start + step)


@singledispatch
def finite_part(X: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Return X with zeros instead of NaN and Inf."""
    return torch.where(torch.isfinite(X), X, 0.0)


@singledispatch
def inner(X: Float[Tensor, "n k"], Y: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """Return xᵀy column by column, accumulated in float64."""
    if X.dtype == torch.float64:
        return torch.linalg.vecdot(X, Y, dim=0)
    pairs = ((X[rows].double(), Y[rows].double()) for rows in _chunks(X))
    return torch.stack([torch.linalg.vecdot(*pair, dim=0) for pair in pairs]).sum(0)


@singledispatch
def norm(X: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """Return the 2-norm of each column, accumulated in float64."""
    if X.dtype == torch.float64 or X.numel() <= CHUNK:
        return torch.linalg.vector_norm(X, dim=0, dtype=torch.float64)
    # In parts, since torch converts all that it is given first.
    parts = [torch.linalg.vector_norm(X[rows], dim=0, dtype=torch.float64) for rows in _chunks(X)]
    return torch.linalg.vector_norm(torch.stack(parts), dim=0)


@singledispatch
def largest(X: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """Return the largest absolute entry of each column."""
    sizes: Tensor = torch.linalg.vector_norm(X, ord=torch.inf, dim=0)
    return sizes.double()


@singledispatch
def gram(X: Float[Tensor, "n j"], Y: Float[Tensor, "n k"]) -> Float[Tensor, "j k"]:
    """Return XᵀY in float64. For float32 vectors this doubles the condition number that CholeskyQR can handle."""
    if X.dtype == Y.dtype == torch.float64:
        return X.mT @ Y
    total = torch.zeros(X.shape[1], Y.shape[1], dtype=torch.float64, device=X.device)
    for rows in _chunks(X if X.shape[1] >= Y.shape[1] else Y):
        left = X[rows].double()
        right = left if Y is X else Y[rows].double()
        total.addmm_(left.mT, right)
    return total


@singledispatch
def combine(X: Float[Tensor, "n j"], C: Float[Tensor, "j k"]) -> Float[Tensor, "n k"]:
    """Return X C, stored with contiguous columns."""
    return (C.to(X).mT @ X.mT).mT


@singledispatch
def axpy(Y: Float[Tensor, "n k"], X: Float[Tensor, "n j"], C: Float[Tensor, "*j k"]) -> Float[Tensor, "n k"]:
    """Compute Y ← Y + X C in place; a C (k,) holds one number for each column."""
    return Y.addcmul_(X, C.to(X)) if C.ndim == 1 else Y.addmm_(X, C.to(X))


@singledispatch
def householder(X: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n r"], Float[Tensor, "r k"]]:
    """Return the thin QR of a block, however ill conditioned, with r = min(n, k). R is float64."""
    Q, R = torch.linalg.qr(X)
    return as_block(Q), R.double()


@singledispatch
def project_out(
    W: Float[Tensor, "n j"], store: Float[Tensor, "n _"], room: int, used: int, which: Int[Tensor, " j"]
) -> tuple[Float[Tensor, "n j"], Float[Tensor, "j used"]]:
    """Subtract from column i of W its projection on orthonormal basis ``which[i]``, twice.

    This is classical Gram–Schmidt. ``store`` holds bases of ``room`` columns one after another, of which the first
    ``used`` columns are filled. Also returns the components of W along them.
    """
    return project_out_by(lambda along: along, W, store, room, used, which)


def project_out_by(
    add_up: Callable[[Tensor], Tensor], W: Tensor, store: Tensor, room: int, used: int, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `project_out` with components along the basis that `add_up` completes."""
    bases, rows = store.mT.unflatten(0, (-1, room)), W.mT
    if len(which) == len(bases):
        rest, along = _subtract_projections(add_up, rows, bases[:, :used])
        return rest.mT, along
    # One after the other: the bases of some vectors could not be taken from the store without a copy.
    parts = [
        _subtract_projections(add_up, rows[i : i + 1], bases[j : j + 1, :used]) for i, j in enumerate(which.tolist())
    ]
    rest, along = (torch.cat(tensors) for tensors in zip(*parts))
    return rest.mT, along


def _subtract_projections(add_up: Callable[[Tensor], Tensor], rows: Tensor, bases: Tensor) -> tuple[Tensor, Tensor]:
    along = add_up(torch.bmm(bases, rows.unsqueeze(2)))
    rows = rows - torch.bmm(along.mT, bases).squeeze(1)
    again = add_up(torch.bmm(bases, rows.unsqueeze(2)))
    return rows - torch.bmm(again.mT, bases).squeeze(1), along.squeeze(2)


# Orthonormal bases of blocks, from their Gram matrices


def tall_qr(X: Float[Vectors, "n k"], overwrite: bool = False) -> tuple[Float[Vectors, "n r"], Float[Tensor, "r k"]]:
    """Return the thin QR of a tall block, r = min(n, k), by CholeskyQR2, or by Householder if X is ill-conditioned.

    Cost: two Gram matrices and two triangular solves. R is float64. With ``overwrite``, Q takes the memory of X.
    """
    R = torch.eye(X.shape[1], dtype=torch.float64, device=X.device)
    Q = X
    if X.shape[1] <= X.shape[0]:
        limit = 1e-2 / torch.finfo(X.dtype).eps
        for turn in range(2):
            L, info = torch.linalg.cholesky_ex(gram(Q, Q))
            pivots = L.diagonal()
            if turn == 0 and (not pivots.numel() or bool((info != 0) | ~(pivots.amax() < limit**0.5 * pivots.amin()))):
                break
            if overwrite:
                rotate(Q, _inverse(L).mT)
            else:
                Q = combine(Q, _inverse(L).mT)
            R = L.mT @ R
        else:
            return Q, R
    return householder(X)


def _inverse(L: Tensor) -> Tensor:
    """Return L⁻¹ for a small lower-triangular L."""
    return torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)


def independent_basis(X: Float[Vectors, "n k"], gram_host: Float[Tensor, "k k"]) -> Float[Vectors, "n r"]:
    """Return an orthonormal basis of the range of X, without dependent and zero columns.

    ``gram_host`` is XᵀX on the CPU, so that the rank is decided without another transfer. If X is too ill-conditioned
    for its Gram matrix, Householder and the singular values of R decide.
    """
    eps = torch.finfo(X.dtype).eps
    sizes = gram_host.diagonal().clamp_min(0).sqrt()
    nonzero = (sizes > 0).nonzero().squeeze(1)
    if not len(nonzero):
        return part(X, 0, 0)
    scale = 1 / sizes[nonzero]
    values, vectors = torch.linalg.eigh(scale[:, None] * gram_host[nonzero][:, nonzero] * scale)
    # The Gram matrix is exact to float64; its eigenvalues are the squares of the singular values.
    if len(nonzero) <= X.shape[0] and values[0] > 1e-12 and values[0] > (1e2 * eps) ** 2:
        W = torch.zeros(len(sizes), len(nonzero), dtype=torch.float64)
        W[nonzero] = scale[:, None] * vectors / values.sqrt()
        Q = combine(X, W.to(X.device, non_blocking=True))
        L, _ = torch.linalg.cholesky_ex(gram(Q, Q))
        return combine(Q, _inverse(L).mT)
    Q, R = householder(columns(X, nonzero) * scale.to(X.device, X.dtype))
    U, singular, _ = torch.linalg.svd(R.cpu(), full_matrices=False)
    return combine(Q, U[:, singular > 30 * eps * singular[0]].to(X.device))
