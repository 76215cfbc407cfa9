"""Links, decompositions of uncertainty, joint draws and scores, against quadrature and dense definitions.

Tests `answers.py`, `outputs.py`.
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import nn

import curvops as co
from curvops.network import PointNormals
from curvops.posterior.predictions import answers, outputs
from tests.posterior.trained import problem, untrained
from tests.randomness import seeded

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


X = torch.randn(5, 4, dtype=DOUBLE, generator=seeded(1))


@pytest.fixture(scope="module")
def classes():
    model, x, y = problem()
    return co.laplace(co.linearize(model, (x, y), "classification"), co.GGN, prior_precision=1.0)


@pytest.fixture(scope="module")
def labels():
    return untrained(co.likelihoods.Bernoulli(), 2, lambda x: (x[:, :2] > 0).double())


@pytest.fixture(scope="module")
def numbers():
    return untrained(
        co.likelihoods.Gaussian(noise=torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE)), 3, lambda x: x[:, :3].sin()
    )


def normal_average(function, mean, variance, nodes=80):
    """E[function(f)], f ~ N(mean, variance), entry by entry, by Gauss–Hermite quadrature."""
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    z, w = torch.from_numpy(z), torch.from_numpy(w) / math.sqrt(2 * math.pi)
    return (function(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * z) * w).sum(-1)


def binary_entropy(p):
    return -torch.special.entr(p).neg().add(torch.special.entr(1 - p).neg())


# Links


def test_label_probabilities_by_each_link(labels):
    """Probit is within 0.01 of the integral for these variances; 1,000 draws within 5 standard errors of it."""
    predicted = labels.predict(X)
    exact = normal_average(torch.sigmoid, predicted.mean, predicted.variance)
    assert float((labels.probabilities(X) - exact).abs().max()) < 0.01
    spread = normal_average(lambda f: f.sigmoid().square(), predicted.mean, predicted.variance) - exact.square()
    error = labels.probabilities(X, "mc", generator=seeded()) - exact
    assert float((error / (spread / 1000).sqrt()).abs().max()) < 5
    with pytest.raises(ValueError, match="must be one of 'probit', 'mc', 'network', got 'bridge'"):
        labels.probabilities(X, "bridge")


@pytest.mark.parametrize("c", [2, 4])
def test_the_bridge_conditions_logits_to_sum_to_zero(c):
    """By the dense formulas, for a covariance whose rows have different sums; then Hobbhahn et al. 2022, eq. (11)."""
    g = seeded()
    mean, root = torch.randn(4, c, generator=g).double(), torch.randn(4, c, c, generator=g).double()
    covariance, ones = root @ root.mT, torch.ones(c, 1, dtype=DOUBLE)
    gain = covariance @ ones / (ones.mT @ covariance @ ones)
    f = mean - (gain @ ones.mT @ mean[..., None]).squeeze(-1)
    v = (covariance - gain @ ones.mT @ covariance).diagonal(dim1=-2, dim2=-1)
    alpha = (1 - 2 / c + f.exp() * (-f).exp().sum(-1, keepdim=True) / c**2) / v
    torch.testing.assert_close(answers.bridge(mean, covariance), alpha / alpha.sum(-1, keepdim=True), **TIGHT)


def test_the_normalised_bridge_is_the_bridge_until_variances_are_large(classes):
    """Of these points two have small variances; for the others normalising is nearer to 1,000 draws."""
    plain, normalised = (classes.probabilities(X, link) for link in ("bridge", "bridge_norm"))
    centring = torch.eye(3, dtype=DOUBLE) - 1 / 3
    covariance = centring @ classes.predict(X).covariance_matrix @ centring
    small = covariance.diagonal(dim1=-2, dim2=-1).mean(-1) < 1.2
    assert 0 < int(small.sum()) < 5
    torch.testing.assert_close(plain[small], normalised[small], **TIGHT)
    drawn = classes.probabilities(X, "mc", generator=seeded())
    assert float((normalised - drawn)[~small].norm()) < float((plain - drawn)[~small].norm())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_bridge_of_sure_logits_is_finite(normalised, dtype):
    """Exponentials beyond the dtype's range, no variance, and a variance that is nearly all shared by the classes."""
    sure = torch.tensor([[80.0, -40.0, 3.0], [400.0, -400.0, 0.0]], dtype=dtype)
    eye, shared = torch.eye(3, dtype=dtype), torch.ones(3, 3, dtype=dtype)
    for covariance in (eye, 1e-30 * eye, 0 * eye, shared, shared + 1e-9 * eye):
        found = answers.bridge(sure, covariance.expand(2, 3, 3), normalised)
        torch.testing.assert_close(found, torch.tensor([[1.0, 0.0, 0.0]] * 2, dtype=dtype), atol=1e-6, rtol=0)
        even = answers.bridge(torch.zeros(1, 3, dtype=dtype), covariance[None], normalised)
        torch.testing.assert_close(even, torch.full((1, 3), 1 / 3, dtype=dtype), atol=1e-6, rtol=0)


