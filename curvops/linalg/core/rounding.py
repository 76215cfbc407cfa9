"""Relative errors that rounding alone can explain."""

from __future__ import annotations

import math
from typing import Any

import torch

NEAR_ZERO = 100.0
"""Eigenvalues within this many eps ‖A‖ of zero count as zero."""
ROUNDING_SEEN = 1e-3
"""Without a tolerance, relative errors from rounding alone are reported above this level."""
ROUNDINGS = 10.0
"""The largest error of an entry of a product, in units of rounding of the sum of the magnitudes of its terms."""


def rounding_level(dtype: torch.dtype, n: int) -> float:
    """Return the backward error, or the share of ‖A‖, that rounding alone causes in vectors of length n."""
    return ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(n)


def require_accuracy(A: Any, rtol: float | int | None) -> None:
    """Raise ValueError if a tolerance is below the relative error that products with A are known to have."""
    error = float(getattr(A, "product_error", 0.0))
    if error and rtol is not None and 0 <= float(rtol) < error:
        raise ValueError(
            f"rtol={float(rtol):.1e} is below the accuracy of products with A: their relative error, measured with the "
            f"compute_dtype of its linearisation, is {error:.1e} (see lin.plan). Pass an rtol of at least that, or "
            "linearise without compute_dtype."
        )
