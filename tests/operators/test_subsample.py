"""Operators of a random part of the data: unbiased, and refused by name where they cannot be made."""

from itertools import combinations

import pytest
import torch
from torch import nn

import curvops as co

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", params=["plain", "weighted", "sequences"])
def lin(request):
    """Five points in batches of two, with weights, or as sequences of three."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, 3, dtype=DOUBLE) if request.param == "sequences" else torch.randn(5, 3, dtype=DOUBLE)
    y = (x[..., 0] > 0).long()
    data = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    if request.param == "weighted":
        data = [(*item, torch.rand(len(item[0]), dtype=DOUBLE) + 0.5) for item in data]
    return co.linearize(model, data, "classification", weights=request.param == "weighted")


@pytest.mark.parametrize("m", [1, 2, 5])
def test_the_mean_over_all_subsets_is_the_full_operator(lin, m):
    parts = [co.subsample(lin, torch.tensor(subset)) for subset in combinations(range(5), m)]
    for make in (lambda lin: co.GGN(lin).to_dense(), lambda lin: lin.gradient(), lambda lin: lin.log_likelihood()):
        torch.testing.assert_close(torch.stack([make(part) for part in parts]).mean(0), make(lin), **TIGHT)
    assert all(part.num_data == m for part in parts)


def test_a_draw_is_without_replacement_and_given_by_its_generator(lin):
    one, again, other = (co.subsample(lin, 3, generator(seed)) for seed in (0, 0, 1))
    torch.testing.assert_close(one.gradient(), again.gradient(), rtol=0, atol=0)
    assert not torch.equal(one.gradient(), other.gradient())
    assert one.num_data == 3 and one.memory_budget == lin.memory_budget
    v = torch.randn(lin.num_parameters, dtype=DOUBLE, generator=generator())
    torch.testing.assert_close(co.GGN(one) @ v, co.GGN(one).to_dense() @ v, **TIGHT)


def test_it_predicts_as_the_whole_network_does(lin):
    x = next(iter(lin.data)).inputs
    torch.testing.assert_close(co.subsample(lin, 2, generator()).predict(x), lin.predict(x), **TIGHT)


WRONG = {
    "none": (0, ValueError, "between 1 and the 5"),
    "too many": (6, ValueError, "between 1 and the 5"),
    "a share": (0.5, TypeError, "whole number"),
    "a truth": (True, TypeError, "whole number"),
    "out of range": (torch.tensor([5]), ValueError, "out of range"),
    "twice": (torch.tensor([1, 1]), ValueError, "twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_sizes_are_refused_by_name(lin, case):
    given, error, match = WRONG[case]
    with pytest.raises(error, match=match):
        co.subsample(lin, given)


def test_it_takes_a_linearisation(lin):
    with pytest.raises(TypeError, match="takes a linearisation"):
        co.subsample(co.GGN(lin), 2)
    with pytest.raises(TypeError, match="manual_seed"):
        co.subsample(lin, 2, 0)
