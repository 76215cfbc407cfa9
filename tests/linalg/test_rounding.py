"""Values without probes in single precision: they are within their intervals, which are narrow where A is ordinary.

Tests `vectors.py`.
"""

import pytest
import torch

from curvops.linalg import Dense, LowRank, Reason, diagonal, frobenius_norm, low_rank, svds, trace
from curvops.linalg.estimators import relative_distance
from tests.linalg.matrices import generator

ORDINARY = 1e-4
"""The relative width below which an interval in single precision is of use."""


def root(decades, rows=80, columns=12, scale=1.0):
    """R with singular values over so many decades, in single precision."""
    left, right = (torch.randn(n, columns, generator=generator(), dtype=torch.float64) for n in (rows, columns))
    sizes = scale * torch.logspace(0, -decades, columns, dtype=torch.float64)
    return ((torch.linalg.qr(left).Q * sizes) @ torch.linalg.qr(right).Q.mT).float()


ROOTS = {
    "ordinary": root(1),
    "ill-conditioned": root(8),
    "large": root(6, scale=1e6),
    "graded columns": root(1) * torch.logspace(0, -12, 12),
    "one direction": torch.ones(80, 12) + 1e-6 * root(1),
}


def gram(R):
    """RᵀR as single precision multiplies by it, and in float64."""
    return Dense(R.mT) @ Dense(R), R.double().mT @ R.double()


def of_difference(R):
    """A matrix less nearly itself: what its terms are off by is more than the difference."""
    A = LowRank(R, torch.ones(R.shape[1]))
    near = (R.double() @ R.double().mT).float() * (1 + 1e-6)
    return A + -1.0 * Dense(near), R.double() @ R.double().mT - near.double()


def distance(R):
    """‖A − B‖/‖A‖ for a B that is A but for rounding."""
    A, exact = gram(R)
    B = exact.float()
    return relative_distance(A, Dense(B)), (exact - B.double()).norm() / exact.norm()


def error_of_low_rank(R):
    A, exact = gram(R)
    found = low_rank(A, 3, generator=generator())
    U = found.vectors.double()
    return found.error, (exact - (U * found.values.double()) @ U.mT).norm() / exact.norm()


def inverse_trace(R):
    """By the closed form of what is held in single precision."""
    P = gram(R)[1].float()
    shift = float(P.norm()) * 2.0**-10
    exact = (P.double() + shift * torch.eye(len(P))).inverse().trace()
    return Dense(P, psd=True).add_diagonal(shift).inverse().trace(), exact


QUANTITIES = {
    "trace": lambda R: (trace(gram(R)[0], method="exact"), gram(R)[1].trace()),
    "diagonal": lambda R: (diagonal(gram(R)[0], method="exact"), gram(R)[1].diagonal()),
    "frobenius_norm": lambda R: (frobenius_norm(gram(R)[0], method="exact"), gram(R)[1].norm()),
    "frobenius_norm of a root": lambda R: (frobenius_norm(Dense(R), method="exact"), R.double().norm()),
    "trace of a known diagonal": lambda R: (Dense(gram(R)[1].float()).trace(), gram(R)[1].trace()),
    "trace of a difference": lambda R: (of_difference(R)[0].trace(), of_difference(R)[1].trace()),
    "trace of an inverse": inverse_trace,
    "relative distance": distance,
    "error of a low rank": error_of_low_rank,
}


@pytest.mark.parametrize("of", ROOTS)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_values_without_probes_are_within_their_intervals(quantity, of):
    found, exact = QUANTITIES[quantity](ROOTS[of])
    low, high = found.interval()
    assert found.samples == 0
    assert (low.double() <= exact).all() and (exact <= high.double()).all(), (found, exact)
    assert bool((found.stderr == 0).all()) is (found.reason is Reason.CONVERGED)
    relative = (high - low).norm() / (1.0 if quantity in ("relative distance", "error of a low rank") else exact.norm())
    if of == "ordinary" and quantity != "trace of a difference":
        assert 0 < relative < ORDINARY and found.reason is Reason.CONVERGED


def test_a_difference_of_close_matrices_is_a_precision_limit():
    found = of_difference(ROOTS["ordinary"])[0]
    assert found.trace().reason is Reason.PRECISION_LIMIT
    for scaled, factor in ((2.0 * found, 2.0), (found * -0.5, 0.5)):
        assert scaled.trace().bias_bound == pytest.approx(factor * found.trace().bias_bound)


@pytest.mark.parametrize("decades", [1, 3, 6, 9, 12])
@pytest.mark.parametrize("which", ["LM", "SM"])
def test_singular_values_are_within_their_residuals(decades, which):
    """Residuals are those of products in single precision: eps ‖A‖ at least, more than a small σ is known to."""
    A = root(decades, 60, 40)
    exact = torch.linalg.svdvals(A.double())
    exact = exact[:3] if which == "LM" else exact.flip(0)[:3]
    found = svds(A, 3, which, generator=generator())
    assert ((found.values.double() - exact).abs() <= found.residuals).all()
    eps = torch.finfo(A.dtype).eps
    converged = torch.tensor([reason is Reason.CONVERGED for reason in found.reasons])
    # By default a small value has converged, too, if its residual is rounding of ‖A‖ and at most √eps σ.
    aims = torch.maximum(1e-6 * found.values, (eps**0.5 * found.values).clamp_max(10 * eps * float(A.norm())))
    assert (found.residuals[converged] <= aims[converged]).all()
    small = exact <= eps**0.5 * float(A.norm()) * 0.1
    assert all(reason is Reason.PRECISION_LIMIT for reason, one in zip(found.reasons, small) if one), found.reasons
