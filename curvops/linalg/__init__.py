"""Linear algebra with matrices known by their products: any LinearOperator or tensor, and nothing of networks."""

from curvops.linalg.base import Operator  # first: importing it closes the cycle of operators and their algebra

# isort: split
from curvops.linalg.algebra import Product, Scaled, Sliced, Sum, Transposed
from curvops.linalg.apply_function import apply_function
from curvops.linalg.block_diagonal import BlockDiagonal
from curvops.linalg.block_jacobi import BlockPreconditioner, block_jacobi
from curvops.linalg.block_lanczos import block_lanczos
from curvops.linalg.cg import cg
from curvops.linalg.cholesky import PivotedCholesky, cholesky
from curvops.linalg.damped import Damped, Inverse
from curvops.linalg.diagonal import diagonal
from curvops.linalg.diagonal_preconditioner import DiagonalPreconditioner, diagonal_preconditioner
from curvops.linalg.dual_descent import dual_descent
from curvops.linalg.effective_dimension import effective_dimension
from curvops.linalg.eigsh import eigsh
from curvops.linalg.frobenius import frobenius_norm
from curvops.linalg.kronecker import EigenKronecker, Kronecker
from curvops.linalg.lanczos import lanczos
from curvops.linalg.logdet import logdet
from curvops.linalg.low_rank import RankTooLow, low_rank
from curvops.linalg.lsmr import lsmr
from curvops.linalg.minres import minres
from curvops.linalg.nystrom import Nystrom, nystrom
from curvops.linalg.operator_preconditioner import ClosedFormPreconditioner, as_preconditioner
from curvops.linalg.preconditioners import FactoredPreconditioner, LowRankPreconditioner
from curvops.linalg.quadrature import SpectralQuadrature, spectral_quadrature
from curvops.linalg.results import (
    Eigenpairs,
    Estimate,
    FunctionNotConverged,
    FunctionProduct,
    NotConverged,
    NotPositiveDefinite,
    PrecisionLimit,
    Reason,
    SingularTriplets,
    Solution,
)
from curvops.linalg.roots import inverse_sqrt, sqrt
from curvops.linalg.solve import method_for, solve
from curvops.linalg.spectral_density import SpectralDensity, spectral_density
from curvops.linalg.structured import Dense, Diagonal, LowRank, draw
from curvops.linalg.svds import svds
from curvops.linalg.trace import trace

__all__ = [
    "BlockDiagonal",
    "BlockPreconditioner",
    "ClosedFormPreconditioner",
    "Damped",
    "Dense",
    "Diagonal",
    "DiagonalPreconditioner",
    "EigenKronecker",
    "Eigenpairs",
    "Estimate",
    "FactoredPreconditioner",
    "FunctionNotConverged",
    "FunctionProduct",
    "Inverse",
    "Kronecker",
    "LowRank",
    "LowRankPreconditioner",
    "NotConverged",
    "NotPositiveDefinite",
    "Nystrom",
    "Operator",
    "PivotedCholesky",
    "Product",
    "PrecisionLimit",
    "RankTooLow",
    "Reason",
    "Scaled",
    "SingularTriplets",
    "Sliced",
    "Solution",
    "SpectralDensity",
    "SpectralQuadrature",
    "Sum",
    "Transposed",
    "apply_function",
    "as_preconditioner",
    "block_jacobi",
    "block_lanczos",
    "cg",
    "cholesky",
    "diagonal_preconditioner",
    "diagonal",
    "draw",
    "dual_descent",
    "effective_dimension",
    "eigsh",
    "frobenius_norm",
    "inverse_sqrt",
    "lanczos",
    "logdet",
    "low_rank",
    "lsmr",
    "method_for",
    "minres",
    "nystrom",
    "solve",
    "spectral_density",
    "spectral_quadrature",
    "sqrt",
    "svds",
    "trace",
]
