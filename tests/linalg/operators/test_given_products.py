"""A function or a SciPy LinearOperator in place of a matrix gives what the matrix gives.

Tests `given_matrix.py`.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor

from curvops import linalg
from tests.linalg.matrices import generator, log_spaced, symmetric

N = 300  # above the size that is formed
MATRIX = symmetric(log_spaced(N, 4))
B = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


FUNCTION = lambda V: MATRIX @ V  # noqa: E731
DECAY = log_spaced(N, 4)


def scaled(ndim: int, v: Tensor) -> Tensor:
    """A product with a diagonal matrix, as somebody writes it for vectors, or for blocks."""
    assert v.ndim == ndim
    return DECAY * v if ndim == 1 else DECAY[:, None] * v


SCIPY = LinearOperator((N, N), matvec=lambda v: MATRIX.numpy() @ v, rmatvec=lambda v: MATRIX.numpy() @ v, dtype=float)
WITH_B: dict[str, Callable[[Any, Tensor], Any]] = {
    "cg": lambda A, b: linalg.cg(A, b, rtol=1e-10).x,
    "cg, refined": lambda A, b: linalg.cg(A, b, rtol=1e-10, refine=True).x,
    "minres": lambda A, b: linalg.minres(A, b, rtol=1e-10).x,
    "lsmr": lambda A, b: linalg.lsmr(A, b, rtol=1e-10).x,
    "solve": lambda A, b: linalg.solve(A, b, method="cg", rtol=1e-10),
    "apply_function": lambda A, b: linalg.apply_function(A, torch.exp, b).value,
    "sqrt": lambda A, b: linalg.sqrt(A, b).value,
    "inverse_sqrt": lambda A, b: linalg.inverse_sqrt(A, b).value,
}
WITHOUT_B: dict[str, Callable[[Any], Any]] = {
    "trace": lambda A: linalg.trace(A, max_matvecs=60, generator=generator(1)).value,
    "diagonal": lambda A: linalg.diagonal(A, max_matvecs=60, generator=generator(1)).value,
    "frobenius_norm": lambda A: linalg.frobenius_norm(A, max_matvecs=60, generator=generator(1)).value,
    "logdet": lambda A: linalg.logdet(A, shift=1.0, generator=generator(1)).value,
    "effective_dimension": lambda A: linalg.effective_dimension(A, 1.0, generator=generator(1)).value,
    "spectral_density": lambda A: linalg.spectral_density(A, generator=generator(1)).matvecs,
    "spectral_quadrature": lambda A: linalg.spectral_quadrature(A, shift=1.0, generator=generator(1)).logdet(1.0).value,
    "eigsh": lambda A: linalg.eigsh(A, 3, generator=generator(1)).values,
    "svds": lambda A: linalg.svds(A, 3, generator=generator(1)).values,
    "lanczos": lambda A: linalg.lanczos(A, 20, generator=generator(1)).T,
    "nystrom": lambda A: linalg.nystrom(A, 20, generator=generator(1)).eigenvalues,
    "low_rank": lambda A: linalg.low_rank(A, 20, generator=generator(1)).values,
}


def rows(names):
    """A block for each function, and a vector for one, which is made a block in one place."""
    return [(name, B) for name in names] + [("cg", B[:, 0])]


@functools.cache
def expected_without_b(name: str) -> Any:
    return WITHOUT_B[name](MATRIX)


@pytest.mark.parametrize(("name", "b"), rows(WITH_B))
def test_right_hand_sides_give_a_scipy_operator_its_dtype(name: str, b: Tensor) -> None:
    torch.testing.assert_close(WITH_B[name](SCIPY, b), WITH_B[name](MATRIX, b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "b"), rows(name for name in WITH_B if name != "lsmr"))  # it needs the transpose
def test_right_hand_sides_give_the_size(name: str, b: Tensor) -> None:
    found = WITH_B[name](partial(scaled, b.ndim), b)
    torch.testing.assert_close(found, WITH_B[name](torch.diag(DECAY), b), rtol=1e-6, atol=1e-6)


AS_OPERATORS = {
    "SciPy": SCIPY,
    "of blocks": linalg.as_operator(FUNCTION, like=B),
    "of vectors": linalg.as_operator(FUNCTION, like=B[:, 0]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in WITHOUT_B
        for kind in AS_OPERATORS
        if kind == "SciPy" or name in ("logdet", "eigsh", "nystrom")
    ],
)
def test_what_has_a_size_needs_no_right_hand_side(name: str, kind: str) -> None:
    given = AS_OPERATORS[kind]
    found, expected = WITHOUT_B[name](given), expected_without_b(name)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("matrix", [MATRIX, MATRIX[:3], MATRIX + MATRIX.triu(1)], ids=["symmetric", "wide", "square"])
def test_a_tensor_is_an_operator(matrix: torch.Tensor) -> None:
    A = linalg.as_operator(matrix)
    assert isinstance(A, linalg.Dense) and linalg.as_operator(A) is A
    assert A.symmetric == (matrix is MATRIX)
    torch.testing.assert_close(A @ B, matrix @ B, rtol=0, atol=1e-12)
    torch.testing.assert_close(A.mT @ (matrix @ B), matrix.mT @ matrix @ B, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="single matrix"):
        linalg.as_operator(matrix[0])


def test_a_rectangular_scipy_operator_solves_least_squares() -> None:
    tall = np.arange(12.0).reshape(4, 3) ** 2
    x = linalg.lsmr(aslinearoperator(tall), B[:4, 0], rtol=1e-12).x
    torch.testing.assert_close(x, torch.linalg.lstsq(torch.tensor(tall), B[:4]).solution[:, 0], rtol=1e-6, atol=1e-8)


def test_a_scipy_operator_follows_the_dtype_of_the_right_hand_sides() -> None:
    found = linalg.cg(SCIPY, B.float())
    assert found.x.dtype == torch.float32 and found.accepted
    assert linalg.as_operator(SCIPY).dtype == torch.float64
