"""Curvatures of the likelihood: GGN, Fishers, Hessian, KFAC, their diagonals, roots and blocks."""

from curvops.operators.curvatures.ggn import Curvature, CurvatureRoot
from curvops.operators.curvatures.kfac import nearest_kronecker

__all__ = ["Curvature", "CurvatureRoot", "nearest_kronecker"]
