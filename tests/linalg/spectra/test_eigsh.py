"""Eigenpairs against dense ones: largest, smallest, inside, repeated.

Tests `thick_restart.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from scipy.sparse.linalg import eigsh as scipy_eigsh

from curvops.linalg import Dense, Reason, cg, eigsh, minres
from tests.linalg.matrices import EXPONENTIAL, SPECTRA, generator, symmetric
from tests.linalg.rooted import rooted
from tests.linalg.systems import Counted

FLAWLESS = {Reason.CONVERGED}
EXACT = {Reason.CONVERGED, Reason.PRECISION_LIMIT}
BULK = torch.linspace(0, 0.5, 113, dtype=torch.float64)
CLUSTER = torch.tensor([2.0, *[1 + 1e-9] * 5, 1.0], dtype=torch.float64)


def ends(values, which, k):
    """The k wanted of descending values, best first."""
    if which == "LM":
        return values[values.abs().argsort(descending=True)][:k]
    low = {"LA": 0, "SA": k, "BE": k // 2}[which]
    found = torch.cat([values[: k - low], values[len(values) - low :]])
    return found.flip(0) if which == "SA" else found


def budget(columns, n, block_size=2, itemsize=8):
    return (columns + 4 * block_size) * n * itemsize


def assert_honest(A, pairs, rtol):
    """Reported residuals are the true ones, and what is called converged is."""
    A, V = A.double(), pairs.vectors.double()
    k = len(pairs.values)
    eps = torch.finfo(pairs.vectors.dtype).eps
    size = torch.linalg.matrix_norm(A, 2)
    true = (A @ V - V * pairs.values).norm(dim=0)
    torch.testing.assert_close(pairs.residuals, true, rtol=1e-3, atol=float(20 * eps * size))
    torch.testing.assert_close(V.mT @ V, torch.eye(k, dtype=torch.float64), rtol=0, atol=300 * eps)
    for j, reason in enumerate(pairs.reasons):
        if reason is Reason.CONVERGED:
            wider = min(20 * eps * size, math.sqrt(eps) * pairs.values[j].abs()) if rtol is None else 0.0
            assert pairs.residuals[j] <= max((rtol or 1e-6) * pairs.values[j].abs(), wider * (1 + 1e-6))
        if reason is Reason.PRECISION_LIMIT:
            assert pairs.residuals[j] <= 20 * eps * size * (1 + 1e-6)


def test_the_history_falls_to_the_tolerance():
    """A row for each look, with as many columns as pairs were asked for."""
    A = symmetric(EXPONENTIAL)
    pairs = eigsh(A, 3, rtol=1e-8, generator=generator(), memory_budget=budget(16, len(A)))
    assert pairs.history.shape[1] == 3 and len(pairs.history) > 2
    assert bool((pairs.history[-1] <= 1e-8 * pairs.values.abs()).all())
    assert float(pairs.history[0].amax()) > 100 * float(pairs.history[-1].amax())


@pytest.mark.parametrize(
    ("name", "which"), [*((name, "BE") for name in SPECTRA), *(("kappa 1e4", which) for which in ("LA", "SA", "LM"))]
)
def test_against_eigh(name, which):
    A = symmetric(SPECTRA[name])
    pairs = eigsh(A, 7, which, rtol=1e-10, generator=generator())
    expected = ends(torch.linalg.eigvalsh(A).flip(0), which, 7)
    torch.testing.assert_close(pairs.values, expected, rtol=1e-10, atol=float(1e-14 * SPECTRA[name].max()))
    assert set(pairs.reasons) <= EXACT
    assert_honest(A, pairs, 1e-10)


@pytest.mark.parametrize(("block_size", "columns"), [(1, None), (1, 24), (2, None), (4, 24)])
def test_every_member_of_a_tight_cluster_is_found(block_size, columns):
    """scipy#26112: a single vector sees one member of 1, 1 + 1e-9 (five times); seven pairs reach all of them."""
    A = symmetric(torch.cat([CLUSTER, BULK]))
    memory = None if columns is None else budget(columns, 120, block_size)
    pairs = eigsh(A, 7, block_size=block_size, memory_budget=memory, generator=generator())
    torch.testing.assert_close(pairs.values, CLUSTER, rtol=0, atol=1e-11 + 1e-9 * (columns is not None))
    assert set(pairs.reasons) == FLAWLESS
    assert_honest(A, pairs, 1e-6)


