"""Jacobi's preconditioners: the diagonal of a positive semidefinite matrix, or its diagonal blocks.

>>> import torch
>>> from curvops.linalg import block_jacobi, diagonal_preconditioner
>>> A = torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[4.0]]))
>>> diagonal_preconditioner(A) @ torch.ones(3)
tensor([0.5000, 0.5000, 0.2500])
>>> P = block_jacobi(A, [2, 1])
>>> P @ torch.ones(3), round(float(P.logdet().exp()), 3)
(tensor([0.3333, 0.3333, 0.2500]), 12.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checks import checked_number
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.partition import Partition, partition
from curvops.linalg.core.results import indefinite
from curvops.linalg.core.structure import columns_of, diagonal_of, require_symmetric
from curvops.linalg.core.vectors import Matrix, ScalarFunction, check_finite, describe_square, entries, put_entries
from curvops.linalg.preconditioners.factored import FilteredPreconditioner
from curvops.summary import Summarised

BlockChoice: TypeAlias = int | Sequence[int] | Sequence[range | Tensor] | Partition


@dataclass(frozen=True, eq=False, repr=False)
class DiagonalPreconditioner(FilteredPreconditioner):
    """The preconditioner P = diag(entries), all positive.

    Examples:
        >>> P = co.linalg.diagonal_preconditioner(torch.diag(torch.tensor([4.0, 16.0])))
        >>> P @ torch.ones(2), round(float(P.logdet()), 4)
        (tensor([0.2500, 0.0625]), 4.1589)
    """

    entries: Float[Tensor, " n"]
    matvecs: int = 0

    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P, exact."""
        return self.entries.double().log().sum()

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest entry."""
        return float(self.entries.amin()), float(self.entries.amax())

    def _filtered(self, function: ScalarFunction, V: Tensor) -> Tensor:
        if function is torch.reciprocal:
            return V / self.entries.unsqueeze(-1)  # rounded once
        return V * function(self.entries).unsqueeze(-1)


def diagonal_preconditioner(A: Matrix | Float[Tensor, " n"], shift: float | int = 0.0) -> DiagonalPreconditioner:
    """Make P = diag(A) + shift I for a matrix or operator A (n, n) or its diagonal (n,), possibly an estimate.

    Args:
        A: (n, n), or its diagonal (n,).
        shift: a number that is added to the diagonal.

    It costs A's diagonal: n products for an operator without a cheaper way, which are counted.

    Returns:
        A DiagonalPreconditioner.

    Raises:
        ValueError: A is neither square nor a vector, or an entry is not finite.
        NotPositiveSemidefiniteError: an entry of P is not positive.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 16.0]))
        >>> P = co.linalg.diagonal_preconditioner(A, shift=1.0)
        >>> co.linalg.cg(A + torch.eye(2), torch.ones(2), preconditioner=P).iterations
        1
    """
    checked_number("shift", shift, "[0, inf)")
    if isinstance(A, Tensor) and A.ndim == 1:
        diagonal, spent = A.detach(), 0
    else:
        describe_square(A)
        diagonal, spent = diagonal_of(A)
    damped = diagonal + shift
    check_finite(damped, "the diagonal of A")
    if not bool((damped > 0).all()):
        worst = int(damped.argmin())
        raise indefinite(f"entry {worst} of the diagonal is {float(damped[worst]):.3e}, not positive.")
    return DiagonalPreconditioner(damped, spent)


@dataclass(frozen=True, eq=False, repr=False)
class EqualBlocks(Summarised):
    """A group of g diagonal blocks of one size s, each with its eigendecomposition."""

    positions: Int[Tensor, "g s"]
    vectors: Float[Tensor, "g s s"]
    values: Float[Tensor, "g s"]


@dataclass(frozen=True, eq=False, repr=False)
class BlockPreconditioner(FilteredPreconditioner):
    """A block-diagonal P, each block with its eigendecomposition; blocks of one size are multiplied at once.

    Examples:
        >>> A = torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[4.0]]))
        >>> P = co.linalg.block_jacobi(A, [2, 1])
        >>> P @ (A @ torch.ones(3))
        tensor([1.0000, 1.0000, 1.0000])
    """

    groups: tuple[EqualBlocks, ...]
    matvecs: int = 0

    def logdet(self) -> Float[Tensor, ""]:
        """Return log det P, exact."""
        return torch.stack([group.values.double().log().sum() for group in self.groups]).sum()

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue of P."""
        every = torch.cat([group.values.flatten() for group in self.groups])
        return float(every.amin()), float(every.amax())

    def _filtered(self, function: ScalarFunction, V: Tensor) -> Tensor:
        result = torch.empty_like(V)
        for group in self.groups:
            rotated = group.vectors.mT @ entries(V, group.positions)
            weights = function(group.values).unsqueeze(-1)
            put_entries(result, group.positions, group.vectors @ (weights * rotated))
        return result


