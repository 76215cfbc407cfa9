"""The network's operators, one file each, built from a linearisation."""

from curvops.operators.diagonal_ggn import DiagonalGGN
from curvops.operators.fisher import EmpiricalFisher
from curvops.operators.ggn import GGN
from curvops.operators.gradients import Gradients
from curvops.operators.hessian import Hessian
from curvops.operators.jacobian import Jacobian
from curvops.operators.kfac import EKFAC, KFAC
from curvops.operators.kfac_factors import NoFactors
from curvops.operators.linearization import Linearization
from curvops.operators.linearize import NoCurvature, linearize
from curvops.operators.subnetwork import BlockDiagonal, Subnetwork
from curvops.operators.subsample import subsample
from curvops.operators.tangent_kernel import TangentKernel

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
    "NoCurvature",
    "NoFactors",
    "Subnetwork",
    "TangentKernel",
    "linearize",
    "subsample",
]
