"""What every public function says of inputs at the edge: empty, not symmetric, out of range, without a step to take.

Tests `symmetry.py`.
"""

import math

import pytest
import torch

from curvops.linalg import (
    Dense,
    Kronecker,
    apply_function,
    block_jacobi,
    cg,
    cholesky,
    diagonal,
    diagonal_preconditioner,
    dual_descent,
    effective_dimension,
    eigsh,
    frobenius_norm,
    inverse_sqrt,
    lanczos,
    logdet,
    low_rank,
    lsmr,
    minres,
    nystrom,
    solve,
    spectral_density,
    spectral_quadrature,
    sqrt,
    svds,
    trace,
)
from curvops.linalg.core.results import Reason
from curvops.linalg.core.symmetry import IN_PLACE, eigh_in_place
from tests.linalg.matrices import generator, log_spaced, rotation, symmetric

N = 60
FLAT = symmetric(torch.linspace(1, 3, N).double())
B = torch.randn(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


FUNCTIONS = {
    "cg": lambda A, **o: cg(A, B[: len(A)], **o),
    "minres": lambda A, **o: minres(A, B[: len(A)], **o),
    "lsmr": lambda A, **o: lsmr(A, B[: len(A)], **o),
    "dual_descent": lambda A, **o: dual_descent(A, B[: len(A)], noise=1.0, **o),
    "solve": lambda A, **o: solve(A, B[: len(A)], **o),
    "nystrom": lambda A, **o: nystrom(A, **o),
    "cholesky": lambda A, **o: cholesky(A, **o),
    "block_jacobi": lambda A, **o: block_jacobi(A, 2, **o),
    "diagonal_preconditioner": lambda A, **o: diagonal_preconditioner(A, **o),
    "low_rank": lambda A, **o: low_rank(A, **o),
    "lanczos": lambda A, **o: lanczos(A, 5, **o),
    "eigsh": lambda A, **o: eigsh(A, 2, **o),
    "svds": lambda A, **o: svds(A, 2, **o),
    "apply_function": lambda A, **o: apply_function(A, torch.exp, B[: len(A)], **o),
    "sqrt": lambda A, **o: sqrt(A, B[: len(A)], **o),
    "inverse_sqrt": lambda A, **o: inverse_sqrt(A, B[: len(A)], **o),
    "spectral_density": lambda A, **o: spectral_density(A, **o),
    "spectral_quadrature": lambda A, **o: spectral_quadrature(A, shift=1.0, **o),
    "trace": lambda A, **o: trace(A, **o),
    "diagonal": lambda A, **o: diagonal(A, **o),
    "frobenius_norm": lambda A, **o: frobenius_norm(A, **o),
    "logdet": lambda A, **o: logdet(A, shift=1.0, **o),
    "effective_dimension": lambda A, **o: effective_dimension(A, 1.0, **o),
}
SOLVERS = ("cg", "minres", "lsmr", "dual_descent", "solve")
KRYLOV = ("eigsh", "svds", "apply_function", "sqrt", "inverse_sqrt")
SAMPLED = ("spectral_quadrature", "trace", "diagonal", "frobenius_norm", "logdet", "effective_dimension")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_matrix_is_an_error(name):
    with pytest.raises(ValueError, match="at least one row"):
        FUNCTIONS[name](torch.zeros(0, 0).double())


@pytest.mark.parametrize("rtol", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", [*SOLVERS, *KRYLOV, *SAMPLED, "cholesky", "low_rank"])
def test_rtol_must_be_a_tolerance(name, rtol):
    with pytest.raises(ValueError, match="rtol must"):
        FUNCTIONS[name](FLAT, rtol=rtol)


@pytest.mark.parametrize("name", SAMPLED)
def test_no_budget_meets_an_estimators_rtol_of_zero(name):
    with pytest.raises(ValueError, match="rtol must be positive"):
        FUNCTIONS[name](FLAT, rtol=0.0)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "diagonal_preconditioner"])
def test_a_negative_memory_budget_is_an_error(name):
    with pytest.raises(ValueError, match="memory_budget"):
        FUNCTIONS[name](FLAT, memory_budget=-1)


@pytest.mark.parametrize("name", [*SOLVERS, *KRYLOV])
def test_a_negative_maxiter_is_an_error(name):
    with pytest.raises(ValueError, match="maxiter must not be negative"):
        FUNCTIONS[name](FLAT, maxiter=-1)


@pytest.mark.parametrize("budget", [-5, 0, 1, 3])
@pytest.mark.parametrize("shift", [1.0, torch.tensor([1.0, 2.0])])
def test_too_few_products_for_a_logdet(budget, shift):
    with pytest.raises(ValueError, match="max_matvecs must"):
        logdet(FLAT, shift=shift, max_matvecs=budget)


