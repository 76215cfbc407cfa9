"""Estimates whose sketch contains all of the matrix, nearly all of it, or all but one direction.

What the sketch leaves out, its stabilising shift and the quadrature are then of the size of rounding, and so is the
error bar: the value must be inside all the same. The intervals are those of 99.9 %: a row fails for 1 in 1,000 seeds.
"""

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from curvops import linalg
from tests.linalg.matrices import generator, rotation

N, MU = 300, 0.3
LENGTHS = torch.arange(N, dtype=torch.float64)
DECAYS = {"flat": torch.ones(N).double(), "cubic": (1 + LENGTHS) ** -3}


@functools.cache
def matrix(decay: str, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix of this rank, and its eigenvalues."""
    Q = rotation(N, 99)  # probes and sketches are to share no numbers with it
    values = torch.where(rank > LENGTHS, 100 * DECAYS[decay], 0.0)
    A = ((Q * values) @ Q.mT).to(dtype)
    return A, torch.linalg.eigvalsh(A.double()).clamp_min(0)


Row = tuple[Callable[[Tensor, int], linalg.Estimate], Callable[[Tensor], Tensor]]
ESTIMATES: dict[str, Row] = {
    "logdet": (lambda A, r: linalg.logdet(A, shift=MU, generator=generator()), lambda v: (v + MU).log().sum()),
    "logdet with a given sketch": (
        lambda A, r: linalg.logdet(
            A,
            shift=MU,
            preconditioner=linalg.nystrom(A, r, generator=generator(1)).preconditioner(MU),
            generator=generator(),
        ),
        lambda v: (v + MU).log().sum(),
    ),
    "spectral_quadrature": (
        lambda A, r: linalg.spectral_quadrature(A, shift=MU, rank=r, generator=generator()).logdet(MU),
        lambda v: (v / MU).log1p().sum(),
    ),
    "effective_dimension": (
        lambda A, r: linalg.effective_dimension(A, MU, rtol=0.01, generator=generator()),
        lambda v: (v / (v + MU)).sum(),
    ),
    "xtrace": (lambda A, r: linalg.trace(A, max_matvecs=2 * r + 2, generator=generator()), torch.sum),
    "xnystrace": (
        lambda A, r: linalg.trace(A, method="xnystrace", max_matvecs=r + 1, generator=generator()),
        torch.sum,
    ),
    "frobenius_norm": (
        lambda A, r: linalg.frobenius_norm(A, max_matvecs=2 * r + 2, generator=generator()),
        torch.linalg.norm,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("columns", [-1, 0, 1], ids=["one less", "as many", "one more"])
@pytest.mark.parametrize(("decay", "rank"), [("flat", 16), ("cubic", 64)])
@pytest.mark.parametrize("name", ESTIMATES)
def test_the_interval_contains_the_value(name: str, decay: str, rank: int, columns: int, dtype: torch.dtype) -> None:
    estimate, exact = ESTIMATES[name]
    A, values = matrix(decay, rank, dtype)
    true = exact(values)
    found = estimate(A, rank + columns)
    low, high = found.interval(0.999)
    rounding = 4 * torch.finfo(torch.float64).eps * N * true.abs()  # of the reference
    assert low - rounding <= true <= high + rounding
