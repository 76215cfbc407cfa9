"""Gradients in the test inputs: of every structure and of draws, against finite differences; others are refused.

Tests `input_graphs.py`.
"""

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import Counted
from tests.randomness import seeded
from tests.zoo_modules import Applied

DOUBLE = torch.float64


def network(outputs=2):
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, outputs)
    return nn.Sequential(*layers).double()


DATA = torch.randn(12, 3, dtype=DOUBLE, generator=seeded())
X = torch.randn(2, 3, dtype=DOUBLE, generator=seeded())
FEW = torch.arange(0, 54, 4)
CASES = {
    "GGN": ({}, co.GGN),
    "GGN, no layer rules": ({"engine": "autodiff"}, co.GGN),
    "KFAC": ({}, co.KFAC),
    "EKFAC": ({}, co.EKFAC),
    "DiagonalGGN": ({}, co.DiagonalGGN),
    "BlockDiagonal": ({}, co.BlockDiagonal),
    "low rank": ({}, lambda lin: co.low_rank(co.GGN(lin), 6, generator=seeded())),
    "last layer, GGN": ({"parameters": "last_layer"}, co.GGN),
    "last layer, KFAC": ({"parameters": "last_layer"}, co.KFAC),
    "last layer, diagonal": ({"parameters": "last_layer"}, co.DiagonalGGN),
    "last layer, low rank": (
        {"parameters": "last_layer"},
        lambda lin: co.low_rank(co.GGN(lin), 6, generator=seeded()),
    ),
    "subnetwork": ({"parameters": FEW}, co.GGN),
    "dense subnetwork": ({"parameters": FEW}, lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(len(FEW)))),
}


def posterior(options=None, curvature=co.GGN, likelihood=None, model=None, prior=1.3, outputs=2):
    likelihood = likelihood or co.likelihoods.Gaussian(0.5)
    y = (
        DATA.repeat(1, outputs)[:, :outputs].sin()
        if not isinstance(likelihood, co.likelihoods.Categorical)
        else (DATA[:, 0] > 0).long()
    )
    lin = co.linearize(model or network(outputs), (DATA, y), likelihood, **(options or {}))
    return co.laplace(lin, curvature(lin), prior, check_mode=False)


def checks(function, x=X):
    """The value is that without a gradient, the gradient along random directions that of finite differences."""
    leaf = x.clone().requires_grad_()
    with torch.no_grad():
        expected = function(leaf)
    torch.testing.assert_close(function(leaf).detach(), expected, rtol=1e-8, atol=1e-10)
    assert torch.autograd.gradcheck(function, (leaf,), rtol=1e-5, atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("case", CASES)
def test_means_and_covariances_of_every_structure(case):
    post = posterior(*CASES[case])
    checks(lambda x: post.predict(x).mean)
    checks(lambda x: post.predict(x).covariance_matrix)
    checks(lambda x: post.predict(x, joint=True).covariance_matrix, X[:1])


def test_variances_of_many_outputs_have_it_without_blocks():
    """Of 65 outputs, each with a weight of its own in one sum."""
    weights = torch.linspace(-1, 2, 65, dtype=DOUBLE)
    for case in ("low rank", "last layer, KFAC", "subnetwork"):
        post = posterior(*CASES[case], outputs=65)
        checks(lambda x, post=post: post.predict(x).variance @ weights, X[:1])


@pytest.mark.parametrize("case", ["GGN", "GGN, no layer rules", "last layer, GGN", "subnetwork"])
def test_draws(case):
    """Of the weights, more and fewer than outputs; the draws may have a gradient, too."""
    post = posterior(*CASES[case])
    draws = post.sample(3, seeded())
    checks(lambda x: post.predict(x, samples=draws).variance)
    checks(lambda x: post.functions(x, 1, samples=draws[:1]))
    both = draws[:1].clone().requires_grad_(), X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z, x: post.predict(x, samples=z).covariance_matrix, both, fast_mode=True)


@pytest.mark.parametrize("link", ["probit", "bridge", "mc", "network"])
def test_probabilities_by_each_link(link):
    post = posterior(likelihood=co.likelihoods.Categorical())
    draws = post.sample(2, seeded()) if link == "network" else None
    checks(lambda x: post.probabilities(x, link, samples=draws, generator=seeded()))


