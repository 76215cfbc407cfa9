"""Methods × hard cases: each gives the right answer, checked against the dense matrix, or the right reason."""

import math
import warnings
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from curvops.errors import ConvergenceError
from curvops.linalg import Reason, cg, dual_descent, lsmr, minres, solve
from tests.linalg.matrices import log_spaced, symmetric
from tests.linalg.systems import Counted, right_hand_sides, true_residuals

SOLVERS = {
    "cg": cg,
    "cg by columns": partial(cg, block=False),
    "minres": minres,
    "lsmr": partial(lsmr, consistent=True),
}
DTYPES = [torch.float32, torch.float64]
ANSWER = {Reason.CONVERGED, Reason.PRECISION_LIMIT}
LIMITS = ANSWER | {Reason.ITERATION_LIMIT, Reason.STAGNATION, Reason.SINGULAR}
NOT_DEFINITE = {Reason.NOT_POSITIVE_DEFINITE}


@dataclass(frozen=True)
class Case:
    """A system in float64 and, where it is not the answer, what each method may say of a column."""

    A: torch.Tensor
    B: torch.Tensor
    reasons: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    def allowed(self, method, dtype):
        wanted = self.reasons.get((method, dtype), self.reasons.get(method, self.reasons.get("all", ANSWER)))
        return wanted | {Reason.ZERO_RIGHT_HAND_SIDE}


def both(*reasons):
    return {"cg": set(reasons), "cg by columns": set(reasons)}


def of_kappa(kappa):
    hard = {"all": LIMITS}
    if kappa <= 1e6:  # what float64 can do, it must
        hard |= {("cg", torch.float64): {Reason.CONVERGED}}
    if kappa <= 1e4:
        hard |= {("cg by columns", torch.float64): {Reason.CONVERGED}, ("minres", torch.float64): {Reason.CONVERGED}}
    return Case(symmetric(log_spaced(30, kappa)), right_hand_sides(30, 2), hard)


def nilpotent(b):
    # In block CG, a nilpotent matrix shows negative curvature, no curvature, or no progress, as b has it.
    no = {**both(*NOT_DEFINITE, Reason.SINGULAR, Reason.STAGNATION), "minres": {Reason.SINGULAR, Reason.NOT_SYMMETRIC}}
    no["lsmr"] = {Reason.CONVERGED} if b == [1.0, 0.0] else {Reason.SINGULAR}
    return Case(torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double(), torch.tensor(b).double().unsqueeze(1), no)


ZEROS = symmetric(torch.cat([torch.zeros(10), torch.linspace(1, 3, 20)]).double())
FLAT = symmetric(torch.linspace(1, 3, 30).double())
RIGHT = right_hand_sides(30, 3)
NOISE = torch.randn(30, 30, generator=torch.Generator().manual_seed(3), dtype=torch.float64) / 30**0.5
SKEW_REASONS = {Reason.NOT_SYMMETRIC, *NOT_DEFINITE, Reason.STAGNATION}

