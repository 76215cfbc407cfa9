"""Functions of a matrix times vectors against dense ones, and what is said of their errors.

Tests `ritz.py`.
"""

import math

import pytest
import torch

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Reason, apply_function
from tests.linalg.matrices import SPECTRA, log_spaced, symmetric
from tests.linalg.systems import Counted
from tests.linalg.systems import function_of as dense
from tests.linalg.systems import right_hand_sides as columns

FUNCTIONS = {
    "exp": lambda x: torch.exp(-x),
    "inverse": lambda x: 1 / x,
    "sqrt": torch.sqrt,
    "inverse sqrt": torch.rsqrt,
    "log": torch.log,
}
ANY_SIGN = {"sign": torch.sign, "inverse": FUNCTIONS["inverse"], "exp": FUNCTIONS["exp"]}
INDEFINITE = {
    "gap": torch.cat([torch.linspace(-2, -0.1, 40), torch.linspace(0.2, 3, 40)]).double(),
    "no gap": torch.linspace(-3, 3, 60).double(),
}
CASES = [(name, SPECTRA[name][::2], FUNCTIONS) for name in ("decaying", "step", "clustered", "kappa 1e8")]
CASES += [(name, values, ANY_SIGN) for name, values in INDEFINITE.items()]


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "values", "functions"), CASES, ids=[case[0] for case in CASES])
def test_the_estimate_holds_and_is_no_exaggeration(name, values, functions, dtype):
    A, B = symmetric(values).to(dtype), columns(len(values), 2, dtype)
    for which, f in functions.items():
        if dtype == torch.float32 and which not in ("sign", "inverse sqrt"):
            continue
        exact = dense(A, f, B)
        for rtol in (1e-3, 1e-8):
            r = apply_function(A, f, B, rtol=rtol)
            error = (r.value.double() - exact).norm(dim=0) / exact.norm(dim=0)
            # The reference itself is known to 1e-14 only.
            assert (r.error_estimates >= 0.5 * error - 1e-14).all(), (which, rtol, r.error_estimates / error)
            told = torch.tensor([reason is not Reason.SINGULAR for reason in r.reasons])
            assert (r.error_estimates <= 200 * error + 1e-13)[told].all(), (which, rtol, r.error_estimates / error)
            assert (r.error_estimates[r.converged] <= rtol).all()
            if dtype == torch.float64 and rtol == 1e-3:
                assert r.accepted and (error <= rtol).all()


@pytest.mark.parametrize("name", ["clustered", "kappa 1e4"])
def test_dense_reference_to_ten_digits(name):
    A, B = symmetric(SPECTRA[name] + 0.1), columns(120, 2)
    for f in FUNCTIONS.values():
        r = apply_function(A, f, B, rtol=1e-12, lower_bound=0.1)
        torch.testing.assert_close(r.value, dense(A, f, B), rtol=1e-10, atol=1e-10)


def test_a_lower_bound_saves_products_and_is_checked():
    A, B = symmetric(SPECTRA["kappa 1e4"]), columns(120, 2)
    known = apply_function(A, torch.rsqrt, B, rtol=1e-4, lower_bound=1e-4)
    assert known.matvecs <= apply_function(A, torch.rsqrt, B, rtol=1e-4).matvecs and known.accepted
    with pytest.raises(NotPositiveSemidefiniteError, match="lower_bound"):
        apply_function(A, torch.rsqrt, B, lower_bound=0.5)


