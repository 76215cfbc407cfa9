"""Rows, columns and the diagonal of a matrix, in cheaper ways than by products if there are any."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import as_step
from curvops.linalg.core.vectors import Matrix, columns, product, unit_columns


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


def known_diagonal(A: Matrix) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]] | None:
    """Return the diagonal of an operator that knows it without products, and the change of its entries by rounding."""
    if isinstance(A, Tensor) or getattr(A, "diagonal_matvecs", None) != 0 or A.ndim > 2:
        return None
    pair: tuple[Tensor, Tensor] = A._diagonal_and_error()
    return pair


def diagonal_of(A: Matrix) -> tuple[Float[Tensor, " n"], int]:
    """Return the diagonal of a square A, and the number of products it took (0 if they cannot be counted)."""
    if isinstance(A, Tensor):
        return A.detach().diagonal(), 0
    with torch.no_grad():
        diagonal: Tensor = as_step(spent := getattr(A, "diagonal_matvecs", 0), A._diagonal)
    return diagonal.detach(), spent