@pytest.mark.parametrize("c", [2, 3, 7])
def test_the_normalised_bridge_scales_to_a_mean_variance_of_the_root_of_half_the_classes(c):
    """Hobbhahn et al. 2022: logits that already have it, and any multiple of them, give one answer."""
    g = seeded()
    mean, root = torch.randn(4, c, generator=g).double(), torch.randn(4, c, c, generator=g).double()
    centring = torch.eye(c, dtype=DOUBLE) - 1 / c
    mean, covariance = mean @ centring, centring @ root @ root.mT @ centring
    share = covariance.diagonal(dim1=-2, dim2=-1).mean(-1) / (c / 2) ** 0.5
    mean, covariance = mean / share.sqrt()[:, None], covariance / share[:, None, None]
    expected = answers.bridge(mean, covariance)
    for size in (1.0, 1.01, 30.0):
        found = answers.bridge(mean * size**0.5, covariance * size, normalised=True)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    smaller = answers.bridge(mean * 0.9**0.5, covariance * 0.9, normalised=True)
    torch.testing.assert_close(smaller, answers.bridge(mean * 0.9**0.5, covariance * 0.9), **TIGHT)


def test_the_network_link_averages_the_network_at_the_draws(classes):
    draws = classes.sample(7, seeded())
    expected = torch.stack([classes.lin.predict(X, weights).softmax(-1) for weights in draws]).mean(0)
    torch.testing.assert_close(classes.probabilities(X, "network", samples=draws), expected, **TIGHT)
    assert classes.probabilities(X, "network", generator=seeded()).sum(-1) == pytest.approx(1.0)


# Uncertainty


def test_mutual_information_of_labels_equals_the_integral(labels):
    predicted = labels.predict(X)
    p = normal_average(torch.sigmoid, predicted.mean, predicted.variance)
    total = binary_entropy(p)
    aleatoric = normal_average(lambda f: binary_entropy(f.sigmoid()), predicted.mean, predicted.variance)
    found = labels.uncertainty(X)
    assert found.unit == "nats" and found.total.shape == (5, 2) and found.stderr is None
    for part, expected in ((found.mean, p), (found.aleatoric, aleatoric), (found.total, total)):
        torch.testing.assert_close(part, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.total, found.aleatoric + found.epistemic, rtol=1e-12, atol=1e-14)
    drawn = labels.uncertainty(X, samples=labels.sample(1000, seeded()))
    assert float(((drawn.epistemic - (total - aleatoric)) / drawn.stderr).abs().max()) < 5
    assert float((drawn.mean - p).abs().max()) < 0.02


@pytest.mark.parametrize("deviation", [1e-6, 1.0, 30.0])
def test_entropies_of_normal_logits_are_integrals(deviation):
    """By SciPy's adaptive quadrature; for small variances v the mutual information is ½ v p (1 − p)."""
    mean, variance = torch.tensor([[0.3, -4.0]], dtype=DOUBLE), torch.full((1, 2), deviation**2, dtype=DOUBLE)
    found = answers.decompose_normal_labels(co.likelihoods.Bernoulli(), mean, variance)

    def expected(function, centre):
        def integrand(z):
            f = torch.tensor(centre + deviation * z, dtype=DOUBLE)
            return math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * float(function(f))

        return quad(integrand, -9, 9, points=[-centre / deviation] if deviation > 1 else None, epsabs=1e-12, limit=500)[
            0
        ]

    for place, centre in enumerate(mean[0].tolist()):
        assert float(found.mean[0, place]) == pytest.approx(expected(torch.sigmoid, centre), rel=1e-9)
        noise = expected(lambda f: binary_entropy(f.sigmoid()), centre)
        assert float(found.aleatoric[0, place]) == pytest.approx(noise, rel=1e-8)
    if deviation < 1e-3:
        p = mean.sigmoid()
        torch.testing.assert_close(found.epistemic, variance * p * (1 - p) / 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 1e-4), (torch.float32, 1e-2), (DOUBLE, 1e-8)])
