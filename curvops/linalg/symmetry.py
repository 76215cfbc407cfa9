"""Telling a matrix that is not symmetric from one whose products are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.linalg.results import Reason

SKEWED = 1e-3
"""The difference between a matrix and its transpose, relative to its size, that no rounding explains."""


def require_symmetric(*matrices: Tensor) -> None:
    """Raise ValueError where one of these small matrices (..., k, k) is not symmetric; one that is not finite passes."""
    for X in matrices:
        gap = torch.linalg.vector_norm(X - X.mT)
        if bool(gap > SKEWED * torch.linalg.vector_norm(X)):
            raise ValueError(Reason.NOT_SYMMETRIC.value)
