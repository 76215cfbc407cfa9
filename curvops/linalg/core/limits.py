"""Levels of rounding."""

from __future__ import annotations

import math

import torch

NEAR_ZERO = 100.0
"""Eigenvalues within this many eps ‖A‖ of zero count as zero."""
ROUNDING_SEEN = 1e-3
"""Relative errors above this, from rounding alone, are told of where no tolerance was given."""
ROUNDINGS = 10.0
"""Units of rounding that a number in a product is off by at most, relative to the sum of the magnitudes behind it."""


def rounding_level(dtype: torch.dtype, n: int) -> float:
    """The backward error, or the share of ‖A‖, that rounding alone makes in vectors of length n."""
    return ROUNDINGS * torch.finfo(dtype).eps * math.sqrt(n)
