import math

import pytest
import scipy.sparse.linalg
import torch

from curvops.linalg import Reason, lsmr
from tests.linalg.matrices import rotation
from tests.linalg.systems import Counted, right_hand_sides

SHAPES = [(80, 30), (30, 80), (50, 50)]


def rectangular(m, n, seed=0):
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measured(A, X, B, damp=0.0):
    """True relative residuals and ‖Aᵀr − damp²x‖/(‖A‖‖(r, damp x)‖)."""
    r = B - A @ X
    size = torch.linalg.matrix_norm(A, 2).square().add(damp**2).sqrt()
    slope = (A.mT @ r - damp**2 * X).norm(dim=0)
    return r.norm(dim=0) / B.norm(dim=0), slope / size / torch.hypot(r.norm(dim=0), damp * X.norm(dim=0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_matches_the_dense_solution(shape, damp):
    A, B = rectangular(*shape), right_hand_sides(shape[0], 3)
    s = lsmr(A, B, damp=damp, rtol=1e-12, maxiter=1000)
    n = shape[1]
    ridge = torch.linalg.solve(A.mT @ A + damp**2 * torch.eye(n, dtype=torch.float64), A.mT @ B) if damp else None
    torch.testing.assert_close(s.x, torch.linalg.pinv(A) @ B if ridge is None else ridge, rtol=1e-9, atol=1e-9)
    assert s.reasons == (Reason.CONVERGED,) * 3 and s.converged.all()


def test_what_converged_means_is_told_by_the_two_residuals():
    A, B = rectangular(80, 30), right_hand_sides(80, 2)
    B = torch.cat([B, A @ right_hand_sides(30, 1)], 1)
    operator = Counted(A)
    s = lsmr(operator, B)
    residuals, slopes = measured(A, s.x, B)
    assert s.converged.all() and s.matvecs == sum(operator.log)
    assert (s.relative_residuals[:2] > 0.5).all() and (s.normal_residuals[:2] <= 1e-6).all()
    assert s.relative_residuals[2] <= 1e-6
    torch.testing.assert_close(s.relative_residuals, residuals, rtol=1e-6, atol=1e-14)
    assert (slopes[:2] <= s.normal_residuals[:2] * (1 + 1e-6)).all()  # its ‖A‖ is a lower bound


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficient_gives_the_shortest_minimiser(shape, dtype):
    m, n = shape
    A, B = rectangular(m, 10) @ rectangular(10, n, seed=1), right_hand_sides(m, 3)
    digits = 1e-11 if dtype == torch.float64 else 1e-5
    s = lsmr(A.to(dtype), B.to(dtype), rtol=digits)
    exact = torch.linalg.pinv(A, rtol=1e-10) @ B
    assert s.converged.all() and float((s.x.double() - exact).norm() / exact.norm()) <= 10 * digits
    wanted = lsmr(A.to(dtype), B.to(dtype), consistent=True)
    assert wanted.reasons == (Reason.SINGULAR,) * 3 and not wanted.accepted
    assert lsmr(A.to(dtype), (A @ exact).to(dtype), consistent=True, rtol=digits).converged.all()


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_any_initial_guess_leads_to_the_same_damped_minimum(damp):
    A, B, x0 = rectangular(60, 40), right_hand_sides(60, 2), right_hand_sides(40, 2, seed=7)
    cold, warm = lsmr(A, B, damp=damp, rtol=1e-11), lsmr(A, B, damp=damp, rtol=1e-11, x0=x0)
    torch.testing.assert_close(warm.x, cold.x, rtol=1e-8, atol=1e-8)
    assert lsmr(A, B, damp=damp, x0=cold.x).iterations == 0


def test_of_a_flat_system_the_solution_nearest_to_the_guess():
    A, B, x0 = rectangular(30, 80), right_hand_sides(30, 2), right_hand_sides(80, 2, seed=7)
    s = lsmr(A, B, x0=x0, rtol=1e-11)
    torch.testing.assert_close(s.x, x0 + torch.linalg.pinv(A) @ (B - A @ x0), rtol=1e-8, atol=1e-8)


def test_zero_tolerance_zero_matrices_and_bad_columns():
    A, B = rectangular(40, 15), right_hand_sides(40, 2)
    s = lsmr(A, B, rtol=0)
    assert set(s.reasons) == {Reason.PRECISION_LIMIT}
    torch.testing.assert_close(s.x, torch.linalg.pinv(A) @ B, rtol=1e-10, atol=1e-10)
    zero = lsmr(torch.zeros(4, 3), torch.ones(4))
    assert zero.reasons == (Reason.CONVERGED,) and torch.equal(zero.x, torch.zeros(3))
    assert lsmr(torch.zeros(4, 3), torch.ones(4), consistent=True).reasons == (Reason.SINGULAR,)
    B = torch.cat([B, torch.zeros(40, 1), torch.full((40, 1), math.nan)], 1)
    s = lsmr(A, B)
    assert s.reasons[2:] == (Reason.ZERO_RIGHT_HAND_SIDE, Reason.NON_FINITE) and s.converged[:3].all()


SMALL = {
    "k^-2": torch.arange(1, 41, dtype=torch.float64) ** -2,
    "k^-3": torch.arange(1, 41, dtype=torch.float64) ** -3,
    "five small": torch.cat([torch.linspace(1, 2, 35), torch.logspace(-3, -5, 5)]).double(),
}


def with_singular_values(m, s):
    return (rotation(m, 0)[:, : len(s)] * s) @ rotation(len(s), 1)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # in SciPy's condition number
@pytest.mark.parametrize(("name", "scale"), [("k^-2", 1.0), ("k^-3", 2.0**40), ("five small", 1.0)])
def test_consistent_float32_systems_come_as_far_as_scipy(name, scale):
    s = SMALL[name]
    A = with_singular_values(60, s).float()
    b = (A.double() @ right_hand_sides(len(s), 1)).float()
    ours = lsmr(A * scale, b, consistent=True, maxiter=400)
    theirs = scipy.sparse.linalg.lsmr(A.numpy(), b[:, 0].numpy(), atol=1e-7, btol=1e-7, conlim=0, maxiter=400)
    answers = torch.cat([ours.x * scale, torch.from_numpy(theirs[0])[:, None]], 1).double()
    reached, level = measured(A.double(), answers, b.double())[0].tolist()
    assert reached <= max(1.1e-6, 1.5 * level)
    assert ours.reasons[0] in (Reason.CONVERGED, Reason.PRECISION_LIMIT, Reason.ITERATION_LIMIT)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("part", [1e-2, 1.0])
def test_a_part_outside_the_range_is_told_at_any_scale(part, dtype, scale):
    A = with_singular_values(60, torch.linspace(1, 2, 40).double())
    outside = rotation(60, 0)[:, 50:51]
    inside = A @ right_hand_sides(40, 1)
    b = inside / inside.norm() + part * outside
    s = lsmr((A * scale).to(dtype), b.to(dtype), consistent=True)
    assert s.reasons == (Reason.SINGULAR,)
    assert abs(float(s.relative_residuals[0]) - part / math.hypot(1, part)) < 1e-3 * part
