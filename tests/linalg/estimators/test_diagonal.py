import math

import pytest
import torch
from linear_operator.operators import DenseLinearOperator
from scipy.special import stdtrit

from curvops.linalg.core.probed import Probed
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.diagonal import METHODS, Bekas, XDiag, XNysDiag, diagonal
from tests.linalg.faulty import nan_from_the_seventh_product
from tests.linalg.matrices import SPECTRA, generator, symmetric

STOCHASTIC = METHODS[:-1]


def probed(A, seed=0):
    return Probed(product(A), describe_square(A), generator(seed))


def test_exact_with_n_products():
    A = torch.randn(120, 120, dtype=torch.float64, generator=generator())
    for options in ({"method": "exact"}, {"max_matvecs": 120}):
        e = diagonal(DenseLinearOperator(A), **options)
        torch.testing.assert_close(e.value, A.diagonal(), rtol=1e-12, atol=1e-12)
        assert e.samples == 0 and e.matvecs == 120 and e.reason is Reason.CONVERGED and not e.stderr.any()


@pytest.mark.parametrize(("method", "rank"), [("xdiag", 9), ("xnysdiag", 15)])
def test_exact_for_low_rank(method, rank):
    for r in (1, rank // 2, rank):
        A = symmetric(torch.cat([torch.linspace(1, 5, r), torch.zeros(200 - r)]).double())
        e = diagonal(A, method=method, max_matvecs=20, generator=generator())
        torch.testing.assert_close(e.value, A.diagonal(), rtol=0, atol=1e-10)


def test_xdiag_is_the_leave_one_out_mean():
    A, K = torch.randn(60, 60, dtype=torch.float64, generator=generator(1)), 8
    estimator = XDiag(probed(A), product(A.mT))
    estimator.spend(6)
    estimator.spend(2 * K)
    Omega, expected = estimator.sketch.Omega, []
    for i in range(K):
        Q = torch.linalg.qr(A @ Omega[:, [j for j in range(K) if j != i]]).Q
        P, w = Q @ Q.mT, Omega[:, i]
        expected.append((P @ A).diagonal() + w * (A @ w - P @ A @ w))
    expected = torch.stack(expected)
    e = estimator.estimate()
    torch.testing.assert_close(e.value, expected.mean(0), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(e.stderr, expected.std(0) / math.sqrt(K), rtol=1e-8, atol=1e-10)
    # The interval is the jackknife's: how the whole estimate moves where one probe is left out of it altogether.
    without = []
    for i in range(K):
        rest = [j for j in range(K) if j != i]
        pairs = []
        for j in rest:
            Q = torch.linalg.qr(A @ Omega[:, [k for k in rest if k != j]]).Q
            P, w = Q @ Q.mT, Omega[:, j]
            pairs.append((P @ A).diagonal() + w * (A @ w - P @ A @ w))
        without.append(torch.stack(pairs).mean(0))
    spread = (K - 1) / K * (torch.stack(without) - torch.stack(without).mean(0)).square().sum(0)
    half = (e.interval()[1] - e.value) / (stdtrit(K - 1, 0.975) * (1 + 6 / K))
    torch.testing.assert_close(half, spread.sqrt(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("name", "budget"), [("power", 10), ("spike", 16)])
def test_intervals_of_diagonal_matrices_hold_though_all_samples_are_off_together(name, budget):
    # The spread of the samples held 81 and 83 % of the entries. 20 runs, whose shares have a standard deviation of 8
    # points: at 94 % (98 %), below 90 % has a false-alarm rate of 2 % (0.1 %).
    k = torch.arange(1, 513, dtype=torch.float64)
    A = torch.diag(k**-2 if name == "power" else torch.where(k == 1, 512.0, 1.0).double())
    g, held = generator(), []
    for _ in range(20):
        low, high = diagonal(A, max_matvecs=budget, generator=g).interval()
        held.append(((low - 1e-12 <= A.diagonal()) & (A.diagonal() <= high + 1e-12)).double().mean())
    assert torch.stack(held).mean() >= 0.9


@pytest.mark.parametrize("name", ["decaying", "flat", "kappa 1e4"])
def test_xnysdiag_is_the_leave_one_out_mean(name):
    A, K = symmetric(SPECTRA[name]), 10
    estimator = XNysDiag(probed(A))
    estimator.spend(3)
    estimator.spend(K)
    Omega, expected = estimator.sketch.Omega, []
    for i in range(K):
        W, w = Omega[:, [j for j in range(K) if j != i]], Omega[:, i]
        approximation = A @ W @ torch.linalg.solve(W.mT @ A @ W, (A @ W).mT)
        expected.append(approximation.diagonal() + w * (A @ w - approximation @ w))
    expected = torch.stack(expected)
    e = estimator.estimate()
    torch.testing.assert_close(e.value, expected.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(e.stderr, expected.std(0) / math.sqrt(K), rtol=1e-7, atol=1e-9)


def test_bekas_streams_the_mean_of_its_probes():
    A = torch.randn(50, 50, dtype=torch.float64, generator=generator(1))
    signs = []

    def multiply(Z):
        signs.append(Z.clone())
        return A @ Z

    estimator = Bekas(Probed(multiply, describe_square(A), generator()))
    estimator.spend(40)
    estimator.spend(45)
    Z = torch.cat(signs, 1)
    samples = Z * (A @ Z)
    e = estimator.estimate()
    torch.testing.assert_close(e.value, samples.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(e.stderr, samples.std(1) / math.sqrt(45), rtol=1e-10, atol=0)


@pytest.mark.parametrize("method", STOCHASTIC)
def test_adaptive_reaches_the_tolerance(method):
    A = symmetric(torch.arange(1, 401, dtype=torch.float64) ** -2.0)
    for rtol in (0.3, 1e-2, 1e-8):
        e = diagonal(A, method=method, rtol=rtol, generator=generator())
        assert e.reason is Reason.CONVERGED and (e.value - A.diagonal()).norm() <= 2 * rtol * A.diagonal().norm()
    e = diagonal(A, method=method, rtol=1e-8, max_matvecs=50, generator=generator())
    assert e.reason is Reason.MATVEC_LIMIT and e.matvecs <= 50


@pytest.mark.parametrize("method", STOCHASTIC)
def test_intervals_cover_the_entries(method):
    # 40 runs of 120 entries at 95 %: entries of a run move together; below 90 % would be ten standard errors away.
    A, g, hits = symmetric(SPECTRA["kappa 1e4"]), generator(), 0
    for _ in range(40):
        low, high = diagonal(A, method=method, max_matvecs=30, generator=g).interval()
        hits += int(((low <= A.diagonal()) & (A.diagonal() <= high)).sum())
    assert hits >= 0.9 * 40 * 120


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_one_by_one(method):
    e = diagonal(torch.zeros(200, 200), method=method, max_matvecs=40, generator=generator())
    assert not e.value.any() and not e.stderr.any()
    assert diagonal(torch.tensor([[3.0]]), method=method).value.tolist() == [3.0]
    assert diagonal(torch.eye(6), method=method, max_matvecs=5, generator=generator()).value.isfinite().all()


@pytest.mark.parametrize("method", STOCHASTIC)
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_and_huge_operators(method, size, dtype):
    A = symmetric(SPECTRA["kappa 1e4"])
    plain = diagonal(A.to(dtype), method=method, max_matvecs=30, generator=generator())
    scaled = diagonal((A * size).to(dtype), method=method, max_matvecs=30, generator=generator())
    tolerance = 1e-4 if dtype is torch.float32 else 1e-9
    assert (scaled.value / size - plain.value).norm() <= tolerance * plain.value.norm()
    assert (scaled.stderr / size - plain.stderr).norm() <= 100 * tolerance * plain.stderr.norm()


@pytest.mark.parametrize("method", METHODS)
def test_nan_on_the_seventh_product(method):
    A = nan_from_the_seventh_product(symmetric(torch.linspace(1, 3, 500).double()))
    with pytest.raises(ValueError, match="NaN"):
        diagonal(A, method=method, rtol=1e-9, generator=generator())
