"""Algorithms on blocks whose storage is in two pieces (`split`): the same numbers, and no piece ever joined."""

import pytest
import torch

from curvops.linalg import (
    apply_function,
    cg,
    dual_descent,
    eigsh,
    inverse_sqrt,
    lanczos,
    logdet,
    lsmr,
    minres,
    nystrom,
    spectral_quadrature,
    sqrt,
    svds,
)
from curvops.linalg.core.orthogonal import independent_basis, tall_qr
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import gram, norm
from tests.linalg.matrices import symmetric
from tests.linalg.split import Split, SplitMatrix, joined, split

N = 300
DECAYING = symmetric(torch.arange(1, N + 1, dtype=torch.float64) ** -1.0)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def same(found, expected):
    """Equal to 1e-12 of the largest entry of each column; a split block where a tensor is a block of long vectors."""
    found = joined(found) if isinstance(found, Split) else torch.as_tensor(found)
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert bool(((found - expected).abs() <= 1e-12 * expected.abs().amax(0)).all()), (found - expected).abs().max()


def test_a_split_block_does_not_become_a_tensor():
    X = split(torch.ones(6, 2))
    for join in (torch.as_tensor, lambda X: torch.ones(6, 6) @ X, lambda X: torch.cat([X]), list, lambda X: X[0]):
        with pytest.raises((AssertionError, TypeError, RuntimeError)):
            join(X)


@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e12])
def test_tall_qr(kappa):
    X = torch.randn(60, 5, dtype=torch.float64, generator=seeded()) * torch.logspace(0, -torch.tensor(kappa).log10(), 5)
    Q, R = tall_qr(split(X))
    torch.testing.assert_close(joined(Q) @ R, X, rtol=0, atol=1e-14)
    torch.testing.assert_close(gram(Q, Q), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-14)


