"""Operators linearised at different weights, or of different parameters, are never combined unseen.

Tests `network_operator.py`, and the tangent space in `parameters.py`.
"""

import pickle
from functools import cache

import pytest
import torch
from torch import nn

import curvops as co


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@cache
def linearized(seed=0, data=0):
    return linearize(network(seed), data=data)


def linearize(model, parameters=None, data=0):
    torch.manual_seed(100 + data)
    return co.linearize(model, (torch.randn(6, 3), torch.arange(6) % 2), "classification", parameters=parameters)


OPERATORS = {
    "GGN": co.GGN,
    "MC GGN": lambda lin: co.GGN(lin, mc_samples=2),
    "EmpiricalFisher": co.EmpiricalFisher,
    "Hessian": co.Hessian,
    "DiagonalGGN": co.DiagonalGGN,
    "KFAC": co.KFAC,
    "EKFAC": co.EKFAC,
    "BlockDiagonal": co.BlockDiagonal,
    "LowRank": lambda lin: co.low_rank(co.GGN(lin), rank=3),
    "Subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(lin.num_parameters)),
    "scaled": lambda lin: 0.5 * co.GGN(lin),
    "scaled KFAC": lambda lin: 2 * co.KFAC(lin),
    "scaled diagonal": lambda lin: 2 * co.DiagonalGGN(lin),
    "scaled low rank": lambda lin: 2 * co.low_rank(co.GGN(lin), rank=3),
    "heuristic damping": lambda lin: co.KFAC(lin).heuristic_damping(0.1),
    "damped": lambda lin: co.GGN(lin).add_diagonal(0.1),
    "inverse": lambda lin: co.KFAC(lin).add_diagonal(0.1).inverse(),
    "sum": lambda lin: co.GGN(lin) + co.KFAC(lin),
    "JᵀJ": lambda lin: lin.jacobian().mT @ lin.jacobian(),
    "J P⁻¹ Jᵀ inside": lambda lin: co.GGN(lin) @ co.DiagonalGGN(lin) @ co.GGN(lin),
}
COMBINATIONS = {
    "+": lambda one, other: one + other,
    "−": lambda one, other: one - other,
    "0.5 ·": lambda one, other: 0.5 * one + other,
    "@": lambda one, other: one @ other,
}


