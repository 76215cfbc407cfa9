"""Block Lanczos with full reorthogonalisation: the projection of a symmetric matrix on a block Krylov space.

Source: Golub & Underwood 1977; two passes of Gram–Schmidt as in Giraud et al. 2005.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.symmetry import skew_tolerance
from curvops.linalg.core.vectors import Description, Vectors, as_block, largest, random_block
from curvops.linalg.spectra.projection import DROPPED, Projection, rotation

# Blocks of vectors held beside the basis in a step.
BLOCK_VECTORS = 4


def start_block(
    facts: Description, start: Vectors | None, block_size: int, generator: torch.Generator | None
) -> Float[Vectors, "n b"]:
    """Check the given start and scale its columns to size about 1, or draw a random one."""
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
    """Return how many of n columns of ``size`` bytes fit in ``memory_budget`` beside the blocks of a step."""
    return n if memory_budget is None else max(0, min(n, memory_budget // size - BLOCK_VECTORS * block_size))


class BlockLanczos(Projection):
    """The projection T = QᵀAQ of symmetric A, with A Q = Q T + P C; ``skew`` measures A's asymmetry so far."""

    STATE = (*Projection.STATE, "skew", "looked")
    skew, looked = 0.0, 0

    @property
    def skewed(self) -> bool:
        """Whether A is not symmetric, beyond what rounding explains, by all columns multiplied."""
        return self.skew > skew_tolerance(self.eps) * self.size * math.sqrt(self.looked)

    def step(self) -> None:
        """Multiply the pending block and project. Costs one product per column of it."""
        V = self.pending
        W = self._in_units(self.multiply(V))
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
        """Return the Ritz values, ascending, and the residual norm of each, in units of ``scale``."""
        values, self.Y = torch.linalg.eigh(self.T)
        return values, (self.C @ self.Y).norm(dim=0)

    def restart(self, kept: Tensor) -> None:
        """Continue from these Ritz vectors, numbered as in the last ``ritz``, and the pending block."""
        Y = self.Y[:, kept]
        self._rotate(torch.arange(self.locked), kept)
        self.T, self.C = torch.diag((Y * (self.T @ Y)).sum(0)), self.C @ Y

    def _rotate(self, old: Tensor, found: Tensor) -> None:
        self.basis.rotate(rotation(self.basis.width, old, self.Y[:, found]))
