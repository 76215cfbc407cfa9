"""One seed gives one draw, however the data are batched."""

import functools
import itertools

import pytest
import torch

import curvops as co
from tests.randomness import perceptron

CURVATURES = {
    "GGN": co.GGN,
    "MC GGN": lambda lin: co.GGN(lin, mc_samples=2, generator=torch.Generator().manual_seed(3)),
    "EmpiricalFisher": co.EmpiricalFisher,
    "half a GGN + KFAC": lambda lin: 0.5 * co.GGN(lin) + co.KFAC(lin),
    "MC KFAC": lambda lin: co.KFAC(lin, fisher="mc", generator=torch.Generator().manual_seed(3)),
    "MC diagonal": lambda lin: co.DiagonalGGN(lin, fisher="mc", generator=torch.Generator().manual_seed(3)),
}


@functools.cache
def linearisations(likelihood="classification"):
    model = perceptron(4, 5, 3)
    x = torch.randn(5, 4).double()
    y = torch.arange(5) % 3 if likelihood == "classification" else torch.randn(5, 3).double()
    batched = ([(x[i : i + size], y[i : i + size]) for i in range(0, 5, size)] for size in (1, 3, 5))
    return [co.linearize(model, data, likelihood) for data in batched]


def assert_alike(draws):
    assert len(draws) == 3
    for each in draws[1:]:
        torch.testing.assert_close(each, draws[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", CURVATURES)
def test_batches_do_not_change_a_draw_of_a_curvature(name):
    made = [CURVATURES[name](lin) for lin in linearisations()]
    assert_alike([co.linalg.draw(op, 4, torch.Generator().manual_seed(1)) for op in made])


@pytest.mark.parametrize(
    ("name", "method"),
    [*itertools.product(CURVATURES, ["cg", None]), *itertools.product(["GGN", "MC GGN", "EmpiricalFisher"], ["dual"])],
)
def test_batches_do_not_change_a_draw_of_a_posterior(name, method):
    posts = [co.laplace(lin, CURVATURES[name](lin), 0.5, check_mode=False) for lin in linearisations()]
    options = {} if method is None else {"method": method, "rtol": 1e-11}
    assert_alike([post.deviations(4, generator=torch.Generator().manual_seed(1), **options).draws for post in posts])


def test_batches_do_not_change_samples_under_an_earlier_posterior():
    """Its GGN is part of the prior, whose noise is that of points, too."""
    posts = [
        co.laplace(earlier, co.GGN, 0.5, check_mode=False).update(lin, check_mode=False)
        for earlier, lin in zip(linearisations("regression"), linearisations())
    ]
    assert_alike([post.sample(3, torch.Generator().manual_seed(1)) for post in posts])
