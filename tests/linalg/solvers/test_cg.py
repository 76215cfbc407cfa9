"""Conjugate gradients against dense solutions: what each column ends with, and why.

Tests `refinement.py`.
"""

import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator

import curvops as co
from curvops.linalg import Reason, cg, nystrom
from tests.linalg.matrices import SPECTRA, log_spaced, symmetric
from tests.linalg.systems import Counted, right_hand_sides, true_residuals

# Right answers.


def test_float32_limit_is_named_and_refinement_goes_beyond_it():
    A, B = symmetric(SPECTRA["kappa 1e4"] * 1900).float(), right_hand_sides(120, 2, torch.float32)
    plain, refined = cg(A, B), cg(A, B, refine=True)
    assert set(plain.reasons) == {Reason.PRECISION_LIMIT} and not plain.converged.any() and plain.accepted
    assert (plain.backward_errors < 1e-5).all()
    assert refined.x.dtype == torch.float64 and refined.converged.all()
    assert (true_residuals(A, refined.x, B) <= 1e-6).all()


def test_refinement_keeps_zero_and_non_finite_columns_apart():
    B = right_hand_sides(120, 3, torch.float32)
    B[:, 0], B[3, 1] = 0, math.inf
    s = cg(symmetric(SPECTRA["flat"]).float(), B, refine=True)
    assert s.reasons == (Reason.ZERO_RIGHT_HAND_SIDE, Reason.NON_FINITE, Reason.CONVERGED)
    assert s.converged.tolist() == [True, False, True] and s.x[:, 1].isnan().all()


def test_converged_columns_are_dropped():
    A = symmetric(SPECTRA["kappa 1e4"])
    easy = torch.linalg.eigh(A).eigenvectors[:, -1]
    operator = Counted(A)
    s = cg(operator, torch.stack([easy, right_hand_sides(120, 1)[:, 0]], 1))
    assert s.converged.all() and operator.log.count(1) > operator.log.count(2)


def test_preconditioners_of_every_kind_agree():
    A, B = symmetric(log_spaced(120, 1e6)), right_hand_sides(120, 2)
    M = torch.linalg.inv(A + 1e-4 * torch.eye(120, dtype=torch.float64))
    plain = cg(A, B)
    for preconditioner, block in ((M, True), (DenseLinearOperator(M), True), (lambda V: M @ V, False)):
        s = cg(A, B, preconditioner=preconditioner, block=block)
        assert s.converged.all() and s.iterations < plain.iterations / 3


def test_callback_and_vector_shape():
    A, seen = symmetric(SPECTRA["flat"]), []
    b = right_hand_sides(120, 1)[:, 0]
    s = cg(A, b, callback=lambda iteration, residuals: seen.append((iteration, residuals)))
    assert s.x.shape == (120,) and s.converged.shape == (1,)
    assert [i for i, _ in seen] == list(range(s.iterations + 1)) and seen[0][1].shape == (1,)
    assert cg(A, b).history.shape[1] == 1


# Right reasons.


def test_non_finite_preconditioner():
    s = cg(torch.eye(3), torch.ones(3), preconditioner=lambda V: V * math.nan)
    assert s.reasons == (Reason.NON_FINITE,)


@pytest.mark.parametrize("guess", [0.0, 1.0])
def test_iteration_limit_says_so_and_returns_the_step_that_lowers_the_energy(guess):
    A, B = symmetric(SPECTRA["kappa 1e4"]), right_hand_sides(120, 2)
    X = torch.full_like(B, guess)
    R, s = B - A @ X, cg(A, B, maxiter=1, x0=X, block=False)
    assert s.reasons == (Reason.ITERATION_LIMIT,) * 2 and s.iterations == 1
    assert (s.relative_residuals > R.norm(dim=0) / B.norm(dim=0)).all()
    assert torch.allclose(s.x, X + R * (R.square().sum(0) / (R * (A @ R)).sum(0)))
    assert cg(A, B, maxiter=0).iterations == 0


def test_no_graph_is_recorded():
    A = torch.eye(3, requires_grad=True)
    assert not cg(A, torch.ones(3, requires_grad=True)).x.requires_grad


# Memory and precision.


def test_memory_budget_solves_in_groups():
    A, B = symmetric(SPECTRA["flat"]), right_hand_sides(120, 5)
    operator = Counted(A)
    s = cg(operator, B, memory_budget=2 * 12 * 120 * 8)
    assert max(operator.log) == 2 and s.converged.all() and s.matvecs == sum(operator.log)
    assert s.history.shape == (s.iterations + 1, 5)
    assert cg(A, B, memory_budget=2.5 * 12 * 120 * 8).groups == s.groups
    assert cg(A, B, memory_budget=0).converged.all()  # one column at a time is the least
    with pytest.raises(ValueError, match="memory_budget"):
        cg(A, B, memory_budget=-1)


class Precise(Counted):
    """Counts the products in float64 and those in float32 apart."""

    def __init__(self, matrix, counts=None):
        super().__init__(matrix)
        self.counts = {} if counts is None else counts

    def to(self, dtype):
        return Precise(self.matrix.to(dtype), self.counts)

    def _matmul(self, rhs):
        self.counts[rhs.dtype] = self.counts.get(rhs.dtype, 0) + rhs.shape[1]
        return super()._matmul(rhs)


