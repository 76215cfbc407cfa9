"""The structure of a matrix: rows, columns and diagonals that it gives, and tests of symmetry and definiteness.

The tests distinguish a violation from rounding. Symmetry has one rule: for vectors X with known images AX, XᵀAX −
(XᵀAX)ᵀ is compared with the size of the images. k random vectors show √(k/n) of ‖A − Aᵀ‖_F/‖A‖_F; the formed matrix
shows all of it. A difference that the dtype does not explain is compared with the rounding of the products themselves,
which a deep network may have in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import as_step
from curvops.linalg.core.algorithm import Multiply
from curvops.linalg.core.results import Reason
from curvops.linalg.core.solve_routes import DENSE_BLOCK, FORMED_COPIES
from curvops.linalg.core.vectors import Description, Matrix, Vectors, columns, norm, product, unit_columns

MOST_SKEW = 0.1
"""A difference of more than this share of the images is not rounding: such products are random."""
LEAST_HALVED = 128
"""The rows of a symmetric product up to which it is computed whole."""


@singledispatch
def rows(A: Matrix) -> Callable[[Tensor], Any]:
    """Return the map index -> A[index, :], dense (b, n); for other `vectors` an object with ``@`` and ``diagonal()``.

    Rows of a tensor cost nothing, rows of a lazy kernel cost their evaluation, and rows of an operator known by its
    products cost one transposed product each.
    """
    if isinstance(A, Tensor):
        dense = A.detach()
        return lambda index: dense[index]

    def take(index: Tensor) -> Tensor:
        with torch.no_grad():
            block = A[index, :]
            result: Tensor = block if isinstance(block, Tensor) else block.to_dense()
        return result.detach()

    return take


def columns_of(A: Matrix, index: Int[Tensor, " j"]) -> Float[Tensor, "n j"]:
    """Return A[:, index], read from a tensor, or by one product each for an operator without a cheaper way."""
    if isinstance(A, Tensor):
        return as_step(len(index), columns, A.detach(), index)
    if hasattr(A, "_columns"):
        with torch.no_grad():
            images: Tensor = as_step(len(index), A._columns, index)
        return images.detach()
    return product(A)(unit_columns(index, A.shape[-1], A.dtype))


def diagonal_of(A: Matrix) -> tuple[Float[Tensor, " n"], int]:
    """Return the diagonal of a square A, and the number of products it took (0 if they cannot be counted)."""
    if isinstance(A, Tensor):
        return A.detach().diagonal(), 0
    with torch.no_grad():
        diagonal: Tensor = as_step(spent := getattr(A, "diagonal_matvecs", 0), A._diagonal)
    return diagonal.detach(), spent


def skew_tolerance(eps: float) -> float:
    """Return the largest relative difference of uᵀAv and vᵀAu that rounding at ``eps`` explains.

    It is relative to the size of A: 5e-6 in float64, for operators that use a lower precision inside, and 1.2e-4 in
    float32, whose products may end a longer computation or come from a device that multiplies with fewer digits.
    """
    return max(5e-6, 1e3 * eps)


def require_symmetric(
    X: Tensor, eps: float, size: Tensor | float | None = None, rounding: Callable[[], float] | None = None
) -> None:
    """Raise ValueError if a small matrix, or one of a batch, is not symmetric; a non-finite one passes.

    The difference to the transpose is compared with ``size``, by default the Frobenius norm, and with the ``rounding``
    of a column, if the dtype does not explain it.
    """
    size = torch.linalg.matrix_norm(X) if size is None else size
    if beyond_rounding(torch.linalg.matrix_norm(X - X.mT), size, eps, rounding or (lambda: 0.0), X.shape[-1]):
        raise ValueError(Reason.NOT_SYMMETRIC.value)


def beyond_rounding(
    gap: Tensor | float, size: Tensor | float, eps: float, rounding: Callable[[], float], products: int
) -> bool:
    """Return whether differences of uᵀAv and vᵀAu are neither the dtype's rounding nor that measured of a product."""
    gap, size = torch.as_tensor(gap), torch.as_tensor(size)
    doubtful = bool((gap > skew_tolerance(eps) * size).any())
    return doubtful and bool((gap > (MOST_SKEW * size).clamp(max=most_explained(rounding(), products))).any())


