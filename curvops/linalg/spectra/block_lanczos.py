"""Block Lanczos with full reorthogonalisation: the projection of a symmetric matrix on a block Krylov space.

>>> import torch
>>> from curvops.linalg import block_lanczos
>>> A = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0]).double())
>>> run = block_lanczos(A, 2, block_size=2, generator=torch.Generator().manual_seed(0))
>>> torch.linalg.eigvalsh(run.T).round(decimals=6).tolist(), run.reason.name  # a single vector sees each only once
([1.0, 1.0, 2.0, 2.0], 'BREAKDOWN')
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.limits import check_limits
from curvops.linalg.core.memory import working
from curvops.linalg.core.results import Reason
from curvops.linalg.core.summary import Summarised
from curvops.linalg.core.symmetry import noticed_skew
from curvops.linalg.core.vectors import (
    Description,
    Matrix,
    Vectors,
    as_block,
    describe_square,
    largest,
    random_block,
)
from curvops.linalg.spectra.projection import DROPPED, Counted, Projection, rotation
from curvops.progress import Progress, at_work

# Blocks of vectors held beside the basis in a step.
BESIDE = 4


@dataclass(frozen=True, eq=False, repr=False)
class BlockLanczosResult(Summarised):
    """A Q = Q T + V C with orthonormal [Q V]; T (symmetric, banded but for rounding) and C are float64 on the host.

    ``reason`` is CONVERGED for the steps asked for, BREAKDOWN for an invariant subspace (V has no columns), RANK_CAPPED
    for a memory budget that ended the run, NON_FINITE for a product with NaN or Inf (Q holds the sound columns),
    NOT_SYMMETRIC for an A that is not: then T is not QᵀAQ.
    """

    Q: Float[Vectors, "n m"]
    T: Float[Tensor, "m m"]
    V: Float[Vectors, "n r"]
    C: Float[Tensor, "r m"]
    reason: Reason
    matvecs: int


def block_lanczos(
    A: Matrix,
    steps: int,
    *,
    start: Float[Vectors, "n b"] | None = None,
    block_size: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> BlockLanczosResult:
    """Project symmetric A on the block Krylov space of ``start``, or of ``block_size`` (4) random vectors.

    Dependent directions, of the start too, are dropped: the block then shrinks. Costs at most ``steps`` block products
    and keeps steps × b vectors; ``memory_budget`` (bytes) caps them. ``progress`` is as in `cg`.

    Raises:
        ValueError: A is not square, steps or block_size is not positive, or ``start`` does not fit, is zero or not
            finite.

    Source: Golub & Underwood 1977; two passes of Gram–Schmidt as in Giraud et al. 2005.
    """
    facts = describe_square(A)
    n = facts.rows
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    check_limits(memory_budget=memory_budget)
    block = start_block(facts, start, min(4, n) if block_size is None else block_size, generator)
    wanted = min(steps * block.shape[1], n)
    with at_work("block_lanczos", wanted, progress, A), working(A, memory_budget) as (multiply, room):
        within = columns_within(room, n, n * facts.dtype.itemsize, block.shape[1])
        capacity = min(wanted, max(block.shape[1], within))
        run = BlockLanczos(Counted(multiply), block, capacity + block.shape[1], generator, inject=False)
        done = 0
        while done < steps and run.width < capacity and run.pending.shape[1] and not run.failed:
            run.step()
            done += 1
    if run.failed:
        reason = Reason.NON_FINITE
    elif run.skewed:
        reason = Reason.NOT_SYMMETRIC
    elif not run.pending.shape[1]:
        reason = Reason.BREAKDOWN
    else:
        reason = Reason.CONVERGED if done == steps else Reason.RANK_CAPPED
    return BlockLanczosResult(run.basis.columns, run.T * run.scale, run.pending, run.C * run.scale, reason, run.matvecs)


def start_block(
    facts: Description, start: Vectors | None, block_size: int, generator: torch.Generator | None
) -> Float[Vectors, "n b"]:
    """The start given, checked and with columns of size about 1, or a random one."""
    n, _, dtype, device = facts
    if start is None:
        if not 1 <= block_size <= n:
            raise ValueError(f"block_size must lie in 1..{n}, the size of the matrix, got {block_size}.")
        return random_block(facts, block_size, "gaussian", generator)
    if start.ndim != 2 or start.shape[0] != n or not start.shape[1] or start.dtype != dtype or start.device != device:
        given = f"{tuple(start.shape)}, {start.dtype} on {start.device}"
        raise ValueError(f"start must have shape ({n}, b), {dtype} on {device}, got {given}.")
    sizes = largest(start)
    if not bool(torch.isfinite(sizes).all() & (sizes > 0).any()):
        raise ValueError("start must be finite and not zero.")
    return as_block(start / torch.where(sizes > 0, sizes, 1.0).to(start.dtype))


def columns_within(memory_budget: int | None, n: int, size: int, block_size: int) -> int:
    """How many columns of ``size`` bytes, of n at most, fit in ``memory_budget`` bytes beside the blocks of a step."""
    return n if memory_budget is None else max(0, min(n, memory_budget // size - BESIDE * block_size))


class BlockLanczos(Projection):
    """T = QᵀAQ for symmetric A, with A Q = Q T + P C; ``skew`` is by how much A was seen not to be."""

    skew, looked = 0.0, 0

    @property
    def skewed(self) -> bool:
        """Whether A is not symmetric, beyond what rounding explains, by all columns multiplied."""
        return self.skew > noticed_skew(self.eps) * self.size * math.sqrt(self.looked)

    def step(self) -> None:
        """Multiply the pending block and project. Costs one product per column of it."""
        V = self.pending
        W = self._scaled(self.multiply(V))
        if self.failed:
            return
        self.basis.append(V)
        H, self.pending, R = self.basis.expand(W, DROPPED * self.noise)
        H = H[self.locked :]
        old, new = self.width, V.shape[1]
        gaps = torch.cat([H[:old] - self.C.mT, H[old:] - H[old:].mT])
        self.skew = math.hypot(self.skew, float(gaps.norm()))
        self.looked += new
        T = torch.zeros(old + new, old + new, dtype=torch.float64)
        T[:old, :old] = self.T
        T[:old, old:], T[old:, :old] = H[:old], H[:old].mT
        T[old:, old:] = (H[old:] + H[old:].mT) / 2
        self.T = T
        self._advance(R)

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Ritz values, ascending, and the residual norm of each, in units of ``scale``."""
        values, self.Y = torch.linalg.eigh(self.T)
        return values, (self.C @ self.Y).norm(dim=0)

    def restart(self, kept: Tensor) -> None:
        """Go on from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""
        Y = self.Y[:, kept]
        self._rotate(torch.arange(self.locked), kept)
        self.T, self.C = torch.diag((Y * (self.T @ Y)).sum(0)), self.C @ Y

    def _rotate(self, old: Tensor, found: Tensor) -> None:
        self.basis.rotate(rotation(self.basis.width, old, self.Y[:, found]))
