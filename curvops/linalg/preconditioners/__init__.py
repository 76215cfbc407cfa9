"""Approximate inverses, on a shelf below all solvers."""
