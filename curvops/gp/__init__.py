"""Gaussian processes made of networks: gpytorch kernels and means, BoTorch models."""

from curvops.gp.kernel import LinearizedKernel
from curvops.gp.mean import LinearizedMean

__all__ = ["LinearizedKernel", "LinearizedMean"]
