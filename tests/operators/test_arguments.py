"""Public constructors take their arguments by position and by name, as their signatures say; nothing is swallowed.

Tests `user_operator.py`.
"""

import inspect
from functools import cache

import pytest
import torch
from torch import nn

import curvops as co
from tests.randomness import perceptron, seeded


@cache
def linearized():
    model = perceptron(3, 4, 2)
    return co.linearize(model, (torch.randn(6, 3).double(), torch.arange(6) % 2), "classification")


X, X2 = torch.linspace(-1, 1, 9).reshape(3, 3).double(), torch.linspace(-2, 1, 6).reshape(2, 3).double()
PRIOR = torch.linspace(1, 2, 26).double()

CALLS = {
    "GGN": (co.GGN, lambda: (5, seeded(1)), ("mc_samples", "generator")),
    "EmpiricalFisher": (co.EmpiricalFisher, lambda: (False,), ("per_token",)),
    "Hessian": (co.Hessian, lambda: (), ()),
    "DiagonalGGN": (co.DiagonalGGN, lambda: ("mc", 3, seeded(1)), ("fisher", "mc_samples", "generator")),
    "KFAC": (co.KFAC, lambda: ("mc", "reduce", 2, seeded(1)), ("fisher", "sharing", "mc_samples", "generator")),
    "EKFAC": (co.EKFAC, lambda: ("mc", "reduce", 2, seeded(1)), ("fisher", "sharing", "mc_samples", "generator")),
    "BlockDiagonal": (co.BlockDiagonal, lambda: ([["*"]],), ("blocks",)),
    "TangentKernel": (co.TangentKernel, lambda: (PRIOR, X, X2), ("prior", "x", "x2")),
}


@pytest.mark.parametrize("name", CALLS)
def test_positions_mean_what_the_signature_says(name):
    make, values, names = CALLS[name]
    assert tuple(inspect.signature(make).parameters)[: 1 + len(names)] == ("lin", *names)
    positional = make(linearized(), *values()).to_dense()
    named = make(lin=linearized(), **dict(zip(names, values()))).to_dense()
    torch.testing.assert_close(positional, named, rtol=1e-10, atol=1e-12)
    if name not in ("EmpiricalFisher", "Hessian"):  # these values are no defaults
        default = make(linearized()).to_dense()
        assert default.shape != named.shape or not torch.allclose(default, named)


def test_a_block_of_a_tensor():
    matrix = torch.arange(9.0).reshape(3, 3)
    torch.testing.assert_close(co.Subnetwork(matrix, [2, 0]).to_dense(), matrix[[2, 0]][:, [2, 0]], rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda lin, prior, noisy: co.GGN(noisy),
        lambda lin, prior, noisy: 2 * co.GGN(noisy),
        lambda lin, prior, noisy: co.KFAC(noisy).add_diagonal(1.0),
        lambda lin, prior, noisy: co.GGN(lin).add_diagonal(prior),
        lambda lin, prior, noisy: co.KFAC(lin).add_diagonal(prior).inverse(),
        lambda lin, prior, noisy: co.GGN(lin) + prior * co.GGN(lin),
    ],
)
def test_a_block_refuses_a_gradient_that_it_would_drop(make):
    model, data = nn.Linear(3, 2).double(), (X, X2.mT)
    prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    lin, noisy = (co.linearize(model, data, co.likelihoods.Gaussian(sigma)) for sigma in (noise.detach(), noise))
    A = make(lin, prior, noisy)
    with pytest.raises(ValueError, match=r"Subnetwork has no gradient.*detach"):
        co.Subnetwork(A, [0, 1])
    with torch.no_grad():
        expected = A.to_dense()[:2, :2]
        torch.testing.assert_close(co.Subnetwork(A, [0, 1]).to_dense(), expected, rtol=1e-10, atol=1e-12)


def test_scipys_eigensolver_takes_an_operator():
    from scipy.sparse.linalg import eigsh

    G = co.GGN(linearized())
    top = eigsh(G.to_scipy(), k=2, return_eigenvectors=False)
    torch.testing.assert_close(torch.tensor(top), torch.linalg.eigvalsh(G.to_dense())[-2:], rtol=1e-8, atol=1e-10)
