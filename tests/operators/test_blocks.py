"""Blocks of layers: by name and by position, damped, and layers that have a diagonal instead."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

import curvops as co
from tests.zoo_modules import Recurrent


def linearized(seed=0, parameters=None, outputs=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(6, 3).double()
    return co.linearize(model, (x, torch.arange(6) % outputs), "classification", parameters=parameters)


def test_a_selection_that_splits_a_kronecker_block():
    lin = linearized(parameters=torch.arange(0, 26, 2))
    with pytest.raises(ValueError, match="splits a Kronecker block"):
        co.KFAC(lin)
    assert co.Subnetwork(co.KFAC(linearized()), torch.arange(0, 26, 2)).shape == (13, 13)


def test_groups_of_blocks_by_name_and_by_position():
    lin = linearized()
    G = co.GGN(lin).to_dense()
    named = co.BlockDiagonal(lin, blocks=[["*.weight"]])
    kept = torch.cat([torch.arange(12), torch.arange(16, 24)])
    torch.testing.assert_close(named.to_dense()[kept][:, kept], G[kept][:, kept], rtol=1e-10, atol=1e-12)
    everything = co.BlockDiagonal(lin, blocks=[torch.arange(26)])
    torch.testing.assert_close(everything.to_dense(), G, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("curvature", [co.GGN, co.EmpiricalFisher, co.BlockDiagonal, co.KFAC, co.EKFAC, co.DiagonalGGN])
@pytest.mark.parametrize("size", [1, 7, 25])
def test_blocks_of_a_precision_and_of_its_inverse(curvature, size):
    """With which the saliency of a set of weights is ½ θᵀ ([P⁻¹]_SS)⁻¹ θ; and its diagonal."""
    prior = 0.3 if curvature in (co.KFAC, co.EKFAC) else torch.linspace(0.2, 1, 26, dtype=torch.float64)
    P = curvature(linearized()).add_diagonal(torch.as_tensor(prior, dtype=torch.float64))
    index = torch.randperm(26, generator=torch.Generator().manual_seed(size))[:size]
    for A, dense in ((P, P.to_dense()), (P.inverse(), torch.linalg.inv(P.to_dense()))):
        block, expected = co.Subnetwork(A, index), dense[index][:, index]
        torch.testing.assert_close(block.to_dense(), expected, rtol=1e-10, atol=1e-12)
        b = torch.linspace(-1, 1, size, dtype=torch.float64)
        torch.testing.assert_close(block.solve(b), torch.linalg.solve(expected, b), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(A.diagonal(), dense.diagonal(), rtol=1e-10, atol=1e-12)


def test_heuristic_damping_stays_kronecker_factored():
    K = co.KFAC(linearized())
    for block, damped in zip(K.blocks, K.heuristic_damping(0.3).blocks, strict=True):
        assert isinstance(damped, co.linalg.Kronecker)
        expected = block.heuristic_damping(0.3).to_dense()
        torch.testing.assert_close(damped.to_dense(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
def test_layers_that_get_a_diagonal_for_want_of_factors_are_named(kind):
    data = torch.randn(4, 40).double(), torch.arange(4) % 3
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    without = (lambda values, x: functional_call(model, values, (x,))), dict(model.named_parameters())
    lin = co.linearize(without, data, "classification")
    with pytest.warns(
        co.errors.NoFactorsWarning, match=r"'0.weight', '0.bias'.*1,230.*'2.bias'.*1,240.*co.GGN"
    ) as caught:
        diagonal = kind(lin)
    assert len(caught) == 1 and "'4.bias'" not in str(caught[0].message)  # the last layer's block is exact
    torch.testing.assert_close(diagonal.blocks[0].entries, co.DiagonalGGN(lin).entries[:1230], rtol=1e-10, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(co.linearize(model, data, "classification"))


def test_a_layer_without_a_rule_that_gets_a_diagonal_is_named():
    lin = co.linearize(Recurrent(nn.GRU, 3, 24).double(), (torch.randn(3, 4, 3), torch.arange(3) % 2), "classification")
    with pytest.warns(co.errors.NoFactorsWarning, match="rnn.*no layer rule.*co.GGN"):
        co.KFAC(lin)
