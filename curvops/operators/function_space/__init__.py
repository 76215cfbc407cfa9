"""Function space: tangent kernels, J Jᵀ, and covariances of outputs."""
