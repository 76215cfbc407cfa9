"""Prior precisions and noise from draws: dense fixed points, monotone EM, coverage, and what must be refused.

Tests `hyperparameters.py`, `log_evidence.py`.
"""

import math
import warnings

import pytest
import torch
from scipy.stats import chi2
from torch import nn

import curvops as co
from tests.posterior.trained import Heads
from tests.randomness import seeded

DOUBLE = torch.float64


def linear(D, N, alpha=1.0, noise=1.0, number=0, scale=1.0, start=0.0):
    """A linear model that was drawn from its prior, linearised where it starts: not at a mode."""
    generator = seeded(number)
    x = scale * torch.randn(N, D, generator=generator, dtype=DOUBLE)
    truth = torch.randn(D, 1, generator=generator, dtype=DOUBLE) / alpha**0.5
    y = x @ truth + noise**0.5 * torch.randn(N, 1, generator=generator, dtype=DOUBLE)
    model = nn.Linear(D, 1, bias=False).double()
    model.weight.data.fill_(start)
    return co.linearize(model, (x, y), co.likelihoods.Gaussian(noise)), x, y


def log_evidence(x, y, alpha, noise):
    """log N(y; 0, σ²I + XXᵀ/α), with autograd."""
    covariance = noise * torch.eye(len(y), dtype=DOUBLE) + x @ x.mT / alpha
    return torch.distributions.MultivariateNormal(torch.zeros(len(y), dtype=DOUBLE), covariance).log_prob(y[:, 0])


def steepness(x, y, post):
    """The largest slope of the exact log evidence in the logarithms."""
    logs = [torch.tensor(float(v), dtype=DOUBLE).log().requires_grad_() for v in hyperparameters(post)]
    return max(abs(float(g)) for g in torch.autograd.grad(log_evidence(x, y, *(u.exp() for u in logs)), logs))


def hyperparameters(post):
    return post.prior_precision, post.observation_noise


@pytest.mark.parametrize("update", ["mackay", "em"])
def test_exact_steps_end_where_the_exact_evidence_is_flat(update):
    lin, x, y = linear(12, 40, alpha=2.0, noise=0.5, start=0.7)
    post = co.laplace(lin, co.GGN, prior_precision=20.0, check_mode=False)
    found = co.evidence.mackay(post, None, 500, update=update, tune_noise=True, xtol=1e-7)
    assert found.tuning.ending is co.evidence.Ending.CONVERGED and found.tuning.mode == "linear"
    assert steepness(x, y, found) < 1e-4
    exact = log_evidence(x, y, *hyperparameters(found))
    torch.testing.assert_close(found.log_evidence(mode="linear").value, exact, rtol=1e-8, atol=1e-8)
    by_gradient = co.evidence.maximize(post, ("scalar", "noise"), xtol=1e-8, mode="linear")
    torch.testing.assert_close(by_gradient.prior_precision, found.prior_precision, rtol=1e-4, atol=0)
    assert by_gradient.observation_noise == pytest.approx(found.observation_noise, rel=1e-4)


@pytest.mark.parametrize("update", ["mackay", "em"])
def test_one_step_is_the_published_update(update):
    """Against dense matrices, away from the fixed point that both updates share."""
    lin, x, y = linear(12, 40, alpha=2.0, noise=0.5)
    post = co.laplace(lin, co.GGN, prior_precision=20.0, check_mode=False).with_noise(5.0)
    with pytest.warns(co.evidence.MaxStepsWarning):
        found = co.evidence.mackay(post, None, 1, update=update, tune_noise=True, xtol=1e-10)
    P = x.mT @ x / 5 + 20 * torch.eye(12, dtype=DOUBLE)
    mode = torch.linalg.solve(P, x.mT @ y / 5)
    gamma, scatter, squares = 12 - 20 * float(torch.linalg.inv(P).trace()), mode.square().sum(), (y - x @ mode).square()
    if update == "em":
        alpha, noise = 12 / (scatter + (12 - gamma) / 20), (squares.sum() + 5 * gamma) / 40
    else:
        alpha, noise = gamma / scatter, squares.sum() / (40 - gamma)
    assert float(found.prior_precision) == pytest.approx(float(alpha), rel=1e-8)
    assert found.observation_noise == pytest.approx(float(noise), rel=1e-8)
    assert found.tuning.matvecs == 0  # nothing was solved for


