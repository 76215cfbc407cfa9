"""Krylov bases, eigenpairs and singular triplets."""
