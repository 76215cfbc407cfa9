"""Estimates of the Frobenius norm of a matrix known by its products, and of the distance of two matrices.

>>> import torch
>>> from curvops.linalg import frobenius_norm
>>> A = torch.diag(torch.arange(1.0, 501.0) ** -1)
>>> estimate = frobenius_norm(A, rtol=0.01, generator=torch.Generator().manual_seed(0))
>>> low, high = estimate.interval()
>>> bool(low <= A.norm() <= high)
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress
from curvops.checks import refuse
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm, working
from curvops.linalg.core.probed import Estimator, Limits, Probed, estimate
from curvops.linalg.core.results import Estimate
from curvops.linalg.core.vectors import Given, Matrix
from curvops.linalg.estimators.exchangeable import LeaveOneOut, RangeSketch, leave_one_out
from curvops.linalg.estimators.trace import Hutchinson

METHODS = ("xtrace", "hutchinson", "exact")
PROBES = 16
"""Products with each matrix; for an error in one eigenvalue, the standard error is √½/√16 = 18 %."""


@algorithm
def frobenius_norm(
    A: Matrix | Given,
    *,
    method: str | None = None,
    rtol: float | None = None,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate ‖A‖_F from products with A only (never Aᵀ).

    The estimate is the root of an estimate of ‖A‖_F² = tr AᵀA, with the standard error of the delta method; the bias
    bound adds the curvature of the root, stderr²/(2 ‖A‖_F), and rounding.

    Args:
        A: (m, n).
        method: "xtrace", the default for square A: leave-one-out estimates ‖A Qᵢ‖_F² + ‖A(I − QᵢQᵢᵀ)ωᵢ‖² with Q from
            the range of A. They are unbiased for every square A, and accurate if A is close to symmetric and decays.
            "hutchinson", the default for other A: mean of ‖Az‖² over random signs, streamed. "exact": n products.
        rtol: as in `trace`.
        max_matvecs: as in `trace`.
        generator: the source of the probes.
        memory_budget: as in `trace`.
        progress: as in `cg`.

    Returns:
        An Estimate of ‖A‖_F.

    Raises:
        ValueError: the method is unknown, xtrace gets a rectangular A, a product is not finite, or the budget is too
            small.

    Source: after XTrace, Epperly, Tropp & Webber 2024.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> round(float(co.linalg.frobenius_norm(A)) ** 2, 4)
        15.0
    """
    A = vec.as_matrix(A)
    facts = vec.describe(A)
    square = facts.rows == facts.columns
    method = ("xtrace" if square else "hutchinson") if method is None else method
    limits = Limits(rtol, max_matvecs)
    refuse(method == "xtrace" and not square, f"xtrace needs a square A, got {facts.rows} x {facts.columns}.")
    families: dict[str, Callable[[Probed], Estimator]] = {"xtrace": XNorm, "hutchinson": Norms}
    return estimate(A, method, families, _exact, limits, generator)[0]


def _exact(probed: Probed) -> Estimate:
    total = torch.zeros((), dtype=torch.float64, device=probed.facts.device)
    for E in vec.unit_blocks(probed.facts, probed.block):
        total = total + vec.norm(probed.multiply(E)).square().sum()
    value, rounding = total.sqrt(), vec.rounding_level(probed.facts.dtype, probed.facts.rows)
    return Estimate.rounded(value, rounding * value, probed.limits.rtol, probed.facts.columns)


def take_root(square: Estimate, eps: float) -> Estimate:
    """Take the root of an estimate of a square, by the delta method."""
    value = square.value.clamp_min(0).sqrt()
    if not bool(value > 0):
        # A square whose estimate is zero or less is only known to be below its own error.
        size = (square.inflation * square.stderr).sqrt()
        return replace(square, value=value, stderr=size, bias_bound=size)
    stderr = square.stderr / (2 * value)
    return replace(square, value=value, stderr=stderr, bias_bound=stderr.square() / (2 * value) + eps * value)


class Norms(Hutchinson):
    """The mean of ‖Az‖² over random signs, streamed."""

    def sample(self, Z: Tensor, Y: Tensor) -> Float[Tensor, " k"]:
        """Return ‖Az‖² of each probe."""
        return vec.norm(Y).square()

    def estimate(self) -> Estimate:
        """Return the root of the mean."""
        return take_root(super().estimate(), torch.finfo(self.probed.facts.dtype).eps)


class XNorm(LeaveOneOut):
    """XTrace of AᵀA with the range sketched by A, without products with Aᵀ; exact for symmetric A of rank ≤ K − 1."""

    least, first, held = 4, 16, 3.0

    def __init__(self, probed: Probed) -> None:
        self.sketch: RangeSketch = RangeSketch(probed, "spherical")

    def estimate(self) -> Estimate:
        """Return the root of the mean of the samples."""
        sketch, out = self.sketch, self.sketch.leave_out()
        H, R = vec.gram(sketch.Z, sketch.Z), sketch.R
        # A(I − P)ω = Q R eⱼ − Z p.
        residual = R.square().sum(0) - 2 * out.against(vec.gram(sketch.Z, sketch.Q) @ R) + out.quadratic(H)
        square = leave_one_out(out.estimates(H, residual), sketch.matvecs, 0.0)
        return take_root(square, torch.finfo(sketch.facts.dtype).eps)


def relative_distance(A: Matrix, B: Matrix, generator: torch.Generator | None = None) -> Estimate:
    """Estimate ‖A − B‖_F / ‖A‖_F from 16 random vectors for both norms, with the standard error of the ratio.

    It is exact, from all unit vectors, if A has at most 16 columns. Cost: one product with each matrix per vector.
    """
    facts = vec.describe(A)
    n, exact = facts.columns, facts.columns <= PROBES
    with torch.no_grad(), working(A, 3 * PROBES) as (multiply, _):
        if exact:
            probes = next(vec.unit_blocks(facts, n))
        else:
            probes = vec.random_block(facts, PROBES, generator=vec.spawn_generator(generator))
        images, others = multiply(probes), vec.product(B)(probes)
        sizes, errors = vec.norm(images).square(), vec.norm(images - others).square()
        of_other = vec.norm(others).square()
    tiny = torch.finfo(sizes.dtype).tiny
    size = (sizes.sum() if exact else sizes.mean()).clamp_min(tiny)
    # Each product has an error of a few units of rounding of its own size, however close the two are to each other.
    rounding = vec.rounding_level(facts.dtype, facts.rows) * (1 + (of_other.sum() / sizes.sum().clamp_min(tiny)).sqrt())
    if exact:
        return Estimate.rounded((errors.sum() / size).sqrt(), rounding, matvecs=n, size=1.0)
    return root_of_ratio(errors, sizes, size, PROBES, rounding)


def root_of_ratio(
    errors: Float[Tensor, " k"], sizes: Float[Tensor, " k"], size: Tensor, matvecs: int, rounding: Tensor | float
) -> Estimate:
    """Estimate (mean error / size)^½ from samples of the error and of its size, with the ratio's standard error."""
    ratio, count = errors.mean() / size, len(errors)
    spread = (errors - ratio * sizes).std() / (size * math.sqrt(count))
    stderr = spread / (2 * ratio.sqrt()) if bool(ratio > 0) else spread
    return Estimate(ratio.sqrt(), stderr, count, matvecs, rounding)
