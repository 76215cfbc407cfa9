"""The network's operators, one file each, built from a linearisation."""

from curvops.operators.ggn import GGN
from curvops.operators.jacobian import Jacobian
from curvops.operators.linearization import Linearization, linearize

__all__ = ["GGN", "Jacobian", "Linearization", "linearize"]