CASES = {
    "kappa 1e4": of_kappa(1e4),
    "kappa 1e6": of_kappa(1e6),
    "kappa 1e12": of_kappa(1e12),
    "one eigenvalue -0.243": Case(
        symmetric(torch.cat([torch.tensor([-0.243]), torch.linspace(0.5, 10, 49)]).double()),
        right_hand_sides(50, 2),
        both(*NOT_DEFINITE),
    ),
    "nilpotent e1": nilpotent([1.0, 0.0]),
    "nilpotent e2": nilpotent([0.0, 1.0]),
    "nilpotent e1 + e2": nilpotent([1.0, 1.0]),
    "singular consistent": Case(ZEROS, ZEROS @ RIGHT),
    "singular inconsistent": Case(
        ZEROS,
        RIGHT,
        {"all": {Reason.SINGULAR}, **both(Reason.SINGULAR, Reason.STAGNATION, Reason.ITERATION_LIMIT, *NOT_DEFINITE)},
    ),
    "zero operator": Case(torch.zeros(5, 5).double(), right_hand_sides(5, 2), {"all": {Reason.SINGULAR}}),
    "non-symmetric": Case(
        torch.eye(30).double() + NOISE, RIGHT, {**both(*SKEW_REASONS), "minres": {Reason.NOT_SYMMETRIC}, "lsmr": LIMITS}
    ),
    "slightly non-symmetric": Case(FLAT + 1e-6 * NOISE, RIGHT),
    "zero right-hand side": Case(FLAT, torch.cat([0 * RIGHT[:, :1], RIGHT[:, :1]], 1)),
    "every scale": Case(FLAT, RIGHT * torch.tensor([1e-30, 1.0, 1e30])),
    "tiny operator": Case(FLAT * 1e-30, RIGHT),
    "huge operator": Case(FLAT * 1e30, RIGHT),
    "dependent columns": Case(FLAT, RIGHT @ torch.tensor([[1.0, 0, 1, 1], [0, 1, -1, 2], [0, 0, 0, 0]]).double()),
    "n = 1, K = 3": Case(torch.tensor([[4.0]]).double(), torch.tensor([[8.0, 1.0, 0.0]]).double()),
    "K > n": Case(symmetric(log_spaced(5, 100)), right_hand_sides(5, 12)),
    "rtol=0": Case(FLAT, RIGHT, {}, {"rtol": 0}),
    "clustered 1, 1 + 1e-9, 2": Case(
        symmetric(torch.cat([torch.ones(1), torch.full((5,), 1.0).double() + 1e-9, torch.full((1,), 2.0)]).double()),
        right_hand_sides(7, 2),
    ),
}
RTOL = 1e-6


def condition(A):
    """The 2-norm condition number, infinite for a zero matrix."""
    return torch.linalg.cond(A).nan_to_num(math.inf)


def check_honesty(A, B, s, rtol):
    """Residuals are the true ones, and no column claims more than they show."""
    true, eps = true_residuals(A, s.x, B), torch.finfo(A.dtype).eps
    # A residual in the dtype itself is known to rounding: eps ‖A‖‖x‖/‖b‖.
    sizes = torch.where(B.double().norm(dim=0) > 0, B.double().norm(dim=0), 1.0)
    rounding = 4 * eps * (1 + torch.linalg.matrix_norm(A.double(), 2) * s.x.double().norm(dim=0) / sizes)
    assert ((s.relative_residuals - true).abs() <= 1e-6 * true + len(A) ** 0.5 * rounding).all()
    for reason, flag, residual, slack, backward in zip(s.reasons, s.converged, true, rounding, s.backward_errors):
        assert bool(flag) == (reason in (Reason.CONVERGED, Reason.ZERO_RIGHT_HAND_SIDE))
        if flag:
            assert residual <= 1.001 * rtol + len(A) ** 0.5 * slack
        if reason is Reason.PRECISION_LIMIT:
            assert residual <= 0.12 and backward <= 10 * eps * len(A) ** 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("method", SOLVERS)
