"""Products that round by more than their dtype, as those of deep networks do: no function takes that for asymmetry."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from curvops import linalg
from tests.linalg.matrices import generator

N, RANK, LEVEL = 600, 300, 1e-3


class Rounded(linalg.Operator):
    """The matrix S Sᵀ whose Sᵀv is rounded to three digits of its largest entry, as inside of a network."""

    def _size(self) -> torch.Size:
        return torch.Size((N, N))

    @property
    def psd(self) -> bool:
        return True

    def _product(self, block: Tensor) -> Tensor:
        (root,) = self._args
        inner = root.mT @ block
        unit = LEVEL * inner.abs().amax(0)
        return root @ ((inner / unit).round() * unit)


def matrix() -> Rounded:
    source = generator(7)  # the probes are to share no numbers with it
    Q = torch.linalg.qr(torch.randn(N, RANK, generator=source))[0]
    return Rounded(Q * 10 * torch.arange(1, RANK + 1) ** -0.5)


b = torch.ones(N)
CALLS: dict[str, Callable[[Rounded], Any]] = {
    "spectral_quadrature": lambda A: linalg.spectral_quadrature(A, shift=0.1, max_matvecs=500, generator=generator()),
    "effective_dimension": lambda A: linalg.effective_dimension(
        A, 1.0, rtol=0.01, max_matvecs=500, generator=generator()
    ),
    "spectral_density": lambda A: linalg.spectral_density(A, generator=generator()),
    "trace": lambda A: linalg.trace(A, method="xnystrace", max_matvecs=60, generator=generator()),
    "diagonal": lambda A: linalg.diagonal(A, method="xnysdiag", max_matvecs=60, generator=generator()),
    "nystrom": lambda A: linalg.nystrom(A, 64, generator=generator()),
    "low_rank": lambda A: linalg.low_rank(A, 20, generator=generator()),
    "lanczos": lambda A: linalg.lanczos(A, 100, generator=generator()),
    "eigsh": lambda A: linalg.eigsh(A, 3, generator=generator()),
    "inverse_sqrt": lambda A: linalg.inverse_sqrt(A.add_diagonal(1.0), b, lower_bound=1.0),
    "minres": lambda A: linalg.minres(A.add_diagonal(1.0), b),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_rounding_of_products_is_not_taken_for_asymmetry(call: Callable[[Rounded], Any]) -> None:
    found = call(matrix())
    reasons = found.reasons if hasattr(found, "reasons") else (getattr(found, "reason", None),)
    assert linalg.Reason.NOT_SYMMETRIC not in reasons


@pytest.mark.parametrize("preconditioner", ["auto", None])
def test_the_interval_of_a_determinant_contains_it_all_the_same(preconditioner: str | None) -> None:
    A = matrix()
    (root,) = A._args
    exact = torch.logdet(root.double() @ root.double().mT + torch.eye(N).double())
    low, high = linalg.logdet(
        A, shift=1.0, preconditioner=preconditioner, max_matvecs=599, generator=generator()
    ).interval()
    assert low <= exact <= high
