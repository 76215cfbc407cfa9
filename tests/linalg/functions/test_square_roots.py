"""Square roots and inverse square roots against dense ones, and what is said of their errors.

Tests `contour.py`.
"""

import math

import linear_operator
import pytest
import torch

from curvops.errors import FunctionConvergenceError, NotPositiveSemidefiniteError
from curvops.linalg import Reason, inverse_sqrt, sqrt
from curvops.linalg.core.column_noise import ColumnNoise
from curvops.linalg.functions.contour import MultiShift, inverse_root_quadrature
from curvops.linalg.operators.draws import DRAW_BLOCK, DRAW_RTOL
from tests.linalg.known import Known
from tests.linalg.matrices import SPECTRA, log_spaced, symmetric

METHODS = ["lanczos", "contour"]
ROOTS = {"sqrt": (sqrt, torch.sqrt), "inverse": (inverse_sqrt, torch.rsqrt)}


def columns(n, k, dtype=torch.float64, seed=1):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense(A, f, B):
    values, vectors = torch.linalg.eigh(A.double())
    return (vectors * f(values.clamp_min(1e-300))) @ (vectors.mT @ B.double())


def errors(result, exact):
    return (result.value.double() - exact).norm(dim=0) / exact.norm(dim=0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [name for name in SPECTRA if name != "kappa 1e8"])
def test_dense_reference_and_an_honest_estimate(name, method):
    A, B = symmetric(SPECTRA[name]), columns(120, 2)
    for root, f in ROOTS.values():
        r = root(A, B, method=method, rtol=1e-7, lower_bound=float(SPECTRA[name].min()) * 0.99, maxiter=4000)
        error = errors(r, dense(A, f, B))
        assert r.accepted and (r.error_estimates <= 1e-7).all()
        assert (error <= 1.001 * r.error_estimates).all() and (r.error_estimates <= 300 * error).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["decaying", "step", "clustered", "flat", "kappa 1e4"])
def test_float32_and_no_bound_known(name, method):
    A, B = symmetric(SPECTRA[name]).float(), columns(120, 2, torch.float32)
    for root, f in ROOTS.values():
        r = root(A, B, method=method, rtol=1e-5)
        error = errors(r, dense(A, f, B))
        assert r.accepted and (error <= r.error_estimates).all()
        assert (r.error_estimates <= 500 * error).all() and (error <= 1e-2).all()


