"""The hyperparameters of largest evidence: a dense gradient vanishes there, whatever was tuned and however."""

import math

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import problem

DOUBLE = torch.float64
CURVATURES = {"GGN": co.GGN, "KFAC": co.KFAC, "diagonal": co.DiagonalGGN}


@pytest.fixture(scope="module")
def network():
    return problem("regression", n=25, outputs=2)


def posterior(network, curvature=co.GGN, prior=1.0, noise=0.3, **options):
    model, x, y = network
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise), **options)
    return co.laplace(lin, curvature, prior, check_mode=False)


def dense_evidence(network, curvature, log_precision, log_noise):
    """With autograd in the logarithms: each entry of the diagonal prior, and the noise."""
    model, x, y = network
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(1.0))
    G = CURVATURES[curvature](lin).to_dense() / log_noise.exp()
    a = log_precision.exp()
    squares = (lin.outputs() - y).square().sum()
    fit = -0.5 * (y.numel() * (math.log(2 * math.pi) + log_noise) + squares / log_noise.exp())
    return fit - 0.5 * ((a * lin.theta.square()).sum() + (G + a.diag()).logdet() - log_precision.sum())


def gradients(network, curvature, post):
    """Of the dense log evidence at what was found: by weight, and in the noise."""
    precision = post.prior_precision.detach().expand(post.lin.num_parameters).log().clone().requires_grad_()
    noise = torch.tensor(post.observation_noise, dtype=DOUBLE).log().requires_grad_()
    value = dense_evidence(network, curvature, precision, noise)
    return value.detach(), *torch.autograd.grad(value, (precision, noise))


def by_layer(network, each):
    return co.linearize(network[0], network[1:], co.likelihoods.Gaussian(1.0)).unflatten(each)


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize("over", ["noise", ("scalar", "noise"), "layers", ("layers", "noise"), ("tensors", "noise")])
def test_the_dense_gradient_vanishes(network, curvature, over):
    post = posterior(network, CURVATURES[curvature])
    before, *_ = gradients(network, curvature, post)
    tuned = co.evidence.maximize(post, over, xtol=1e-9)
    value, slopes, of_noise = gradients(network, curvature, tuned)
    assert tuned.tuning.ending is co.evidence.Ending.CONVERGED and len(tuned.tuning.steps) < 60 and value > before
    torch.testing.assert_close(tuned.log_evidence().value, value, rtol=1e-10, atol=1e-8)
    parts = by_layer(network, slopes)
    if "layers" in over:
        for layer in ("0", "2"):
            assert abs(parts[f"{layer}.weight"].sum() + parts[f"{layer}.bias"].sum()) < 1e-6
    elif "tensors" in over:
        assert tuned.tuning.groups == tuple(parts) and all(abs(part.sum()) < 1e-6 for part in parts.values())
    elif "scalar" in over:
        assert abs(slopes.sum()) < 1e-6 and tuned.prior_precision.ndim == 0
    else:
        assert tuned.prior_precision == post.prior_precision
    assert (abs(of_noise) < 1e-6) == ("noise" in over)


def test_over_weights_each_slope_vanishes_or_its_weight_stands_at_the_limit(network):
    for curvature in CURVATURES:
        post = posterior(network, CURVATURES[curvature])
        tuned = co.evidence.maximize(post, "weights", xtol=1e-9)
        value, slopes, _ = gradients(network, curvature, tuned)
        torch.testing.assert_close(tuned.log_evidence().value, value, rtol=1e-10, atol=1e-8)
        inside = (tuned.prior_precision.log().abs() < 13.8) & (tuned.prior_precision.log().abs() > 0)
        assert int(inside.sum()) > 30 and float(slopes[inside].abs().max()) < 1e-6


def test_a_search_finds_the_maximum_from_far_below_and_from_far_above(network):
    near, *far = (co.evidence.maximize(posterior(network, prior=prior), xtol=1e-4) for prior in (1.0, 1e-5, 1e5))
    for each in far:
        torch.testing.assert_close(each.prior_precision, near.prior_precision, rtol=1e-3, atol=0)


