"""What every public function says of inputs at the edge: empty, not symmetric, out of range, without a step to take.

Tests `structure.py`.
"""

import math

import pytest
import torch

from curvops import linalg
from curvops.linalg import Reason, dual_descent, eigsh, inverse_sqrt, lanczos, logdet, nystrom, solve, sqrt
from tests.linalg.matrices import generator, log_spaced, rotation, symmetric
from tests.linalg.systems import function_of, right_hand_sides

N = 60
FLAT = symmetric(torch.linspace(1, 3, N).double())
B = right_hand_sides(N, 2)
SOLVERS = ("cg", "minres", "lsmr", "dual_descent", "solve")
ROOTS = ("sqrt", "inverse_sqrt")
KRYLOV = ("eigsh", "svds", "apply_function", *ROOTS)
SAMPLED = ("spectral_quadrature", "trace", "diagonal", "frobenius_norm", "logdet", "effective_dimension")
OTHERS = ("nystrom", "cholesky", "block_jacobi", "diagonal_preconditioner", "low_rank", "lanczos", "spectral_density")
FUNCTIONS = (*SOLVERS, *KRYLOV, *SAMPLED, *OTHERS)
FURTHER = {
    **{name: lambda n: (B[:n],) for name in (*SOLVERS, *ROOTS)},
    "apply_function": lambda n: (torch.exp, B[:n]),
    **{name: lambda n: (2,) for name in ("block_jacobi", "lanczos", "eigsh", "svds")},
    "effective_dimension": lambda n: (1.0,),
}
"""Arguments after the matrix of so many rows."""


def call(name, A, **options):
    options = ({"shift": 1.0} if name in ("spectral_quadrature", "logdet") else {}) | options
    return getattr(linalg, name)(A, *FURTHER.get(name, lambda n: ())(len(A)), **options)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_empty_matrix_is_an_error(name):
    with pytest.raises(ValueError, match="at least one row"):
        call(name, torch.zeros(0, 0).double())


@pytest.mark.parametrize("rtol", [-1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", [*SOLVERS, *KRYLOV, *SAMPLED, "cholesky", "low_rank"])
def test_rtol_must_be_a_tolerance(name, rtol):
    with pytest.raises(ValueError, match="rtol must"):
        call(name, FLAT, rtol=rtol)


@pytest.mark.parametrize("name", SAMPLED)
def test_no_budget_meets_an_estimators_rtol_of_zero(name):
    with pytest.raises(ValueError, match="rtol must be positive"):
        call(name, FLAT, rtol=0.0)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "diagonal_preconditioner"])
def test_a_negative_memory_budget_is_an_error(name):
    with pytest.raises(ValueError, match="memory_budget"):
        call(name, FLAT, memory_budget=-1)


@pytest.mark.parametrize("name", [*SOLVERS, *KRYLOV])
def test_a_negative_maxiter_is_an_error(name):
    with pytest.raises(ValueError, match="maxiter must not be negative"):
        call(name, FLAT, maxiter=-1)


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
    root = function_of(FLAT, torch.sqrt if f is sqrt else torch.rsqrt, B)
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


ESTIMATED = {"max_matvecs": 40, "generator": generator()}
REFUSED = [
    ("nystrom", {}),
    ("cholesky", {}),
    ("block_jacobi", {}),
    ("low_rank", {}),
    ("low_rank", {"rank": 10}),
    ("spectral_density", {}),
    ("spectral_quadrature", {}),
    ("effective_dimension", {}),
    ("logdet", {}),
    ("logdet", {"preconditioner": None, **ESTIMATED}),
    ("logdet", {"preconditioner": "auto", **ESTIMATED}),
    ("logdet", {"shift": torch.ones(2), **ESTIMATED}),
    ("trace", {"method": "xnystrace", **ESTIMATED}),
    ("diagonal", {"method": "xnysdiag", **ESTIMATED}),
]


@SKEWS
@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_not_symmetric_is_an_error(name, options, size):
    with pytest.raises(ValueError, match="not symmetric|not positive" if name == "cholesky" else "not symmetric"):
        call(name, skewed(size), **options)


@SKEWS
@pytest.mark.parametrize("name", ["apply_function", "sqrt", "inverse_sqrt"])
def test_functions_of_a_matrix_that_is_not_symmetric(name, size):
    found = call(name, skewed(size))
    assert set(found.reasons) == {Reason.NOT_SYMMETRIC} and (found.error_estimates == math.inf).all()


@SKEWS
def test_projections_of_a_matrix_that_is_not_symmetric(size):
    assert lanczos(skewed(size), 20, generator=generator()).reason is Reason.NOT_SYMMETRIC
    # With true residuals by the side: a pair of so nearly symmetric a matrix may stagnate above its tolerance.
    reasons = set(eigsh(skewed(size), 2, generator=generator()).reasons)
    assert reasons <= {Reason.NOT_SYMMETRIC, Reason.STAGNATION}


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
    A = linalg.Dense(symmetric(log_spaced(300, 1e4)), psd=True)
    rank, column = 5, 3 * 300 * 8
    capped = (A + A).add_diagonal(torch.tensor(1e-2).double())
    x = solve(capped, torch.ones(300, 8).double(), memory_budget=rank * column)
    assert len(capped.preconditioner(8).eigenvalues) <= rank  # the one that the solve made
    torch.testing.assert_close(capped.to_dense() @ x, torch.ones(300, 8).double(), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("annotations_unchecked")
def test_one_seed_for_a_sketch_and_for_probes_does_not_bias_them():
    """Errors in standard errors, averaged over 20 seeds, are beyond 0.8 by chance with a probability below 1e-3."""
    A = symmetric(log_spaced(150, 1e4))
    exact = (torch.linalg.eigvalsh(A) + 0.01).log().sum()
    errors = []
    for seed in range(20):
        P = nystrom(A, 30, generator=generator(seed)).preconditioner(0.01)
        found = logdet(A, shift=0.01, preconditioner=P, max_matvecs=140, generator=generator(seed))
        errors.append((found.value - exact) / found.stderr)
    assert torch.stack(errors).mean().abs() < 0.8


def test_a_decomposition_leaves_a_factor_as_it_was():
    """A factor in double precision is not copied for it."""
    X = torch.randn(1, 50, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    A = X @ X.mT
    given = A.clone()
    linalg.Kronecker(torch.ones(1, 1, 1, dtype=torch.float64), given).eigen()
    assert torch.equal(given, A)
