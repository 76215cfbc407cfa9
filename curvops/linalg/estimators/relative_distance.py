"""The relative distance of two matrices known by their products."""

from __future__ import annotations

import math

import torch

from curvops.linalg.core.memory import working
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.rounding import rounding_level
from curvops.linalg.core.vectors import Matrix, describe, norm, product, random_block, spawn_generator, unit_block

PROBES = 16
"""Products with each matrix: for an error in one eigenvalue, the standard error is √½/√16 = 18 %."""
LEAST_VECTORS = 3 * PROBES


def relative_distance(A: Matrix, B: Matrix, generator: torch.Generator | None = None) -> Estimate:
    """Estimate ‖A − B‖_F / ‖A‖_F by 16 random vectors for both norms, with the standard error of the ratio.

    Exact, from all unit vectors, where A has no more than 16 columns. Cost: one product with each matrix per vector.
    """
    facts = describe(A)
    n, exact = facts.columns, facts.columns <= PROBES
    with torch.no_grad(), working(A, None, LEAST_VECTORS) as (multiply, _):
        if exact:
            probes = unit_block(n, 0, n, dtype=facts.dtype, device=facts.device)
        else:
            probes = random_block(facts, PROBES, generator=spawn_generator(generator))
        images, others = multiply(probes), product(B)(probes)
        sizes, errors = norm(images).square(), norm(images - others).square()
        of_other = norm(others).square()
    tiny = torch.finfo(sizes.dtype).tiny
    size = (sizes.sum() if exact else sizes.mean()).clamp_min(tiny)
    ratio = (errors.sum() if exact else errors.mean()) / size
    # Each product has an error of a few units of rounding of its own size, however close the two are to each other.
    rounding = rounding_level(facts.dtype, facts.rows) * (1 + (of_other.sum() / sizes.sum().clamp_min(tiny)).sqrt())
    if exact:
        return Estimate.rounded(ratio.sqrt(), rounding, matvecs=n, size=1.0)
    spread = (errors - ratio * sizes).std() / (size * math.sqrt(PROBES))
    stderr = spread / (2 * ratio.sqrt()) if bool(ratio > 0) else spread
    return Estimate(ratio.sqrt(), stderr, PROBES, PROBES, rounding)
