"""The network's operators, one file each, built from a linearisation."""

from curvops.operators.diagonal import DiagonalGGN
from curvops.operators.fisher import EmpiricalFisher
from curvops.operators.ggn import GGN
from curvops.operators.gradients import Gradients
from curvops.operators.hessian import Hessian
from curvops.operators.jacobian import Jacobian
from curvops.operators.kernel import TangentKernel
from curvops.operators.kfac import EKFAC, KFAC
from curvops.operators.kfac_factors import NoFactors
from curvops.operators.linearization import Linearization
from curvops.operators.linearize import NoCurvature, linearize
from curvops.operators.subnetwork import BlockDiagonal, Subnetwork

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
]