@pytest.mark.parametrize("f", [sqrt, inverse_sqrt])
@pytest.mark.parametrize("limit", [{"max_matvecs": 0}, {"max_matvecs": 1}, {"max_matvecs": 10}, {"maxiter": 0}])
def test_a_root_without_a_step_knows_that_it_knows_nothing(f, limit):
    found = f(FLAT, B, **limit)
    assert set(found.reasons) <= {Reason.RANK_CAPPED, Reason.ITERATION_LIMIT} and not found.accepted
    exact = torch.linalg.eigh(FLAT)
    root = (exact.eigenvectors * exact.eigenvalues ** (0.5 if f is sqrt else -0.5)) @ exact.eigenvectors.mT @ B
    assert ((found.value - root).norm(dim=0) <= found.error_estimates * root.norm(dim=0)).all()


def test_roots_of_zero():
    zero = torch.zeros(N, N).double()
    found = sqrt(zero, B)
    assert found.converged.all() and (found.value == 0).all()
    assert set(inverse_sqrt(zero, B).reasons) == {Reason.SINGULAR}


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
@pytest.mark.parametrize("f", [sqrt, inverse_sqrt])
def test_roots_of_what_is_not_finite(f, spoil):
    A = FLAT.clone()
    A[3, 3] = spoil
    found = f(A, B)
    assert set(found.reasons) == {Reason.NON_FINITE} and (found.error_estimates == math.inf).all()


def skewed(size):
    """A positive definite symmetric part, and a difference to the transpose of that relative size."""
    Q = rotation(N, 7)
    return FLAT + size * 3 * (Q - Q.mT) / 2


# 1e-4 was taken for rounding: answers for one of the symmetric matrices nearby, as converged.
SKEWS = pytest.mark.parametrize("size", [0.3, 1e-4])


@SKEWS
@pytest.mark.parametrize(
    "name",
    [
        "nystrom",
        "cholesky",
        "block_jacobi",
        "low_rank",
        "spectral_density",
        "spectral_quadrature",
        "logdet",
        "effective_dimension",
    ],
)
def test_not_symmetric_is_an_error(name, size):
    with pytest.raises(ValueError, match="not symmetric|not positive" if name == "cholesky" else "not symmetric"):
        FUNCTIONS[name](skewed(size))


@SKEWS
@pytest.mark.parametrize("options", [{"preconditioner": None}, {"preconditioner": "auto"}, {"shift": torch.ones(2)}])
def test_a_stochastic_logdet_sees_that_a_matrix_is_not_symmetric(options, size):
    with pytest.raises(ValueError, match="not symmetric"):
        logdet(skewed(size), **({"shift": 1.0} | options), max_matvecs=40, generator=generator())


@SKEWS
@pytest.mark.parametrize(("estimator", "method"), [(trace, "xnystrace"), (diagonal, "xnysdiag")])
def test_a_nystrom_estimate_sees_that_a_matrix_is_not_symmetric(estimator, method, size):
    with pytest.raises(ValueError, match="not symmetric"):
        estimator(skewed(size), method=method, max_matvecs=20, generator=generator())


@SKEWS
def test_a_low_rank_approximation_sees_that_a_matrix_is_not_symmetric(size):
    with pytest.raises(ValueError, match="not symmetric"):
        low_rank(skewed(size), 10, generator=generator())


@SKEWS
@pytest.mark.parametrize("name", ["apply_function", "sqrt", "inverse_sqrt"])
def test_functions_of_a_matrix_that_is_not_symmetric(name, size):
    found = FUNCTIONS[name](skewed(size))
    assert set(found.reasons) == {Reason.NOT_SYMMETRIC} and (found.error_estimates == math.inf).all()


@SKEWS
def test_projections_of_a_matrix_that_is_not_symmetric(size):
    assert lanczos(skewed(size), 20, generator=generator()).reason is Reason.NOT_SYMMETRIC
    # With true residuals by the side: a pair of so nearly symmetric a matrix may stagnate above its tolerance.
    reasons = set(eigsh(skewed(size), 2, generator=generator()).reasons)
    assert reasons <= {Reason.NOT_SYMMETRIC, Reason.STAGNATION}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kappa", [10.0, 1e8])
