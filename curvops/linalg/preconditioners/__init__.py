"""Approximate inverses, below all solvers."""