@pytest.mark.parametrize(("block_size", "which", "seed"), [(1, "LA", 0), (2, "SA", 1), (4, "BE", 0), (2, "LM", 0)])
def test_exact_multiplicities_larger_than_the_block(block_size, which, seed):
    many = torch.full((6,), 3.0, dtype=torch.float64)
    bulk = 2 * 0.9 ** torch.arange(48, dtype=torch.float64) - 1
    values = torch.cat([bulk, -many] if which == "LM" else [many, bulk, -many])
    A = symmetric(values, seed)
    k = 16 if which == "BE" else 8
    memory = budget(k + 16, len(A), block_size)
    pairs = eigsh(A, k, which, block_size=block_size, memory_budget=memory, generator=generator(seed))
    torch.testing.assert_close(pairs.values, ends(values, which, k), rtol=0, atol=1e-10)
    assert set(pairs.reasons) == FLAWLESS


def test_a_start_without_the_best_vector_is_found_out():
    A = symmetric(EXPONENTIAL)
    V = torch.linalg.eigh(A).eigenvectors.flip(1)
    pairs = eigsh(A, 3, start=V[:, 4:9].mT.contiguous().mT, rtol=1e-10, generator=generator())
    torch.testing.assert_close(pairs.values, EXPONENTIAL[:3], rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("ring", "scale", "dtype", "columns"),
    [
        (False, 1e-15, torch.float64, 50),
        (False, 1e-15, torch.float32, 100),
        (True, 1.0, torch.float32, 50),
        (True, 1e15, torch.float64, 100),
    ],
)
def test_the_smallest_of_a_singular_laplacian_at_any_scale(ring, scale, dtype, columns):
    """Zero and its neighbours, of a path and of a cycle, against cosines; with restarts and without."""
    n, k, eps = 100, 3, torch.finfo(dtype).eps
    neighbours = torch.ones(n - 1, dtype=torch.float64).diag(1)
    neighbours[0, -1] = float(ring)
    neighbours = neighbours + neighbours.mT
    A = ((neighbours.sum(0).diag() - neighbours) * scale).to(dtype)
    step = torch.tensor([0, 1, 1] if ring else [0, 0.5, 1], dtype=torch.float64)
    exact = (2 - 2 * torch.cos(2 * math.pi * step / n)) * -float(A[0, 1])
    memory = budget(columns, n, itemsize=A.element_size())
    pairs = eigsh(A, k, "SA", generator=generator(), memory_budget=memory)
    assert set(pairs.reasons) <= EXACT and pairs.accepted
    assert dtype == torch.float32 or pairs.reasons[1:] == (Reason.CONVERGED,) * (k - 1)
    torch.testing.assert_close(pairs.values, exact, rtol=0, atol=4 * eps * 4 * scale)
    assert_honest(A / scale, replace(pairs, values=pairs.values / scale, residuals=pairs.residuals / scale), None)


@pytest.mark.parametrize("A", [torch.zeros(9, 9), torch.eye(9), 3 * torch.eye(1)], ids=["zero", "identity", "n = 1"])
@pytest.mark.parametrize("which", ["LA", "SA", "BE", "LM"])
def test_multiples_of_the_identity(A, which):
    k = min(4, len(A))
    pairs = eigsh(A, k, which, generator=generator())
    torch.testing.assert_close(pairs.values, A.diagonal()[:k].double())
    assert set(pairs.reasons) <= EXACT and pairs.residuals.max() <= 1e-6
    torch.testing.assert_close(pairs.vectors.mT @ pairs.vectors, torch.eye(k))


@pytest.mark.parametrize("k", [1, 5, 6])
def test_all_pairs_of_a_small_matrix(k):
    A = symmetric(torch.tensor([3.0, 1.0, 1.0, 0.0, -2.0, -2.0]).double())
    pairs = eigsh(A, k, "LA", rtol=1e-12, block_size=6, generator=generator())
    torch.testing.assert_close(pairs.values, torch.linalg.eigvalsh(A).flip(0)[:k], rtol=0, atol=1e-13)


def test_pairs_unpack_as_values_and_vectors_and_the_largest_are_those_of_scipy():
    """Without `which`, the largest in size, of both signs."""
    A = symmetric(torch.cat([torch.tensor([-5.0, 4.0]), torch.linspace(-1, 1, 30)]).double())
    values, vectors = eigsh(A, 2, generator=generator())
    torch.testing.assert_close(values, torch.tensor([-5.0, 4.0]).double(), rtol=1e-12, atol=0)
    torch.testing.assert_close(A @ vectors, vectors * values, rtol=0, atol=1e-5)
    expected = scipy_eigsh(A.numpy(), 2, return_eigenvectors=False)
    torch.testing.assert_close(values.sort().values, torch.as_tensor(expected).sort().values, rtol=1e-12, atol=0)


