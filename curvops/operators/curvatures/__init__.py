"""Curvatures of the likelihood: GGN, Fishers, Hessian, their diagonals, roots and blocks."""
