"""Orthonormal bases of blocks of long vectors, from their Gram matrices."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.vectors import Vectors, columns, combine, gram, householder, part, rotate


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
    kept = (sizes > 0).nonzero().squeeze(1)
    if not len(kept):
        return part(X, 0, 0)
    scale = 1 / sizes[kept]
    values, vectors = torch.linalg.eigh(scale[:, None] * gram_host[kept][:, kept] * scale)
    # The Gram matrix is exact to float64; its eigenvalues are the squares of the singular values.
    if len(kept) <= X.shape[0] and values[0] > 1e-12 and values[0] > (1e2 * eps) ** 2:
        W = torch.zeros(len(sizes), len(kept), dtype=torch.float64)
        W[kept] = scale[:, None] * vectors / values.sqrt()
        Q = combine(X, W.to(X.device, non_blocking=True))
        L, _ = torch.linalg.cholesky_ex(gram(Q, Q))
        return combine(Q, _inverse(L).mT)
    Q, R = householder(columns(X, kept) * scale.to(X.device, X.dtype))
    U, singular, _ = torch.linalg.svd(R.cpu(), full_matrices=False)
    return combine(Q, U[:, singular > 30 * eps * singular[0]].to(X.device))
