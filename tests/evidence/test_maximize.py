"""The hyperparameters of largest evidence: a dense gradient vanishes there, whatever was tuned and however."""

import math

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import problem
from tests.zoo_modules import Several

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


@pytest.mark.parametrize("curvature", CURVATURES)
@pytest.mark.parametrize(
    "over", ["noise", "scalar", ("scalar", "noise"), "layers", ("layers", "noise"), ("tensors", "noise")]
)
def test_the_dense_gradient_vanishes(network, curvature, over):
    post = posterior(network, CURVATURES[curvature])
    before, *_ = gradients(network, curvature, post)
    tuned = co.evidence.maximize(post, over, xtol=1e-9)
    value, slopes, of_noise = gradients(network, curvature, tuned)
    assert tuned.tuning.ending is co.evidence.Ending.CONVERGED and len(tuned.tuning.steps) < 60 and value > before
    torch.testing.assert_close(tuned.log_evidence().value, value, rtol=1e-10, atol=1e-8)
    parts = post.lin.unflatten(slopes)
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


@pytest.mark.parametrize("mode", ["map", "linear"])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_few_steps_find_a_scalar_from_far_below_and_from_far_above(network, curvature, mode):
    """At the maximum γ = αs, with s of the network's weights or of the linear model's, whatever the curvature is."""
    for prior in (1e-4, 1.0, 1e4):
        post = co.evidence.maximize(posterior(network, CURVATURES[curvature], prior), xtol=1e-6, mode=mode)
        alpha, eye = float(post.prior_precision), torch.eye(post.lin.num_parameters, dtype=DOUBLE)
        theta, G, F = post.mean, co.GGN(post.lin).to_dense(), post.curvature.to_dense()
        if mode == "linear":
            theta = torch.linalg.solve(G + alpha * eye, G @ theta - post.lin.gradient())
        gamma = torch.linalg.solve(F + alpha * eye, F).trace()
        torch.testing.assert_close(alpha * theta.square().sum(), gamma, rtol=1e-5, atol=0)
        assert post.tuning.converged and len(post.tuning.steps) <= 10


@pytest.mark.parametrize(
    ("prior", "noise", "over", "remedy"),
    [
        (1e-12, 0.3, "scalar", "with_prior"),
        (1e13, 0.3, "scalar", "with_prior"),
        (1e-12, 0.3, "layers", "with_prior"),
        (1.0, 1e-14, "noise", "with_noise"),
        (1.0, 1e13, "noise", "with_noise"),
    ],
)
def test_a_start_beyond_the_reach_of_a_search_is_named_as_a_cause(network, prior, noise, over, remedy):
    with pytest.raises(ValueError, match=rf"no maximum.*too far from it.*{remedy}\(value\)"):
        co.evidence.maximize(posterior(network, prior=prior, noise=noise), over)


def test_a_scalar_found_with_the_noise_is_that_found_alone_at_this_noise(network):
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


def test_where_data_determine_few_of_many_weights_the_solves_do_not_keep_it_from_converging(network):
    x, wide = network[1], nn.Sequential(nn.Linear(network[1].shape[1], 500), nn.Tanh(), nn.Linear(500, 2)).double()
    assert len(co.evidence.maximize(posterior((wide, x, x[:, :1].sin().expand(-1, 2))), "layers").tuning.steps) < 30


def test_weighted_targets_count_by_their_weights():
    """Integer weights are repeated points."""
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
    assert one.tuning.targets == pytest.approx(18)
    assert one.observation_noise == pytest.approx(other.observation_noise, rel=1e-8)
    torch.testing.assert_close(one.prior_precision, other.prior_precision, rtol=1e-7, atol=0)


def test_dead_weights_stay_and_undetermined_ones_are_named():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.randn(20, 3, dtype=DOUBLE)
    x[:, 0] = 0  # the first column of the first weight has no curvature
    y = x.sum(1, keepdim=True)
    with pytest.warns(co.evidence.UndeterminedWarning, match="4 of 21 weights"):
        tuned = co.evidence.maximize(posterior((model, x, y), noise=0.1), "weights")
    at = tuned.lin.unflatten(tuned.prior_precision)["0.weight"]
    torch.testing.assert_close(at[:, 0], torch.full((4,), 1e-6).double())
    model[0].weight.data[:, 0] = 0  # at a mode they are zero: the evidence does not depend on their precision
    tuned = co.evidence.maximize(posterior((model, x, y), noise=0.1), "weights")
    assert bool((tuned.lin.unflatten(tuned.prior_precision)["0.weight"][:, 0] == 1).all())
    torch.nn.utils.vector_to_parameters(torch.zeros(16).double(), model[0].parameters())
    with pytest.warns(co.evidence.UndeterminedWarning, match="the larger the prior precision of '0' is"):
        tuned = co.evidence.maximize(posterior((model, x, y), noise=0.1), "layers")
    assert tuned.tuning.converged and 0 < tuned.tuning.steps[-1].effective_parameters[0] < 0.1