def test_mutual_information_of_nearly_equal_draws_is_that_of_second_order(dtype, spread):
    """½ E[zᵀ(diag p − p pᵀ)z] for deviations z, far below the rounding of an entropy."""
    logits = torch.randn(5, 3, dtype=DOUBLE, generator=seeded(2))
    z = spread * torch.randn(400, 5, 3, dtype=DOUBLE, generator=seeded(3))
    z, p = z - z.mean(0), logits.softmax(-1)
    expected = ((p * z.square()).sum(-1) - (p * z).sum(-1).square()).mean(0) / 2
    found = answers.decompose_labels(co.likelihoods.Categorical(), (logits + z).to(dtype))
    torch.testing.assert_close(found.epistemic.double(), expected, rtol=max(1e-3, spread), atol=0)
    sampled = co.metrics.mutual_information((logits + z).softmax(-1))
    torch.testing.assert_close(sampled, expected, rtol=max(1e-3, spread), atol=0)


def test_the_stderr_of_mutual_information_covers(classes):
    """200 seeds: two standard errors hold the value of 200,000 draws for 95 %; fewer than 180 has odds of 1 in 300."""
    predicted = classes.predict(X[:1])
    mean, root = predicted.mean, outputs.covariance_root(predicted.covariance_matrix)

    def draws(k, seed):
        return mean + outputs.root_times(root, outputs.gaussian_noise(mean, k, PointNormals.drawn(seeded(seed)), 0))

    many = draws(200_000, 99).softmax(-1)
    exact = torch.special.entr(many.mean(0)).sum(-1) - torch.special.entr(many).sum(-1).mean(0)
    hits = 0
    for found in (answers.decompose_labels(classes.lin.likelihood, draws(1000, seed)) for seed in range(200)):
        hits += bool(((found.epistemic - exact).abs() <= 2 * found.stderr).all())
    assert hits >= 180


def test_numbers_decompose_in_closed_form(numbers):
    found, predicted = numbers.uncertainty(X), numbers.predict(X)
    noise = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE).expand(5, 3)
    torch.testing.assert_close(found.aleatoric, noise, **TIGHT)
    torch.testing.assert_close(found.epistemic, predicted.variance, **TIGHT)
    torch.testing.assert_close(found.total, numbers.predict(X, noise=True).variance, **TIGHT)
    assert found.unit == "variance" and found.stderr is None
    assert "5 points" in repr(found)


def test_rates_are_averaged_over_the_posterior():
    counts = untrained(co.likelihoods.Poisson(), 2, lambda x: x[:, :2].exp().round())
    predicted, found = counts.predict(X), counts.uncertainty(X)
    rate = normal_average(torch.exp, predicted.mean, predicted.variance)
    squared = normal_average(lambda f: (2 * f).exp(), predicted.mean, predicted.variance)
    torch.testing.assert_close(found.mean, rate, **TIGHT)
    torch.testing.assert_close(found.total, rate + squared - rate.square(), **TIGHT)
    with pytest.raises(ValueError, match="no class probabilities"):
        counts.probabilities(X)
    with pytest.raises(ValueError, match=r"noise=True.*Poisson\(\)"):
        counts.predict(X, noise=True)


def test_points_are_taken_some_at_a_time_where_draws_are_many(classes):
    """A point's draws depend on its position alone; those of 3,000 points are made in two groups."""
    many = X.repeat(600, 1)
    few, found = (classes.uncertainty(x, generator=seeded()) for x in (X, many))
    torch.testing.assert_close(found.epistemic[: len(X)], few.epistemic, **TIGHT)
    assert found.epistemic.shape == (len(many),) and found.mean.shape == (len(many), 3)
    spread = (found.stderr[: len(X)].square() + found.stderr[-len(X) :].square()).sqrt()
    assert float(((found.epistemic[-len(X) :] - few.epistemic) / spread).abs().max()) < 6


