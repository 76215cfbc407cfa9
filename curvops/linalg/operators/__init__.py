"""Structured matrices and their algebra.

The floors above draw noise by columns (`ColumnNoise`, `normal`) and say more of a Kronecker factor than its dtype holds
(`Details`); everything else they know by `curvops.linalg`.
"""

from curvops.linalg.operators.base import Operator  # first: its import closes the cycle of operators and their algebra

# isort: split
from curvops.linalg.operators.draws import ColumnNoise, normal
from curvops.linalg.operators.kronecker_factors import Details

__all__ = ["ColumnNoise", "Details", "Operator", "normal"]
