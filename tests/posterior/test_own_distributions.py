"""Predictions of targets whose distribution a user makes from the outputs, and of heteroscedastic ones.

Tests `by_autograd.py`, `answers.py`, `outputs.py`: equal to the built-in likelihoods' where one exists, and to
averages over the same draws of the outputs.
"""

import functools
import math

import pytest
import torch
from torch import Tensor, distributions, nn

import curvops as co
from tests.posterior.trained import untrained
from tests.randomness import perceptron, seeded

FromDistribution = co.likelihoods.FromDistribution
DOUBLE = torch.float64
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
N, K = 5, 40


X = torch.randn(N, 4, dtype=DOUBLE, generator=seeded(1))


def label(x: Tensor) -> Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def events(x: Tensor) -> Tensor:
    return (x[:, :2] > 0).double()


def real(x: Tensor) -> Tensor:
    return x[:, :2].sin()


def ordinal(f: Tensor) -> distributions.Distribution:
    """Return a proportional-odds model of three ordered classes from one output."""
    above = torch.sigmoid(f - torch.tensor([-0.5, 0.7], dtype=f.dtype, device=f.device))
    ones, zeros = torch.ones_like(f), torch.zeros_like(f)
    above = torch.cat([ones, above, zeros], 1)
    return distributions.Categorical(probs=above[:, :-1] - above[:, 1:])


def in_pairs(f: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Categorical(logits=f.unflatten(1, (2, 3))), 1)


def events_of(f: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Bernoulli(logits=f), 1)


def spread_of(f: Tensor) -> distributions.Distribution:
    return distributions.Normal(f[:, :2].sinh(), 0.1 + f[:, 2:].exp())


PAIRS = {
    "classes": (lambda f: distributions.Categorical(logits=f), co.likelihoods.Categorical(), 3, label),
    "probabilities": (lambda f: distributions.Categorical(f.softmax(-1)), co.likelihoods.Categorical(), 3, label),
    "labels": (events_of, co.likelihoods.Bernoulli(), 2, events),
    "labels by entry": (lambda f: distributions.Bernoulli(f.sigmoid()), co.likelihoods.Bernoulli(), 2, events),
}


@functools.cache
def pair(name):
    """The posteriors under a user's distribution and under the built-in likelihood, and the targets."""
    function, builtin, outputs, targets = PAIRS[name]
    return *(untrained(likelihood, outputs, targets) for likelihood in (FromDistribution(function), builtin)), targets


@pytest.mark.parametrize("samples", [False, True], ids=["by points", "by samples"])
@pytest.mark.parametrize("name", PAIRS)
def test_answers_are_those_of_the_built_in_likelihood(name, samples) -> None:
    own, known, targets = pair(name)
    y, draws = targets(X), known.sample(K, seeded()) if samples else None
    # Draws of single points go through eigenvectors, whose signs are rounding; their means differ by 7 errors at most.
    close = {"rtol": 1e-8, "atol": 1e-10} if samples else {"rtol": 0, "atol": 0.1}

    def compare(ask) -> None:
        torch.testing.assert_close(ask(own), ask(known), **close)

    for link in ("mc", "network"):
        compare(lambda post, link=link: post.probabilities(X, link, samples=draws, generator=seeded()))
    by_default = own.probabilities(X, samples=draws, generator=seeded())
    torch.testing.assert_close(by_default, own.probabilities(X, "mc", samples=draws, generator=seeded()), **TIGHT)
    parts = ["mean", "total", "aleatoric", "epistemic", "stderr"]
    if known.uncertainty(X, samples=draws).stderr is None:  # of built-in labels, by an integral
        parts.remove("stderr")
    for part in parts:
        compare(lambda post, part=part: getattr(post.uncertainty(X, samples=draws, generator=seeded()), part))
    assert own.uncertainty(X, samples=draws).unit == "nats"
    for joint in (False, True) if samples else (False,):
        compare(lambda post, j=joint: post.log_likelihood(X, y, j, samples=draws, generator=seeded()).value)


