import math

import pytest
import torch
from scipy.special import stdtrit

from curvops.linalg.core.probed import Probed
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.diagonal import METHODS, Bekas, XDiag, XNysDiag, diagonal
from tests.linalg.matrices import SPECTRA, generator, symmetric

STOCHASTIC = METHODS[:-1]


def probed(A, seed=0):
    return Probed(product(A), describe_square(A), generator(seed))


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


@pytest.mark.parametrize("name", ["flat", "kappa 1e4"])
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