def test_a_scalar_found_by_gradient_is_that_of_the_search(network):
    """At fixed noise the two ways meet: ("scalar", "noise") started at its own maximum in the noise does not move."""
    both = co.evidence.maximize(posterior(network), ("scalar", "noise"), xtol=1e-8)
    alone = co.evidence.maximize(posterior(network, noise=both.observation_noise), xtol=1e-6)
    torch.testing.assert_close(both.prior_precision, alone.prior_precision, rtol=1e-4, atol=0)


@pytest.mark.parametrize("over", ["layers", "weights"])
def test_by_probes_it_comes_near_the_exact_one(network, over, annotations_unchecked):
    """64 probes, fixed seed. Layers: within 4 standard errors of γ, a false alarm once in 8,000 seeds."""
    exact = co.evidence.maximize(posterior(network), over, xtol=1e-6)
    generator, narrow = torch.Generator().manual_seed(0), posterior(network, memory_budget=2**14)
    found = co.evidence.maximize(narrow, over, generator=generator, probes=64, steps=30 if over == "layers" else 20)
    distance = (found.prior_precision / exact.prior_precision).log().abs()
    last = found.tuning.steps[-1]
    if over == "layers":
        bar = 4 * (last.stderr / last.effective_parameters).max()
        assert found.tuning.converged and 0 < float(bar) < 0.5 and float(distance.max()) < float(bar)
        return
    value = float(posterior(network, prior=found.prior_precision).log_evidence())
    best, start = (float(post.log_evidence()) for post in (exact, posterior(network)))
    assert best - value < 0.05 * (best - start)


def test_weighted_targets_count_by_their_weights():
    """Integer weights are repeated points."""
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1).double(), torch.randn(9, 2, dtype=DOUBLE)
    y, w = x.sum(1, keepdim=True) + torch.randn(9, 1).double(), torch.tensor([1.0, 2, 3] * 3).double()
    often = w.long()
    gaussian = co.likelihoods.Gaussian(1.0)
    weighted = co.linearize(model, [(x, y, w)], gaussian, weights=True)
    repeated = co.linearize(model, (x.repeat_interleave(often, 0), y.repeat_interleave(often, 0)), gaussian)
    one, other = (
        co.evidence.maximize(co.laplace(lin, co.GGN, 1.0, check_mode=False), ("scalar", "noise"), xtol=1e-9)
        for lin in (weighted, repeated)
    )
    assert one.tuning.targets == pytest.approx(18) and one.observation_noise == pytest.approx(
        other.observation_noise, rel=1e-8
    )
    torch.testing.assert_close(one.prior_precision, other.prior_precision, rtol=1e-7, atol=0)


def test_dead_weights_stay_and_undetermined_ones_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(20, 3, dtype=DOUBLE)
    x[:, 0] = 0  # the first column of the first weight has no curvature
    y = x.sum(1, keepdim=True)
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.1)), co.GGN, 1.0, check_mode=False)
    with pytest.warns(co.evidence.UndeterminedWarning, match="4 of 21 weights"):
        tuned = co.evidence.maximize(post, "weights")
    at = tuned.lin.unflatten(tuned.prior_precision)["0.weight"]
    torch.testing.assert_close(at[:, 0], torch.full((4,), 1e-6).double())
    model[0].weight.data[:, 0] = 0  # at a mode they are zero: the evidence does not depend on their precision
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.1)), co.GGN, 1.0, check_mode=False)
    tuned = co.evidence.maximize(post, "weights")
    assert bool((tuned.lin.unflatten(tuned.prior_precision)["0.weight"][:, 0] == 1).all())
    model[2].weight.data.zero_()
    model[2].bias.data.zero_()
    post = co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.1)), co.GGN, 1.0, check_mode=False)
    with pytest.raises(ValueError, match=r"no maximum.*of '0' falls.*of '2' grows"):
        co.evidence.maximize(post, "layers")