LABELLED = {
    "ordinal": (ordinal, 1, label, lambda p: p.probs),
    "two targets of three classes": (in_pairs, 6, lambda x: torch.stack([label(x), label(-x)], 1), None),
    "one hot": (
        lambda f: distributions.OneHotCategorical(logits=f),
        3,
        lambda x: nn.functional.one_hot(label(x), 3).double(),
        lambda p: p.probs,
    ),
}


@pytest.mark.parametrize(("function", "outputs", "targets", "probs"), LABELLED.values(), ids=LABELLED)
def test_classes_are_averaged_over_the_draws(function, outputs, targets, probs) -> None:
    post = untrained(FromDistribution(function), outputs, targets)
    draws = post.sample(K, seeded())
    f = post.functions(X, K, samples=draws)
    p = torch.stack([function(g).base_dist.probs if probs is None else probs(function(g)) for g in f])
    torch.testing.assert_close(post.probabilities(X, samples=draws), p.mean(0), **TIGHT)
    found = post.uncertainty(X, samples=draws)
    torch.testing.assert_close(found.mean, p.mean(0), **TIGHT)
    torch.testing.assert_close(found.total, torch.special.entr(p.mean(0)).sum(-1), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.aleatoric, torch.special.entr(p).sum(-1).mean(0), rtol=1e-8, atol=1e-10)
    assert found.stderr.shape == found.total.shape
    by_points = post.probabilities(X, generator=seeded())
    assert float((by_points - post.probabilities(X, samples=post.sample(2000, seeded(1)))).abs().max()) < 0.1
    torch.testing.assert_close(by_points.sum(-1), torch.ones_like(by_points.sum(-1)), **TIGHT)
    empirical = co.sampling.empirical(post.lin, draws.unsqueeze(0), through="linearization")
    torch.testing.assert_close(empirical.probabilities(X), p.mean(0), **TIGHT)


