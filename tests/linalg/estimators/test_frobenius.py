import math

import pytest
import torch

from curvops.linalg.core.probed import Probed
from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import describe_square, product
from curvops.linalg.estimators.frobenius import XNorm, frobenius_norm
from tests.linalg.matrices import SPECTRA, generator, symmetric


def probed(A, seed=0):
    return Probed(product(A), describe_square(A), generator(seed))


@pytest.mark.parametrize("name", ["flat", "kappa 1e8"])
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


def test_rectangular():
    A = torch.randn(300, 500, dtype=torch.float64, generator=generator(1))
    e = frobenius_norm(A, rtol=0.01, generator=generator())
    assert e.reason is Reason.CONVERGED and (e.value / A.norm() - 1).abs() < 0.03