def test_slightly_non_symmetric_products():
    N = torch.randn(120, 120, dtype=torch.float64, generator=generator())
    A = symmetric(SPECTRA["flat"]) + 1e-6 * N / torch.linalg.matrix_norm(N, 2)
    strict = eigsh(A, 4, rtol=1e-10, generator=generator())
    assert set(strict.reasons) == {Reason.STAGNATION} and strict.residuals.max() < 2e-6
    assert set(eigsh(A, 4, rtol=1e-5, generator=generator()).reasons) == FLAWLESS


@pytest.mark.parametrize("spoil", [1, 7])
def test_nan_in_a_product(spoil):
    A = Counted(symmetric(SPECTRA["flat"]), spoil)
    pairs = eigsh(A, 4, generator=generator())
    assert set(pairs.reasons) == {Reason.NON_FINITE} and len(A.log) == spoil
    assert pairs.values.isnan().all() and pairs.vectors.isnan().all() and pairs.residuals.isinf().all()


def test_products_are_counted_and_limited():
    A = Counted(symmetric(SPECTRA["kappa 1e8"]))
    pairs = eigsh(A, 4, "SA", max_matvecs=50, generator=generator())
    assert sum(A.log) == pairs.matvecs <= 50
    assert set(pairs.reasons) == {Reason.ITERATION_LIMIT}
    assert_honest(A.matrix, pairs, 1e-6)
    A.log.clear()
    pairs = eigsh(A, 4, generator=generator())
    assert sum(A.log) == pairs.matvecs and set(pairs.reasons) == FLAWLESS


def test_iterations_are_limited_but_k_products_are_made():
    pairs = eigsh(symmetric(SPECTRA["flat"]), 7, maxiter=0, generator=generator())
    assert len(pairs.values) == 7 and pairs.matvecs == 15 and set(pairs.reasons) == {Reason.ITERATION_LIMIT}


def test_a_memory_budget_that_was_too_small_is_the_reason():
    A = symmetric(SPECTRA["kappa 1e8"])
    pairs = eigsh(A, 4, "SA", memory_budget=budget(10, 120), maxiter=60, generator=generator())
    assert set(pairs.reasons) == {Reason.RANK_CAPPED}
    with pytest.raises(RuntimeError, match="4 of 4 pairs did not converge; .*\nRANK_CAPPED"):
        pairs.raise_if_failed()


def test_what_was_not_checked_is_not_converged():
    """Twelve equal values and a block of two: the budget ends while the complement is looked at."""
    values = torch.cat([torch.full((12,), 3.0).double(), torch.linspace(0, 2, 108, dtype=torch.float64)])
    pairs = eigsh(symmetric(values), 4, rtol=1e-3, max_matvecs=46, generator=generator())
    assert Reason.CONVERGED not in pairs.reasons and Reason.UNVERIFIED in pairs.reasons


def test_seeds_reproduce_and_operators_agree():
    A = symmetric(SPECTRA["kappa 1e4"])
    runs = [eigsh(M, 3, generator=generator(5)) for M in (A, A, Dense(A), DenseLinearOperator(A))]
    runs.append(Dense(A).eigsh(3, generator=generator(5)))
    for run in runs[1:]:
        assert torch.equal(run.vectors, runs[0].vectors) and torch.equal(run.values, runs[0].values)


def test_callback_sees_the_residuals_shrink():
    seen = []
    pairs = eigsh(symmetric(SPECTRA["flat"]) * 64, 3, callback=lambda i, r: seen.append((i, r)), generator=generator())
    assert [i for i, _ in seen] == sorted({i for i, _ in seen})
    torch.testing.assert_close(seen[-1][1].max(), pairs.residuals.max(), rtol=0.1, atol=0)
    assert float(seen[3][1].max()) > 1e3 * float(seen[-1][1].max())


