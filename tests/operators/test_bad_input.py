"""Bad input to operators is refused at the door, naming what to do instead."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

import curvops as co


def linearized(seed=0, parameters=None, outputs=2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x = torch.randn(6, 3).double()
    return co.linearize(model, (x, torch.arange(6) % outputs), "classification", parameters=parameters)


CASES = {
    "fisher": (lambda lin: co.KFAC(lin, fisher="type-2"), ValueError, "'exact', 'mc'"),
    "fisher of a diagonal": (lambda lin: co.DiagonalGGN(lin, fisher="true"), ValueError, "'exact', 'mc'"),
    "sharing": (lambda lin: co.EKFAC(lin, sharing="sum"), ValueError, "'expand' or 'reduce'"),
    "mc_samples": (lambda lin: co.GGN(lin, mc_samples=0), ValueError, "at least 1"),
    "mc_samples of the exact Fisher": (lambda lin: co.KFAC(lin, mc_samples=-1), ValueError, "at least 1"),
    "mc_samples of nothing drawn": (lambda lin: co.KFAC(lin, mc_samples=5), ValueError, "fisher='mc'"),
    "mc_samples of EKFAC": (lambda lin: co.EKFAC(lin, fisher="empirical", mc_samples=0), ValueError, "at least 1"),
    "mc_samples of a diagonal": (lambda lin: co.DiagonalGGN(lin, mc_samples=2), ValueError, "draws nothing"),
    "rank above D": (lambda lin: co.low_rank(co.GGN(lin), rank=27), ValueError, "27"),
    "rank below 1": (lambda lin: co.low_rank(co.GGN(lin), rank=0), ValueError, "rank"),
    "index out of range": (lambda lin: co.Subnetwork(co.GGN(lin), [0, 26]), ValueError, "26 is out of range"),
    "index twice": (lambda lin: co.Subnetwork(co.GGN(lin), [3, 3]), ValueError, "twice"),
    "no index": (lambda lin: co.Subnetwork(co.GGN(lin), torch.empty(0, dtype=torch.long)), ValueError, "nothing"),
    "an empty list": (lambda lin: co.Subnetwork(co.GGN(lin), []), ValueError, "nothing"),
    "mask of another size": (lambda lin: co.Subnetwork(co.GGN(lin), torch.ones(5).bool()), ValueError, r"\(26,\)"),
    "indices that are real": (lambda lin: co.Subnetwork(co.GGN(lin), [0.5]), TypeError, "integers"),
    "blocks": (lambda lin: co.BlockDiagonal(lin, blocks="rows"), ValueError, "'layer'"),
    "blocks that overlap": (lambda lin: co.BlockDiagonal(lin, blocks=[["0.*"], ["*.bias"]]), ValueError, "overlap"),
    "blocks of nothing": (lambda lin: co.BlockDiagonal(lin, blocks=[["1.*"]]), ValueError, "matches no parameter"),
    "kernel with a zero prior": (lambda lin: co.TangentKernel(lin, 0.0), ValueError, "positive"),
    "kernel with a short prior": (lambda lin: co.TangentKernel(lin, torch.ones(3)), ValueError, "26"),
    "a matrix as KFAC's prior": (lambda lin: co.KFAC(lin).add_diagonal(torch.eye(26).double()), ValueError, r"\(D,\)"),
    "a matrix as EKFAC's prior": (lambda lin: co.EKFAC(lin).add_diagonal(torch.eye(26).double()), ValueError, "EKFAC"),
    "a number": (lambda lin: co.KFAC(lin) + 0.5, TypeError, r"add_diagonal\(0.5\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_error_that_says_what_to_do(name):
    make, error, message = CASES[name]
    with pytest.raises(error, match=message):
        make(linearized())


def test_a_selection_that_splits_a_kronecker_block():
    lin = linearized(parameters=torch.arange(0, 26, 2))
    with pytest.raises(ValueError, match="cannot be split.*co.Subnetwork"):
        co.KFAC(lin)
    assert co.Subnetwork(co.KFAC(linearized()), torch.arange(0, 26, 2)).shape == (13, 13)


def test_blocks_beyond_the_memory_budget():
    torch.manual_seed(0)
    model = nn.Linear(30, 10).double()
    data = torch.randn(4, 30).double(), torch.arange(4)
    lin = co.linearize(model, data, "classification", memory_budget=100_000)
    with pytest.raises(ValueError, match="co.KFAC"):
        co.BlockDiagonal(lin)


def test_sums_over_different_data_need_the_same_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    first, second = ((torch.randn(6, 3).double(), torch.arange(6) % 2) for _ in range(2))
    a, b = (co.linearize(model, data, "classification") for data in (first, second))
    both = tuple(torch.cat(pair) for pair in zip(first, second))
    whole = co.GGN(co.linearize(model, both, "classification"))
    torch.testing.assert_close((co.GGN(a) + co.GGN(b)).to_dense(), whole.to_dense(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="different weights"):
        co.GGN(a) + co.GGN(linearized(seed=1))
    with pytest.raises(ValueError, match="different parameters"):
        co.GGN(a) + co.GGN(linearized(parameters="last_layer"))


def test_groups_of_blocks_by_name_and_by_position():
    lin = linearized()
    G = co.GGN(lin).to_dense()
    named = co.BlockDiagonal(lin, blocks=[["*.weight"]])
    kept = torch.cat([torch.arange(12), torch.arange(16, 24)])
    torch.testing.assert_close(named.to_dense()[kept][:, kept], G[kept][:, kept], rtol=1e-10, atol=1e-12)
    everything = co.BlockDiagonal(lin, blocks=[torch.arange(26)])
    torch.testing.assert_close(everything.to_dense(), G, rtol=1e-10, atol=1e-12)


def test_heuristic_damping_stays_kronecker_factored():
    K = co.KFAC(linearized())
    damped = K.heuristic_damping(0.3)
    B, A = K.blocks[0].left[0], K.blocks[0].right[0]
    pi = (A.diagonal().mean() / B.diagonal().mean()).sqrt()
    shift = torch.tensor(0.3, dtype=torch.float64).sqrt()
    expected = torch.kron(
        B + shift / pi * torch.eye(len(B), dtype=B.dtype), A + shift * pi * torch.eye(len(A), dtype=A.dtype)
    )
    torch.testing.assert_close(damped.blocks[0].to_dense(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [co.KFAC, co.EKFAC])
def test_layers_that_get_a_diagonal_for_want_of_factors_are_named(kind):
    torch.manual_seed(0)
    data = torch.randn(4, 40).double(), torch.arange(4) % 3
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    without = (lambda values, x: functional_call(model, values, (x,))), dict(model.named_parameters())
    lin = co.linearize(without, data, "classification")
    with pytest.warns(co.NoFactors, match=r"'0.weight', '0.bias'.*1,230.*co.GGN") as caught:
        diagonal = kind(lin)
    assert len(caught) == 1  # the last layer's block is exact
    torch.testing.assert_close(diagonal.blocks[0].entries, co.DiagonalGGN(lin).entries[:1230], rtol=1e-10, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(co.linearize(model, data, "classification"))


def test_a_layer_without_a_rule_that_gets_a_diagonal_is_named():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 24, batch_first=True), nn.Linear(24, 2)

        def forward(self, x):
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    lin = co.linearize(Last().double(), (torch.randn(3, 4, 3), torch.arange(3) % 2), "classification")
    with pytest.warns(co.NoFactors, match="rnn.*no layer rule.*co.GGN"):
        co.KFAC(lin)


def test_a_kernel_in_another_dtype_stays_symmetric():
    lin = linearized()
    for kernel in (co.TangentKernel(lin), co.TangentKernel(lin, 2.0, x=torch.randn(3, 3), x2=torch.randn(2, 3))):
        single = kernel.to(torch.float32)
        assert single.psd == kernel.psd and single.symmetric == kernel.symmetric and single.dtype == torch.float32
        torch.testing.assert_close(single.to_dense().double(), kernel.to_dense(), rtol=1e-4, atol=1e-4)
    P = co.TangentKernel(lin).to(torch.float32).add_diagonal(1.0)
    b = torch.ones(P.shape[-1])
    torch.testing.assert_close(P @ P.solve(b), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "operator",
    [co.GGN, co.EmpiricalFisher, co.Hessian, co.DiagonalGGN, co.KFAC, co.EKFAC, co.BlockDiagonal, co.TangentKernel],
)
def test_an_operator_is_made_of_a_linearisation(operator):
    with pytest.raises(TypeError, match=f"{operator.__name__} is built from a linearised network.*got Linear"):
        operator(torch.nn.Linear(2, 2))
