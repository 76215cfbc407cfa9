"""The operators of a network, one file each, built from a linearisation."""

from curvops.errors import NoFactorsWarning
from curvops.operators.curvatures.ggn import GGN, DiagonalGGN, EmpiricalFisher, Hessian
from curvops.operators.curvatures.kfac import EKFAC, KFAC
from curvops.operators.curvatures.subnetwork import BlockDiagonal, Subnetwork
from curvops.operators.function_space.tangent_kernel import TangentKernel
from curvops.operators.linearized.linearization import Linearization, linearize, subsample
from curvops.operators.linearized.network_operator import Gradients, Jacobian
from curvops.ranks import operators_over_ranks  # noqa: F401  (registers what ranks add to operators)
from curvops.ranks.sharded_linearization import ShardedLinearization

__all__ = [
    "EKFAC",
    "GGN",
    "KFAC",
    "BlockDiagonal",
    "DiagonalGGN",
    "EmpiricalFisher",
    "Gradients",
    "Hessian",
    "Jacobian",
    "Linearization",
    "NoFactorsWarning",
    "ShardedLinearization",
    "Subnetwork",
    "TangentKernel",
    "linearize",
    "subsample",
]