def formed(multiply: Multiply, facts: Description) -> Float[Tensor, "n n"]:
    """Form A in float64 by n products; raise ValueError if it is not symmetric. A non-finite one passes."""
    n, _, dtype, device = facts
    dense = multiply(torch.eye(n, dtype=dtype, device=device)).double()
    start = torch.ones(n, 1, dtype=dtype, device=device)
    require_symmetric(dense, torch.finfo(dtype).eps, rounding=lambda: rounding_of(multiply, start))
    return dense


def may_be_formed(A: Matrix, products: float | int, room: int | None) -> bool:
    """Return whether all eigenpairs of A may be computed, by as many products as rows, within ``room`` bytes."""
    n = A.shape[0]
    fits = room is None or FORMED_COPIES * n * n * torch.float64.itemsize <= room
    return n <= min(DENSE_BLOCK, products) and fits and getattr(A, "layouts", None) is None


def most_explained(rounding: float, products: int) -> float:
    """Return the largest difference of XᵀAX and its transpose that products of this measured rounding explain.

    Eight times the rounding counts as explained.
    """
    return 8.0 * rounding * math.sqrt(products)


def rounding_of(multiply: Multiply, start: Float[Vectors, "n 1"]) -> float:
    """Measure the rounding of a product with a unit vector as ‖Ax − A(x − s) − As‖ for unit s and x along As.

    It vanishes for every linear map, symmetric or not. Costs three products.
    """
    s = start / norm(start).to(start.dtype)
    image = multiply(s)
    x = image / norm(image).clamp_min(torch.finfo(image.dtype).tiny).to(image.dtype)
    return float(norm(multiply(x) - multiply(x - s) - image))


def clearly_indefinite(dense: Float[Tensor, "*batch n n"]) -> bool:
    """Return whether a symmetric matrix has an eigenvalue below zero by more than rounding explains.

    Costs a Cholesky factorisation, and the eigenvalues if that fails.
    """
    if not dense.numel() or not bool((torch.linalg.cholesky_ex(dense).info != 0).any()):
        return False
    if not bool(dense.isfinite().all()):
        return False  # non-finite matrices have their own reason
    values = torch.linalg.eigvalsh(dense)
    noise = dense.shape[-1] * torch.finfo(dense.dtype).eps * values.abs().amax(-1)
    return bool((values[..., 0] < -noise).any())


def add_gram(
    target: Float[Tensor, "n m"], rows: Float[Tensor, "n k"], others: Float[Tensor, "m k"], half: bool
) -> None:
    """Add rows · othersᵀ to target; with `half`, n equals m and only entries on and above the diagonal are needed."""
    if not half or len(rows) <= LEAST_HALVED:
        target.addmm_(rows, others.mT)
        return
    cut = len(rows) // 2
    for half_rows in (slice(0, cut), slice(cut, None)):
        add_gram(target[half_rows, half_rows], rows[half_rows], others[half_rows], half)
    target[:cut, cut:].addmm_(rows[:cut], others[cut:].mT)


def mirror(total: Tensor) -> Tensor:
    """Copy the entries above the diagonals of (g, p, p) below them, in place; return diagonals (g, p) unchanged."""
    p, tile = total.shape[-1], 256
    if total.ndim == 3 and p <= tile:
        return total.copy_(total.triu() + total.triu(1).mT)
    for start in range(0, p if total.ndim == 3 else 0, tile):
        here, after = slice(start, start + tile), slice(start + tile, None)
        corner = total[:, here, here].triu()
        total[:, here, here] = corner + corner.triu(1).mT
        if start + tile < p:
            total[:, after, here] = total[:, here, after].mT
    return total


def eigh_in_place(matrix: Float[Tensor, "*batch n n"]) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Return the eigenvalues, ascending, and the eigenvectors of a symmetric matrix, whose memory the vectors may take.

    Beside the matrix and its vectors LAPACK works with twice as much. The transposed matrix has the layout in which it
    writes vectors, so that no copy is needed.
    """
    if matrix.is_cuda:
        return torch.linalg.eigh(matrix)
    out = matrix.new_empty(matrix.shape[:-1]), matrix.mT
    torch.linalg.eigh(matrix.mT, out=out)
    return out
