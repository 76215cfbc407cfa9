"""Levels of rounding."""

NEAR_ZERO = 100.0
"""Eigenvalues within this many eps ‖A‖ of zero count as zero."""
