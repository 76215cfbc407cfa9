"""MINRES against dense solutions, of indefinite and singular systems too.

Tests `short_recurrence.py`.
"""

import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

from curvops.linalg import Reason, minres, nystrom
from tests.linalg.matrices import SPECTRA, generator, log_spaced, symmetric
from tests.linalg.systems import right_hand_sides, true_residuals

ALTERNATING = torch.tensor([1.0, -1.0], dtype=torch.float64)


def indefinite(values):
    return symmetric(values * ALTERNATING.repeat(len(values) // 2))


def test_residuals_are_the_least_of_the_krylov_space():
    A, b = indefinite(SPECTRA["flat"]), right_hand_sides(120, 1)[:, 0]
    krylov = [b]
    for steps in range(1, 7):
        krylov.append(A @ krylov[-1])
        basis = torch.linalg.qr(torch.stack(krylov[:-1], 1)).Q
        least = torch.linalg.lstsq(A @ basis, b.unsqueeze(1)).solution
        expected = float((b - A @ (basis @ least)[:, 0]).norm() / b.norm())
        assert float(minres(A, b, maxiter=steps).relative_residuals[0]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_systems_give_the_shortest_solution(dtype):
    values = torch.cat([torch.zeros(20), torch.linspace(1, 3, 20), -torch.linspace(1, 3, 20)]).double()
    A = symmetric(values)
    pseudo = torch.linalg.pinv(A, hermitian=True, rtol=1e-10)
    outside = right_hand_sides(60, 3)
    digits = 1e-12 if dtype == torch.float64 else 1e-5
    inside = A @ outside
    s = minres(A.to(dtype), inside.to(dtype), rtol=digits)
    assert s.reasons == (Reason.CONVERGED,) * 3
    torch.testing.assert_close(s.x.double(), pseudo @ inside, rtol=0, atol=20 * digits)
    s = minres(A.to(dtype), outside.to(dtype))
    assert s.reasons == (Reason.SINGULAR,) * 3 and not s.converged.any()
    # r is a difference, so that half of the digits show whether it is a null vector, and as many of x are right.
    half = 8 * math.sqrt(torch.finfo(dtype).eps)
    assert (s.normal_residuals <= half).all()
    error = s.x.double() - pseudo @ outside
    assert error.norm() <= half * (pseudo @ outside).norm()
    # The error is A⁺ r: its norm is at most ‖A r‖ over the square of the least eigenvalue, which is 1; ‖A‖ is 3.
    r = outside - A @ s.x.double()
    assert ((A @ r).norm(dim=0) <= 1.5 * 3 * s.normal_residuals * r.norm(dim=0)).all()
    assert (error.norm(dim=0) <= 1.5 * 3 * s.normal_residuals * r.norm(dim=0)).all()


def test_the_shortest_minimiser_is_measured_from_the_initial_guess():
    values = torch.cat([torch.zeros(10), torch.linspace(1, 3, 30)]).double()
    A, B, x0 = symmetric(values), right_hand_sides(40, 2), right_hand_sides(40, 2, seed=5)
    null = torch.eye(40, dtype=torch.float64) - torch.linalg.pinv(A, hermitian=True, rtol=1e-10) @ A
    s = minres(A, B, x0=x0)
    assert s.reasons == (Reason.SINGULAR,) * 2
    torch.testing.assert_close(null @ s.x, null @ x0, rtol=0, atol=1e-4)
    consistent = minres(A, A @ B, x0=x0, rtol=1e-12)
    torch.testing.assert_close(null @ consistent.x, null @ x0, rtol=0, atol=1e-10)


def test_shift_is_added_to_the_diagonal():
    A, B = symmetric(SPECTRA["flat"]), right_hand_sides(120, 2)
    s = minres(A, B, shift=-2.0037, rtol=1e-10, maxiter=3000)
    assert s.converged.all()
    assert (true_residuals(A - 2.0037 * torch.eye(120, dtype=torch.float64), s.x, B) <= 1.01e-10).all()


@pytest.mark.usefixtures("annotations_unchecked")
def test_preconditioners_save_iterations_and_an_indefinite_one_is_an_error():
    A, B = indefinite(log_spaced(120, 1e4)), right_hand_sides(120, 2)
    values, vectors = torch.linalg.eigh(A)
    M = vectors @ torch.diag(1 / (values.abs() + 1e-3)) @ vectors.mT
    plain = minres(A, B)
    for preconditioner in (M, DenseLinearOperator(M), lambda V: M @ V):
        s = minres(A, B, preconditioner=preconditioner)
        assert s.converged.all() and s.iterations < plain.iterations / 3
    with pytest.raises(ValueError, match="positive definite"):
        minres(A, B, preconditioner=-M)


@pytest.mark.parametrize(("n", "rank", "shift"), [(4, 4, 1e-8), (40, 3, 1e-6), (40, 20, 1e-8)])
def test_rounding_of_a_preconditioner_is_not_taken_for_a_fault_of_the_matrix(n, rank, shift):
    A = symmetric(torch.linspace(0.9, 1, n).double()).float()
    M = nystrom(A, rank, shift=shift, generator=generator()).preconditioner()
    s = minres(A, torch.randn(n, generator=generator(1)), shift=shift, preconditioner=M)
    assert s.reasons[0] is not Reason.NOT_SYMMETRIC


def test_the_limit_is_a_reason():
    A, B = indefinite(SPECTRA["flat"]), right_hand_sides(120, 2)
    s = minres(A, B, maxiter=3)
    assert s.reasons == (Reason.ITERATION_LIMIT,) * 2 and s.iterations == 3
    torch.testing.assert_close(s.relative_residuals, true_residuals(A, s.x, B), rtol=1e-10, atol=0)
    assert minres(A, B[:, 0]).x.shape == (120,)