@pytest.mark.usefixtures("annotations_unchecked")
def test_interior_by_minres_inside_the_spectrum_by_cg_below_it_and_of_all_pairs_at_an_eigenvalue():
    values = torch.linspace(0.2, 5, 30, dtype=torch.float64)
    A = Dense(symmetric(values))
    for sigma, solver in ((0.1, cg), (0.1, minres), (2.01, minres), (2.01, None), (float(values[9]), None)):
        pairs = A.eigsh(3, sigma=sigma, solver=solver, generator=generator())
        expected = values[(values - sigma).abs().argsort()][:3].sort().values  # two are equally near to the last one
        torch.testing.assert_close(pairs.values.sort().values, expected, rtol=1e-9, atol=0)
        assert set(pairs.reasons) == FLAWLESS
    inside = A.eigsh(3, sigma=2.01, solver=cg, generator=generator())
    assert set(inside.reasons) <= {Reason.NOT_POSITIVE_DEFINITE, Reason.UNVERIFIED}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "which"), [("clustered", "LA"), ("kappa 1e8", "LM"), ("kappa 1e8", "SA")])
def test_from_a_narrow_root(name, which, dtype):
    """The pairs are those of the whole matrix, although the largest eigenvalues are found on the smaller one."""
    values, k, rtol = SPECTRA[name], 7, 1e-10 if dtype == torch.float64 else 1e-5
    A = rooted(values, 300, dtype)
    pairs = eigsh(A, k, which, rtol=rtol, generator=generator())
    whole = torch.cat([values, torch.zeros(300 - len(values)).double()]).sort(descending=True).values
    atol = float((rtol + 20 * torch.finfo(dtype).eps) * values.amax())
    torch.testing.assert_close(pairs.values, ends(whole, which, k), rtol=0, atol=atol)
    assert_honest(A.to_dense(), pairs, rtol)
    assert set(pairs.reasons) <= EXACT


def test_from_a_narrow_root_with_fewer_eigenvalues_than_pairs():
    values = torch.cat([torch.linspace(1, 2, 5), torch.zeros(25)]).double()
    A = rooted(values, 200)
    pairs = eigsh(A, 9, generator=generator())
    expected = values.sort(descending=True).values[:9]
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-12)
    assert_honest(A.to_dense(), pairs, 1e-6)
    assert set(pairs.reasons) <= EXACT
    assert set(eigsh(A, 40, generator=generator()).reasons) <= EXACT  # more than the root has columns


def test_from_a_narrow_root_products_are_counted_and_limited():
    A = rooted(EXPONENTIAL, 600)
    whole = eigsh(A, 6, generator=generator())
    limit = whole.matvecs - 20
    few = eigsh(A, 6, max_matvecs=limit, generator=generator())
    assert few.matvecs <= limit and Reason.CONVERGED not in {*few.reasons} - {*whole.reasons}
    with pytest.raises(ValueError, match="at least 17"):
        eigsh(A, 6, max_matvecs=16, generator=generator())


def test_from_a_narrow_root_that_is_not_finite():
    A = rooted(SPECTRA["flat"], 600)
    A._args[0][3, 4] = math.nan
    pairs = eigsh(A, 2, generator=generator())
    assert {*pairs.reasons} == {Reason.NON_FINITE} and pairs.vectors.shape == (600, 2) and pairs.values.isnan().all()


def test_by_default_float32_pairs_converge_where_they_have_what_float32_gives():
    A = symmetric(torch.logspace(0, -3, 200, dtype=torch.float64)).float()
    usual, strict = (eigsh(A, 100, rtol=rtol, generator=generator()) for rtol in (None, 1e-6))
    assert set(usual.reasons) == FLAWLESS and Reason.PRECISION_LIMIT in strict.reasons
    assert bool((usual.residuals > 1e-6 * usual.values).any())
    assert_honest(A, usual, None)


def test_by_default_values_that_rounding_hides_do_not_converge_in_float32():
    A = torch.diag(torch.cat([torch.ones(1), 1e-7 * torch.linspace(1, 2, 60)]))
    assert set(eigsh(A, 5, generator=generator()).reasons[1:]) == {Reason.PRECISION_LIMIT}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_operators(size, dtype):
    values = torch.linspace(-1, 2, 60, dtype=torch.float64)
    A = (symmetric(values) * size).to(dtype)
    pairs = eigsh(A, 4, "LM", generator=generator())
    eps = torch.finfo(dtype).eps
    expected = values.flip(0)[:4] * size
    torch.testing.assert_close(pairs.values, expected, rtol=1e-10 + 20 * eps, atol=0)
    assert set(pairs.reasons) <= EXACT
    assert (pairs.residuals <= 20 * eps * 2 * size + 1e-6 * expected).all()


def test_nilpotent_matrix_is_no_success():
    pairs = eigsh(torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double(), 2, generator=generator())
    assert set(pairs.reasons) == {Reason.NOT_SYMMETRIC} and pairs.residuals.min() > 0.1
