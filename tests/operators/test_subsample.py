"""Operators of a random part of the data are unbiased.

Tests `linearization.py`.
"""

from itertools import combinations

import pytest
import torch
from torch import nn

import curvops as co
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module", params=["plain", "weighted", "sequences"])
def lin(request):
    """Five points in batches of two, with weights, or as sequences of three."""
    model = perceptron(3, 4, 2)
    x = torch.randn(5, 3, 3, dtype=DOUBLE) if request.param == "sequences" else torch.randn(5, 3, dtype=DOUBLE)
    y = (x[..., 0] > 0).long()
    data = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    if request.param == "weighted":
        data = [(*item, torch.rand(len(item[0]), dtype=DOUBLE) + 0.5) for item in data]
    return co.linearize(model, data, "classification", weights=request.param == "weighted")


def _factor(side, **options):
    """One factor of each layer of KFAC: their product is no sum over points."""
    return lambda lin: torch.cat([getattr(block, side).flatten() for block in co.KFAC(lin, **options).blocks])


SUMS = {
    "GGN": lambda lin: co.GGN(lin).to_dense(),
    "Hessian": lambda lin: co.Hessian(lin).to_dense(),
    "EmpiricalFisher": lambda lin: co.EmpiricalFisher(lin).to_dense(),
    "EmpiricalFisher per token": lambda lin: co.EmpiricalFisher(lin, per_token=True).to_dense(),
    "its diagonal": lambda lin: co.EmpiricalFisher(lin).diagonal(),
    "BlockDiagonal": lambda lin: co.BlockDiagonal(lin).to_dense(),
    "Subnetwork": lambda lin: co.Subnetwork(co.EmpiricalFisher(lin), torch.arange(5)).to_dense(),
    "DiagonalGGN": lambda lin: co.DiagonalGGN(lin).entries,
    "DiagonalGGN empirical": lambda lin: co.DiagonalGGN(lin, fisher="empirical").entries,
    "KFAC": _factor("left"),
    "KFAC empirical": _factor("left", fisher="empirical"),
    "KFAC empirical, separate": _factor("left", fisher="empirical", bias="separate", sharing="reduce"),
    "gradient": lambda lin: lin.gradient(),
    "gradients": lambda lin: lin.gradients().mT @ torch.ones(lin.gradients().shape[0], dtype=DOUBLE),
    "log-likelihood": lambda lin: lin.log_likelihood(),
}
DRAWN = {
    "GGN drawn": lambda lin: co.GGN(lin, mc_samples=2, generator=seeded()).to_dense(),
    "DiagonalGGN drawn": lambda lin: co.DiagonalGGN(lin, fisher="mc", generator=seeded()).entries,
    "KFAC drawn": lambda lin: co.KFAC(lin, fisher="mc", generator=seeded()).to_dense(),
    "EKFAC drawn": lambda lin: co.EKFAC(lin, fisher="mc", generator=seeded()).to_dense(),
}


def test_the_mean_over_all_subsets_is_the_full_quantity(lin):
    """Of empirical Fishers a weight was squared: with N/m for it they were N/m too large."""
    parts = [co.subsample(lin, torch.tensor(subset)) for subset in combinations(range(5), 4)]
    for name, make in SUMS.items():
        found = torch.stack([make(part) for part in parts]).mean(0)
        assert torch.allclose(found, make(lin), rtol=1e-10, atol=1e-12), name
    assert all(part.num_data == 4 for part in parts)


@pytest.mark.parametrize("name", DRAWN)
def test_sums_over_drawn_targets_are_linear_in_the_weights(name):
    """Drawn targets are the same from equal seeds."""
    model = perceptron(3, 4, 2)
    x, y, w = torch.randn(5, 3, dtype=DOUBLE), torch.arange(5) % 2, torch.tensor([1, 2, 1, 0, 2]).double()
    once, thrice = (
        DRAWN[name](co.linearize(model, (x, y, factor * w), "classification", weights=True)) for factor in (1, 3)
    )
    torch.testing.assert_close(thrice, 3 * once, **TIGHT)


def test_a_draw_is_without_replacement_and_given_by_its_generator(lin):
    one, again, other = (co.subsample(lin, 3, seeded(seed)) for seed in (0, 0, 1))
    torch.testing.assert_close(one.gradient(), again.gradient(), rtol=0, atol=0)
    assert not torch.equal(one.gradient(), other.gradient())
    assert one.num_data == 3 and one.memory_budget == lin.memory_budget
    v = torch.randn(lin.num_parameters, dtype=DOUBLE, generator=seeded())
    torch.testing.assert_close(co.GGN(one) @ v, co.GGN(one).to_dense() @ v, **TIGHT)


def test_one_point_and_all_points_are_subsets_too(lin):
    """Without a generator, one of the five; of all five the sums are the full ones."""
    singles = [co.subsample(lin, torch.tensor([i])).gradient() for i in range(5)]
    one = co.subsample(lin, 1)
    assert one.num_data == 1 and any(torch.allclose(one.gradient(), each, rtol=1e-12) for each in singles)
    torch.testing.assert_close(co.subsample(lin, 5, seeded()).gradient(), lin.gradient(), **TIGHT)


def test_it_predicts_as_the_whole_network_does(lin):
    x = next(iter(lin.data)).inputs
    torch.testing.assert_close(co.subsample(lin, 2, seeded()).predict(x), lin.predict(x), **TIGHT)


def test_points_of_many_batches_are_in_few():
    """As many as the sizes of the data require: two of four points, not eight of one."""
    passes = []

    class Counted(nn.Linear):
        def forward(self, x):
            passes.append(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    model, x = Counted(3, 2).double(), torch.randn(40, 3, dtype=DOUBLE)
    lin = co.linearize(model, [(x[i : i + 4], x[i : i + 4, 0].gt(0).long()) for i in range(0, 40, 4)], "classification")
    few = co.subsample(lin, torch.arange(0, 40, 5))
    passes.clear()
    dense = co.GGN(few).to_dense()
    assert max(passes) == 4
    whole = co.linearize(model, (x[::5], x[::5, 0].gt(0).long(), torch.full((8,), 5.0)), "classification", weights=True)
    torch.testing.assert_close(dense, co.GGN(whole).to_dense(), **TIGHT)
