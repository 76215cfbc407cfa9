"""Square roots and inverse square roots against dense ones, and what is said of their errors."""

import math

import linear_operator
import pytest
import torch

from curvops.errors import FunctionConvergenceError, NotPositiveSemidefiniteError
from curvops.linalg import Reason, inverse_sqrt, sqrt
from curvops.linalg.operators import ColumnNoise
from tests.linalg.known import Known
from tests.linalg.matrices import SPECTRA, log_spaced, symmetric
from tests.linalg.systems import function_of as dense
from tests.linalg.systems import right_hand_sides as columns

# Bytes: all vectors are stored, 20 for each of two columns of float64, or as few as possible.
BUDGETS = [None, 22 * 2 * 60 * 8, 1]
HALF = {name: values[::2] for name, values in SPECTRA.items()}
ROOTS = {"sqrt": (sqrt, torch.sqrt), "inverse": (inverse_sqrt, torch.rsqrt)}


def errors(result, exact):
    return (result.value.double() - exact).norm(dim=0) / exact.norm(dim=0)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("name", "dtype", "rtol", "bound"),
    [
        ("decaying", torch.float64, 1e-7, True),
        ("flat", torch.float64, 1e-7, True),
        ("decaying", torch.float32, 1e-5, False),
    ],
)
def test_dense_reference_and_an_honest_estimate(name, dtype, rtol, bound, budget):
    A, B = symmetric(HALF[name]).to(dtype), columns(60, 2, dtype)
    options = {"lower_bound": float(HALF[name].min()) * 0.99, "maxiter": 1500} if bound else {}
    for root, f in ROOTS.values():
        r = root(A, B, rtol=rtol, memory_budget=budget, **options)
        error = errors(r, dense(A, f, B))
        assert r.accepted and (error <= 1.001 * r.error_estimates).all()
        assert (r.error_estimates <= (300 if bound else 500) * error).all()
        assert (r.error_estimates <= 1e-7).all() if bound else (error <= 1e-2).all()


def test_ten_digits_where_the_bound_is_known():
    A, B = symmetric(HALF["kappa 1e4"] + 0.01), columns(60, 3)
    for budget in BUDGETS:
        for root, f in ROOTS.values():
            r = root(A, B, rtol=1e-11, lower_bound=0.01, memory_budget=budget)
            torch.testing.assert_close(r.value, dense(A, f, B), rtol=1e-10, atol=1e-10)


def test_semidefinite_matrices_have_a_root_and_no_inverse():
    factor = columns(90, 20)
    A, B = factor @ factor.mT, columns(90, 2, seed=2)
    r = sqrt(A, B, rtol=1e-5)
    assert r.accepted and (errors(r, dense(A, lambda x: x.clamp_min(0).sqrt(), B)) <= r.error_estimates).all()
    r = inverse_sqrt(A, B, maxiter=200)
    assert not r.accepted and r.value.isfinite().all() and (r.error_estimates > 1e-2).all()
    with pytest.raises(FunctionConvergenceError, match="did not converge"):
        r.raise_if_failed(1e-6)


def test_indefinite_matrices_are_refused():
    A = symmetric(torch.cat([torch.tensor([-0.243]), torch.linspace(1, 2, 49)]).double())
    for root, _ in ROOTS.values():
        with pytest.raises(NotPositiveSemidefiniteError, match="positive semidefinite approximation"):
            root(A, columns(50, 2))
    with pytest.raises(NotPositiveSemidefiniteError, match="smaller lower_bound"):
        inverse_sqrt(symmetric(SPECTRA["flat"]), columns(120, 1), lower_bound=2.0)