@algorithm
def block_jacobi(
    A: Matrix,
    blocks: BlockChoice,
    shift: float | int = 0.0,
    *,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> BlockPreconditioner:
    """Make P from the diagonal blocks of A + shift I, each factorised.

    Args:
        A: (n, n), positive semidefinite.
        blocks: one size for all blocks (the last may be smaller), the size of each, a Partition, or sets of positions.
        shift: a number that is added to the diagonal of A.
        memory_budget: bytes for the blocks, which hold Σ s² numbers.
        progress: as in `cg`.

    The blocks of a tensor are read from it. Any other A costs one product for each column, n in total, since a product
    with several blocks at once would mix their contributions. For the layers of a network,
    ``as_preconditioner(co.BlockDiagonal(lin).add_diagonal(prior))`` is cheaper.

    Returns:
        A BlockPreconditioner with the factors of the blocks.

    Raises:
        ValueError: A is not square, or the blocks do not cover 0..n − 1, do not fit in the budget, or are not finite.
        NotPositiveSemidefiniteError: a block of A + shift I has an eigenvalue that is not positive.

    Source: Jacobi 1845; with b blocks the largest eigenvalue of P^-½AP^-½ is at most b.

    Examples:
        >>> A = torch.block_diag(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[4.0]]))
        >>> P = co.linalg.block_jacobi(A, [2, 1])
        >>> co.linalg.cg(A, torch.ones(3), preconditioner=P).iterations
        1
    """
    n, _, dtype, device = describe_square(A)
    checked_number("shift", shift, "[0, inf)")
    position_blocks = _positions(blocks, n, device)
    size = sum(len(block) ** 2 for block in position_blocks) * torch.finfo(dtype).bits // 8
    if memory_budget is not None and size > memory_budget:
        raise ValueError(f"the blocks take {size} bytes, more than memory_budget={memory_budget}; use smaller blocks.")
    alike: dict[int, list[Tensor]] = {}
    for block in position_blocks:
        alike.setdefault(len(block), []).append(block)
    current_run().expect(n)
    with torch.no_grad():
        groups = tuple(_group(A, torch.stack(positions), float(shift)) for positions in alike.values())
    return BlockPreconditioner(groups, 0 if isinstance(A, Tensor) else n)


def _positions(blocks: BlockChoice, n: int, device: torch.device) -> list[Tensor]:
    """Check the blocks and return the positions of each."""
    if isinstance(blocks, Partition):
        division = blocks
    else:
        if isinstance(blocks, int):
            blocks = [min(blocks, n - start) for start in range(0, n, blocks)]
        sets: list[range | Tensor] = []
        start = 0
        for block in blocks:
            sets.append(range(start, start + block) if isinstance(block, int) else block)
            start += len(sets[-1])
        division = partition(sets, device)
    if division.size != n:
        raise ValueError(f"the blocks have {division.size} positions, but A has {n} rows.")
    parts = division.parts
    return [torch.arange(p.start, p.stop, device=device) if isinstance(p, range) else p.to(device) for p in parts]


def _group(A: Matrix, positions: Tensor, shift: float) -> EqualBlocks:
    """Read or compute blocks of one size, and factorise them in float64."""
    g, s = positions.shape
    if isinstance(A, Tensor):
        dense = A.detach()[positions.unsqueeze(2), positions.unsqueeze(1)]
    else:
        dense = torch.empty(g, s, s, dtype=A.dtype, device=positions.device)
        for flat in torch.arange(g * s, device=positions.device).split(64):
            which, column = flat // s, flat % s
            images = columns_of(A, positions.flatten()[flat])
            dense[which, :, column] = images.gather(0, positions[which].mT).mT
    check_finite(dense, "a diagonal block of A")
    require_symmetric(dense, torch.finfo(dense.dtype).eps)
    values, vectors = torch.linalg.eigh((dense + dense.mT).double() / 2)
    values = values + shift
    rounding = s * torch.finfo(dense.dtype).eps * values.abs().amax(1)
    worst = int((values[:, 0] - rounding).argmin())
    start, lowest = int(positions[worst, 0]), float(values[worst, 0])
    if not lowest > float(rounding[worst]):
        raise indefinite(f"the block that starts at position {start} has an eigenvalue {lowest:.3e}.")
    return EqualBlocks(positions, vectors.to(dense), values.to(dense))
