"""A function, or an operator of SciPy, in place of a matrix. Tests `function_operator.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor

import curvops as co
from curvops import linalg

N = 30
ROOT = torch.randn(N, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DENSE = ROOT @ ROOT.mT / N + torch.eye(N, dtype=torch.float64)
TALL = torch.randn(40, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
B = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


class Methods:
    """Whose methods multiply."""

    def multiply(self, V: Tensor) -> Tensor:
        return DENSE @ V


FUNCTIONS: dict[str, Any] = {
    "lambda": lambda V: DENSE @ V,
    "partial": partial(torch.matmul, DENSE),
    "method": Methods().multiply,
    "SciPy": aslinearoperator(DENSE.numpy()),
    "SciPy's own": LinearOperator((N, N), matvec=lambda x: DENSE.numpy() @ x, dtype=np.float64),
}
SOLVERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cg": lambda A, b: linalg.cg(A, b, rtol=1e-13).x,
    "cg, by name": lambda A, b: linalg.cg(A=A, B=b, rtol=1e-13).x,
    "cg, refined": lambda A, b: linalg.cg(A, b, rtol=1e-13, refine=True).x,
    "minres": lambda A, b: linalg.minres(A, b, rtol=1e-13).x,
    "solve": lambda A, b: linalg.solve(A, b, rtol=1e-13),
    "inverse of the square root, twice": lambda A, b: (
        linalg.inverse_sqrt(A, linalg.inverse_sqrt(A, b, rtol=1e-13).value, rtol=1e-13).value
    ),
    "apply_function": lambda A, b: linalg.apply_function(A, lambda x: 1 / x, b, rtol=1e-13).value,
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_is_solved_with_as_its_matrix(function: str, solver: str) -> None:
    for b in (B, B[:, 0]):
        x = SOLVERS[solver](FUNCTIONS[function], b)
        torch.testing.assert_close(x, torch.linalg.solve(DENSE, b), rtol=1e-10, atol=1e-10)


def test_a_function_gets_what_the_right_hand_side_is() -> None:
    scale = DENSE.diagonal()
    assert linalg.cg(lambda v: scale * v, B[:, 0]).converged.all()
    assert linalg.cg(lambda V: scale[:, None] * V, B).converged.all()
    with pytest.raises(ValueError, match=r"the function returned .*\(30, 30\) for a tensor \(30, 1\)"):
        linalg.cg(lambda V: scale * V, B[:, :1])


def test_least_squares_take_an_operator_of_scipy() -> None:
    b = torch.randn(40, dtype=torch.float64)
    x = linalg.lsmr(aslinearoperator(TALL.numpy()), b, rtol=1e-14).x
    torch.testing.assert_close(x, torch.linalg.lstsq(TALL, b.unsqueeze(1)).solution[:, 0], rtol=1e-9, atol=1e-10)
    with pytest.raises(TypeError, match=r"multiplies by Aᵀ, too: pass a scipy.sparse.linalg.LinearOperator"):
        linalg.lsmr(lambda v: DENSE @ v, B)


def test_estimators_and_spectra_take_the_operator_of_a_function() -> None:
    made = {
        "vector": co.linalg.as_operator(lambda v: DENSE @ v, like=B[:, 0]),
        "block": co.linalg.as_operator(lambda V: DENSE @ V, like=B),
        "SciPy": co.linalg.as_operator(FUNCTIONS["SciPy"]),
    }
    for A in made.values():
        assert A.shape == DENSE.shape and A.dtype == torch.float64
        torch.testing.assert_close(A.to_dense(), DENSE)
        torch.testing.assert_close(A @ B, DENSE @ B)
        largest = torch.linalg.eigvalsh(DENSE)[-3:].flip(0)
        torch.testing.assert_close(linalg.eigsh(A, 3, rtol=1e-12).values, largest, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(linalg.trace(A, max_matvecs=N).value, DENSE.trace(), rtol=1e-10, atol=1e-9)
        shifted = A.add_diagonal(torch.tensor(2.0, dtype=torch.float64))
        torch.testing.assert_close(shifted @ B, DENSE @ B + 2 * B)
    assert co.linalg.as_operator(DENSE) is DENSE


def test_a_float32_right_hand_side_gives_float32() -> None:
    b = B[:, 0].float()
    assert linalg.cg(lambda v: DENSE.float() @ v, b).x.dtype == torch.float32
    assert linalg.cg(FUNCTIONS["SciPy"], b).x.dtype == torch.float32