def test_independent_basis():
    X = torch.randn(60, 3, dtype=torch.float64, generator=seeded())
    X = torch.stack([X[:, 0], X[:, 1], X[:, 0], 1e-9 * X[:, 2], X[:, 0] + X[:, 1]], 1)
    Q = independent_basis(split(X), gram(X, X))
    assert Q.shape == (60, 3)
    torch.testing.assert_close(gram(Q, Q), torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("block", [True, False])
def test_cg(block, preconditioned):
    A = symmetric(torch.linspace(1, 4, N, dtype=torch.float64))
    B = torch.randn(N, 4, dtype=torch.float64, generator=seeded())
    B[:, 2] = 0
    results = []
    for matrix, right, start in ((A, B, 0.1 * B), (SplitMatrix.of(A), split(B), split(0.1 * B))):
        P = nystrom(matrix, 20, generator=seeded(1)).preconditioner(0.5) if preconditioned else None
        results.append(cg(matrix, right, x0=start, preconditioner=P, rtol=1e-10, block=block, keep_directions=40))
    expected, found = results
    same(found.x, expected.x)
    assert expected.accepted and found.reasons == expected.reasons
    assert (found.matvecs, found.iterations) == (expected.matvecs, expected.iterations)
    assert bool((norm(split(B - A @ joined(found.x))) <= 1e-10 * norm(B)).all())
    torch.testing.assert_close(found.history[:5], expected.history[:5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("lowest", [-0.5, 0.0])
def test_cg_that_fails(block, lowest):
    A = symmetric(torch.cat([torch.linspace(1, 4, N - 1), torch.tensor([lowest])]).double())
    B = torch.randn(N, 3, dtype=torch.float64, generator=seeded())
    B[7, 1] = float("nan")
    expected, found = cg(A, B, block=block), cg(SplitMatrix.of(A), split(B), block=block)
    assert found.reasons == expected.reasons and not expected.accepted
    assert bool(joined(found.x)[:, 1].isnan().all())


def test_cg_with_refinement():
    A = symmetric(torch.linspace(1, 4, N, dtype=torch.float64))
    B = torch.randn(N, 3, dtype=torch.float64, generator=seeded())
    options = {"rtol": 1e-13, "refine": torch.float32, "memory_budget": 24 * 8 * N}
    expected, found = cg(A, B, **options), cg(SplitMatrix.of(A), split(B), **options)
    same(found.x, expected.x)
    assert expected.accepted and found.reasons == expected.reasons
    assert (found.matvecs, found.exact_matvecs) == (expected.matvecs, expected.exact_matvecs)


def same_solutions(found, expected):
    same(found.x, expected.x)
    assert found.reasons == expected.reasons
    assert (found.matvecs, found.iterations) == (expected.matvecs, expected.iterations)


@pytest.mark.parametrize("preconditioned", [False, True])
def test_minres(preconditioned):
    A = symmetric(torch.cat([torch.linspace(1, 4, N - 20), torch.linspace(-2, -1, 20)]).double())
    B = torch.randn(N, 4, dtype=torch.float64, generator=seeded())
    B[:, 2], B[7, 1] = 0, float("nan")
    results = []
    for matrix, right, start in ((A, B, 0.1 * B), (SplitMatrix.of(A), split(B), split(0.1 * B))):
        P = (lambda V: 2.0 * V) if preconditioned else None
        results.append(minres(matrix, right, x0=start, preconditioner=P, shift=0.1, rtol=1e-9))
    expected, found = results
    assert expected.reasons[0] is expected.reasons[3] is Reason.CONVERGED
    kept = [0, 2, 3]
    assert bool(joined(found.x)[:, 1].isnan().all())
    torch.testing.assert_close(joined(found.x)[:, kept], expected.x[:, kept], rtol=0, atol=1e-12)
    assert (found.reasons, found.matvecs) == (expected.reasons, expected.matvecs)


def test_minres_of_a_singular_system():
    A = symmetric(torch.cat([torch.linspace(1, 4, N - 1), torch.zeros(1)]).double())
    B = torch.randn(N, 2, dtype=torch.float64, generator=seeded())
    expected, found = minres(A, B, rtol=1e-9), minres(SplitMatrix.of(A), split(B), rtol=1e-9)
    assert found.reasons == expected.reasons == (Reason.SINGULAR,) * 2
    within = 2 * 1e-9 * float(B.norm(dim=0).max())  # each is off by rtol ‖b‖ / λ, of which the least is 1
    torch.testing.assert_close(joined(found.x), expected.x, rtol=0, atol=within)


@pytest.mark.parametrize("damp", [0.0, 0.5])
def test_lsmr(damp):
    A = symmetric(torch.linspace(1, 4, N, dtype=torch.float64))[:, :120]
    B, start = (torch.randn(k, 3, dtype=torch.float64, generator=seeded(k)) for k in A.shape)
    expected = lsmr(A, B, damp=damp, x0=start, rtol=1e-10)
    found = lsmr(SplitMatrix.of(A), split(B), damp=damp, x0=split(start), rtol=1e-10)
    assert expected.accepted
    same_solutions(found, expected)


def test_dual_descent():
    x = torch.linspace(0, 1, N, dtype=torch.float64)
    K, B = torch.exp(-50 * (x[:, None] - x).square()), torch.stack([(9 * x).sin(), x * 0, x], 1)
    expected, found = (
        dual_descent(matrix, right, noise=1.0, batch_size=150, maxiter=40, generator=seeded())
        for matrix, right in ((K, B), (SplitMatrix.of(K), split(B)))
    )
    assert expected.accepted
    same_solutions(found, expected)


def test_lanczos():
    results = [lanczos(A, 12, generator=seeded()) for A in (DECAYING, SplitMatrix.of(DECAYING))]
    expected, found = results
    same(found.Q, expected.Q)
    same(found.T, expected.T)
    assert found.reason is expected.reason is Reason.CONVERGED and found.matvecs == expected.matvecs == 12


@pytest.mark.parametrize("which", ["LA", "SA"])
def test_eigsh_with_restarts(which):
    values = torch.cat([torch.linspace(1, 2, N - 8), torch.tensor([0.4, 0.6, 0.8, 0.8, 3, 3.5, 4, 4])]).double()
    A, columns = symmetric(values), 24
    expected, found = (
        eigsh(matrix, 4, which, rtol=1e-9, generator=seeded(), memory_budget=8 * N * (columns + 8))
        for matrix in (A, SplitMatrix.of(A))
    )
    same(found.values, expected.values)
    assert expected.reasons == found.reasons == (Reason.CONVERGED,) * 4
    assert found.matvecs == expected.matvecs > 2 * columns
    V = joined(found.vectors)
    assert bool(((A @ V - V * found.values).norm(dim=0) <= 1e-9 * found.values.abs()).all())
    same(norm(found.vectors), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("tall", [True, False])
def test_svds(tall):
    A = DECAYING[:, :120] if tall else DECAYING[:120]
    expected, found = (svds(matrix, 3, rtol=1e-9, generator=seeded()) for matrix in (A, SplitMatrix.of(A)))
    same(found.values, expected.values)
    assert expected.reasons == found.reasons == (Reason.CONVERGED,) * 3 and found.matvecs == expected.matvecs
    U, V = joined(found.U), joined(found.V)
    assert bool(((A @ V - U * found.values).norm(dim=0) <= 1e-9 * found.values).all())
    assert bool(((A.mT @ U - V * found.values).norm(dim=0) <= 1e-9 * found.values).all())


FUNCTIONS = {
    "sqrt": sqrt,
    "inverse_sqrt": inverse_sqrt,
    "exp": lambda A, B, **options: apply_function(A, torch.exp, B, **options),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    function = FUNCTIONS[name]
    A = symmetric(torch.linspace(1, 40, N, dtype=torch.float64))
    B = torch.randn(N, 4, dtype=torch.float64, generator=seeded())
    B[:, 2], B[7, 1] = 0, float("nan")
    expected, found = function(A, B, rtol=1e-10), function(SplitMatrix.of(A), split(B), rtol=1e-10)
    R = (Reason.CONVERGED, Reason.NON_FINITE, Reason.ZERO_RIGHT_HAND_SIDE, Reason.CONVERGED)
    assert found.reasons == expected.reasons == R and found.matvecs == expected.matvecs
    assert bool(joined(found.value)[:, 1].isnan().all())
    same(Split(*(piece[:, [0, 2, 3]] for piece in found.value.pieces)), expected.value[:, [0, 2, 3]])


@pytest.mark.parametrize("rank", [None, 30])
def test_nystrom(rank):
    A = symmetric(0.7 ** torch.arange(N, dtype=torch.float64))
    V = torch.randn(N, 2, dtype=torch.float64, generator=seeded(1))
    expected, found = (nystrom(M, rank, shift=1e-3, generator=seeded()) for M in (A, SplitMatrix.of(A)))
    same(found.eigenvalues, expected.eigenvalues)
    same(found @ split(V), expected @ V)
    assert (found.matvecs, found.reason) == (expected.matvecs, expected.reason)
    P, Q = expected.preconditioner(), found.preconditioner()
    for name in ("__matmul__", "sqrt", "sqrt_inverse"):
        same(getattr(Q, name)(split(V)), getattr(P, name)(V))
    same(Q.logdet(), P.logdet())


@pytest.mark.parametrize("preconditioner", ["auto", None, "own"])
def test_stochastic_logdet(preconditioner):
    found = []
    for matrix in (DECAYING, SplitMatrix.of(DECAYING)):
        own = (
            nystrom(matrix, 20, generator=seeded(1)).preconditioner(0.01) if preconditioner == "own" else preconditioner
        )
        found.append(logdet(matrix, shift=0.01, max_matvecs=N // 2, rtol=0.001, preconditioner=own, generator=seeded()))
    expected, found = found
    same(found.value, expected.value)
    # Error bars are differences of numbers of the size of the value.
    tolerance = 1e-12 * float(expected.value.abs())
    assert abs(found.stderr - expected.stderr) <= tolerance and abs(found.bias_bound - expected.bias_bound) <= tolerance
    assert (found.samples, found.matvecs, found.reason) == (expected.samples, expected.matvecs, expected.reason)
    assert expected.samples > 0 and expected.matvecs < N


def test_a_grid_of_logdets_with_a_control_variate():
    grid = torch.tensor([0.01, 0.1, 1.0], dtype=torch.float64)
    both = [
        spectral_quadrature(A, shift=0.01, probes=6, rank=20, generator=seeded())
        for A in (DECAYING, SplitMatrix.of(DECAYING))
    ]
    expected, found = (run.logdet(grid) for run in both)
    same(found.value, expected.value)
    same(found.stderr, expected.stderr)
    assert found.matvecs == expected.matvecs