def test_one_draw_says_that_its_error_is_unknown(classes):
    found = classes.uncertainty(X, classes.sample(1, seeded()))
    assert bool(found.stderr.isinf().all()) and float(found.epistemic.abs().max()) < 1e-12


# Functions, noise and draws


def test_functions_are_joint_draws_of_the_linearised_network(numbers):
    draws = numbers.sample(6, seeded())
    J = numbers.lin.jacobian(X).to_dense()
    expected = (numbers.lin.predict(X).flatten() + (draws - numbers.mean) @ J.mT).view(6, 5, 3)
    torch.testing.assert_close(numbers.functions(X, 6, seeded()), expected, **TIGHT)
    torch.testing.assert_close(numbers.functions(X, 6, samples=draws), expected, **TIGHT)
    with pytest.raises(ValueError, match="k is 5, but there are 6"):
        numbers.functions(X, 5, samples=draws)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_noise_is_added_to_the_diagonal_alone(numbers, joint, drawn):
    samples = numbers.sample(4, seeded()) if drawn else None
    plain = numbers.predict(X, joint, samples).covariance_matrix
    noisy = numbers.predict(X, joint, samples, noise=True)
    noise = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE)
    added = torch.diag(noise.repeat(5)) if joint else torch.diag(noise)
    torch.testing.assert_close(noisy.covariance_matrix, plain + added, **TIGHT)
    torch.testing.assert_close(noisy.variance.flatten(), (plain + added).diagonal(dim1=-2, dim2=-1).flatten(), **TIGHT)


@pytest.mark.usefixtures("annotations_unchecked")
def test_variances_from_draws_carry_their_error(numbers):
    """100 sets of 20 draws: the χ² interval of a variance holds for 95 %; fewer than 85 has odds of 1 in 25,000."""
    exact, held, errors = numbers.predict(X[:1]).variance[0, 0], 0, []
    for samples in numbers.sample(2000, seeded(), rtol=1e-6).split(20):
        found = numbers.predict(X[:1], samples=samples)
        low, high = found.variance_interval()
        held += bool(low[0, 0] <= exact <= high[0, 0])
        errors.append(found.variance[0, 0] - exact)
    assert held >= 85
    torch.testing.assert_close(found.variance_stderr, found.variance * (2 / 20) ** 0.5, rtol=1e-12, atol=0)
    assert 0.75 < float(torch.stack(errors).std() / (exact * (2 / 20) ** 0.5)) < 1.25
    with pytest.raises(ValueError, match="level"):
        found.variance_interval(1.5)


def test_what_is_made_of_drawn_variances_states_no_error(numbers):
    found = numbers.predict(X[:4], samples=numbers.sample(20, seeded()))
    for other in (found[1:3], found * 3, found + found, found.add_jitter(1e-3)):
        assert other.variance.shape[1:] == found.variance.shape[1:]
        with pytest.raises(ValueError, match="only the result of predict"):
            _ = other.variance_stderr


# Scores


def test_the_log_likelihood_of_numbers_is_that_of_the_predictive(numbers):
    y = X[:, :3].sin()
    found = numbers.log_likelihood(X, y)
    law = numbers.predict(X, noise=True)
    expected = torch.distributions.MultivariateNormal(law.mean, law.covariance_matrix).log_prob(y)
    torch.testing.assert_close(found.value, expected, **TIGHT)
    assert found.samples == 0
    drawn = numbers.log_likelihood(X, y, samples=numbers.sample(4000, seeded(), rtol=1e-6))
    assert float(((drawn.value - expected) / drawn.stderr).abs().max()) < 5


def test_the_log_likelihood_of_a_single_output_is_an_integral():
    """Far from the predictions, too, where a thousand draws of the output are ten nats too low."""
    law = torch.distributions.LogNormal
    post = untrained(lambda f: law(f, 0.3), 1, lambda x: x[:, :1].exp())
    y, f = torch.logspace(-3, 3, 5, dtype=DOUBLE).unsqueeze(1), post.predict(X)
    expected = law(f.mean, (f.variance + 0.3**2).sqrt()).log_prob(y)
    torch.testing.assert_close(post.log_likelihood(X, y).value, expected[:, 0], **TIGHT)