SEVERAL = {"kind": "classification", "first": co.likelihoods.Gaussian(1.0), "second": co.likelihoods.Gaussian(0.7)}


def several_outputs():
    """A class, and two values of unequal noise, from one hidden layer."""
    torch.manual_seed(0)
    model, x = Several({"kind": 3, "first": 1, "second": 1}).double(), torch.randn(60, 4, dtype=DOUBLE)
    values = x[:, :2] + torch.tensor([0.1, 0.7]).double() * torch.randn(60, 2).double()
    for name in ("first", "second"):
        model.heads[f"head_{name}"].weight.data.zero_()
    return model, x, {"kind": x[:, :3].argmax(1), "first": values[:, :1], "second": values[:, 1:]}


def dense_evidence_of_several(model, data, curvature, logs):
    """The log evidence of a prior precision and two noises, by a curvature that is built for these values."""
    alpha, *noises = logs.exp()
    lin = co.linearize(
        model, data, SEVERAL | {n: co.likelihoods.Gaussian(v) for n, v in zip(("first", "second"), noises)}
    )
    G = curvature(lin).to_dense()
    ratio = (G + alpha * torch.eye(len(G)).double()).logdet() - len(G) * logs[0]
    return lin.log_likelihood() - 0.5 * (alpha * lin.theta.square().sum() + ratio)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN], ids=lambda curvature: curvature.__name__)
def test_the_noise_of_each_of_several_outputs_is_tuned(curvature):
    """Beside a class: no step of 1 % in a noise or the precision raises the dense evidence, and the slopes vanish."""
    model, x, y = several_outputs()
    lin = co.linearize(model, (x, y), SEVERAL)
    post = co.laplace(lin, curvature, 1.0, check_mode=False)
    tuned = co.evidence.maximize(post, ("scalar", "noise"), xtol=1e-7)
    assert tuned.tuning.converged and tuned.tuning.steps[-1].noise.shape == (2,)
    members = tuned.lin.likelihood.likelihoods
    logs = torch.stack([tuned.prior_precision, members["first"].noise, members["second"].noise.reshape(())]).log()

    def evidence(change):
        return float(dense_evidence_of_several(model, (x, y), curvature, logs + change))

    for step in 0.01 * torch.eye(3, dtype=DOUBLE):
        above, here, below = evidence(step), evidence(0 * step), evidence(-step)
        assert here > max(above, below) and abs(above - below) / 0.02 < 3e-3
    assert float(tuned.log_evidence()) == pytest.approx(evidence(torch.zeros(3).double()), rel=1e-10)
    assert "noise" in str(tuned.tuning)
    with pytest.raises(ValueError, match="no single noise"):
        tuned.tuning.noise_interval()


def test_noises_of_outputs_are_those_of_networks_of_their_own():
    """A linear model of two outputs under a prior of two layers is two models, of one noise each."""
    x = torch.randn(40, 2, dtype=DOUBLE)
    y = x + torch.tensor([0.1, 0.8]).double() * torch.randn(40, 2).double()
    layers = [nn.Linear(2, 1, bias=False).double() for _ in range(2)]

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = layers

        def forward(self, x):
            return torch.cat([self.one(x), self.two(x)], 1)

    def tuned(model, targets, noise):
        lin = co.linearize(model, (x, targets), co.likelihoods.Gaussian(noise))
        post = co.laplace(lin, co.GGN, 1.0, check_mode=False)
        return co.evidence.maximize(post, ("layers", "noise"), mode="linear", xtol=1e-8)

    both = tuned(Both(), y, torch.ones(2, dtype=DOUBLE))
    alone = [tuned(layer, y[:, i : i + 1], 1.0) for i, layer in enumerate(layers)]
    expected = torch.tensor([post.observation_noise for post in alone], dtype=DOUBLE)
    torch.testing.assert_close(both.lin.likelihood.noise, expected, rtol=1e-4, atol=0)
    alphas = torch.cat([post.tuning.steps[-1].prior_precision for post in alone])
    torch.testing.assert_close(both.tuning.steps[-1].prior_precision, alphas, rtol=1e-4, atol=0)


def test_several_noises_are_refused_where_the_determinant_is_an_estimate(network):
    noise = torch.tensor([0.3, 0.2], dtype=DOUBLE)
    with pytest.raises(ValueError, match="several noises are tuned where log det P is exact"):
        co.evidence.maximize(posterior(network, noise=noise, memory_budget=2**14), "noise")
    tuned = co.evidence.maximize(posterior(network, co.KFAC, noise=noise), "noise", steps=2)
    assert tuned.lin.likelihood.noise.shape == (2,)
