"""Stochastic estimates with error bars.

Beside those of `curvops.linalg`, the floors above take all eigenvalues of a small matrix, and the distance of two.
"""

from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, dense_spectrum
from curvops.linalg.estimators.frobenius import relative_distance

__all__ = ["DenseSpectrum", "dense_spectrum", "relative_distance"]
