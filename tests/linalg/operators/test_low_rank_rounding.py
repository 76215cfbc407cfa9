"""The bounds that Woodbury's closed forms state of their rounding, against 40 digits.

Tests `low_rank.py`.
"""

import pytest
import torch
from mpmath import mp, mpf

from curvops import linalg
from curvops.linalg import LowRank, Reason
from tests.linalg.matrices import generator

DIGITS = 40
N, R = 7, 3
ORDINARY = 1e-4
"""The relative width below which an interval in single precision is of use."""


def orthonormal():
    return torch.linalg.qr(torch.randn(N, R, dtype=torch.float64, generator=generator())).Q


def with_unit_vectors():
    """A basis whose range holds unit vectors: entries of P⁻¹ there are far below 1/d."""
    vectors = orthonormal()
    vectors[:, :2] = 0
    vectors[:2, :] = 0
    vectors[0, 0] = vectors[1, 1] = 1
    return torch.linalg.qr(vectors).Q


VECTORS = {
    "orthonormal": orthonormal,
    "unit vectors": with_unit_vectors,
    "any": lambda: torch.randn(N, R, dtype=torch.float64, generator=generator()),
    "nearly dependent": lambda: (
        torch.ones(N, R, dtype=torch.float64) + 1e-3 * torch.randn(N, R, dtype=torch.float64, generator=generator())
    ),
}
VALUES = {
    "graded": torch.logspace(0, -8, R, dtype=torch.float64),
    "with a zero": torch.tensor([1.0, 1e-3, 0.0], dtype=torch.float64),
}
SHIFTS = {
    "number": torch.tensor(1.0, dtype=torch.float64),
    "vector": torch.logspace(-3, 3, N, dtype=torch.float64),
}


def exact(P):
    """Return log det P and the diagonal of P⁻¹ for an mpmath matrix."""
    with mp.workdps(DIGITS):
        inverse = P**-1
        return float(mp.log(mp.det(P))), torch.tensor([float(inverse[i, i]) for i in range(N)], dtype=torch.float64)


def as_mp(matrix):
    return mp.matrix([[mpf(x) for x in row] for row in matrix.tolist()])


def check(P, matrix):
    """Hold the closed form's log det and inverse diagonal against those of the matrix."""
    form = P._closed_form()
    logdet, diagonal = exact(matrix)
    estimates = linalg.logdet(P), linalg.diagonal(P.inverse())
    for found, expected in zip(estimates, (logdet, diagonal)):
        low, high = found.interval()
        assert bool((low.double() <= expected).all() and (expected <= high.double()).all()), (found, expected)
        assert (found.reason is Reason.CONVERGED) == bool((found.stderr == 0).all())
    assert form is not None
    return estimates


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1e8, 1e14])
@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("vectors", VECTORS)
def test_a_low_rank_plus_a_diagonal_is_within_its_bounds(vectors, values, shift, size, dtype):
    U, s, d = VECTORS[vectors]().to(dtype), (size * VALUES[values]).to(dtype), SHIFTS[shift].to(dtype)
    with mp.workdps(DIGITS):
        held = as_mp(U)
        matrix = held * mp.diag(s.tolist()) * held.T + mp.diag(d.expand(N).tolist())
    logdet, diagonal = check(LowRank(U, s).add_diagonal(d), matrix)
    if vectors == "orthonormal" and shift == "number" and size <= 1e8:
        assert diagonal.reason is Reason.CONVERGED
        assert size < 1 or logdet.reason is Reason.CONVERGED  # log det P is of the order of the values
        assert logdet.bias_bound <= ORDINARY * max(1.0, abs(float(logdet)))
        assert diagonal.bias_bound.norm() <= ORDINARY * diagonal.value.norm()


def test_where_rounding_decides_the_bound_is_what_is_known_of_a_matrix_plus_a_diagonal():
    """Two directions that single precision cannot tell apart: 0 ≤ log det(P/D) ≤ Σ log(1 + s uᵀD⁻¹u)."""
    u = torch.ones(N, 1)
    vectors = torch.cat([u, u + 1e-7 * torch.arange(N).unsqueeze(1)], 1)
    found = linalg.logdet(LowRank(vectors, torch.tensor([1e12, 1e12])).add_diagonal(1.0))
    assert found.reason is Reason.PRECISION_LIMIT and 1 < found.bias_bound < 200


def test_many_rows_in_single_precision_have_a_cholesky_factor():
    A = torch.randn(1000, 3, generator=generator())
    L = linalg.Dense(A @ A.mT, psd=True).cholesky().to_dense()
    assert (L @ L.mT - A @ A.mT).norm() < 1e-3 * (A @ A.mT).norm()
