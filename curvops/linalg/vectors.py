"""The few primitives through which every algorithm touches long vectors.

A block of K vectors of length n has shape (n, K) and is stored as ``(K, n).mT``, so that a column is contiguous.
Small results (scalars per column, K × K matrices) are float64 whatever the vectors' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int
from linear_operator import LinearOperator
from torch import Tensor

Matrix: TypeAlias = Tensor | LinearOperator
CHUNK = 1 << 20


class Description(NamedTuple):
    """What an algorithm must know of a matrix before it multiplies by it."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device


def describe(A: Matrix) -> Description:
    """Size, dtype and device of a dense or lazy matrix.

    Raises:
        TypeError: A is neither a tensor nor a LinearOperator, or is not of a floating dtype of 32 bits or more.
        ValueError: A is not a matrix (batches are not supported), or is empty.
    """
    if not isinstance(A, (Tensor, LinearOperator)):
        raise TypeError(f"A must be a tensor or a linear_operator.LinearOperator, got {type(A).__name__}.")
    if len(A.shape) != 2:
        raise ValueError(f"A must be a single matrix, got shape {tuple(A.shape)}.")
    if not A.shape.numel():
        raise ValueError(f"A must have at least one row and one column, got {A.shape[0]} x {A.shape[1]}.")
    if not A.dtype.is_floating_point:
        raise TypeError(f"A must have a real floating dtype, got {A.dtype}.")
    require_precision(A.dtype)
    return Description(int(A.shape[0]), int(A.shape[1]), A.dtype, torch.device(A.device))


def require_precision(dtype: torch.dtype) -> None:
    """Raise TypeError for half precision: it is only multiplied."""
    if torch.finfo(dtype).bits < 32:
        raise TypeError(
            f"{dtype} is too coarse to solve or factorise with (its rounding is {torch.finfo(dtype).eps:.1g}); "
            "convert the operator with op.to(torch.float32), or linearise a model in single precision (model.float()). "
            "Its products work as it is."
        )


def describe_square(A: Matrix) -> Description:
    """As ``describe``, and a ValueError when A is not square."""
    facts = describe(A)
    if facts.rows != facts.columns:
        raise ValueError(f"A must be square, got {facts.rows} x {facts.columns}.")
    return facts


def product(A: Matrix) -> Callable[[Tensor], Tensor]:
    """The map V -> A V on blocks (n, K), without linear_operator's re-wrapping and without recording a graph."""
    if isinstance(A, Tensor):
        dense = A.detach()
        return lambda V: dense @ V
    multiply = A._matmul

    def apply(V: Tensor) -> Tensor:
        if not V.shape[1]:
            return V.new_empty(A.shape[0], 0)
        with torch.no_grad():
            result: Tensor = multiply(V)
        return result.detach()

    return apply


def transposed_product(A: Matrix) -> Callable[[Tensor], Tensor]:
    """The map U -> Aᵀ U on blocks (m, K), under the conditions of ``product``."""
    if isinstance(A, Tensor):
        return product(A.mT)
    multiply = A._t_matmul

    def apply(U: Tensor) -> Tensor:
        if not U.shape[1]:
            return U.new_empty(A.shape[1], 0)
        with torch.no_grad():
            result: Tensor = multiply(U)
        return result.detach()

    return apply


def rows(A: Matrix) -> Callable[[Tensor], Tensor]:
    """The map index -> A[index, :], dense (b, n).

    A tensor's rows cost nothing, those of a lazy kernel their evaluation, those of an operator known by its products
    one transposed product each.
    """
    if isinstance(A, Tensor):
        dense = A.detach()
        return lambda index: dense[index]

    def take(index: Tensor) -> Tensor:
        with torch.no_grad():
            part = A[index, :]
            result: Tensor = part if isinstance(part, Tensor) else part.to_dense()
        return result.detach()

    return take


def empty_block(n: int, k: int, like: Tensor) -> Float[Tensor, "n k"]:
    """An uninitialised block of k columns, each contiguous."""
    return torch.empty(k, n, dtype=like.dtype, device=like.device).mT


def part(X: Float[Tensor, "n k"], start: int, stop: int) -> Float[Tensor, "n j"]:
    """Columns start..stop of X, sharing its memory."""
    return X[:, start:stop]


