"""Function space: tangent kernels, J Jᵀ, and covariances of outputs."""

from curvops.operators.function_space.function_space import FunctionSpace
from curvops.operators.function_space.point_covariance import point_covariances, row_covariances

__all__ = ["FunctionSpace", "point_covariances", "row_covariances"]
