"""Gaussian posteriors over the weights, and what they predict."""

from curvops.posterior.laplace import Laplace, NotAMode, laplace

__all__ = ["Laplace", "NotAMode", "laplace"]
