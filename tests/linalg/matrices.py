"""Test matrices by prescribed spectrum, and sources of random numbers."""

import functools

from torch import Tensor

from curvops.cli import problems
from curvops.cli.problems import clusters, flat, geometric, log_spaced, powers, step
from tests.randomness import seeded

__all__ = ["EXPONENTIAL", "SPECTRA", "N", "generator", "log_spaced", "rotation", "symmetric"]

N = 120
EXPONENTIAL = geometric(N, 0.9)
SPECTRA: dict[str, Tensor] = {
    "decaying": powers(N, -2),
    "step": step(N, 20, 100, 1),
    "clustered": clusters(N, (1, 10, 50, 200)),
    "flat": flat(N, 1, 3),
    "kappa 1e4": log_spaced(N, 1e4),
    "kappa 1e8": log_spaced(N, 1e8),
}
rotation = functools.cache(problems.rotation)


generator = seeded


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues and random eigenvectors, in their dtype."""
    Q = rotation(len(eigenvalues), seed)
    A = (Q * eigenvalues.double()) @ Q.mT
    return ((A + A.mT) / 2).to(eigenvalues.dtype)
