"""Linear algebra with matrices known by their products: any LinearOperator or tensor, without a network."""

from curvops.linalg.operators.base import (
    Operator,  # first: its import closes the cycle of operators and their algebra
)

# isort: split
from curvops.errors import (
    BlockSizeWarning,
    ConvergenceError,
    FunctionConvergenceError,
    ManyProductsWarning,
    MemoryBudgetWarning,
    NotPositiveDefiniteError,
    NotPositiveSemidefiniteError,
    PrecisionWarning,
    RankWarning,
)
from curvops.linalg.core.results import Eigenpairs, Estimate, FunctionProduct, Reason, SingularTriplets, Solution
from curvops.linalg.estimators.diagonal import diagonal
from curvops.linalg.estimators.frobenius import frobenius_norm
from curvops.linalg.estimators.logdet import logdet
from curvops.linalg.estimators.quadrature import SpectralQuadrature, effective_dimension, spectral_quadrature
from curvops.linalg.estimators.spectral_density import SpectralDensity, spectral_density
from curvops.linalg.estimators.trace import trace
from curvops.linalg.operators.algebra import Product, Scaled, Sliced, Sum, Transposed
from curvops.linalg.operators.closed_form import ClosedFormPreconditioner, as_preconditioner
from curvops.linalg.operators.damped import Damped, Inverse
from curvops.linalg.operators.direct_sum import DirectSum
from curvops.linalg.operators.draws import draw
from curvops.linalg.operators.given_matrix import Dense, Diagonal, as_operator
from curvops.linalg.operators.kronecker import EigenKronecker, Kronecker
from curvops.linalg.operators.low_rank import LowRank, low_rank
from curvops.linalg.preconditioners.cholesky import PivotedCholesky, cholesky
from curvops.linalg.preconditioners.factored import FactoredPreconditioner, LowRankPreconditioner
from curvops.linalg.preconditioners.jacobi import (
    BlockPreconditioner,
    DiagonalPreconditioner,
    block_jacobi,
    diagonal_preconditioner,
)
from curvops.linalg.preconditioners.nystrom import Nystrom, nystrom
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.dual_descent import dual_descent
from curvops.linalg.solvers.lsmr import lsmr
from curvops.linalg.solvers.minres import minres
from curvops.linalg.solvers.solve import method_for, solve
from curvops.linalg.spectra.apply_function import apply_function, inverse_sqrt, sqrt
from curvops.linalg.spectra.eigsh import eigsh
from curvops.linalg.spectra.lanczos import lanczos
from curvops.linalg.spectra.svds import svds
from curvops.ranks.on_shards import BlockRows

__all__ = [
    "BlockSizeWarning",
    "MemoryBudgetWarning",
    "BlockPreconditioner",
    "ClosedFormPreconditioner",
    "Damped",
    "Dense",
    "Diagonal",
    "DiagonalPreconditioner",
    "BlockRows",
    "DirectSum",
    "EigenKronecker",
    "Eigenpairs",
    "Estimate",
    "FactoredPreconditioner",
    "FunctionConvergenceError",
    "FunctionProduct",
    "Inverse",
    "Kronecker",
    "ManyProductsWarning",
    "LowRank",
    "LowRankPreconditioner",
    "ConvergenceError",
    "NotPositiveDefiniteError",
    "NotPositiveSemidefiniteError",
    "Nystrom",
    "Operator",
    "PivotedCholesky",
    "Product",
    "PrecisionWarning",
    "RankWarning",
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
    "as_operator",
    "as_preconditioner",
    "block_jacobi",
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
