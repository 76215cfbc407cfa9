"""Approximate inverses, one floor below all solvers."""