def test_products_with_the_jacobian():
    lin = posterior().lin
    V, U = torch.randn(54, 3, dtype=DOUBLE, generator=seeded()), torch.randn(4, 3, dtype=DOUBLE, generator=seeded())
    checks(lambda x: lin.jacobian(x, differentiable=True) @ V[:, :1])
    checks(lambda x: V[:, :1].mT @ (lin.jacobian(x, differentiable=True).mT @ U[:, :2]))
    plain = lin.jacobian(X, differentiable=True) @ V
    assert not plain.requires_grad
    x = X.clone().requires_grad_()
    (found,) = torch.autograd.grad((lin.jacobian(x, differentiable=True).to(torch.float32) @ V.float()).sum(), x)
    (expected,) = torch.autograd.grad((lin.jacobian(x, differentiable=True) @ V).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Tempered(nn.Module):
    """A layer with one number, which no layer rule serves, for all of its outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.layer(x).tanh()


@pytest.mark.parametrize("draws", [1, 8])
def test_a_parameter_that_is_a_number(draws):
    post = posterior(model=Tempered().double())
    V = torch.randn(9, draws, dtype=DOUBLE, generator=seeded())
    checks(lambda x: post.lin.jacobian(x, differentiable=True) @ V)
    checks(lambda x: post.predict(x, samples=post.mean + V.mT).mean)
    checks(lambda x: post.predict(x).variance)


def test_a_curvature_is_solved_with_once():
    """Forward; the backward pass differentiates J alone."""
    post = posterior(curvature=lambda lin: Counted(co.GGN(lin).to_dense()))
    x = X.clone().requires_grad_()
    variance = post.predict(x).variance
    before = post.curvature.products
    variance.sum().backward()
    assert before == post.curvature.products > 0 and bool((x.grad != 0).any())


def test_the_weights_get_none_and_later_training_changes_nothing():
    model = network()
    post, x = posterior(model=model), X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(post.predict(x).variance.sum(), x)
    variance = post.predict(x).variance.sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    variance.backward()
    torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


class Pair(nn.Module):
    """Two real inputs and an index, by position or by name."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, a, b, index):
        return self.head(torch.tanh(a * b + self.table(index)))


@pytest.mark.parametrize("as_mapping", [False, True])
def test_of_several_inputs_those_get_it_that_ask(as_mapping):
    """Integers have none, and a second one without requires_grad stays a constant."""
    model = Pair().double()
    index = torch.arange(12) % 5

    def given(a, b, i):
        return {"a": a, "b": b, "index": i} if as_mapping else (a, b, i)

    lin = co.linearize(model, [(given(DATA, DATA.cos(), index), DATA[:, :2])], co.likelihoods.Gaussian(0.5))
    for curvature in (co.GGN, co.DiagonalGGN):
        post = co.laplace(lin, curvature, 1.3, check_mode=False)
        checks(lambda a, post=post: post.predict(given(a, X.sin(), index[:2])).covariance_matrix)
        pair = X.clone().requires_grad_(), X.sin().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda a, b, post=post: post.predict(given(a, b, index[:2])).variance,
            pair,
            rtol=1e-5,
            atol=1e-7,
            fast_mode=True,
        )


class Squared(torch.autograd.Function):
    """Its backward leaves autograd: right once, wrong twice."""

    @staticmethod
    def forward(ctx, a):
        ctx.factor = 2 * a.detach()
        return a.square()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.factor * gradient


def around(function):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), Applied(function), nn.Linear(4, 2)).double()


def test_what_cannot_have_it_is_refused_by_name():
    x = X.clone().requires_grad_()
    with pytest.raises(ValueError, match=r"second derivatives of .*Squared.*detach"):
        posterior(model=around(Squared.apply)).predict(x)
    with pytest.raises(ValueError, match=r"cuts it off.*detach"):
        posterior({"parameters": "2.*"}, model=around(torch.detach)).predict(x)
    prior = torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    with pytest.raises(ValueError, match="detach one"):
        posterior(prior=prior).predict(x)
    lin = posterior().lin
    with pytest.raises(ValueError, match="pass x"):
        lin.jacobian(differentiable=True)
    with pytest.raises(RuntimeError, match="first derivatives.*create_graph"):
        torch.autograd.grad(posterior().predict(x).variance.sum(), x, create_graph=True)
    with torch.no_grad():
        assert posterior(model=around(Squared.apply)).predict(x).variance.isfinite().all()
