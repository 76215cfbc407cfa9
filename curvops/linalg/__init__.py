"""Linear algebra with matrices known by their products: any LinearOperator or tensor, and nothing of networks."""

from curvops.linalg.base import Operator  # first: importing it closes the cycle of operators and their algebra

# isort: split
from curvops.linalg.algebra import Product, Scaled, Sliced, Sum, Transposed
from curvops.linalg.block_diagonal import BlockDiagonal
from curvops.linalg.block_jacobi import BlockPreconditioner, block_jacobi
from curvops.linalg.cg import cg
from curvops.linalg.cholesky import PivotedCholesky, cholesky
from curvops.linalg.damped import Damped, Inverse
from curvops.linalg.diagonal import diagonal
from curvops.linalg.diagonal_preconditioner import DiagonalPreconditioner, diagonal_preconditioner
from curvops.linalg.effective_dimension import effective_dimension
from curvops.linalg.frobenius import frobenius_norm
from curvops.linalg.kronecker import EigenKronecker, Kronecker
from curvops.linalg.lanczos import lanczos
from curvops.linalg.logdet import logdet
from curvops.linalg.low_rank import RankTooLow, low_rank
from curvops.linalg.nystrom import Nystrom, nystrom
from curvops.linalg.operator_preconditioner import ClosedFormPreconditioner, as_preconditioner
from curvops.linalg.preconditioners import FactoredPreconditioner, LowRankPreconditioner
from curvops.linalg.quadrature import SpectralQuadrature, spectral_quadrature
from curvops.linalg.results import (
    Eigenpairs,
    Estimate,
    NotConverged,
    NotPositiveDefinite,
    Reason,
    Solution,
)
from curvops.linalg.structured import Dense, Diagonal, LowRank, draw
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
    "RankTooLow",
    "Reason",
    "Scaled",
    "Sliced",
    "Solution",
    "SpectralQuadrature",
    "Sum",
    "Transposed",
    "as_preconditioner",
    "block_jacobi",
    "cg",
    "cholesky",
    "diagonal_preconditioner",
    "diagonal",
    "draw",
    "effective_dimension",
    "frobenius_norm",
    "lanczos",
    "logdet",
    "low_rank",
    "nystrom",
    "spectral_quadrature",
    "trace",
]
