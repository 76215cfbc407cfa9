"""Estimates from one sketch, the same numbers as by leaving each probe out and starting over with dense matrices."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.special import stdtrit
from torch import Tensor

from curvops import linalg
from tests.linalg.known import Noted
from tests.linalg.matrices import SPECTRA, generator, symmetric

N = 120


def nearly_symmetric(name: str) -> Tensor:
    noise = torch.randn(N, N, dtype=torch.float64, generator=generator(5))
    return symmetric(SPECTRA[name]) + 0.1 * noise / N


def range_without(A: Tensor, Omega: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of the range without probe i, and what is left of that probe, of its mean length."""
    Q = torch.linalg.qr(A @ without(Omega, i)).Q
    left = Omega[:, i] - Q @ (Q.mT @ Omega[:, i])
    return Q, left * math.sqrt(len(A) - Q.shape[1]) / left.norm()


def without(Omega: Tensor, i: int) -> Tensor:
    return torch.cat([Omega[:, :i], Omega[:, i + 1 :]], 1)


def nystrom_without(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    W = without(Omega, i)
    return A @ W @ torch.linalg.solve(W.mT @ A @ W, (A @ W).mT)


def xtrace(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    Q, left = range_without(A, Omega, i)
    return (Q.mT @ A @ Q).trace() + left @ A @ left


def xnystrace(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    approximation, W = nystrom_without(A, Omega, i), torch.linalg.qr(without(Omega, i)).Q
    left = Omega[:, i] - W @ (W.mT @ Omega[:, i])
    left = left * math.sqrt(len(A) - W.shape[1]) / left.norm()
    return approximation.trace() + left @ (A - approximation) @ left


def xnorm(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    Q, left = range_without(A, Omega, i)
    return (A @ Q).norm().square() + (A @ left).norm().square()


def xdiag(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    Q, probe = torch.linalg.qr(A @ without(Omega, i)).Q, Omega[:, i]
    P = Q @ Q.mT
    return (P @ A).diagonal() + probe * (A @ probe - P @ A @ probe)


def xnysdiag(A: Tensor, Omega: Tensor, i: int) -> Tensor:
    approximation, probe = nystrom_without(A, Omega, i), Omega[:, i]
    return approximation.diagonal() + probe * (A @ probe - approximation @ probe)


Sample = Callable[[Tensor, Tensor, int], Tensor]
ROWS: dict[str, tuple[Any, str, Sample, Tensor, int, int]] = {
    "trace, flat": (linalg.trace, "xtrace", xtrace, nearly_symmetric("flat"), 20, 10),
    "trace, kappa 1e8": (linalg.trace, "xtrace", xtrace, nearly_symmetric("kappa 1e8"), 20, 10),
    "Nyström trace, step": (linalg.trace, "xnystrace", xnystrace, symmetric(SPECTRA["step"]), 20, 20),
    "Nyström trace, kappa 1e4": (linalg.trace, "xnystrace", xnystrace, symmetric(SPECTRA["kappa 1e4"]), 20, 20),
    "norm, flat": (linalg.frobenius_norm, "xtrace", xnorm, nearly_symmetric("flat"), 20, 10),
    "norm, kappa 1e8": (linalg.frobenius_norm, "xtrace", xnorm, nearly_symmetric("kappa 1e8"), 20, 10),
    "diagonal": (
        linalg.diagonal,
        "xdiag",
        xdiag,
        torch.randn(N, N, dtype=torch.float64, generator=generator(1)),
        20,
        10,
    ),
    "Nyström diagonal, flat": (linalg.diagonal, "xnysdiag", xnysdiag, symmetric(SPECTRA["flat"]), 20, 20),
    "Nyström diagonal, kappa 1e4": (linalg.diagonal, "xnysdiag", xnysdiag, symmetric(SPECTRA["kappa 1e4"]), 20, 20),
}
"""Estimate, method, the sample without probe i, the matrix, a budget of products and the probes that it gives."""


@pytest.mark.parametrize("grown", [False, True], ids=["at once", "grown"])
@pytest.mark.parametrize("name", ROWS)
def test_value_and_error_are_those_of_starting_over_without_each_probe(name: str, grown: bool) -> None:
    estimate, method, sample, A, budget, K = ROWS[name]
    noted = Noted(A, is_symmetric=False)
    options = {"rtol": 1e-14} if grown else {}
    found = estimate(noted, method=method, max_matvecs=budget, generator=generator(), **options)
    assert found.matvecs == budget and (sum(float(block[:, 0].norm()) > 2 for block in noted.blocks) > 1) is grown
    Omega = noted.probes
    assert Omega.shape == (N, K)

    def mean(probes: Tensor) -> tuple[Tensor, Tensor]:
        samples = torch.stack([sample(A, probes, i) for i in range(probes.shape[1])])
        return samples.mean(0), samples.std(0) / math.sqrt(len(samples))

    value, by_samples = mean(Omega)
    fewer = torch.stack([mean(without(Omega, i))[0] for i in range(K)])
    by_probes = ((K - 1) / K * (fewer - fewer.mean(0)).square().sum(0)).sqrt()
    if estimate is linalg.frobenius_norm:
        value = value.sqrt()
        by_probes = by_probes / (2 * value)
    torch.testing.assert_close(found.value, value, rtol=1e-9, atol=1e-9)
    stderr = by_samples if estimate is linalg.diagonal else by_probes
    torch.testing.assert_close(found.stderr, stderr, rtol=1e-7, atol=1e-9)
    if method == "xdiag":  # the interval is that of the whole estimate, as one probe is left out of it altogether
        half = (found.interval()[1] - found.value) / (stdtrit(K - 1, 0.975) * (1 + 6 / K))
        torch.testing.assert_close(half, by_probes, rtol=1e-8, atol=1e-10)
