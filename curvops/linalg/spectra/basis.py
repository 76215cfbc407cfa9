"""An orthonormal basis that grows by blocks: two-pass Gram–Schmidt, dependent directions dropped, fresh ones drawn."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.orthogonal import tall_qr
from curvops.linalg.core.vectors import Vectors, axpy, combine, empty_block, gram, join, part, put, random_block, rotate

# A fresh direction counts as orthogonal once a pass of Gram–Schmidt leaves this share of it.
KEPT_SHARE = 0.7
MOST_PASSES = 4


class Basis:
    """An orthonormal basis in one piece of memory, n × capacity, of which ``width`` columns are in use."""

    def __init__(self, like: Float[Vectors, "n k"], capacity: int, generator: torch.Generator | None) -> None:
        self.n = like.shape[0]
        self.store = empty_block(like, capacity)
        self.width = 0
        self.generator = generator

    @property
    def columns(self) -> Float[Vectors, "n m"]:
        """The columns in use, sharing memory."""
        return part(self.store, 0, self.width)

    def append(self, V: Float[Vectors, "n b"]) -> None:
        """Add orthonormal columns that are orthogonal to those in use."""
        put(self.store, self.width, V)
        self.width += V.shape[1]

    def rotate(self, C: Float[Tensor, "m k"]) -> None:
        """Replace the basis by Q C, for C (on the host) with orthonormal columns."""
        rotate(self.columns, C)
        self.width = C.shape[1]

    def expand(
        self, W: Float[Vectors, "n b"], floor: float
    ) -> tuple[Float[Tensor, "m b"], Float[Vectors, "n r"], Float[Tensor, "r b"]]:
        """Return H, V, R with W = Q H + V R, V orthonormal and orthogonal to Q; W is overwritten.

        H and R are on the host. Directions of W − Q H of size at most ``floor`` are dropped, so that r ≤ b. Cost:
        8 n m b operations.
        """
        Q = self.columns
        H = gram(Q, W)
        V = axpy(W, Q, -H)
        R = torch.eye(V.shape[1], dtype=torch.float64)
        H = H.cpu()
        for turn in range(MOST_PASSES):
            V, R, share = _trim(V, R, floor, self.n - self.width)
            if not V.shape[1] or (turn and share > KEPT_SHARE):
                break
            again = gram(Q, V)
            V = axpy(V, Q, -again)
            H += again.cpu() @ R
        return H, V, R

    def fresh(self, width: int, beside: Float[Vectors, "n r"]) -> Float[Vectors, "n b"]:
        """Add random directions to ``beside``, orthogonal to it and to the basis, up to ``width`` columns or all."""
        missing = min(width, self.n - self.width) - beside.shape[1]
        if missing <= 0:
            return beside
        drawn = random_block(beside, missing, "gaussian", self.generator)
        for _ in range(2):
            drawn = axpy(drawn, self.columns, -gram(self.columns, drawn))
            drawn, _ = tall_qr(axpy(drawn, beside, -gram(beside, drawn)))
        return join(beside, drawn)


def _trim(V: Vectors, R: Tensor, floor: float, most: int) -> tuple[Vectors, Tensor, float]:
    """Return V's orthonormal basis without directions of V R up to ``floor``, its R, V's least singular value."""
    Q, S = tall_qr(V)
    S = S.cpu()
    share = float(torch.linalg.svdvals(S)[-1]) if S.numel() else 0.0
    total = S @ R
    U, sizes, Wt = torch.linalg.svd(total, full_matrices=False)
    kept = min(int((sizes > floor).sum()), most)
    if kept == len(sizes):
        return Q, total, share
    return combine(Q, U[:, :kept].to(Q.device)), sizes[:kept, None] * Wt[:kept], share
