"""Stochastic Lanczos quadrature: one run for log-determinants and effective dimensions at every scalar shift."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from curvops.checkpoint import NOTHING, Checkpoint, begin, resumable
from curvops.checks import checked_whole
from curvops.linalg.core.probed import Limits, Probed, probing
from curvops.linalg.core.solve_routes import EXACT_SIZE
from curvops.linalg.core.vectors import Matrix, ScalarFunction, describe_square, product
from curvops.linalg.estimators.brackets import SpectralQuadrature, log_ratio, positive
from curvops.linalg.estimators.dense_spectrum import KnownSpectrum, known_spectrum
from curvops.linalg.estimators.sampler import FIRST_PROBES, Sampler, Sketch
from curvops.linalg.preconditioners.nystrom import Nystrom
from curvops.progress import Progress, at_work
from curvops.records import from_record

__all__ = ["SpectralQuadrature", "spectral_quadrature"]

LEAST = 4
LEAST_VECTORS = 12
"""Vectors that one probe of a few steps takes."""


@resumable
def spectral_quadrature(
    G: Matrix,
    *,
    shift: float | int,
    probes: int | None = None,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    rank: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> SpectralQuadrature:
    """Run Lanczos on positive semidefinite G for log det(I + G/μ) and the like, at every μ.

    A matrix of n ≤ 256 is formed and decomposed instead, unless probes, rank or a smaller budget were asked for.

    Args:
        shift: the smallest μ of interest. A smaller one may be asked for later; its bracket is wider.
        probes: their number; None adds probes until the standard error of log det(I + G/shift) is rtol of its value.
        max_matvecs: the budget in products, sketch included; by default as many as it takes to meet rtol.
        rank: of the Nyström control variate; None takes one where it is expected to save products.
        memory_budget: bytes for the Lanczos bases; caps the depth and the probes that run in lock-step. None takes the
            rest of the budget of the linearisation behind G.
        progress: as in `cg`.

    The depth grows until the bracket at ``shift`` is half as wide as the error expected of the probes, then probes are
    added. Costs one block product a step.

    Raises:
        ValueError: G is not square, a product is not finite, shift is not positive, or the budget is below 4 products.

    Source: Ubaru, Chen & Saad 2017; the control variate as in Adams et al. 2018.
    """
    mu, limits, facts = float(positive(shift)), Limits(rtol, max_matvecs, memory_budget), describe_square(G)
    limits.check(LEAST)
    if probes is not None:
        checked_whole("probes", probes)
    exact = probes is None and rank is None and facts.rows <= min(EXACT_SIZE, limits.products) and memory_budget is None
    kept = begin("spectral_quadrature", None, dict, facts.device)
    source = kept.source("generator", generator, facts.device)
    if kept.done:
        return kept.result(KnownSpectrum if exact else SpectralQuadrature)
    if exact:
        with torch.no_grad(), at_work("spectral_quadrature", facts.rows, progress, G):
            return kept.finish(known_spectrum(product(G), facts, rtol))
    with (
        at_work("spectral_quadrature", max_matvecs, progress, G),
        probing(G, source, limits, LEAST_VECTORS) as probed,
    ):
        return kept.finish(run(probed, [mu], probes, rank, kept=kept))


def run(
    probed: Probed,
    shifts: Sequence[float],
    probes: int | None = None,
    rank: int | None = None,
    of_shift: Callable[[float], ScalarFunction] = log_ratio,
    kept: Checkpoint = NOTHING,
) -> SpectralQuadrature:
    """Add probes until tr f(G) is known to rtol for the f of each shift; the smallest shift decides the depth.

    A checkpoint is written after each group of probes.
    """
    functions, budget = [of_shift(mu) for mu in sorted(shifts)], probed.limits.products
    half = probed.with_half_memory()  # a sketch is made with half, and stays beside the probes
    sketch, known = Sketch(half), kept.state
    if known is not None and known["sketch"] is not None:
        sketch.made = from_record(Nystrom, known["sketch"])
    elif rank:
        sketch.make(min(rank, budget // 2))
    with torch.no_grad():
        sampler = Sampler((probed if rank == 0 else half).after(sketch.matvecs), min(shifts), functions=functions)

        def save() -> None:
            kept.save(lambda: {"sampler": sampler.state(), "sketch": sketch.made})

        if known is not None:
            sampler.recall(known["sampler"])
        else:
            sampler.first(min(probes or FIRST_PROBES, budget // 2))
            if rank is None and probes is None and (worth := sampler.sketch_rank()):
                sketch.make(worth)
                sampler.budget -= sketch.matvecs
            save()
        sampler.add(probes, sketch, save)
        return sampler.quadrature(sketch, probes is None)