def test_ten_digits_where_the_bound_is_known():
    A, B = symmetric(SPECTRA["kappa 1e4"] + 0.01), columns(120, 3)
    for method in METHODS:
        for root, f in ROOTS.values():
            r = root(A, B, method=method, rtol=1e-11, lower_bound=0.01)
            torch.testing.assert_close(r.value, dense(A, f, B), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_the_root_times_the_inverse_root_gives_the_vector_back(method):
    A, b = symmetric(SPECTRA["flat"]), columns(120, 1)[:, 0]
    there = sqrt(A, b, rtol=1e-10, method=method).value
    back = inverse_sqrt(A, there, rtol=1e-10, method=method).value
    torch.testing.assert_close(back, b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("method", METHODS)
def test_semidefinite_matrices_have_a_root_and_no_inverse(method):
    factor = columns(90, 20)
    A, B = factor @ factor.mT, columns(90, 2, seed=2)
    r = sqrt(A, B, method=method, rtol=1e-5)
    assert r.accepted and (errors(r, dense(A, torch.sqrt, B)) <= r.error_estimates).all()
    r = inverse_sqrt(A, B, method=method, maxiter=200)
    assert not r.accepted and r.value.isfinite().all() and (r.error_estimates > 1e-2).all()
    with pytest.raises(FunctionConvergenceError, match="did not converge"):
        r.raise_if_failed(1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_indefinite_matrices_are_refused(method):
    A = symmetric(torch.cat([torch.tensor([-0.243]), torch.linspace(1, 2, 49)]).double())
    for root, _ in ROOTS.values():
        with pytest.raises(NotPositiveSemidefiniteError, match="positive semidefinite approximation"):
            root(A, columns(50, 2), method=method)
    with pytest.raises(NotPositiveSemidefiniteError, match="smaller lower_bound"):
        inverse_sqrt(symmetric(SPECTRA["flat"]), columns(120, 1), method=method, lower_bound=2.0)


@pytest.mark.parametrize("method", METHODS)
def test_columns_of_every_kind(method):
    A, B = symmetric(SPECTRA["flat"]), columns(120, 5)
    B[:, 1], B[:, 2], B[0, 3], B[:, 4] = 0, B[:, 0] * 1e-30, math.inf, B[:, 0] * 1e30
    r = inverse_sqrt(A, B, method=method)
    assert [reason.name for reason in r.reasons] == [
        "CONVERGED",
        "ZERO_RIGHT_HAND_SIDE",
        "CONVERGED",
        "NON_FINITE",
        "CONVERGED",
    ]
    torch.testing.assert_close(r.value[:, 2] * 1e30, r.value[:, 0], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(r.value[:, 4] / 1e30, r.value[:, 0], rtol=1e-8, atol=1e-8)
    assert (r.value[:, 1] == 0).all() and r.error_estimates[3] == math.inf
    one = inverse_sqrt(torch.tensor([[4.0]]).double(), torch.ones(1, 3).double(), method=method)
    torch.testing.assert_close(one.value, torch.full((1, 3), 0.5).double(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("annotations_unchecked")
def test_budgets():
    A, B = symmetric(SPECTRA["kappa 1e4"]), columns(120, 4)
    capped = inverse_sqrt(A, B, method="contour", max_matvecs=60)
    assert capped.reasons == (Reason.RANK_CAPPED,) * 4 and capped.matvecs <= 60
    alone = inverse_sqrt(A, B, method="contour", lower_bound=1e-4, memory_budget=1)
    torch.testing.assert_close(alone.value, dense(A, torch.rsqrt, B), rtol=1e-4, atol=1e-4)
    short = inverse_sqrt(A, B, method="contour", maxiter=3)
    assert short.reasons == (Reason.ITERATION_LIMIT,) * 4
    with pytest.raises((ValueError, TypeError), match="lanczos"):
        sqrt(A, B, method="newton")
    with pytest.raises(ValueError, match="lower_bound"):
        sqrt(A, B, lower_bound=-1.0)


@pytest.mark.parametrize("kappa", [1.0, 10.0, 1e4, 1e8, 1e12, 1e15])
def test_the_quadrature_is_as_exact_as_it_says(kappa):
    for rtol in (1e-2, 1e-6, 1e-12):
        rule = inverse_root_quadrature(3.0 / kappa, 3.0, rtol)
        x = torch.logspace(math.log10(3.0 / kappa), math.log10(3.0), 1001, dtype=torch.float64)
        assert (rule(x) * x.sqrt() - 1).abs().max() <= 1.01 * rtol + 1e-14
        assert (rule.shifts > 0).all() and (rule.weights > 0).all() and len(rule.shifts) <= 60


def test_shifted_solves_and_their_residuals():
    values, shifts = log_spaced(60, 1e3), torch.tensor([1e-4, 1e-2, 1.0, 30.0]).double()
    A, B, weights = symmetric(values), columns(60, 3), torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    run = MultiShift(lambda V: A @ V, B, shifts, weights, 1.0, keep=True)
    for _ in range(40):
        run.step()
    for s, x in enumerate(run.solutions):
        residual = (B - A @ x - shifts[s] * x).norm(dim=0)
        torch.testing.assert_close(residual, run.residual_norms()[s], rtol=1e-3, atol=1e-10)
    expected = sum(w * x for w, x in zip(weights, run.solutions))
    torch.testing.assert_close(run.weighted, expected, rtol=1e-10, atol=1e-10)
    low, high, _ = run.ends(0)
    assert low == pytest.approx(1e-3, rel=0.4) and high == pytest.approx(1.0, rel=1e-6)


@pytest.fixture
def products_only(monkeypatch, no_foreign_solvers):
    monkeypatch.setattr("curvops.linalg.core.solve_routes.DENSE_SIZE", 0)


@pytest.mark.parametrize("damped", [True, False])
def test_sqrt_inv_matmul_and_its_gradients(damped, products_only):
    n, R, L = 40, columns(40, 3), columns(40, 4, seed=3).mT
    shift = torch.tensor(0.05).double()

    def loss(root, pair):
        return root.sin().sum() + pair[0].cos().sum() + (pair[1] * torch.arange(4)).sum()

    def ours(X, R, L, d):
        P = Known((X + X.mT) / 2, is_psd=True)
        P = P.add_diagonal(d) if damped else P
        return P.sqrt_inv_matmul(R), P.sqrt_inv_matmul(R, L)

    def reference(X, R, L, d):
        values, V = torch.linalg.eigh((X + X.mT) / 2 + (d * torch.eye(n).double() if damped else 0))
        root = V @ (values.rsqrt()[:, None] * V.mT)
        return root @ R, (L @ root @ R, (L @ root).square().sum(1))

    inputs = (symmetric(log_spaced(n, 1e3)), R, L, shift)
    found = []
    for function in (ours, reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        root, pair = function(*leaves)
        gradients = torch.autograd.grad(loss(root, pair), leaves if damped else leaves[:3])
        found.append((root, *pair, *gradients))
    for mine, theirs in zip(*found):
        assert (mine - theirs).norm() <= 1e-9 * theirs.norm()


def test_sqrt_inv_matmul_of_a_vector_and_through_linear_operator(products_only):
    X, b = symmetric(SPECTRA["flat"]), columns(120, 1)[:, 0]
    expected = dense(X, torch.rsqrt, b[:, None])[:, 0]
    torch.testing.assert_close(Known(X, is_psd=True).sqrt_inv_matmul(b), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        linear_operator.sqrt_inv_matmul(Known(X, is_psd=True), b), expected, rtol=1e-9, atol=1e-9
    )
    with pytest.raises(NotPositiveSemidefiniteError):
        Known(-X, is_psd=True).sqrt_inv_matmul(b)


def test_samples_of_an_operator_without_a_root_are_its_square_root_times_normal_vectors(products_only):
    X, noise = symmetric(torch.linspace(0.1, 2, 12).double()), torch.empty(DRAW_BLOCK + 3, 12, dtype=torch.float64)
    torch.manual_seed(5)
    draws = Known(X, is_psd=True).zero_mean_mvn_samples(len(noise))
    torch.manual_seed(5)
    ColumnNoise.of(None, len(noise), X.device).fill(noise)
    exact = dense(X, torch.sqrt, noise.mT).mT
    assert ((draws - exact).norm(dim=1) <= DRAW_RTOL * exact.norm(dim=1)).all()
    with pytest.raises(NotPositiveSemidefiniteError):
        Known(-X, is_psd=True).zero_mean_mvn_samples(2)
