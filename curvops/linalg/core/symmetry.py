"""Telling a matrix that is not symmetric, or not positive semidefinite, from one that is rounded.

One rule for symmetry: of vectors X whose images AX are at hand, XᵀAX − (XᵀAX)ᵀ is compared with the size of the
images. Of k random vectors it sees √(k/n) of ‖A − Aᵀ‖_F/‖A‖_F, all of it where A is formed.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.results import Reason

LEAST_SKEW = 5e-6
ROUNDING_UNITS = 1e3


def is_known_psd(A: Any) -> bool:
    """Whether A is promised to be positive semidefinite; a tensor or a foreign operator promises nothing."""
    return bool(getattr(A, "psd", False))


def noticed_skew(eps: float) -> float:
    """The difference between uᵀAv and vᵀAu, relative to the size of A, that rounding at ``eps`` does not explain.

    5e-6 in float64, for operators that are formed in lower precision inside, and 1.2e-4 in float32, whose products may
    be those of a longer computation, or of a device that multiplies with fewer digits.
    """
    return max(LEAST_SKEW, ROUNDING_UNITS * eps)


def require_symmetric(X: Tensor, eps: float, size: Tensor | float | None = None) -> None:
    """Raise ValueError where a small matrix, or one of a batch, is not symmetric; one that is not finite passes.

    ``size`` is what its difference to its transpose is compared with, its own Frobenius norm by default.
    """
    gap = torch.linalg.matrix_norm(X - X.mT)
    size = torch.linalg.matrix_norm(X) if size is None else size
    if bool((gap > noticed_skew(eps) * size).any()):
        raise ValueError(Reason.NOT_SYMMETRIC.value)


def clearly_indefinite(dense: Float[Tensor, "*batch n n"]) -> bool:
    """Whether a symmetric matrix has an eigenvalue below zero by more than rounding explains.

    Costs a Cholesky factorisation, and the eigenvalues where that fails.
    """
    if not dense.numel() or not bool((torch.linalg.cholesky_ex(dense).info != 0).any()):
        return False
    if not bool(dense.isfinite().all()):
        return False  # that is another reason
    values = torch.linalg.eigvalsh(dense)
    noise = dense.shape[-1] * torch.finfo(dense.dtype).eps * values.abs().amax(-1)
    return bool((values[..., 0] < -noise).any())