def dense_targets(post, function, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The mean (N, m) and the joint covariance (N·m, N·m) of real targets over functions."""
    made = [function(f) for f in post.functions(X, len(draws), samples=draws)]
    means, noise = torch.stack([p.mean for p in made]), torch.stack([p.variance for p in made]).mean(0)
    return means.mean(0), means.flatten(1).mT.cov() + noise.flatten().diag()


def test_real_targets_have_the_noise_that_the_user_gives_them() -> None:
    post = untrained(FromDistribution(spread_of), 4, real, mc=True)
    draws = post.sample(K, seeded())
    mean, covariance = dense_targets(post, spread_of, draws)
    joint = post.predict(X, joint=True, samples=draws, noise=True)
    torch.testing.assert_close(joint.mean, mean, **TIGHT)
    torch.testing.assert_close(joint.covariance_matrix, covariance, **TIGHT)
    blocks = covariance.unflatten(0, (N, 2)).unflatten(2, (N, 2)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    each = post.predict(X, samples=draws, noise=True)
    torch.testing.assert_close(each.mean, mean, **TIGHT)
    torch.testing.assert_close(each.covariance_matrix, blocks, **TIGHT)
    groups = post.predict(X[:4], samples=draws, noise=True, groups=2)
    torch.testing.assert_close(groups.covariance_matrix[0], covariance[:4, :4], **TIGHT)
    found = post.uncertainty(X, samples=draws)
    torch.testing.assert_close(found.total, each.variance, **TIGHT)
    assert found.unit == "variance" and found.stderr is not None
    by_points, again = (post.predict(X, noise=True) for _ in range(2))
    torch.testing.assert_close(by_points.covariance_matrix, again.covariance_matrix, rtol=0, atol=0)
    many = post.predict(X, samples=post.sample(4000, seeded(1)), noise=True)
    assert float((by_points.variance / many.variance).log().abs().max()) < 0.5  # eight standard errors
    empirical = co.sampling.empirical(post.lin, draws.unsqueeze(0), through="linearization")
    parts = empirical.uncertainty(X)
    torch.testing.assert_close(parts.epistemic, found.epistemic * (K - 1) / K, **TIGHT)
    torch.testing.assert_close(empirical.predict(X, noise=True).variance, parts.total, **TIGHT)
    alone = post.uncertainty(X, samples=draws[:1])
    torch.testing.assert_close(alone.total, alone.aleatoric, **TIGHT)


@pytest.mark.parametrize("kind", [distributions.Normal, functools.partial(distributions.StudentT, 4.0)])
def test_the_score_of_real_targets_averages_their_density_over_the_draws(kind) -> None:
    """Their own draws are those around the mode of each target, by a Hessian that is not the Fisher."""
    likelihood = FromDistribution(lambda f: kind(f[:, :1], f[:, 1:].exp()))
    post = untrained(likelihood, 2, lambda x: x[:, :1].sin(), mc=True)
    draws, y = post.sample(K, seeded()), X[:, :1].sin()
    log_p = torch.stack([likelihood.log_prob(g, y) for g in post.functions(X, K, samples=draws)])
    score = post.log_likelihood(X, y, samples=draws).value
    torch.testing.assert_close(score, log_p.logsumexp(0) - math.log(K), **TIGHT)
    found, expected = (
        post.log_likelihood(X, y, samples=s, generator=seeded()) for s in (None, post.sample(4000, seeded(1)))
    )
    assert bool(((found.value - expected.value).abs() < 5 * (found.stderr + expected.stderr)).all())
    assert bool((found.stderr < 0.05).all())


def test_a_rate_that_overflows_far_out_has_no_likelihood_there() -> None:
    y = events(X)[:, :1]
    likelihoods = FromDistribution(counts), co.likelihoods.Poisson()
    posts = [untrained(likelihood, 1, lambda x: events(x)[:, :1]).with_prior(1e-4) for likelihood in likelihoods]
    own, builtin = (post.log_likelihood(X, y).value for post in posts)
    torch.testing.assert_close(own, builtin, **TIGHT)


@pytest.mark.filterwarnings("error::curvops.errors.UndeterminedWarning")
def test_prior_precisions_under_which_a_density_overflows_are_not_chosen() -> None:
    model, x = perceptron(4, 32, 2, dtype=torch.float32), X.float()
    own, found = lambda f: distributions.Independent(counts(f), 1), []
    for likelihood in (own, co.likelihoods.Poisson()):
        lin = co.linearize(model, (x, events(x).float()), likelihood)
        found.append(co.laplace(lin, validation=(9 * x, 1 - events(x).float())))
    assert not all(map(math.isfinite, found[0].tuning.scores)) and all(map(math.isfinite, found[1].tuning.scores))
    torch.testing.assert_close(found[0].prior_precision, found[1].prior_precision, rtol=0.01, atol=0)


def test_heteroscedastic_targets_have_their_own_noise() -> None:
    """In closed form E exp(s) = exp(E s + Var s / 2), for points, groups and jointly."""
    post = untrained(co.likelihoods.HeteroscedasticGaussian(), 4, real)
    f, joint = post.predict(X), post.predict(X, joint=True).covariance_matrix
    noise = (f.mean[:, 2:] + f.variance[:, 2:] / 2).exp()
    keep = torch.arange(4 * N).view(N, 4)[:, :2].flatten()
    expected = joint[keep][:, keep] + noise.flatten().diag()
    found = post.predict(X, joint=True, noise=True)
    torch.testing.assert_close(found.mean, f.mean[:, :2], **TIGHT)
    torch.testing.assert_close(found.covariance_matrix, expected, rtol=1e-8, atol=1e-10)
    each = post.predict(X, noise=True)
    blocks = f.covariance_matrix[:, :2, :2] + torch.diag_embed(noise)
    torch.testing.assert_close(each.covariance_matrix, blocks, rtol=1e-8, atol=1e-10)
    parts = post.uncertainty(X)
    torch.testing.assert_close(each.variance, parts.total, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.aleatoric, noise, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.epistemic, f.variance[:, :2], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(parts.mean, f.mean[:, :2], **TIGHT)
    groups = post.predict(X[:4], noise=True, groups=2)
    torch.testing.assert_close(groups.covariance_matrix[1], expected[4:8, 4:8], rtol=1e-8, atol=1e-10)
    draws = post.sample(K, seeded())
    sampled, outputs = (post.predict(X, joint=True, samples=draws, noise=noise) for noise in (True, False))
    inner = outputs.covariance_matrix[keep][:, keep]
    own = (outputs.mean[:, 2:] + outputs.variance[:, 2:] / 2).exp()
    torch.testing.assert_close(sampled.covariance_matrix, inner + own.flatten().diag(), rtol=1e-8, atol=1e-10)
    empirical = co.sampling.empirical(post.lin, draws.unsqueeze(0), through="linearization")
    torch.testing.assert_close(empirical.predict(X, noise=True).variance, empirical.uncertainty(X).total, **TIGHT)
    assert post.predict(X[:0], noise=True).mean.shape == (0, 2)


def counts(f: Tensor) -> distributions.Distribution:
    return distributions.Poisson(f.exp())


def correlated(f: Tensor) -> distributions.Distribution:
    return distributions.MultivariateNormal(f, torch.eye(2, dtype=f.dtype) + 0.5)


def angles(f: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.VonMises(f, 2.0), 1)


def two_angles(f: Tensor) -> distributions.Distribution:
    kinds = distributions.Categorical(torch.ones_like(f))
    return distributions.MixtureSameFamily(kinds, distributions.VonMises(f, 2.0))


REFUSED = {
    "the noise of angles": (angles, 2, real, lambda p: p.predict(X, noise=True), "a VonMises of angles"),
    "the uncertainty of angles": (angles, 2, real, lambda p: p.uncertainty(X), "angles.*log_likelihood"),
    "a mixture of angles": (two_angles, 2, lambda x: real(x)[:, 0], lambda p: p.uncertainty(X), "angles.*functions"),
    "probit of ordinal classes": (
        ordinal,
        1,
        label,
        lambda p: p.probabilities(X, "probit"),
        "must be one of 'mc', 'network'",
    ),
    "the noise of classes": (ordinal, 1, label, lambda p: p.predict(X, noise=True), r"noise=True.*uncertainty\(x\)"),
    "the noise of counts": (counts, 2, lambda x: events(x), lambda p: p.predict(X, noise=True), "noise=True"),
    "the noise of dependent entries": (correlated, 2, real, lambda p: p.predict(X, noise=True), "noise=True"),
    "probabilities of numbers": (correlated, 2, real, lambda p: p.probabilities(X), "no class probabilities"),
    "a mean that does not exist": (
        *(lambda f: distributions.Cauchy(f, 0.5), 2, real),
        lambda p: p.predict(X, noise=True),
        "a Cauchy, which has no mean",
    ),
    "joint targets without samples": (
        *(spread_of, 4, real),
        lambda p: p.predict(X, joint=True, noise=True),
        r"samples=post.sample\(k\)",
    ),
}


@pytest.mark.parametrize(("function", "outputs", "targets", "ask", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_answer_is_refused_by_name(function, outputs, targets, ask, words) -> None:
    with pytest.raises(ValueError, match=words):
        ask(untrained(FromDistribution(function), outputs, targets, mc=True))


def test_counts_and_vectors_have_variances() -> None:
    post = untrained(FromDistribution(counts), 2, lambda x: x[:, :2].exp().round())
    f, found = post.predict(X), post.uncertainty(X, generator=seeded())
    rate = (f.mean + f.variance / 2).exp()
    assert float((found.mean / rate).log().abs().max()) < 0.2 and bool((found.total > found.mean).all())
    post = untrained(FromDistribution(correlated), 2, real)
    torch.testing.assert_close(post.uncertainty(X).aleatoric, torch.full((N, 2), 1.5, dtype=DOUBLE), **TIGHT)
