"""Test matrices by prescribed spectrum."""

from __future__ import annotations

from torch import Tensor

from curvops.cli.problems import clusters, flat, geometric, log_spaced, powers, rotation, step, symmetric

__all__ = ["EXPONENTIAL", "SPECTRA", "N", "log_spaced", "rotation", "symmetric"]

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