@pytest.mark.parametrize("name", CASES)
def test_right_answer_or_right_reason(name, method, dtype):
    case = CASES[name]
    A, B = case.A.to(dtype), case.B.to(dtype)
    s = SOLVERS[method](A, B, **({"rtol": RTOL} | case.options))
    check_honesty(A, B, s, case.options.get("rtol", RTOL))
    assert set(s.reasons) <= case.allowed(method, dtype), [reason.name for reason in s.reasons]
    if s.accepted and condition(case.A) < 1e3:
        exact = torch.linalg.solve(A.double(), B.double())
        sizes = torch.where(exact.norm(dim=0) > 0, exact.norm(dim=0), 1.0)
        assert ((s.x.double() - exact).norm(dim=0) / sizes).max() <= (1e-4 if dtype == torch.float32 else 2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_solve_answers_or_raises(name, dtype):
    case = CASES[name]
    A, B = case.A.to(dtype), case.B.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            x = solve(A, B, rtol=RTOL)
        except ConvergenceError as failure:
            assert not failure.solution.accepted
            assert condition(case.A) * torch.finfo(dtype).eps > 1e-3
            return
    assert torch.isfinite(x).all() and (true_residuals(A, x, B) <= 0.1).all()
    if condition(case.A) < 1e3:
        assert (true_residuals(A, x, B) <= (1e-5 if dtype == torch.float32 else RTOL)).all()


@pytest.mark.parametrize("name", CASES)
def test_dual_descent_never_claims_more_than_it_has(name):
    A, B = CASES[name].A, CASES[name].B
    s = dual_descent(A, B, batch_size=16, rtol=1e-3, maxiter=100, generator=torch.Generator().manual_seed(0))
    check_honesty(A, B, s, 1e-3)
    easy = {"singular consistent", "dependent columns", "n = 1, K = 3", "tiny operator", "huge operator", "every scale"}
    assert s.converged.all() or name not in easy
    if name.startswith(("nilpotent", "one eigen", "singular inconsistent", "zero operator")):
        assert not s.converged.all() or name == "nilpotent e1"


@pytest.mark.parametrize("method", SOLVERS)
def test_a_product_that_is_nan_at_the_seventh_call(method):
    A = symmetric(log_spaced(30, 1e4))
    s = SOLVERS[method](Counted(A, spoil=7), RIGHT)
    check_honesty(A, RIGHT, s, RTOL)
    assert s.reasons == (Reason.NON_FINITE,) * 3 and torch.isfinite(s.x).all()


@pytest.mark.parametrize("method", SOLVERS)
def test_columns_with_nan_or_inf_touch_no_other(method):
    B = right_hand_sides(30, 4)
    B[5, 1], B[7, 2] = math.nan, math.inf
    s = SOLVERS[method](FLAT, B)
    assert s.reasons == (Reason.CONVERGED, Reason.NON_FINITE, Reason.NON_FINITE, Reason.CONVERGED)
    assert s.x[:, 1:3].isnan().all() and s.relative_residuals[1:3].tolist() == [math.inf] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("method", SOLVERS)
def test_an_exact_initial_guess_needs_no_iteration(method, dtype):
    A = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=dtype))
    X = torch.tensor([[3.0, 1.0], [1.0, -2.0], [2.0, 0.5]], dtype=dtype)
    s = SOLVERS[method](A, A @ X, x0=X, rtol=0)
    assert s.reasons == (Reason.CONVERGED,) * 2 and torch.equal(s.x, X) and s.iterations == 0


@pytest.mark.parametrize("method", SOLVERS)
def test_no_columns(method):
    s = SOLVERS[method](FLAT, RIGHT[:, :0])
    assert s.x.shape == (30, 0) and s.reasons == () and s.accepted


@pytest.mark.parametrize("method", SOLVERS)
def test_a_solution_beyond_the_range_of_the_dtype_is_no_answer(method):
    s = SOLVERS[method](1e-20 * torch.eye(3), 1e30 * torch.ones(3))
    assert s.reasons == (Reason.NON_FINITE,) and not s.converged.any()


@pytest.mark.parametrize("method", SOLVERS)
def test_noise_in_the_products_is_no_answer(method):
    g = torch.Generator().manual_seed(0)

    class Noisy(Counted):
        def noisy(self, out):
            return out + 1e-3 * torch.randn(out.shape, generator=g, dtype=out.dtype) * out.norm() / 10

        def _matmul(self, rhs):
            return self.noisy(self.matrix @ rhs)

        def _t_matmul(self, rhs):
            return self.noisy(self.matrix.mT @ rhs)

    s = SOLVERS[method](Noisy(FLAT), RIGHT, maxiter=400)
    assert not s.accepted
    assert set(s.reasons) <= {Reason.STAGNATION, Reason.ITERATION_LIMIT, Reason.NOT_SYMMETRIC}
