"""Telling a matrix that is not symmetric from one whose products are rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from curvops.linalg.results import Reason

SKEWED = 1e-3
"""The difference between a matrix and its transpose, relative to its size, that no rounding explains."""


def require_symmetric(X: Tensor) -> None:
    """Raise ValueError where a small matrix, or one of a batch, is not symmetric; one that is not finite passes."""
    gap = torch.linalg.matrix_norm(X - X.mT)
    if bool((gap > SKEWED * torch.linalg.matrix_norm(X)).any()):
        raise ValueError(Reason.NOT_SYMMETRIC.value)
