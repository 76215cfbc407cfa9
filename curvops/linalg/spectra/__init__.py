"""Krylov bases, eigenpairs, singular triplets and functions of matrices."""
