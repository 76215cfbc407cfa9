"""The log posterior that samplers take: its scale, its gradient against Laplace's own, batches and selections.

Tests `transition.py`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.sampling.gaussians import seeded
from tests.sampling.readouts import Halting

S = co.sampling


def problem(outputs: int = 3) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    X = torch.randn(11, 2, dtype=torch.float64, generator=seeded(1))
    return model, X, torch.randint(0, outputs, (11,), generator=seeded(2))


def priors(lin: Any, model: nn.Module, X: Tensor, y: Tensor) -> dict[str, Any]:
    D = lin.num_parameters
    earlier = co.laplace(co.linearize(model, (X + 1, y), "classification"), co.KFAC, 1.0, check_mode=False)
    return {
        "number": 0.7,
        "vector": torch.linspace(0.5, 2, D, dtype=torch.float64),
        "per layer": {"0.*": 1.5, "2.*": 0.5},
        "operator": co.KFAC(lin).add_diagonal(0.3),
        "posterior": earlier,
    }


@pytest.mark.parametrize(
    ("prior", "by_lin"),
    [(prior, True) for prior in ("number", "vector", "per layer", "operator", "posterior")] + [("vector", False)],
)
def test_value_and_gradient_are_those_of_the_posterior_over_n(prior: str, by_lin: bool) -> None:
    model, X, y = problem()
    lin = co.linearize(model, (X, y), "classification")
    A = priors(lin, model, X, y)[prior]
    mean: Any = 0.0 if prior == "posterior" else {"*": 0.2}
    if by_lin:
        f = S.log_posterior(lin, prior_precision=A, prior_mean=mean)
    else:
        f = S.log_posterior(model, "classification", prior_precision=A, prior_mean=mean, data_size=11)
    post = co.laplace(lin, co.GGN, A, mean, check_mode=False)
    params = {name: (value + 0.1).requires_grad_() for name, value in f.params.items()}
    value = f(params, (X, y))
    theta = torch.cat([p.detach().flatten() for p in params.values()])
    torch.nn.utils.vector_to_parameters(theta, model.parameters())
    at = co.linearize(model, (X, y), "classification")
    wanted = (float(at.log_likelihood()) - 0.5 * float(post.prior.quadratic(theta))) / 11
    assert float(value.detach()) == pytest.approx(wanted, rel=1e-12)
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(params.values()))])
    assert torch.allclose(gradient, -(at.gradient() + post.prior.gradient(theta)) / 11, rtol=1e-10, atol=1e-13)


def test_the_mean_over_equal_batches_is_the_whole() -> None:
    model, X, y = problem()
    f = S.log_posterior(model, "classification", data_size=11)
    parts = [f(f.params, (X[i : i + 1], y[i : i + 1])) for i in range(11)]
    assert float(torch.stack(parts).mean()) == pytest.approx(float(f(f.params, (X, y))), rel=1e-12)


def test_it_is_a_snapshot_and_gives_copies() -> None:
    model, X, y = problem()
    f = S.log_posterior(model, "classification", data_size=11, parameters="2.*")
    before = f(f.params, (X, y))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    f.params["2.weight"].zero_()
    assert list(f.params) == ["2.weight", "2.bias"]
    assert torch.equal(before, f(f.params, (X, y)))
    lin = f.linearize(f.model.theta, (X, y))
    gradient = lin.gradient()
    X.zero_()
    assert torch.equal(gradient, lin.gradient())


def test_a_subnetwork_is_one_tensor() -> None:
    model, X, y = problem()
    index = torch.tensor([0, 5, 20])
    lin = co.linearize(model, (X, y), "classification", index)
    f = S.log_posterior(lin)
    assert list(f.params) == ["subnetwork"] and torch.equal(f.params["subnetwork"], lin.theta)
    chain = S.run(S.baoa(f, 0.1), f.params, [(X, y)], steps=3, generator=seeded(0))
    assert chain.theta.shape == (1, 3, 3)


def test_sequences_weights_and_mappings() -> None:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7)).double()
    tokens = torch.randint(0, 7, (5, 4), generator=seeded(0))
    f = S.log_posterior(model, co.likelihoods.Categorical(), data_size=5)
    lin = co.linearize(model, (tokens, tokens), co.likelihoods.Categorical())
    assert float(f.log_likelihood(f.params, (tokens, tokens))) == pytest.approx(float(lin.log_likelihood()) / 5)
    w = torch.linspace(0, 2, 5, dtype=torch.float64)
    weighted = S.log_posterior(model, co.likelihoods.Categorical(), data_size=5, weights=True)
    known = co.linearize(model, (tokens, tokens, w), co.likelihoods.Categorical(), weights=True)
    found = weighted.log_likelihood(f.params, (tokens, tokens, w))
    assert float(found) == pytest.approx(float(known.log_likelihood()) / 5)
    named = {"inputs": tokens, "targets": tokens}
    assert torch.equal(f(f.params, named), f(f.params, (tokens, tokens)))


def test_chains_of_a_network_by_vmap_are_those_of_a_loop() -> None:
    model, X, y = problem()
    f = S.log_posterior(model, "classification", data_size=11)
    found = []
    for vectorized in (True, False):
        sampler = S.chains(S.sghmc(f, 0.1), 4, vectorized=vectorized)
        found.append(S.run(sampler, f.params, [(X, y)], steps=5, generator=seeded(0)).theta)
    assert torch.allclose(found[0], found[1], rtol=1e-11) and not torch.equal(found[0][0], found[0][1])


def test_a_network_without_vmap_falls_back_to_the_loop() -> None:
    X, y = torch.randn(11, 3), torch.arange(11) % 2
    f = S.log_posterior(Halting(), "classification", data_size=11)
    sampler = S.sgld(f, 0.1)
    assert sampler.data_size == S.sgld(f, 0.1, data_size=11).data_size == 11
    with pytest.warns(S.NotVectorizedWarning, match="one by one"):
        found = S.run(S.chains(sampler, 3), f.params, [(X, y)], steps=4, generator=seeded(0))
    loop = S.run(S.chains(sampler, 3, vectorized=False), f.params, [(X, y)], steps=4, generator=seeded(0))
    assert torch.equal(found.theta, loop.theta)
    with pytest.raises(RuntimeError, match="vmap"):
        S.run(S.chains(sampler, 3, vectorized=True), f.params, [(X, y)], steps=1)


def test_batch_statistics_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        S.log_posterior(model, "classification", data_size=11)

    def value(params: Any, batch: Any) -> Tensor:
        return -torch.func.functional_call(model, params, (batch[0],)).square().mean()

    params = {name: p.detach() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="batch statistics"):
        S.run(S.chains(S.sgld(value, 0.1, data_size=11), 2), params, [(problem()[1], None)], steps=1)
    S.log_posterior(model.eval(), "classification", data_size=11)


def test_steps_follow_whatever_else_changes() -> None:
    """A noise that is tuned, and a user's layer: each step is computed anew."""

    class Moody(nn.Module):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * x

    noise = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    f = S.log_posterior(nn.Sequential(nn.Linear(2, 3).double(), Moody()), co.likelihoods.Gaussian(noise), data_size=7)
    density = S.sgld(f, 0.1).density
    state = S.sgld(f, 0.1).init(f.params, seeded(0))
    batch = torch.randn(7, 2, generator=seeded(1)).double(), torch.randn(7, 3, generator=seeded(2)).double()
    for _ in range(3):
        with torch.no_grad():
            noise.mul_(2)
        Moody.factor *= 2
        value, gradient = density.gradient(state.theta, state.structure, batch)
        params = {name: p.requires_grad_() for name, p in f.params.items()}
        wanted = f(params, batch)
        slopes = torch.autograd.grad(wanted, list(params.values()))
        assert torch.allclose(value, wanted.detach(), rtol=1e-12)
        assert torch.allclose(gradient, torch.cat([g.flatten() for g in slopes]), rtol=1e-10, atol=1e-12)