def several_noises(noises=(0.1, 0.7)):
    """Of weights (24,) that are 0, in the order of the heads: J is x for each column of outputs."""
    x = torch.randn(40, 4, generator=seeded(), dtype=DOUBLE)
    y = {"a": x[:, :1], "b": x[:, 1:3], "c": torch.arange(40) % 3}
    for name, noise in zip("ab", noises):
        y[name] = y[name] + noise**0.5 * torch.randn(y[name].shape, generator=seeded(1), dtype=DOUBLE)
    model = Heads(4, a=1, b=2, c=3).double()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    likelihoods = {"a": co.likelihoods.Gaussian(0.3), "b": co.likelihoods.Gaussian(2.0), "c": "classification"}
    lin = co.linearize(model, (x, y), likelihoods)
    return co.laplace(lin, co.GGN, prior_precision=5.0, check_mode=False), x, y


def noises_of(post):
    return torch.stack([post.lin.likelihood.likelihoods[name].noise.reshape(()) for name in "ab"])


@pytest.mark.parametrize("update", ["mackay", "em"])
def test_one_step_updates_the_noise_of_each_of_several_outputs(update):
    """Against dense matrices; by draws, the test below."""
    post, x, y = several_noises()
    with pytest.warns(co.evidence.MaxStepsWarning):
        found = co.evidence.mackay(post, None, 1, update=update, tune_noise=True, xtol=1e-10)
    expected = []
    for name, noise in (("a", 0.3), ("b", 2.0)):
        P = x.mT @ x / noise + 5 * torch.eye(4, dtype=DOUBLE)
        mode = torch.linalg.solve(P, x.mT @ y[name] / noise)
        squares, targets = (y[name] - x @ mode).square().sum(), y[name].numel()
        gamma = y[name].shape[1] * (4 - 5 * torch.linalg.inv(P).trace())
        expected.append((squares + noise * gamma) / targets if update == "em" else squares / (targets - gamma))
    torch.testing.assert_close(noises_of(found), torch.stack(expected), rtol=1e-4, atol=0)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_several_noises_end_where_their_evidence_is_largest(curvature, annotations_unchecked):
    post, *_ = several_noises()
    post = co.laplace(post.lin, curvature, 5.0, check_mode=False)
    found = co.evidence.mackay(post, None, 300, tune_noise=True, xtol=1e-7)
    assert found.tuning.converged and found.tuning.steps[-1].noise.shape == (2,)
    by_gradient = co.evidence.maximize(found, ("scalar", "noise"), xtol=1e-7, mode="linear")
    torch.testing.assert_close(noises_of(found), noises_of(by_gradient), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.prior_precision, by_gradient.prior_precision, rtol=1e-4, atol=0)
    if curvature is co.GGN:
        drawn = co.evidence.mackay(post, 64, 60, tune_noise=True, generator=seeded())
        assert drawn.tuning.ending is co.evidence.Ending.WITHIN_ERROR
        torch.testing.assert_close(noises_of(drawn), noises_of(found), rtol=0.05, atol=0)