def test_the_log_likelihood_of_several_outputs_is_drawn_where_the_target_is_likely():
    """Fifty standard deviations from the prediction, too, where draws around it are hundreds of nats too low."""
    lognormal = torch.distributions.LogNormal
    post = untrained(lambda f: torch.distributions.Independent(lognormal(f, 3.0), 1), 2, lambda x: x[:, :2].exp())
    predicted, y = post.predict(X), torch.logspace(-60, 60, 10, dtype=DOUBLE).view(5, 2)
    law = torch.distributions.MultivariateNormal(predicted.mean, predicted.covariance_matrix + 9 * torch.eye(2))
    found = post.log_likelihood(X, y, generator=seeded())
    assert float(found.stderr.amax()) < 0.1
    assert float(((found.value - law.log_prob(y.log()) + y.log().sum(1)) / found.stderr).abs().max()) < 4


def test_the_log_likelihood_of_labels_averages_probabilities(labels):
    y = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 1], [1, 0]], dtype=DOUBLE)
    draws = labels.sample(50, seeded())
    p = labels.functions(X, 50, samples=draws).sigmoid()
    each = torch.where(y == 1, p, 1 - p).prod(-1)
    found = labels.log_likelihood(X, y, samples=draws)
    torch.testing.assert_close(found.value, each.mean(0).log(), **TIGHT)
    torch.testing.assert_close(found.stderr, each.std(0) / each.mean(0) / 50**0.5, **TIGHT)


def test_the_dyadic_score_is_the_mean_of_products_of_pairs(classes):
    y, draws = torch.tensor([0, 1, 2, 1, 0]), classes.sample(40, seeded())
    p = classes.functions(X, 40, samples=draws).softmax(-1)
    each = p[:, torch.arange(5), y]  # (k, N)
    found = classes.log_likelihood(X, y, joint=True, samples=draws, generator=seeded(3))
    possible = {}
    for i in range(5):
        for j in range(5):
            for n in range(1, 10):
                if i != j:
                    possible[i, j, n] = float((each[:, i] ** n * each[:, j] ** (10 - n)).mean().log())
    assert found.value.shape == (2,)
    for value in found.value.tolist():
        assert min(abs(value - other) for other in possible.values()) < 1e-10
    certain = classes.log_likelihood(X, y, joint=True, samples=draws[:1].expand(2, -1), generator=seeded(3))
    assert float(certain.stderr.max()) < 1e-12  # equal draws


# Thousands of outputs


def test_covariances_beyond_the_budget_are_refused_and_variances_are_not():
    """70 classes at 430 points: 17 MB of covariances in float64, more than the least room."""
    x, y = torch.randn(20, 4).double(), torch.arange(20) * 3
    lin = co.linearize(nn.Linear(4, 70).double(), (x, y), "classification", memory_budget=2**24)
    post, points = co.laplace(lin, co.DiagonalGGN, 1.3, check_mode=False), torch.randn(430, 4).double()
    draws, match = post.sample(3, seeded()), r"70 × 70 covariances of 430 points need 16,856,000 bytes.*samples="
    exact = torch.cat([post.predict(part).covariance_matrix for part in points.split(215)])
    torch.testing.assert_close(post.predict(points).variance, exact.diagonal(dim1=1, dim2=2), **TIGHT)
    expected = answers.scale_logits(lin.predict(points), exact.diagonal(dim1=1, dim2=2)).softmax(-1)
    torch.testing.assert_close(post.probabilities(points), expected, **TIGHT)
    of_draws = post.predict(points, samples=draws)
    pushed = post.functions(points, 3, samples=draws) - lin.predict(points)
    torch.testing.assert_close(of_draws.variance, pushed.square().mean(0), **TIGHT)
    product = of_draws.lazy_covariance_matrix @ points.new_ones(430, 70, 1)
    torch.testing.assert_close(product.squeeze(-1), torch.einsum("knc,kn->nc", pushed, pushed.sum(-1)) / 3, **TIGHT)
    for call in (
        lambda: post.predict(points).covariance_matrix,
        lambda: of_draws.covariance_matrix,
        lambda: post.probabilities(points, "bridge"),
        lambda: post.probabilities(points, "mc"),
        lambda: post.uncertainty(points),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert post.probabilities(points, "mc", samples=draws).shape == (430, 70)
    assert post.uncertainty(points, samples=draws).total.shape == (430,)
    with pytest.raises(ValueError, match=r"joint covariance of 2,100 outputs needs 35,280,000 bytes.*functions"):
        post.predict(points[:30], joint=True).covariance_matrix  # noqa: B018
