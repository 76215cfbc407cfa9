"""Block Lanczos with full reorthogonalisation: the projection of a symmetric matrix on a block Krylov space.

>>> import torch
>>> from curvops.linalg.block_lanczos import block_lanczos
>>> A = torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0]).double())
>>> run = block_lanczos(A, 2, block_size=2, generator=torch.Generator().manual_seed(0))
>>> torch.linalg.eigvalsh(run.T).round(decimals=6).tolist(), run.reason.name  # a single vector sees each only once
([1.0, 1.0, 2.0, 2.0], 'BREAKDOWN')
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.basis import Basis
from curvops.linalg.results import Reason
from curvops.linalg.vectors import (
    Description,
    Matrix,
    as_block,
    combine,
    describe_square,
    empty_block,
    largest,
    norm,
    part,
    product,
    random_block,
)

# Blocks of vectors held beside the basis in a step.
BESIDE = 4


@dataclass(frozen=True, eq=False)
class BlockLanczosResult:
    """A Q = Q T + V C with orthonormal [Q V]; T is symmetric, and banded but for rounding.

    ``reason`` is CONVERGED for the steps asked for, BREAKDOWN for an invariant subspace (V has no columns), RANK_CAPPED
    for a memory budget that ended the run, NON_FINITE for a product with NaN or Inf (Q holds the sound columns).
    """

    Q: Float[Tensor, "n m"]
    T: Float[Tensor, "m m"]
    V: Float[Tensor, "n r"]
    C: Float[Tensor, "r m"]
    reason: Reason
    matvecs: int


def block_lanczos(
    A: Matrix,
    steps: int,
    *,
    start: Float[Tensor, "n b"] | None = None,
    block_size: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
) -> BlockLanczosResult:
    """Project symmetric A on the block Krylov space of ``start``, or of ``block_size`` (4) random vectors.

    Dependent directions, of the start too, are dropped: the block then shrinks. Costs at most ``steps`` block products
    and keeps steps × b vectors; ``memory_budget`` (bytes) caps them.

    Raises:
        ValueError: A is not square, steps or block_size is not positive, or ``start`` does not fit, is zero or not
            finite.

    Source: Golub & Underwood 1977; two passes of Gram–Schmidt as in Giraud et al. 2005.
    """
    facts = describe_square(A)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    block = start_block(facts, start, min(4, facts.rows) if block_size is None else block_size, generator)
    wanted = min(steps * block.shape[1], facts.rows)
    capacity = min(wanted, columns_within(memory_budget, facts, block.shape[1]))
    run = BlockLanczos(Counted(product(A)), block, capacity + block.shape[1], generator, inject=False)
    done = 0
    while done < steps and run.width < capacity and run.pending.shape[1] and not run.failed:
        run.step()
        done += 1
    if run.failed:
        reason = Reason.NON_FINITE
    elif not run.pending.shape[1]:
        reason = Reason.BREAKDOWN
    else:
        reason = Reason.CONVERGED if done == steps else Reason.RANK_CAPPED
    return BlockLanczosResult(run.basis.columns, run.T * run.scale, run.pending, run.C * run.scale, reason, run.matvecs)


def start_block(
    facts: Description, start: Tensor | None, block_size: int, generator: torch.Generator | None
) -> Float[Tensor, "n b"]:
    """The start given, checked and with columns of size about 1, or a random one."""
    n, _, dtype, device = facts
    if start is None:
        if not 1 <= block_size <= n:
            raise ValueError(f"block_size must lie in 1..{n}, the size of the matrix, got {block_size}.")
        return random_block(n, block_size, "gaussian", dtype=dtype, device=device, generator=generator)
    if start.ndim != 2 or start.shape[0] != n or not start.shape[1] or start.dtype != dtype or start.device != device:
        given = f"{tuple(start.shape)}, {start.dtype} on {start.device}"
        raise ValueError(f"start must have shape ({n}, b), {dtype} on {device}, got {given}.")
    sizes = largest(start)
    if not bool(torch.isfinite(sizes).all() & (sizes > 0).any()):
        raise ValueError("start must be finite and not zero.")
    return as_block(start / torch.where(sizes > 0, sizes, 1.0).to(start))


def columns_within(memory_budget: int | None, facts: Description, block_size: int) -> int:
    """How many columns of a basis fit in ``memory_budget`` bytes beside the blocks of a step; at least one block."""
    if memory_budget is None:
        return facts.rows
    vector = facts.rows * torch.finfo(facts.dtype).bits // 8
    return max(block_size, memory_budget // vector - BESIDE * block_size)


class Counted:
    """A product with blocks that counts the vectors it was given."""

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self.multiply, self.matvecs = multiply, 0

    def __call__(self, V: Tensor) -> Tensor:
        """The product with a block."""
        self.matvecs += V.shape[1]
        return self.multiply(V)


class BlockLanczos:
    """A Q = Q T + P C in units of ``scale``, with the pending block P to be multiplied next; T and C on the host.

    The first ``locked`` columns of the basis are settled: everything is orthogonal to them, and Q, T, C leave them out.
    With ``inject`` random directions take the place of dropped ones, so that the Krylov space goes on past an
    invariant subspace and multiple eigenvalues are met more than once.
    """

    def __init__(
        self,
        multiply: Counted,
        start: Float[Tensor, "n b"],
        capacity: int,
        generator: torch.Generator | None,
        inject: bool,
    ) -> None:
        self.multiply, self.inject = multiply, inject
        self.n, self.block_size = start.shape
        self.eps = torch.finfo(start.dtype).eps
        self.basis = Basis(start, min(capacity, self.n), generator)
        self.locked = self.degree = 0
        self.scale, self.size = 1.0, 0.0
        self.failed = False
        self.T = torch.zeros(0, 0, dtype=torch.float64)
        self.C = torch.zeros(0, 0, dtype=torch.float64)
        longest = float(norm(start).amax())
        _, self.pending, _ = self.basis.expand(as_block(start), 10 * self.eps * longest)
        if inject:
            self.pending = self.basis.fresh(self.block_size, self.pending)

    @property
    def width(self) -> int:
        """Columns of Q."""
        return len(self.T)

    @property
    def matvecs(self) -> int:
        """Products spent, of one vector each."""
        return self.multiply.matvecs

    @property
    def upcoming(self) -> int:
        """Columns of P."""
        return self.pending.shape[1]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to multiply: Q spans the whole space or an invariant part of it."""
        return not self.pending.shape[1]

    @property
    def noise(self) -> float:
        """What rounding leaves of a residual, in units of ``scale``."""
        return self.eps * self.size

    def step(self) -> None:
        """Multiply the pending block and project. Costs one product per column of it."""
        V = self.pending
        W = as_block(self.multiply(V))
        image = float(norm(W).amax())
        if not math.isfinite(image):
            self.failed = True
            return
        if self.size == 0 and image > 0:
            self.scale = 2.0 ** round(math.log2(image))  # a power of two: dividing by it is exact
        self.size = max(self.size, image / self.scale)
        self.basis.append(V)
        H, self.pending, R = self.basis.expand(W.div_(self.scale), 10 * self.noise)
        old, new = self.width, V.shape[1]
        H = H[self.locked :]
        T = torch.zeros(old + new, old + new, dtype=torch.float64)
        T[:old, :old] = self.T
        T[:old, old:], T[old:, :old] = H[:old], H[:old].mT
        T[old:, old:] = (H[old:] + H[old:].mT) / 2
        self.T = T
        self.C = torch.cat([torch.zeros(len(R), old, dtype=torch.float64), R], 1)
        self.degree += 1
        if self.inject:
            self.refill(self.block_size)

    def refill(self, width: int) -> None:
        """Random directions beside the pending ones, up to ``width``."""
        self.pending = self.basis.fresh(width, self.pending)
        missing = self.pending.shape[1] - len(self.C)
        self.C = torch.cat([self.C, torch.zeros(missing, self.width, dtype=torch.float64)])

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Ritz values, ascending, and the residual norm of each, in units of ``scale``."""
        values, self.Y = torch.linalg.eigh(self.T)
        return values, (self.C @ self.Y).norm(dim=0)

    def restart(self, kept: Tensor) -> None:
        """Go on from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""
        self._rotate(torch.arange(self.locked), self.Y[:, kept])
        values = (self.Y[:, kept].mT @ self.T @ self.Y[:, kept]).diagonal()
        self.T, self.C = torch.diag(values), self.C @ self.Y[:, kept]

    def lock(self, old: Tensor, found: Tensor) -> None:
        """Settle some of the locked columns and some Ritz vectors; the rest of the basis and the pending block go."""
        self._rotate(old, self.Y[:, found])
        self.locked = self.basis.width
        self.T = torch.zeros(0, 0, dtype=torch.float64)
        self.C = torch.zeros(0, 0, dtype=torch.float64)
        self.pending = part(self.pending, 0, 0)
        self.degree = 0

    def _rotate(self, old: Tensor, Y: Tensor) -> None:
        C = torch.zeros(self.basis.width, len(old) + Y.shape[1], dtype=torch.float64)
        C[old, torch.arange(len(old))] = 1.0
        C[self.locked :, len(old) :] = Y
        self.basis.rotate(C)

    @property
    def settled(self) -> Float[Tensor, "n k"]:
        """The locked columns."""
        return part(self.basis.store, 0, self.locked)

    def vectors(self, chosen: Tensor) -> Float[Tensor, "n k"]:
        """Ritz vectors, numbered as in the last ``ritz``."""
        return combine(part(self.basis.columns, self.locked, self.basis.width), self.Y[:, chosen].to(self.basis.store))