@pytest.mark.parametrize("name", ["clustered", "kappa 1e4"])
def test_refinement_in_float32_takes_a_float64_product_for_four_digits_of_a_column(name):
    A, B = symmetric(SPECTRA[name]), right_hand_sides(120, 4)
    operator = Precise(A)
    s = cg(operator, B, rtol=1e-10, refine=torch.float32)
    assert s.x.dtype == torch.float64 and s.converged.all()
    assert (true_residuals(A, s.x, B) <= 1.01e-10).all()
    assert s.exact_matvecs == operator.counts[torch.float64]
    assert s.matvecs == sum(operator.counts.values())
    assert s.exact_matvecs <= max(3 * 4, 0.1 * s.matvecs)  # ten digits take three corrections; the rest is float32
    assert cg(A, B, rtol=1e-10, refine=torch.float32).exact_matvecs == s.exact_matvecs


def test_refinement_takes_a_float64_preconditioner_and_names_bad_dtypes():
    A, B = symmetric(log_spaced(120, 1e6)), right_hand_sides(120, 2)
    M = torch.linalg.inv(A + 1e-4 * torch.eye(120, dtype=torch.float64))
    s = cg(A, B, rtol=1e-10, refine=torch.float32, preconditioner=M)
    assert s.converged.all() and (true_residuals(A, s.x, B) <= 1.01e-10).all()
    with pytest.raises(ValueError, match="float32"):
        cg(A, B, refine=torch.bfloat16)


@pytest.mark.parametrize("low", [True, torch.float32])
def test_refinement_that_ends_at_rounding_names_the_precision_not_the_operator(low):
    A, B = symmetric(log_spaced(60, 1e5)), right_hand_sides(60, 2)
    solution = cg(A, B, rtol=0, refine=low, maxiter=10_000)
    assert solution.reasons == (Reason.PRECISION_LIMIT,) * 2
    norms = torch.linalg.vector_norm(A @ solution.x - B, dim=0) / (
        torch.linalg.matrix_norm(A, 2) * solution.x.norm(dim=0) + B.norm(dim=0)
    )
    assert (solution.backward_errors < 5e-14).all() and (solution.backward_errors >= 0.5 * norms).all()


# Directions that are kept.

OUTLIERS = torch.cat([torch.logspace(0, 6, 60, dtype=torch.float64), torch.full((440,), 0.5, dtype=torch.float64)])


def test_conjugation_to_all_directions_ends_with_the_krylov_space_and_to_some_on_the_way_there():
    """60 eigenvalues apart from one of multiplicity 440: a Krylov space of 8 columns is exhausted by 9 iterations."""
    A, B = torch.diag(OUTLIERS), right_hand_sides(500, 8)
    last, some, every = (cg(A, B, rtol=1e-8, keep_directions=most) for most in (0, 32, 1024))
    assert last.converged.all() and some.converged.all() and every.converged.all()
    assert every.iterations == 9 and every.matvecs <= 80  # a product for each column checks the end
    assert every.iterations < some.iterations < last.iterations / 2


@pytest.mark.parametrize(
    ("kind", "most", "sketched"),
    [("one", 16, False), ("eight", 1024, True), ("dependent", 16, True), ("zero", 1024, False)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_directions_leave_the_solution(dtype, kind, most, sketched):
    A = symmetric(SPECTRA["kappa 1e4" if dtype == torch.float64 else "decaying"])
    B = right_hand_sides(120, 1 if kind == "one" else 8)
    if kind == "dependent":
        B[:, 5] = B[:, 0] - 2 * B[:, 1]
    if kind == "zero":
        B[:, 2] = 0
    M = nystrom(A, 20, generator=torch.Generator().manual_seed(0)).preconditioner() if sketched else None
    options = {"rtol": 1e-13 if dtype == torch.float64 else 1e-6, "keep_directions": most}
    s = cg(A.to(dtype), B.to(dtype), preconditioner=M and (lambda V: (M @ V.double()).to(dtype)), **options)
    exact = torch.linalg.solve(A, B)
    assert s.accepted
    assert (s.x - exact).norm() <= (1e-10 if dtype == torch.float64 else 1e-4) * exact.norm()
    assert (s.x[:, B.norm(dim=0) == 0] == 0).all()


@pytest.mark.parametrize(("columns", "most", "dtype"), [(1, 0, torch.float64), (3, 400, torch.float32)])
def test_an_inconsistent_system_ends_long_before_the_limit(dtype, columns, most):
    values = torch.cat([torch.zeros(200), torch.logspace(-3, 0, 100)]).double()
    A, B = symmetric(values), right_hand_sides(300, columns)
    s = cg(A.to(dtype), B.to(dtype), keep_directions=most)
    assert set(s.reasons) == {Reason.SINGULAR} and s.iterations <= 1000  # the limit is 3,000
    assert cg(A.to(dtype), (A @ B).to(dtype), keep_directions=most).accepted


def test_what_rounding_leaves_under_a_preconditioner_is_not_taken_for_a_null_vector() -> None:
    """Its directions avoid the largest eigenvalues: ‖A‖ was estimated by small ones, and the solution was refused."""
    n, rank = 100, 20
    values = torch.cat([torch.logspace(4.3, 1, rank, dtype=torch.float64), torch.full((n - rank,), 0.3).double()])
    for seed in range(8):
        g = torch.Generator().manual_seed(seed)
        Q = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64)).Q
        A = ((Q * values) @ Q.mT).float()
        sketch = co.linalg.nystrom(co.linalg.Dense((A + A.mT) / 2, psd=True), rank=rank, generator=g)
        b = (Q @ torch.cat([torch.ones(rank), torch.full((n - rank,), 0.2)]).double()).float()
        A = co.linalg.Dense((A + A.mT) / 2, psd=True)
        solution = co.linalg.cg(A, b, preconditioner=sketch.preconditioner(0.3), rtol=1e-7)
        assert solution.reasons == (Reason.PRECISION_LIMIT,) and solution.accepted, seed
