"""Exact draws of N(0, A) as columns, by an operator's own square root or by those that every matrix has.

The noise of a column depends only on the seed and on the column's number, so that a block can be drawn in parts of any
width.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Groups, Memories, hold
from curvops.checks import drawn_seed, refuse_modes
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm, assembled, memories_of, solve_width
from curvops.linalg.core.vectors import Description
from curvops.linalg.spectra.apply_function import sqrt
from curvops.ranks.sharded_vectors import SEED, ranks_together


class ColumnNoise(torch.Generator):
    """A source of noise for some columns among many; the noise of a column does not depend on the others.

    In the n-th requested block, column j comes from a generator seeded by (key, n, j), with the seed from Philox, whose
    counter is (n, j). The source is a `torch.Generator`, seeded by its key and first column, so that operators with
    their own `_draw` can draw from it as from any other generator.
    """

    def __new__(cls, key: int, columns: range, device: torch.device) -> ColumnNoise:
        return super().__new__(cls, device)  # type: ignore[call-arg]

    def __init__(self, key: int, columns: range, device: torch.device) -> None:
        self.key, self.columns, self._asked = key, columns, 0
        self.manual_seed(key + columns.start)

    @classmethod
    def of(cls, generator: torch.Generator | None, k: int, device: torch.device) -> ColumnNoise:
        """Return a source for k columns; its key comes from a generator, by default torch's own, or from a source."""
        if isinstance(generator, ColumnNoise) and len(generator.columns) == k:
            return cls(generator.draw_key(), generator.columns, generator.device)
        return cls(drawn_seed(generator), range(k), device if generator is None else generator.device)

    def part(self, start: int, stop: int) -> ColumnNoise:
        """Return a new source for some of the columns, in the state before the first request."""
        return ColumnNoise(self.key, self.columns[start:stop], self.device)

    def fill(self, rows: Float[Tensor, "k n"]) -> None:
        """Fill each row with the standard normal numbers of its column."""
        words = self._philox().random_raw(self.columns.stop)[self.columns.start :]
        for row, word in zip(rows, words.tolist()):
            row.normal_(generator=self.manual_seed(word >> 2))

    def draw_key(self) -> int:
        """Draw the key of another source, the same for all columns."""
        return int(self._philox(of_columns=False).random_raw(1)[0]) >> 2

    def _philox(self, of_columns: bool = True) -> np.random.Philox:
        self._asked += 1
        return np.random.Philox(key=self.key, counter=[0, self._asked, int(not of_columns), 1])


@algorithm
def draw(
    operator: LinearOperator,
    k: int,
    generator: torch.Generator | None = None,
    memories: Memories | None = None,
) -> Tensor:
    """Draw k columns of N(0, A), (n, k), exact from the square roots that the parts of A have.

    A sum adds independent draws, B A Bᵀ multiplies a draw of A, and so on down to operators with their own root
    (`Operator._draw`). A small matrix is factorised. For a large one tagged as positive semidefinite, noise is
    multiplied by its square root (`sqrt`, to a relative error of 1e-5, or `FunctionConvergenceError`). If the memory
    budget (of A's networks, or ``memories``) has no room for the working vectors of all draws, they are made in groups,
    with the same numbers: a draw's noise depends only on the seed and the draw's position.

    Args:
        operator: A (n, n), positive semi-definite.
        k: the number of draws.
        generator: the source of the noise.
        memories: memory budgets for the working vectors; None means those of A's networks.

    Returns:
        The draws as columns, (n, k).

    Raises:
        ValueError: A is large, does not provide a root, and is not tagged as positive semidefinite.

    Examples:
        >>> P = co.linalg.Diagonal(torch.full((3,), 4.0))
        >>> co.linalg.draw(P, 1000, torch.Generator().manual_seed(0)).shape
        torch.Size([3, 1000])
    """
    refuse_modes(operator.dtype, operator.device)
    width, beside = solve_width(operator, k, memories)
    held = memories_of(operator) if memories is None else memories
    noise = ColumnNoise.of(generator, k, operator.device)
    if (ranks := ranks_together(operator)) is not None and not isinstance(generator, ColumnNoise):
        ranks.require_equal({SEED: noise.key})
    with hold(held, beside):
        groups = Groups("drawn", width)
        return assembled(groups, k, lambda i, j: draw_together(operator, j - i, noise.part(i, j)))


def draw_together(operator: LinearOperator, k: int, generator: torch.Generator | None) -> Tensor:
    """Draw all columns at once, by the operator's own method, or by the dense matrix for a foreign operator."""
    draw = getattr(operator, "_draw", None)
    return draw_dense(operator, k, generator) if draw is None else draw(k, generator)


def draw_dense(operator: LinearOperator, k: int, generator: torch.Generator | None) -> Tensor:
    """Draw by the eigenvectors of the dense matrix."""
    values, vectors = dense_eigenpairs(operator)
    noise = normal(len(values), k, values.dtype, values.device, generator)
    return vectors @ (values.sqrt().unsqueeze(-1) * (vectors.mT @ noise))


def dense_eigenpairs(operator: LinearOperator) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues, at least zero, and eigenvectors of the dense matrix, which must not be indefinite."""
    vec.require_precision(operator.dtype, operator.device)
    dense = operator.to_dense()
    vec.check_finite(dense, f"cannot draw: {type(operator).__name__} {tuple(operator.shape)}")
    values, vectors = torch.linalg.eigh(dense)
    require_not_negative(values, rounding=10 * len(values) * torch.finfo(values.dtype).eps * values.abs().max())
    return values.clamp_min(0), vectors


def draw_by_products(operator: LinearOperator, k: int, generator: torch.Generator | None) -> Tensor:
    """Return A^½ z for positive semidefinite A, to 1e-5, an error too small to show in any number of draws.

    As many as 32 columns run at once.
    """
    n, dtype, device, rtol = operator.shape[-1], operator.dtype, operator.device, 1e-5
    noise = normal(n, k, dtype, device, generator)
    roots = [sqrt(operator, block, rtol=rtol).raise_if_failed(rtol) for block in noise.split(32, 1)]
    return vec.join(*(block.value for block in roots)) if k else noise


def require_not_negative(values: Tensor, rounding: float | Tensor = 0.0) -> None:
    """Raise NotPositiveSemidefiniteError if an eigenvalue is below zero by more than rounding."""
    if bool((values < -rounding).any()):
        raise NotPositiveSemidefiniteError(f"cannot draw from N(0, A): negative eigenvalue {values.min().item():.3g}.")


def normal(n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw k standard normal vectors as columns, (n, k)."""
    if isinstance(generator, ColumnNoise) and len(generator.columns) == k:
        rows = torch.empty(k, n, dtype=dtype, device=generator.device)
        generator.fill(rows)
        return rows.to(device).mT
    return vec.random_block(Description(n, n, dtype, device), k, "gaussian", generator)
