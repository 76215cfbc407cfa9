import math

import pytest
import torch

from curvops.linalg.core.probed import Probed
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.frobenius import METHODS, XNorm, frobenius_norm
from tests.linalg.faulty import nan_from_the_seventh_product
from tests.linalg.matrices import SPECTRA, generator, symmetric


def probed(A, seed=0):
    return Probed(product(A), describe_square(A), generator(seed))


def test_exact_with_n_products():
    A = torch.randn(90, 50, dtype=torch.float64, generator=generator())
    for options in ({"method": "exact"}, {"max_matvecs": 50}, {"rtol": 1e-9}):
        e = frobenius_norm(A, **options)
        torch.testing.assert_close(e.value, A.norm(), rtol=1e-12, atol=0)
        assert e.samples == 0 and e.reason is Reason.CONVERGED


def test_exact_for_low_rank():
    A = symmetric(torch.cat([torch.linspace(-1, 5, 9), torch.zeros(200)]).double())
    e = frobenius_norm(A, max_matvecs=20, generator=generator())
    torch.testing.assert_close(e.value, A.norm(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["decaying", "flat", "kappa 1e8"])
def test_is_the_root_of_the_leave_one_out_mean(name):
    A = symmetric(SPECTRA[name]) + 0.1 * torch.randn(120, 120, dtype=torch.float64, generator=generator(5)) / 120
    K = 10
    estimator = XNorm(probed(A))
    estimator.spend(2 * K)
    Omega, expected = estimator.sketch.Omega, []
    for i in range(K):
        Q = torch.linalg.qr(A @ Omega[:, [j for j in range(K) if j != i]]).Q
        left = Omega[:, i] - Q @ (Q.mT @ Omega[:, i])
        left = left * math.sqrt(120 - K + 1) / left.norm()
        expected.append((A @ Q).norm().square() + (A @ left).norm().square())
    expected = torch.stack(expected)
    torch.testing.assert_close(estimator.samples(), expected, rtol=1e-10, atol=0)
    e, root = estimator.estimate(), expected.mean().sqrt()
    torch.testing.assert_close(e.value, root, rtol=1e-10, atol=0)
    without = estimator.without()
    spread = ((K - 1) / K * (without - without.mean()).square().sum()).sqrt()
    torch.testing.assert_close(e.stderr, spread / (2 * root), rtol=1e-8, atol=0)
    for i in range(K):
        started_over = XNorm(probed(A))
        sketch, Omega = started_over.sketch, estimator.sketch.Omega[:, [j for j in range(K) if j != i]]
        sketch.Omega, (sketch.Q, sketch.R) = Omega, torch.linalg.qr(A @ Omega)
        sketch.Z = A @ sketch.Q
        torch.testing.assert_close(without[i], started_over.samples().mean(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["xtrace", "hutchinson"])
@pytest.mark.parametrize("kind", ["symmetric", "general"])
def test_interval_covers(kind, method):
    # 200 runs at 95 %: fewer than 180 hits has a false-alarm rate below 0.2 %.
    A = symmetric(SPECTRA["kappa 1e4"])
    if kind == "general":
        A = A @ torch.randn(120, 120, dtype=torch.float64, generator=generator(7))
    g, hits = generator(), 0
    for _ in range(200):
        low, high = frobenius_norm(A, method=method, max_matvecs=30, generator=g).interval()
        hits += bool(low <= A.norm() <= high)
    assert hits >= 180


def test_rectangular_and_adaptive():
    A = torch.randn(300, 500, dtype=torch.float64, generator=generator(1))
    e = frobenius_norm(A, rtol=0.01, generator=generator())
    assert e.reason is Reason.CONVERGED and (e.value / A.norm() - 1).abs() < 0.03
    assert frobenius_norm(A, rtol=1e-6, max_matvecs=60, generator=generator()).reason is Reason.MATVEC_LIMIT


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_one_by_one(method):
    e = frobenius_norm(torch.zeros(200, 200), method=method, max_matvecs=40, generator=generator())
    assert e.value == 0 and e.stderr == 0
    assert float(frobenius_norm(torch.tensor([[-3.0]]), method=method).value) == 3.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_and_huge_operators(method, size, dtype):
    A = symmetric(SPECTRA["kappa 1e4"])
    plain = frobenius_norm(A.to(dtype), method=method, max_matvecs=30, generator=generator())
    scaled = frobenius_norm((A * size).to(dtype), method=method, max_matvecs=30, generator=generator())
    tolerance = 1e-4 if dtype is torch.float32 else 1e-9
    torch.testing.assert_close(scaled.value / size, plain.value, rtol=tolerance, atol=0)


@pytest.mark.parametrize("method", METHODS)
def test_nan_on_the_seventh_product(method):
    A = nan_from_the_seventh_product(symmetric(torch.linspace(1, 3, 500).double()))
    with pytest.raises(ValueError, match="NaN"):
        frobenius_norm(A, method=method, rtol=1e-9, generator=generator())