def test_columns_of_every_kind():
    A, B = symmetric(SPECTRA["flat"]), columns(120, 5)
    B[:, 1], B[:, 2], B[0, 3], B[:, 4] = 0, B[:, 0] * 1e-30, math.inf, B[:, 0] * 1e30
    r = inverse_sqrt(A, B)
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
    one = inverse_sqrt(torch.tensor([[4.0]]).double(), torch.ones(1, 3).double())
    torch.testing.assert_close(one.value, torch.full((1, 3), 0.5).double(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("annotations_unchecked")
def test_budgets():
    A, B = symmetric(SPECTRA["kappa 1e4"]), columns(120, 4)
    capped = inverse_sqrt(A, B, max_matvecs=60)
    assert capped.reasons == (Reason.RANK_CAPPED,) * 4 and capped.matvecs <= 60
    for most in (60, 300, 1000):
        tight = inverse_sqrt(A, B, max_matvecs=most, memory_budget=1)
        assert tight.reasons == (Reason.RANK_CAPPED,) * 4 and most - 30 <= tight.matvecs <= most
        error = errors(tight, dense(A, torch.rsqrt, B))
        assert (error <= tight.error_estimates).all()
    short = inverse_sqrt(A, B, maxiter=3, memory_budget=1)
    assert short.reasons == (Reason.ITERATION_LIMIT,) * 4
    with pytest.raises(ValueError, match="lower_bound"):
        sqrt(A, B, lower_bound=-1.0)


def test_columns_that_end_at_different_depths_are_made_again_one_with_the_other():
    values, V = torch.linalg.eigh(symmetric(log_spaced(120, 100)))
    A, B = (V * values) @ V.mT, torch.stack([V[:, 3], V[:, :9].sum(1), columns(120, 1)[:, 0]], 1)
    r = inverse_sqrt(A, B, rtol=1e-9, maxiter=2000, memory_budget=1)
    assert r.accepted
    torch.testing.assert_close(r.value, dense(A, torch.rsqrt, B), rtol=1e-7, atol=1e-7)


def test_products_that_come_out_differently_the_second_time_are_in_the_estimate():
    A, b = symmetric(log_spaced(60, 1e4)), columns(60, 1)
    source = torch.Generator().manual_seed(0)

    def product(V):
        return A @ V + 1e-9 * torch.randn(V.shape, generator=source, dtype=V.dtype)

    r = inverse_sqrt(product, b, rtol=1e-7, memory_budget=1)
    error = errors(r, dense(A, torch.rsqrt, b))
    assert ((error <= 2 * r.error_estimates) & (error > 1e-5)).all()


# Beyond the size at which a matrix is formed.
LARGE = 260


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("damped", [True, False])
def test_sqrt_inv_matmul_and_its_gradients(damped, no_foreign_solvers):
    n, R, L = LARGE, columns(LARGE, 2), columns(LARGE, 2, seed=3).mT
    shift = torch.tensor(0.05).double()

    def loss(root, pair):
        return root.sin().sum() + pair[0].cos().sum() + (pair[1] * torch.arange(2)).sum()

    def ours(X, R, L, d):
        P = Known((X + X.mT) / 2, is_psd=True)
        P = P.add_diagonal(d) if damped else P
        return P.sqrt_inv_matmul(R), P.sqrt_inv_matmul(R, L)

    def reference(X, R, L, d):
        values, V = torch.linalg.eigh((X + X.mT) / 2 + (d * torch.eye(n).double() if damped else 0))
        root = V @ (values.rsqrt()[:, None] * V.mT)
        return root @ R, (L @ root @ R, (L @ root).square().sum(1))

    inputs = (symmetric(log_spaced(n, 2)), R, L, shift)
    found = []
    for function in (ours, reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        root, pair = function(*leaves)
        gradients = torch.autograd.grad(loss(root, pair), leaves if damped else leaves[:3])
        found.append((root, *pair, *gradients))
    for mine, theirs in zip(*found):
        assert (mine - theirs).norm() <= 1e-9 * theirs.norm()


def test_sqrt_inv_matmul_of_a_vector_and_through_linear_operator(no_foreign_solvers):
    X, b = symmetric(torch.linspace(1, 3, LARGE).double()), columns(LARGE, 1)[:, 0]
    expected = dense(X, torch.rsqrt, b[:, None])[:, 0]
    torch.testing.assert_close(Known(X, is_psd=True).sqrt_inv_matmul(b), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        linear_operator.sqrt_inv_matmul(Known(X, is_psd=True), b), expected, rtol=1e-9, atol=1e-9
    )
    with pytest.raises(NotPositiveSemidefiniteError):
        Known(-X, is_psd=True).sqrt_inv_matmul(b)


def test_samples_of_an_operator_without_a_root_are_its_square_root_times_normal_vectors(no_foreign_solvers):
    X, noise = (
        symmetric(torch.linspace(0.1, 2, LARGE).double()),
        torch.empty(35, LARGE, dtype=torch.float64),
    )
    torch.manual_seed(5)
    draws = Known(X, is_psd=True).zero_mean_mvn_samples(len(noise))
    torch.manual_seed(5)
    ColumnNoise.of(None, len(noise), X.device).fill(noise)
    exact = dense(X, torch.sqrt, noise.mT).mT
    assert ((draws - exact).norm(dim=1) <= 1e-5 * exact.norm(dim=1)).all()
    with pytest.raises(NotPositiveSemidefiniteError):
        Known(-X, is_psd=True).zero_mean_mvn_samples(2)