@cache
def elsewhere(name):
    """An operator at other weights."""
    return OPERATORS[name](linearized(seed=1))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_other_weights_are_refused_on_either_side(name, combination):
    """Of each operator beside a GGN, and in sums beside those whose sums have rules of their own."""
    combine, here = COMBINATIONS[combination], OPERATORS[name](linearized())
    for other in ("GGN", "DiagonalGGN", "KFAC", "EKFAC", "LowRank", "inverse") if combination == "+" else ("GGN",):
        for pair in ((here, elsewhere(other)), (elsewhere(other), here)):
            with pytest.raises(ValueError, match="different weights.*'0.weight'"):
                combine(*pair)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_same_weights_under_other_data_may_be_combined(name):
    one, other = OPERATORS[name](linearized(data=0)), co.KFAC(linearized(data=1))
    torch.testing.assert_close((one + other).to_dense(), one.to_dense() + other.to_dense(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["GGN", "DiagonalGGN", "KFAC", "damped"])
def test_other_parameters_of_the_same_number_are_refused(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    data = torch.randn(6, 3), torch.arange(6) % 3
    one, other = (co.linearize(model, data, "classification", parameters=glob) for glob in ("0.*", "2.*"))
    with pytest.raises(ValueError, match=r"different parameters.*'0.weight'.*'2.weight'"):
        OPERATORS[name](one) + OPERATORS[name](other)


def test_other_positions_of_the_same_tensors_are_refused():
    one, other = (linearize(network(), torch.tensor(index)) for index in ([0, 3, 12], [0, 4, 12]))
    with pytest.raises(ValueError, match="different parameters"):
        co.GGN(one) + co.GGN(other)


def test_products_with_a_jacobian_need_its_weights():
    one, other = linearized(), linearized(seed=1)
    P = co.KFAC(other).add_diagonal(1.0)
    with pytest.raises(ValueError, match="different weights"):
        one.jacobian() @ P.inverse()
    with pytest.raises(ValueError, match="different weights"):
        P.inverse() @ one.jacobian().mT


def test_functions_of_different_networks_may_be_added():
    one, other = linearized(), linearized(seed=1)
    total = co.TangentKernel(one) + other.jacobian() @ other.jacobian().mT
    assert total.shape == (12, 12)


@pytest.mark.parametrize("name", ["GGN", "KFAC", "DiagonalGGN", "LowRank", "damped", "sum"])
def test_a_posterior_needs_a_curvature_at_its_own_weights(name):
    lin = linearized()
    with pytest.raises(ValueError, match="different weights"):
        co.laplace(lin, OPERATORS[name](linearized(seed=1)), 1.0, check_mode=False)
    assert co.laplace(lin, OPERATORS[name](linearized(data=1)), 1.0, check_mode=False).lin is lin


def test_a_subnetwork_by_its_operator_is_the_one_by_its_selection():
    index = torch.tensor([12, 13, 20, 25])  # of the second tensor on
    block = co.Subnetwork(co.GGN(linearized()), index)
    selected = co.GGN(linearize(network(), index))
    torch.testing.assert_close((block + selected).to_dense(), 2 * selected.to_dense(), rtol=1e-10, atol=1e-10)
    nested = co.Subnetwork(block, [1, 3])
    assert (nested + co.GGN(linearize(network(), index[[1, 3]]))).shape == (2, 2)
    with pytest.raises(ValueError, match="different parameters"):
        block + co.Subnetwork(co.GGN(linearized()), [12, 13, 20, 24])
    with pytest.raises(ValueError, match="different weights"):
        block + co.Subnetwork(co.GGN(linearized(seed=1)), index)


@pytest.mark.parametrize("name", ["GGN", "KFAC", "DiagonalGGN", "LowRank"])
def test_casts_and_copies_stay_where_they_were(name):
    lin = linearized()
    single = OPERATORS[name](lin).to(torch.float32)
    assert single + co.GGN(lin).to(torch.float32) is not None
    assert single + co.GGN(linearize(network().float())) is not None
    with pytest.raises(ValueError, match="different weights"):
        single + co.GGN(linearized(seed=1)).to(torch.float32)
    half = OPERATORS[name](lin).to(torch.bfloat16)
    assert half + co.GGN(lin).to(torch.bfloat16) is not None
    copied = pickle.loads(pickle.dumps(OPERATORS[name](lin)))
    assert copied + co.GGN(lin) is not None
    with pytest.raises(ValueError, match="different weights"):
        copied + co.GGN(linearized(seed=1))


@pytest.mark.parametrize("name", [name for name in OPERATORS if "J" not in name])
def test_a_copy_detached_from_its_weights_is_a_constant(name):
    here, there = OPERATORS[name](linearized()), co.KFAC(linearized(seed=1))
    free = here.detached_from_weights()
    assert type(free) is type(here)
    torch.testing.assert_close(free.to_dense(), here.to_dense(), rtol=1e-10, atol=1e-12)
    for total in (free + there, there + free, free.to(torch.float64) + there):
        torch.testing.assert_close(total.to_dense(), here.to_dense() + there.to_dense(), rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="different weights"):  # the sum stands where its other term does
            total + co.GGN(linearized(seed=2))
    with pytest.raises(ValueError, match="different parameters"):
        free + co.GGN(linearize(network(seed=1), "last_layer"))
    with pytest.raises(ValueError, match=r"op.detached_from_weights\(\)"):
        here + there


def with_statistics(change=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    if change is not None:
        with torch.no_grad():
            dict([*model.named_parameters(), *model.named_buffers()])[change].add_(0.5)
    return model


@pytest.mark.parametrize("changed", ["0.weight", "0.bias", "1.weight", "1.running_mean", "1.running_var"])
def test_what_is_frozen_counts_too(changed):
    here, there = (linearize(with_statistics(change), "3.*") for change in (None, changed))
    for make in (co.GGN, co.KFAC, co.DiagonalGGN):
        with pytest.raises(ValueError, match=f"different weights.*'{changed}'"):
            make(here) + make(there)
        assert make(here) + make(linearize(with_statistics(), "3.*", data=1)) is not None
    block = co.Subnetwork(co.GGN(linearize(with_statistics())), torch.arange(24, 34))
    with pytest.raises(ValueError, match=f"different weights.*'{changed}'"):
        block + co.GGN(there)


def test_tasks_that_share_a_body_and_have_heads_of_their_own():
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()

    class Task(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.body, self.name = body, name
            self.add_module(name, nn.Linear(4, 2).double())

        def forward(self, x):
            return getattr(self, self.name)(self.body(x))

    one, other = (co.GGN(linearize(Task(name), "body.*")) for name in ("sky", "sea"))
    torch.testing.assert_close((one + other).to_dense(), one.to_dense() + other.to_dense(), rtol=1e-10, atol=1e-10)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="sea"):  # another head of the same name
        one + other + co.GGN(linearize(Task("sea"), "body.*"))


def test_what_carries_no_mark_combines_with_anything():
    lin = linearized()
    G, D = co.GGN(lin), lin.num_parameters
    for other in (torch.eye(D).double(), co.linalg.Diagonal(torch.ones(D).double())):
        expected = G.to_dense() + torch.eye(D)
        torch.testing.assert_close((G + other).to_dense(), expected, rtol=1e-10, atol=1e-10)
