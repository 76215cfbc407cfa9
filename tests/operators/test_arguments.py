"""Public constructors take their arguments by position and by name, as their signatures say; nothing is swallowed.

Tests `reading.py`.
"""

import inspect
from functools import cache

import pytest
import torch
from torch import nn

import curvops as co
from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank


@cache
def linearized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return co.linearize(model, (torch.randn(6, 3).double(), torch.arange(6) % 2), "classification")


def seeded():
    return torch.Generator().manual_seed(1)


X, X2 = torch.linspace(-1, 1, 9).reshape(3, 3).double(), torch.linspace(-2, 1, 6).reshape(2, 3).double()
PRIOR = torch.linspace(1, 2, 26).double()

CALLS = {
    "GGN": (co.GGN, lambda: (5, seeded()), ("mc_samples", "generator")),
    "EmpiricalFisher": (co.EmpiricalFisher, lambda: (False,), ("per_token",)),
    "Hessian": (co.Hessian, lambda: (), ()),
    "DiagonalGGN": (co.DiagonalGGN, lambda: ("mc", 3, seeded()), ("fisher", "mc_samples", "generator")),
    "KFAC": (co.KFAC, lambda: ("mc", "reduce", 2, seeded()), ("fisher", "sharing", "mc_samples", "generator")),
    "EKFAC": (co.EKFAC, lambda: ("mc", "reduce", 2, seeded()), ("fisher", "sharing", "mc_samples", "generator")),
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


@pytest.mark.parametrize("name", CALLS)
def test_what_the_signature_does_not_name_is_refused(name):
    make = CALLS[name][0]
    with pytest.raises(TypeError, match=rf"co.{name}\(lin.*too many positional"):
        make(linearized(), *range(20))
    with pytest.raises(TypeError, match=rf"co.{name}\(lin.*'fissher'"):
        make(linearized(), fissher="mc")
    with pytest.raises(TypeError, match="missing a required argument"):
        make()
    for wrong in (torch.eye(26).double(), Dense(torch.eye(26).double()), nn.Linear(2, 2), None):
        with pytest.raises(TypeError, match=f"{name} is built from a linearised network.*got {type(wrong).__name__}"):
            make(wrong)


WRONG = {
    "a count that is a word": (lambda lin: co.GGN(lin, "mc"), TypeError, "mc_samples.*'mc'"),
    "a count that is a flag": (lambda lin: co.GGN(lin, True), TypeError, "mc_samples.*True"),
    "a seed for a generator": (lambda lin: co.GGN(lin, 2, 0), TypeError, "torch.Generator.*manual_seed"),
    "a seed for KFAC": (lambda lin: co.KFAC(lin, "mc", generator=0), TypeError, "torch.Generator"),
    "a number for a flag": (lambda lin: co.EmpiricalFisher(lin, 5), TypeError, "per_token must be True or False"),
    "a count for a Fisher": (lambda lin: co.KFAC(lin, 5), ValueError, "fisher=5.*'exact'"),
    "a Fisher for a sharing": (lambda lin: co.KFAC(lin, "mc", "exact"), ValueError, "'expand' or 'reduce'"),
    "a block of a linearisation": (lambda lin: co.Subnetwork(lin, [0, 1]), TypeError, r"co.Subnetwork\(co.GGN\(lin\)"),
    "a block of a network": (lambda lin: co.Subnetwork(nn.Linear(2, 2), [0]), TypeError, "operator.*Linear"),
    "no indices": (lambda lin: co.Subnetwork(co.GGN(lin)), TypeError, "indices"),
    "a shift for an operator": (lambda lin: co.Damped(1.0, co.GGN(lin)), TypeError, "Damped.*float"),
    "a word for a shift": (lambda lin: co.Damped(co.GGN(lin), "one"), TypeError, "shift.*'one'"),
    "a dict for a vector": (lambda lin: co.GGN(lin) @ {"0.weight": torch.ones(4, 3)}, TypeError, "lin.flatten"),
    "a list for a vector": (lambda lin: co.GGN(lin) @ [1.0] * 26, TypeError, "tensor.*list"),
    "an unknown keyword of Dense": (lambda lin: Dense(torch.eye(3), symmetric=True), TypeError, "symmetric"),
    "a vector for Dense": (lambda lin: Dense(torch.ones(3)), ValueError, r"\(3,\)"),
    "a matrix for Diagonal": (lambda lin: Diagonal(torch.eye(3)), ValueError, r"\(3, 3\)"),
    "values of another rank": (lambda lin: LowRank(torch.eye(3)[:, :2], torch.ones(3)), ValueError, r"\(3, 2\)"),
    "an unknown keyword of blocks": (
        lambda lin: DirectSum(Diagonal(torch.ones(2)), positions=[range(2)], symmetric=True),
        TypeError,
        "symmetric",
    ),
    "an unknown keyword of Kronecker": (
        lambda lin: Kronecker(torch.ones(1, 2), torch.ones(1, 2), psd=True),
        TypeError,
        "psd",
    ),
}


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_by_name(name):
    make, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        make(linearized())


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


def test_damped_takes_a_number():
    G = co.GGN(linearized())
    expected = G.add_diagonal(2.0).to_dense()
    for shift in (2.0, torch.tensor(2.0)):
        torch.testing.assert_close(co.Damped(G, shift).to_dense(), expected, rtol=1e-10, atol=1e-12)
