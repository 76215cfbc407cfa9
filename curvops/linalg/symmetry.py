"""Telling a matrix that is not symmetric from one whose products are rounded.

One rule: of vectors X whose images AX are at hand, XᵀAX − (XᵀAX)ᵀ is compared with the size of the images. Of k random
vectors it sees √(k/n) of ‖A − Aᵀ‖_F/‖A‖_F, all of it where A is formed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from curvops.linalg.results import Reason

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
