"""Relative errors that rounding alone can explain."""

from __future__ import annotations

import math

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