def put(X: Float[Tensor, "n k"], start: int, V: Float[Tensor, "n j"]) -> None:
    """Write V over the columns of X that begin at start."""
    X[:, start : start + V.shape[1]] = V


def rotate(X: Float[Tensor, "n j"], C: Float[Tensor, "j k"]) -> None:
    """Write X C over the first k ≤ j columns of X, with little memory of its own."""
    small = C.to(X)
    rows = max(1, CHUNK // max(1, X.shape[1]))
    for i in range(0, len(X), rows):
        X[i : i + rows, : C.shape[1]] = combine(X[i : i + rows], small)


def as_block(X: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """A copy of X with contiguous columns."""
    return empty_block(X.shape[0], X.shape[1], X).copy_(X)


def random_block(
    n: int,
    k: int,
    kind: Literal["rademacher", "gaussian"] = "rademacher",
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n k"]:
    """Independent random vectors with independent entries of mean 0 and variance 1."""
    home = device if generator is None else generator.device
    rows = torch.empty(k, n, dtype=dtype, device=home)
    if kind == "rademacher":
        rows.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    else:
        rows.normal_(generator=generator)
    return rows.to(device).mT


def columns(X: Float[Tensor, "n k"], index: Int[Tensor, " j"]) -> Float[Tensor, "n j"]:
    """The chosen columns of X, contiguous; the index may stay on the host."""
    return X.mT[index.to(X.device)].mT


def join(*blocks: Float[Tensor, "n _"]) -> Float[Tensor, "n k"]:
    """The blocks side by side, contiguous by columns."""
    return torch.cat([block.mT for block in blocks]).mT


def unit_block(n: int, first: int, k: int, *, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "n k"]:
    """The unit vectors e_first … e_(first + k − 1) as columns."""
    rows = torch.zeros(k, n, dtype=dtype, device=device)
    rows.diagonal(offset=first).fill_(1)
    return rows.mT


def entries(X: Float[Tensor, "n k"], index: Int[Tensor, "*i"]) -> Float[Tensor, "*i k"]:
    """The rows of X at the given positions."""
    return X[index]


def put_entries(X: Float[Tensor, "n k"], index: Int[Tensor, "*i"], rows: Float[Tensor, "*i k"]) -> None:
    """Write rows of X at the given positions, in place."""
    X[index] = rows


def square_sums(X: Float[Tensor, "n k"]) -> Float[Tensor, " n"]:
    """Squared length of each row."""
    return X.square().sum(1)


def draw_positions(weights: Float[Tensor, " n"], k: int, generator: torch.Generator | None = None) -> Int[Tensor, " j"]:
    """At most k distinct positions out of k drawn in proportion to non-negative weights, not all zero."""
    home = weights.device if generator is None else generator.device
    cumulative = weights.double().cumsum(0)
    levels = torch.rand(k, dtype=torch.float64, device=home, generator=generator).to(weights.device) * cumulative[-1]
    return torch.searchsorted(cumulative, levels, right=True).clamp_max(len(weights) - 1).unique()


def columns_of(A: Matrix, index: Int[Tensor, " j"]) -> Float[Tensor, "n j"]:
    """A[:, index]: read off a tensor, one product each for an operator that has no cheaper way."""
    if isinstance(A, Tensor):
        return columns(A.detach(), index)
    if hasattr(A, "_columns"):
        with torch.no_grad():
            own: Tensor = A._columns(index)
        return own.detach()
    units = torch.zeros(len(index), A.shape[-1], dtype=A.dtype, device=index.device)
    return product(A)(units.scatter_(1, index.unsqueeze(1), 1.0).mT)


def diagonal_of(A: Matrix) -> tuple[Float[Tensor, " n"], int]:
    """The diagonal of a square A, and the products it took (0 where they cannot be counted)."""
    if isinstance(A, Tensor):
        return A.detach().diagonal(), 0
    with torch.no_grad():
        diagonal: Tensor = A._diagonal()
    return diagonal.detach(), getattr(A, "diagonal_matvecs", 0)


def _chunks(n: int) -> range:
    return range(0, max(n, 1), CHUNK)


def inner(X: Float[Tensor, "n k"], Y: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """xᵀy column by column, accumulated in float64."""
    parts = [torch.linalg.vecdot(X[i : i + CHUNK].double(), Y[i : i + CHUNK].double(), dim=0) for i in _chunks(len(X))]
    return torch.stack(parts).sum(0)


def norm(X: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """2-norm of each column, accumulated in float64."""
    sizes: Tensor = torch.linalg.vector_norm(X, dim=0, dtype=torch.float64)
    return sizes


def largest(X: Float[Tensor, "n k"]) -> Float[Tensor, " k"]:
    """Largest absolute entry of each column."""
    sizes: Tensor = torch.linalg.vector_norm(X, ord=torch.inf, dim=0)
    return sizes.double()


def gram(X: Float[Tensor, "n j"], Y: Float[Tensor, "n k"]) -> Float[Tensor, "j k"]:
    """XᵀY in float64. For float32 vectors this doubles the condition number that CholeskyQR survives."""
    total = torch.zeros(X.shape[1], Y.shape[1], dtype=torch.float64, device=X.device)
    for i in _chunks(len(X)):
        left = X[i : i + CHUNK].double()
        right = left if Y is X else Y[i : i + CHUNK].double()
        total.addmm_(left.mT, right)
    return total


def combine(X: Float[Tensor, "n j"], C: Float[Tensor, "j k"]) -> Float[Tensor, "n k"]:
    """X C, stored with contiguous columns."""
    return (C.to(X).mT @ X.mT).mT


def axpy(Y: Float[Tensor, "n k"], X: Float[Tensor, "n j"], C: Float[Tensor, "j k"]) -> Float[Tensor, "n k"]:
    """Y ← Y + X C, in place."""
    return Y.addmm_(X, C.to(X))


def tall_qr(X: Float[Tensor, "n k"]) -> tuple[Float[Tensor, "n r"], Float[Tensor, "r k"]]:
    """Thin QR of a tall block, r = min(n, k): CholeskyQR2, or Householder where X is ill conditioned.

    Cost: two Gram matrices and two triangular solves. R is float64.
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
            Q = _divide(Q, L)
            R = L.mT @ R
        else:
            return Q, R
    Q, R = torch.linalg.qr(X)
    return as_block(Q), R.double()


def _divide(X: Tensor, L: Tensor) -> Tensor:
    """X L⁻ᵀ for a small lower-triangular L."""
    inverse = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return combine(X, inverse.mT)


def independent_basis(X: Float[Tensor, "n k"], gram_host: Float[Tensor, "k k"]) -> Float[Tensor, "n r"]:
    """Orthonormal basis of the range of X, dependent and zero columns left out.

    ``gram_host`` is XᵀX on the host, so that the rank is decided without another transfer. Where X is too ill
    conditioned for its Gram matrix to tell, Householder and the singular values of R decide.
    """
    eps = torch.finfo(X.dtype).eps
    sizes = gram_host.diagonal().clamp_min(0).sqrt()
    kept = (sizes > 0).nonzero().squeeze(1)
    if not len(kept):
        return X[:, :0]
    scale = 1 / sizes[kept]
    values, vectors = torch.linalg.eigh(scale[:, None] * gram_host[kept][:, kept] * scale)
    # The Gram matrix is exact to float64; its eigenvalues are squares of the singular values wanted.
    if len(kept) <= X.shape[0] and values[0] > 1e-12 and values[0] > (1e2 * eps) ** 2:
        W = torch.zeros(len(sizes), len(kept), dtype=torch.float64)
        W[kept] = scale[:, None] * vectors / values.sqrt()
        Q = combine(X, W.to(X.device))
        L, _ = torch.linalg.cholesky_ex(gram(Q, Q))
        return _divide(Q, L)
    scaled = X[:, kept.to(X.device)] * scale.to(X)
    Q, R = torch.linalg.qr(scaled)
    U, singular, _ = torch.linalg.svd(R.double().cpu(), full_matrices=False)
    rank = int((singular > 30 * eps * singular[0]).sum())
    return combine(Q, U[:, :rank].to(X.device))


def orthogonalize(W: Float[Tensor, "K n"], basis: Float[Tensor, "K m n"]) -> Float[Tensor, "K n"]:
    """Each row of W minus its projection on its own basis: classical Gram–Schmidt, twice, in place."""
    for _ in range(2):
        coefficients = torch.bmm(basis, W.unsqueeze(2))
        W.sub_(torch.bmm(coefficients.mT, basis).squeeze(1))
    return W
