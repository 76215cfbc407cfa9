"""Curvatures of the likelihood: GGN, Fishers, Hessian, KFAC, their diagonals, roots and blocks."""
