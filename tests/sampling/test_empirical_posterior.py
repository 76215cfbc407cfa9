"""Posteriors known by draws: moments, labels and scores by hand, through the network and through its linearisation."""

import math

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from tests.posterior.trained import problem
from tests.zoo import ZOO, call, parameters_of

POINTS = torch.randn(7, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def drawn(model: nn.Module, chains: int = 2, each: int = 6, spread: float = 0.1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + spread * torch.randn(chains, each, *p.shape, generator=generator, dtype=p.dtype)
        for name, p in model.named_parameters()
    }


def at_each(model: nn.Module, draws: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network at each draw, one by one."""
    flat = {name: tensor.flatten(0, 1) for name, tensor in draws.items()}
    count = len(next(iter(flat.values())))
    return torch.stack(
        [torch.func.functional_call(model, {n: t[i] for n, t in flat.items()}, x) for i in range(count)]
    ).detach()


def setting(likelihood: str = "regression", **given):
    model, x, y = problem(likelihood, steps=20)
    lin = co.linearize(model, (x, y), likelihood if likelihood == "classification" else co.likelihoods.Gaussian(0.3))
    draws = drawn(model, **given)
    return model, lin, draws, (x, y)


def outputs_of(lin, model, draws, through: str, x: Tensor = POINTS) -> Tensor:
    if through == "network":
        return at_each(model, draws, x)
    J = lin.jacobian(x).to_dense()
    steps = torch.cat([draws[name].flatten(2).flatten(0, 1) for name in draws], 1) - lin.theta
    return lin.predict(x) + (steps @ J.mT).unflatten(1, (len(x), -1))


@pytest.mark.parametrize("through", ["network", "linearization"])
def test_moments_are_those_of_the_outputs_at_the_draws(through: str) -> None:
    model, lin, draws, _ = setting()
    post = co.sampling.empirical(lin, draws, through)
    f = outputs_of(lin, model, draws, through)
    predicted, joint = post.predict(POINTS), post.predict(POINTS, joint=True)
    assert torch.allclose(predicted.mean, f.mean(0), atol=1e-12)
    gap = f - f.mean(0)
    blocks = torch.einsum("kni,knj->nij", gap, gap) / len(f)
    assert torch.allclose(predicted.covariance_matrix, blocks, atol=1e-12)
    flat = gap.flatten(1)
    assert torch.allclose(joint.covariance_matrix, flat.mT @ flat / len(f), atol=1e-12)
    noisy = post.predict(POINTS, noise=True)
    assert torch.allclose(noisy.variance, predicted.variance + 0.3, atol=1e-12)
    assert not isinstance(predicted, co.posterior.SampledNormal)  # whose interval would take the draws for independent
    assert torch.allclose(post.mean, post.draws.mean(0))


def test_the_order_and_the_form_of_the_draws_do_not_matter() -> None:
    _, lin, draws, _ = setting()
    backwards = dict(reversed(draws.items()))
    vectors = torch.cat([draws[name].flatten(2) for name in lin.model.selection.names], 2)
    first, *others = [co.sampling.empirical(lin, given) for given in (draws, backwards, vectors)]
    assert all(torch.equal(first.draws, other.draws) for other in others)
    assert first.chains == 2 and first.draws.shape == (12, lin.num_parameters)


@pytest.mark.parametrize("through", ["network", "linearization"])
def test_probabilities_average_the_softmax_at_the_draws(through: str) -> None:
    model, lin, draws, (x, y) = setting("classification")
    post = co.sampling.empirical(lin, draws, through)
    p = outputs_of(lin, model, draws, through).softmax(-1)
    for link in (None, "mc", "network")[: 3 if through == "network" else 2]:
        assert torch.allclose(post.probabilities(POINTS, link), p.mean(0), atol=1e-12)
    normal = post.predict(POINTS)
    scaled = normal.mean / (1 + math.pi / 8 * normal.variance).sqrt()
    assert torch.allclose(post.probabilities(POINTS, "probit"), scaled.softmax(-1), atol=1e-12)
    parts = post.uncertainty(POINTS)
    mean = p.mean(0)
    assert torch.allclose(parts.total, -(mean * mean.log()).sum(-1), atol=1e-12)
    assert torch.allclose(parts.aleatoric, -(p * p.log()).sum(-1).mean(0), atol=1e-12)
    scores = post.log_likelihood(x, y)
    log_p = outputs_of(lin, model, draws, through, x).log_softmax(-1)[:, torch.arange(len(y)), y]
    assert torch.allclose(scores.value, log_p.logsumexp(0) - math.log(12), atol=1e-12)
    assert post.log_likelihood(x, y, joint=True).value.shape == (15,)


def test_the_score_of_numbers_is_that_of_the_mixture_and_not_of_a_normal() -> None:
    model, lin, draws, (x, y) = setting(spread=0.5)
    post = co.sampling.empirical(lin, draws)
    each = torch.distributions.Normal(at_each(model, draws, x), 0.3**0.5).log_prob(y).sum(-1)
    assert torch.allclose(post.log_likelihood(x, y).value, each.logsumexp(0) - math.log(12), atol=1e-10)


@pytest.mark.parametrize(
    ("likelihood", "moments"),
    [
        (co.likelihoods.Gaussian(0.3), lambda f: (f, torch.full_like(f, 0.3))),
        (co.likelihoods.HeteroscedasticGaussian(), lambda f: (f[..., :1], f[..., 1:].exp())),
        (co.likelihoods.Poisson(), lambda f: (f.exp(), f.exp())),
    ],
    ids=["gaussian", "heteroscedastic", "poisson"],
)
def test_uncertainty_of_numbers_is_the_law_of_total_variance_over_the_draws(likelihood, moments) -> None:
    model, x, y = problem("regression", outputs=2, steps=5)
    y = y[:, :1] if isinstance(likelihood, co.likelihoods.HeteroscedasticGaussian) else y
    y = y.abs().round() if isinstance(likelihood, co.likelihoods.Poisson) else y
    draws = drawn(model, spread=0.4)
    post = co.sampling.empirical(co.linearize(model, (x, y), likelihood), draws)
    means, noise = moments(at_each(model, draws, POINTS))
    parts = post.uncertainty(POINTS)
    assert torch.allclose(parts.mean, means.mean(0), atol=1e-12)
    assert torch.allclose(parts.aleatoric, noise.mean(0), atol=1e-12)
    assert torch.allclose(parts.epistemic, means.var(0, correction=0), atol=1e-12)
    assert parts.stderr is not None and bool((parts.stderr > 0).all())


def test_errors_of_means_know_that_draws_of_a_chain_depend_on_each_other() -> None:
    """Where each draw comes ten times, a chain is worth a tenth of its draws: √10 times the error."""
    _, lin, draws, _ = setting("classification", chains=1, each=40)
    slow = {name: tensor.repeat_interleave(10, 1) for name, tensor in draws.items()}
    fast, repeated = (co.sampling.empirical(lin, given).uncertainty(POINTS).stderr for given in (draws, slow))
    iid = co.sampling.empirical(lin, slow)
    believed = iid.uncertainty(POINTS, samples=iid.draws).stderr
    assert bool((repeated > 2 * believed).all()) and bool((repeated / fast > 0.5).all())
    apart = {name: torch.stack([t[0, :1].expand_as(t[0]), t[0, 1:2].expand_as(t[0])]) for name, t in draws.items()}
    stuck = co.sampling.empirical(lin, apart)
    ratio = stuck.uncertainty(POINTS).stderr / stuck.uncertainty(POINTS, samples=stuck.draws).stderr
    assert bool((ratio > 5).all())  # 80 draws of two chains that never moved are two draws, and 40 times the variance


def test_functions_and_samples_are_of_the_empirical_law() -> None:
    _, lin, draws, _ = setting()
    post = co.sampling.empirical(lin, draws)
    chosen = post.sample(50, torch.Generator().manual_seed(0))
    assert all(any(torch.equal(row, draw) for draw in post.draws) for row in chosen)
    f = post.functions(POINTS, 50, torch.Generator().manual_seed(0))
    assert torch.allclose(f, torch.stack([lin.predict(POINTS, row) for row in chosen]), atol=1e-12)
    few = post.predict(POINTS, samples=chosen)
    assert isinstance(few, co.posterior.SampledNormal) and few.draws == 50
    assert torch.allclose(few.mean, f.mean(0), atol=1e-12)


def test_gradients_in_the_inputs() -> None:
    _, lin, draws, _ = setting()
    for through in ("network", "linearization"):
        post = co.sampling.empirical(lin, draws, through)
        x = POINTS[:2].clone().requires_grad_()
        (found,) = torch.autograd.grad(post.predict(x).variance.sum(), x)
        h = 1e-6
        ahead, behind = (post.predict(POINTS[:2] + s * h * torch.eye(4)[0].double()).variance.sum() for s in (1, -1))
        moved = (ahead - behind) / (2 * h)
        assert float(found[:, 0].sum()) == pytest.approx(float(moved), rel=1e-5)


@pytest.mark.parametrize(
    "name", ["mlp", "resnet_batchnorm", "lstm", "inplace_add", "setitem", "numpy_backward", "function_pair"]
)
def test_many_draws_in_one_pass_or_one_by_one_give_one_answer(name: str) -> None:
    model, inputs = ZOO[name].build()
    outputs = call(model, inputs)
    lin = co.linearize(model, (inputs, torch.zeros_like(outputs)), co.likelihoods.Gaussian(noise=1.0))
    vectors = lin.theta + 0.1 * torch.randn(2, 3, lin.num_parameters, dtype=torch.float64)
    post = co.sampling.empirical(lin, vectors)
    expected = torch.stack([lin.predict(inputs, row).reshape(-1, outputs.shape[-1]) for row in post.draws])
    assert torch.allclose(post.functions(inputs, 6, samples=post.draws), expected, atol=1e-10)
    assert set(parameters_of(model)) == set(lin.model.selection.names)


@pytest.mark.usefixtures("annotations_unchecked")
def test_one_draw_has_no_spread() -> None:
    _, lin, draws, _ = setting()
    with pytest.raises(ValueError, match="one draw has no spread"):
        co.sampling.empirical(lin, {name: t[:1, :1] for name, t in draws.items()})
    chains = co.sampling.empirical(lin, {name: t[:, :1] for name, t in draws.items()})  # the last state of each
    assert bool(chains.uncertainty(POINTS).stderr.isfinite().all())