def test_columns_end_on_their_own():
    A = symmetric(SPECTRA["flat"])
    B = columns(120, 4)
    B[:, 1] = 0
    B[:, 2] = torch.linalg.eigh(A).eigenvectors[:, 7]
    B[3, 3] = math.nan
    r = apply_function(A, torch.log, B)
    names = [reason.name for reason in r.reasons]
    assert names == ["CONVERGED", "ZERO_RIGHT_HAND_SIDE", "CONVERGED", "NON_FINITE"]
    assert r.matvecs == r.iterations + 1 and not r.accepted
    assert (r.value[:, 1] == 0).all() and r.error_estimates[1] == 0 and r.error_estimates[3] == math.inf
    torch.testing.assert_close(r.value[:, 2], SPECTRA["flat"].sort().values[7].log() * B[:, 2], rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="NON_FINITE"):
        r.raise_if_failed(1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_any_scale_of_the_right_hand_side(scale, dtype):
    A, b = symmetric(SPECTRA["flat"]).to(dtype), columns(120, 1, dtype)[:, 0]
    r = apply_function(A, torch.sqrt, b * scale)
    assert r.accepted and r.value.shape == (120,)
    torch.testing.assert_close(r.value / scale, dense(A, torch.sqrt, b[:, None])[:, 0].to(dtype), rtol=1e-4, atol=1e-4)


def test_exact_multiplicities():
    values = torch.tensor([1.0] * 20 + [2.0] * 30 + [7.0] * 10).double()
    A, B = torch.diag(values), columns(60, 3)
    r = apply_function(A, torch.rsqrt, B, rtol=1e-12)
    torch.testing.assert_close(r.value, values.rsqrt()[:, None] * B, rtol=1e-12, atol=1e-13)
    assert r.iterations == 3 and r.accepted


def test_rounding_of_a_semidefinite_matrix_counts_as_zero_and_singular_ones_are_told():
    low = torch.randn(80, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        A, B = (low @ low.mT).to(dtype), columns(80, 2, dtype)
        r = apply_function(A, torch.sqrt, B)
        values, vectors = torch.linalg.eigh(low @ low.mT)
        exact = (vectors * values.clamp_min(0).sqrt()) @ (vectors.mT @ B.double())
        error = (r.value.double() - exact).norm(dim=0) / exact.norm(dim=0)
        assert r.accepted and (error <= r.error_estimates).all()
        for f in (torch.log, torch.rsqrt):
            r = apply_function(A, f, B)
            assert r.reasons == (Reason.SINGULAR,) * 2 and r.value.isfinite().all() and not r.accepted
    inside = (low @ low.mT) @ columns(80, 1)
    r = apply_function(low @ low.mT, FUNCTIONS["inverse"], inside, rtol=1e-8)
    torch.testing.assert_close((low @ low.mT) @ r.value, inside, rtol=1e-6, atol=1e-6)


def test_indefinite_matrices_are_refused_where_f_has_no_value():
    for f in (torch.sqrt, torch.log, torch.rsqrt):
        with pytest.raises(NotPositiveSemidefiniteError, match="add_diagonal"):
            apply_function(symmetric(INDEFINITE["gap"]), f, columns(80, 1))
    with pytest.raises(ValueError, match="scale A"):
        apply_function(1e4 * torch.eye(4, dtype=torch.float64), torch.exp, torch.ones(4, dtype=torch.float64))


def test_budgets_end_the_depth_and_say_so():
    A, B = symmetric(SPECTRA["kappa 1e8"]), columns(120, 2)
    twice = apply_function(A, torch.sqrt, B, memory_budget=120 * 8 * 2 * 22, maxiter=200)
    assert twice.reasons == (Reason.ITERATION_LIMIT,) * 2 and twice.iterations == 200 and twice.matvecs <= 800
    products = apply_function(A, torch.sqrt, B, max_matvecs=31)
    assert products.reasons == (Reason.RANK_CAPPED,) * 2 and products.matvecs <= 31
    steps = apply_function(A, torch.sqrt, B, maxiter=12)
    assert steps.reasons == (Reason.ITERATION_LIMIT,) * 2 and steps.iterations == 12
    for r in (twice, products, steps):
        exact = dense(A, lambda x: x.clamp_min(0).sqrt(), B)
        error = (r.value - exact).norm(dim=0) / exact.norm(dim=0)
        assert (error <= r.error_estimates).all() and (r.error_estimates > 1e-6).all()


def test_nan_on_the_seventh_product_is_a_reason():
    r = apply_function(Counted(symmetric(SPECTRA["kappa 1e4"]), spoil=7), torch.sqrt, columns(120, 2))
    assert r.reasons == (Reason.NON_FINITE,) * 2 and r.value.isfinite().all() and (r.error_estimates > 1e-3).all()


def test_callback_sees_the_estimates():
    seen = []
    A, B = symmetric(SPECTRA["flat"]), columns(120, 2)
    r = apply_function(A, torch.log, B, callback=lambda depth, errors: seen.append((depth, errors)))
    assert seen[-1][0] == r.iterations and torch.equal(seen[-1][1], r.error_estimates)


def test_a_product_below_the_smallest_number_is_no_success():
    A, b = symmetric(log_spaced(60, 1e2)).float(), torch.full((60,), 1e-30)
    lost = apply_function(1e-30 * A, torch.sqrt, b)
    assert lost.reasons == (Reason.NON_FINITE,) and lost.error_estimates[0] > 0.1
    assert apply_function(A, torch.sqrt, b).error_estimates[0] < 1e-4
    assert apply_function(torch.zeros(4, 4), torch.sqrt, b[:4]).accepted


# What a polynomial through the Ritz values does not show: steps, kinks, peaks, and what begins beyond them.
SHARP = {
    "step": lambda x: (x > 0.9).double(),
    "kink": lambda x: (x - 0.8).clamp_min(0),
    "narrow band": lambda x: ((x > 0.3) & (x < 0.36)).double(),
    "peak": lambda x: torch.exp(-(((x - 0.37) / 1e-2) ** 2)),
    "exp": lambda x: torch.exp(-50 * x),
    "erfc": lambda x: torch.special.erfc(20 * (x - 0.5)),
}


@pytest.mark.parametrize("name", ["uniform", "decaying", "spike"])
def test_no_certificate_for_what_lies_between_the_ritz_values(name):
    flat = (torch.arange(40, dtype=torch.float64) + 0.5) / 40
    values = {"uniform": flat, "decaying": (torch.arange(40) + 1.0).double() ** -1.5, "spike": flat.clone()}[name]
    values[-1] = 50.0 if name == "spike" else values[-1]
    B = columns(40, 3)
    B[:, 2] *= (1 - flat) ** 4
    for which, f in SHARP.items():
        exact = f(values)[:, None] * B
        for rtol in (1e-1, 1e-3) if name == "decaying" else (1e-3,):
            r = apply_function(torch.diag(values), f, B, rtol=rtol)
            error = (r.value - exact).norm(dim=0) / exact.norm(dim=0)
            assert (error <= rtol)[r.converged].all(), (which, rtol, error, r.reasons)
            # The complete Krylov space is exact, and forty products reach it.
            assert r.accepted, (which, rtol, r.reasons)


def test_a_jump_at_an_eigenvalue_is_beyond_the_precision():
    """⌊10x⌋ at an eigenvalue 1: rounding of A decides between 9 and 10."""
    A, b = symmetric(torch.linspace(0, 1, 80).double()), columns(80, 1)
    assert apply_function(A, lambda x: torch.floor(10 * x), b).reasons == (Reason.PRECISION_LIMIT,)
    assert apply_function(A, lambda x: torch.floor(10 * x + 1e-9), b).reasons == (Reason.CONVERGED,)


def test_too_few_steps_are_never_certified():
    A, b = torch.diag(torch.linspace(0, 1, 100).double()), columns(100, 1)
    for steps in (1, 2):
        r = apply_function(A, torch.exp, b, rtol=0.9, maxiter=steps)
        assert r.reasons == (Reason.UNVERIFIED,) and not r.accepted and r.error_estimates < 0.9
    unseen = apply_function(A, lambda x: (x > 0.999).double(), b, maxiter=5)
    assert unseen.reasons == (Reason.ITERATION_LIMIT,) and unseen.error_estimates == math.inf


def test_where_the_spectrum_lies_is_looked_up_only_in_doubt():
    A, b = torch.diag(torch.linspace(0, 1, 50)), torch.zeros(50)
    b[-1] = 1.0
    plain = apply_function(A, lambda x: torch.exp(-x), b, rtol=1e-4)
    assert plain.reasons == (Reason.CONVERGED,) and plain.matvecs == 1
    doubted = apply_function(A, SHARP["exp"], b)
    assert doubted.reasons == (Reason.PRECISION_LIMIT,) and doubted.matvecs == 11
    # Without products for that nothing is said.
    assert apply_function(A, SHARP["exp"], b, max_matvecs=2).reasons == (Reason.UNVERIFIED,)