@pytest.mark.parametrize("scale", [3.0, 0.02])
def test_gamma_is_counted_in_the_space_of_smaller_variance(scale):
    """Strong data: weight space, 2Σ(1 − p)²/K; weak data: function space, 2Σp²/K; 4 standard errors of 32 draws."""
    lin, *_ = linear(30, 40, scale=scale)
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    p = torch.linalg.eigvalsh(co.GGN(lin).to_dense())
    p = p / (p + 1)
    step = co.evidence.mackay(post, 32, 1, generator=seeded()).tuning.steps[0]
    best = min((2 * p.square().sum() / 32) ** 0.5, (2 * (1 - p).square().sum() / 32) ** 0.5)
    assert abs(float(step.effective_parameters) - float(p.sum())) < 4 * best
    assert 0.5 * best < float(step.stderr) < 2 * best  # of a χ² spread with 31 degrees of freedom
    of_draws = post.deviations(32, generator=seeded()).matvecs
    assert step.matvecs == of_draws + (32 if scale < 1 else 0)  # function space takes G z of each draw


class Sides(nn.Module):
    """Two layers, whose weights are drawn from priors of precision 1 and 9."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Linear(n, 1, bias=False).double() for n in (20, 25))
        for layer in (self.left, self.right):
            nn.init.zeros_(layer.weight)

    def forward(self, x):
        return self.left(x[:, :20]) + self.right(x[:, 20:])


@pytest.fixture(scope="module")
def sides():
    model, generator = Sides(), seeded(2)
    x = torch.randn(80, 45, generator=generator, dtype=DOUBLE)
    truth = torch.randn(45, 1, generator=generator, dtype=DOUBLE) / torch.tensor([1.0] * 20 + [3.0] * 25).unsqueeze(1)
    y = x @ truth + 0.3**0.5 * torch.randn(80, 1, generator=generator, dtype=DOUBLE)
    return co.laplace(co.linearize(model, (x, y), co.likelihoods.Gaussian(0.3)), co.GGN, 1.0, check_mode=False)


@pytest.mark.parametrize("prior", ["iso", "g", "layer", "tensor"])
def test_draws_agree_with_exact_counts_under_every_structure(sides, prior):
    exact = co.evidence.mackay(sides, None, 60, prior=prior)
    found = co.evidence.mackay(sides, 64, 60, prior=prior, generator=seeded())
    assert exact.tuning.converged and found.tuning.converged
    bars = found.tuning.steps[-1].stderr / found.tuning.steps[-1].effective_parameters
    distance = (found.prior_precision / exact.prior_precision).log().abs().max()
    assert 0 < float(distance) < 8 * float(bars.max()) < 0.2  # an error of γ grows on its way into α
    if prior == "g":
        ratio = exact.prior_precision / co.DiagonalGGN(sides.lin).entries.clamp_min(1e-6)
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-10, atol=0)
    if prior in ("layer", "tensor"):
        names = ("left", "right") if prior == "layer" else ("left.weight", "right.weight")
        assert found.tuning.groups == names and len(found.prior_precision.unique()) == 2
        low, high = exact.tuning.prior_interval()
        assert bool((low < torch.tensor([1.0, 9.0])).all() and (torch.tensor([1.0, 9.0]) < high).all())
        by_gradient = co.evidence.maximize(sides, "layers", xtol=1e-7, mode="linear")
        torch.testing.assert_close(by_gradient.prior_precision, exact.prior_precision, rtol=1e-3, atol=0)


def test_later_steps_start_at_earlier_solutions(annotations_unchecked):
    """Of one noise: the last step, where the precision hardly moves, takes fewer products than the first.

    The likelihood is given as a function, since a Gaussian's GGN of a last layer has a closed form.
    """
    _, x, y = linear(300, 350, alpha=1.0, noise=20.0)
    model = nn.Linear(300, 1, bias=False).double()
    model.weight.data.zero_()
    lin = co.linearize(model, (x, y), lambda f, y: (f - y).square().sum(1) / 40.0)
    post = co.laplace(lin, co.GGN, prior_precision=2.0, check_mode=False)
    noise = post.deviations(4, generator=seeded()).noise
    found = co.evidence.mackay(post, 4, 12, noise=noise, method="cg")
    products = [step.matvecs for step in found.tuning.steps]
    assert len(products) > 2 and products[-1] < 0.75 * products[0]


def test_mackay_that_oscillates_says_so_and_em_does_not(annotations_unchecked):
    """γ from many weak directions falls as 1/α, the scatter of one strong direction is constant: slope −0.9."""
    x = torch.eye(250, dtype=DOUBLE)
    x[0, 0] = 1e3
    y = torch.zeros(250, 1, dtype=DOUBLE)
    y[0] = 2e3
    model = nn.Linear(250, 1, bias=False).double()
    model.weight.data.zero_()
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(1.0))
    post = co.laplace(lin, co.GGN, prior_precision=30.0, check_mode=False)
    with pytest.warns(co.evidence.OscillationWarning, match="update='em'"):
        found = co.evidence.mackay(post, None, 30)
    assert found.tuning.oscillated and found.tuning.converged and len(found.tuning.steps) < 20
    exact = co.evidence.maximize(post, xtol=1e-6, mode="linear")
    torch.testing.assert_close(found.prior_precision, exact.prior_precision, rtol=1e-3, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", co.evidence.OscillationWarning)
        assert not co.evidence.mackay(post, None, 5, update="em").tuning.oscillated


@pytest.mark.parametrize("tune", ["em", "mackay", "gradient"])
def test_steps_that_ran_out_are_said_to_have_and_so_are_their_intervals(tune, annotations_unchecked):
    lin, *_ = linear(12, 40, alpha=2.0, noise=0.5)
    post = co.laplace(lin, co.GGN, prior_precision=2000.0, check_mode=False)

    def tuned(steps):
        if tune == "gradient":
            return co.evidence.maximize(post, ("scalar", "noise"), steps=steps, mode="linear")
        return co.evidence.mackay(post, None, steps, update=tune, tune_noise=True)

    with pytest.warns(co.evidence.MaxStepsWarning, match="The steps were spent"):
        found = tuned(2).tuning
    assert not found.converged
    for interval in (found.prior_interval, found.noise_interval):
        with pytest.warns(co.evidence.MaxStepsWarning, match="interval"):
            interval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = tuned(2000).tuning
        assert found.converged and found.prior_interval()[0] > 0 and found.noise_interval()[0] > 0


def test_intervals_are_quantiles_of_chi_squared(annotations_unchecked):
    """At both ends of each interval scipy's own distribution function says half of what the level leaves out."""
    lin, *_ = linear(12, 40, alpha=2.0, noise=0.5)
    found = co.evidence.mackay(co.laplace(lin, co.GGN, 1.0, check_mode=False), None, 500, tune_noise=True).tuning
    last = found.steps[-1]
    gamma = float(last.effective_parameters)
    for given in ({}, {"level": 0.95}, {"level": 0.5}):
        half = (1 - given.get("level", 0.95)) / 2
        low, high = (float(end) * gamma / float(last.prior_precision) for end in found.prior_interval(**given))
        assert chi2.cdf(low, gamma) == pytest.approx(half, rel=1e-8)
        assert chi2.sf(high, gamma) == pytest.approx(half, rel=1e-8)
        low, high = (last.noise * (40 - gamma) / end for end in found.noise_interval(**given))
        assert chi2.sf(low, 40 - gamma) == pytest.approx(half, rel=1e-8)
        assert chi2.cdf(high, 40 - gamma) == pytest.approx(half, rel=1e-8)


def test_data_that_determine_nothing_are_named():
    lin, *_ = linear(4, 9)
    (batch,) = list(lin.data)
    for inputs, targets in ((batch.inputs, 0 * batch.targets), (0 * batch.inputs, batch.targets)):
        model = nn.Linear(4, 1, bias=False).double()
        model.weight.data.zero_()
        post = co.laplace(
            co.linearize(model, (inputs, targets), co.likelihoods.Gaussian(noise=1.0)), co.GGN, 1.0, check_mode=False
        )
        with pytest.raises(ValueError, match="no maximum"):
            co.evidence.mackay(post, None)
    assert math.isfinite(float(post.log_evidence()))
