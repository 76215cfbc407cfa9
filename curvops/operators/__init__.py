"""The network's operators, one file each, built from a linearisation."""

from curvops.operators.diagonal import DiagonalGGN
from curvops.operators.fisher import EmpiricalFisher
from curvops.operators.ggn import GGN
from curvops.operators.hessian import Hessian
from curvops.operators.jacobian import Jacobian
from curvops.operators.linearization import Linearization, linearize

__all__ = ["DiagonalGGN", "EmpiricalFisher", "GGN", "Hessian", "Jacobian", "Linearization", "linearize"]