def test_rounding_is_not_taken_for_asymmetry(kappa, dtype):
    A = symmetric(log_spaced(N, kappa)).to(dtype)
    A = (A + 1e-6 * torch.randn(N, N, generator=generator()).to(dtype) / N**0.5) if kappa == 10 else A
    assert lanczos(A, 20, generator=generator()).reason is Reason.CONVERGED
    assert eigsh(A, 2, rtol=1e-3, generator=generator()).reasons == (Reason.CONVERGED,) * 2
    for shift in (1e-6, 1.0):
        estimate = logdet(A, shift=shift, max_matvecs=40, generator=generator())
        assert math.isfinite(float(estimate.value))
    assert spectral_density(A, generator=generator()).matvecs > 0
    assert len(nystrom(A, 10, generator=generator()).eigenvalues) == 10


def test_a_rank_of_zero_by_budget_is_told():
    assert nystrom(FLAT, memory_budget=0).reason is Reason.RANK_CAPPED
    assert nystrom(FLAT, 0).reason is Reason.CONVERGED


def test_an_interior_pair_of_a_broken_operator_is_no_number():
    A = FLAT.clone()
    A[0, 0] = math.inf
    pairs = eigsh(A, 2, sigma=2.0, generator=generator())
    assert set(pairs.reasons) == {Reason.NON_FINITE} and pairs.values.isnan().all() and pairs.residuals.isinf().all()


def test_dual_descent_in_groups():
    whole = dual_descent(FLAT, B, rtol=1e-4, generator=generator())
    parts = dual_descent(FLAT, B, rtol=1e-4, memory_budget=1, generator=generator())
    assert whole.converged.all() and parts.converged.all()
    torch.testing.assert_close(parts.x, whole.x, rtol=0, atol=1e-3)
    assert set(dual_descent(FLAT, B, rtol=1e-12, maxiter=0).reasons) == {Reason.ITERATION_LIMIT}


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_sketch_of_a_solve_is_kept_within_the_budget():
    A = Dense(symmetric(log_spaced(300, 1e4)), psd=True)
    rank, column = 5, 3 * 300 * 8
    capped = (A + A).add_diagonal(torch.tensor(1e-2).double())
    x = solve(capped, torch.ones(300, 8).double(), memory_budget=rank * column)
    assert len(capped.preconditioner(8).eigenvalues) <= rank  # the one that the solve made
    torch.testing.assert_close(capped.to_dense() @ x, torch.ones(300, 8).double(), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("sketch", [lambda A, g: nystrom(A, 30, generator=g).preconditioner(0.01)])
def test_one_seed_for_a_sketch_and_for_probes_does_not_bias_them(sketch):
    """Errors in standard errors, averaged over 30 seeds, are beyond 0.8 by chance with a probability below 1e-4."""
    A = symmetric(log_spaced(150, 1e4))
    exact = (torch.linalg.eigvalsh(A) + 0.01).log().sum()
    errors = []
    for seed in range(30):
        P = sketch(A, generator(seed))
        found = logdet(A, shift=0.01, preconditioner=P, max_matvecs=140, generator=generator(seed))
        errors.append((found.value - exact) / found.stderr)
    assert torch.stack(errors).mean().abs() < 0.8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 3, 7, 30])
def test_roots_of_singular_matrices_know_what_rounding_does(n, dtype):
    for seed in range(12):
        values = torch.cat([torch.zeros(n // 2), torch.linspace(0.3, 1, n - n // 2)]).double()
        A = symmetric(values, seed).to(dtype)
        b = torch.randn(n, 1, generator=generator(seed)).to(dtype)
        found = sqrt(A, b)
        exact, V = torch.linalg.eigh(A.double())
        root = V @ (exact.clamp_min(0).sqrt()[:, None] * (V.mT @ b.double()))
        error = (found.value.double() - root).norm() / root.norm()
        assert error <= 10 * found.error_estimates[0] or found.error_estimates[0] > 0.1  # then nothing is claimed
        assert error <= 1e-6 + 10 * torch.finfo(dtype).eps or not found.converged.all()


@pytest.mark.parametrize("n", [IN_PLACE - 1, IN_PLACE])
def test_eigenvectors_take_the_memory_of_a_large_matrix(n):
    X = torch.randn(2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = X + X.mT
    given = A.clone()
    values, V = eigh_in_place(given)
    assert (values - torch.linalg.eigvalsh(A)).abs().max() <= 1e-10 * values.abs().max()
    assert (V @ torch.diag_embed(values) @ V.mT - A).abs().max() <= 1e-10 * values.abs().max()
    assert (V.data_ptr() == given.data_ptr()) == (n == IN_PLACE)


def test_a_decomposition_leaves_a_factor_as_it_was():
    """A factor in double precision is not copied for it."""
    X = torch.randn(1, IN_PLACE, IN_PLACE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = X @ X.mT
    given = A.clone()
    Kronecker(torch.ones(1, 1, 1, dtype=torch.float64), given).eigen()
    assert torch.equal(given, A)
