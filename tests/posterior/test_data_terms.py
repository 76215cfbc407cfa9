"""The likelihood in the evidence, and at the mode, is that of the data which the curvature is of.

Tests `matrix_identity.py`, `terms.py`.
"""

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import curvops as co
from tests.posterior.trained import to_the_mode
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64


def trained(x, y, prior):
    """A network at a mode of the posterior of all data."""
    return to_the_mode(perceptron(3, 4, 2), x, y, prior)


@pytest.fixture(scope="module")
def halves():
    x = torch.randn(20, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.2).long()
    model = trained(x, y, 1.0)
    parts = [co.linearize(model, (x[s], y[s]), "classification") for s in (slice(0, 8), slice(8, 20))]
    return (*parts, co.linearize(model, (x, y), "classification"))


SUMS = {
    "two GGNs": lambda a, b: co.GGN(a) + co.GGN(b),
    "the other order": lambda a, b: co.GGN(b) + co.GGN(a),
    "parts": lambda a, b: 0.25 * co.GGN(a) + (co.GGN(b) + 0.75 * co.GGN(a)),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_data_sets_is_the_posterior_of_all_data(halves, name):
    a, b, both = halves
    expected = co.laplace(both, co.GGN, prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mode of all data, of neither half alone
        post = co.laplace(b, SUMS[name](a, b), prior_precision=1.0)
    assert post.mode_gap == pytest.approx(expected.mode_gap, abs=1e-9)
    torch.testing.assert_close(post.log_evidence().value, expected.log_evidence().value, rtol=1e-10, atol=1e-10)
    tuned, reference = co.evidence.maximize(post), co.evidence.maximize(expected)
    torch.testing.assert_close(tuned.prior_precision, reference.prior_precision, rtol=1e-6, atol=0)


UNKNOWN = {
    "uneven": (lambda a, b: co.GGN(b) + 0.5 * co.GGN(a), "0.5 times"),
    "an earlier posterior": (lambda a, b: co.GGN(b) + co.KFAC(a).add_diagonal(1.0), "does not keep"),
    "a diagonal in an earlier posterior": (
        lambda a, b: (co.GGN(b) + 2 * co.DiagonalGGN(b)).add_diagonal(1.0) - co.GGN(b),
        "2 times",
    ),
    "a detached diagonal": (lambda a, b: co.DiagonalGGN(b) + co.DiagonalGGN(a).detached_from_weights(), "detached"),
    "a matrix beside it": (lambda a, b: co.KFAC(b) + torch.eye(26, dtype=DOUBLE), "does not record"),
    "a matrix under it": (lambda a, b: co.linalg.Dense(torch.eye(26, dtype=DOUBLE)) + co.DiagonalGGN(b), "not record"),
    "a Hessian too": (lambda a, b: co.GGN(b) + co.EmpiricalFisher(b), "2 times"),
}


TEMPERED = {
    "GGN": lambda a, b, both: 0.4 * co.GGN(both),
    "a sum": lambda a, b, both: 0.4 * (co.GGN(a) + co.GGN(b)),
    "each": lambda a, b, both: co.GGN(a) * 0.4 + 0.4 * co.GGN(b),
    "KFAC": lambda a, b, both: 0.4 * co.KFAC(both),
    "EKFAC": lambda a, b, both: co.EKFAC(both) * 0.4,
    "diagonal": lambda a, b, both: 0.4 * co.DiagonalGGN(both),
    "low rank": lambda a, b, both: 0.4 * co.low_rank(co.GGN(both), rank=3, generator=seeded()),
    "of a low rank": lambda a, b, both: co.low_rank(0.4 * co.GGN(both), rank=3, generator=seeded()),
    "Hessian": lambda a, b, both: 0.4 * co.Hessian(both),
}


@pytest.mark.parametrize("name", TEMPERED)
@pytest.mark.parametrize("mode", ["map", "linear"])
def test_a_multiple_of_a_curvature_tempers_the_likelihood(halves, name, mode):
    """log ∫ p(y|θ)^0.4 p(θ) dθ, at θ* and at the tempered linear model's mode, under each prior; any temperature."""
    a, b, both = halves
    curvature = TEMPERED[name](a, b, both)
    D, theta = both.num_parameters, both.theta
    vector = torch.full((D,), 2.0, dtype=DOUBLE) if "KFAC" in name else torch.linspace(1.0, 3.0, D, dtype=DOUBLE)
    y = torch.cat([batch.targets for batch in both.data])
    J, H, G = both.jacobian().to_dense(), both.outputs(), curvature.to_dense()
    data_gradient = 0.4 * both.gradient()
    for prior in (3.0, vector):
        post = co.laplace(b if name in ("a sum", "each") else both, curvature, prior, temperature=0.3, check_mode=False)
        found = post.log_evidence(mode=mode)
        A = torch.as_tensor(prior, dtype=DOUBLE).expand(D)
        at = theta if mode == "map" else post.linear_mode(rtol=1e-10).theta
        f = (H.flatten() + J @ (at - theta)).view(20, 2)
        fit = 0.4 * f.log_softmax(1)[torch.arange(20), y].sum()
        gradient = 0.4 * J.mT @ (f.softmax(1) - nn.functional.one_hot(y, 2)).flatten() + A * at
        assert mode == "map" or float(gradient.norm()) < 1e-6
        expected = fit - 0.5 * ((A * at.square()).sum() + torch.logdet(G + A.diag()) - A.log().sum())
        torch.testing.assert_close(found.value, expected, rtol=1e-8, atol=1e-8)
        assert found.power == pytest.approx(0.4) and "power=0.4" in repr(found)
        gap = (data_gradient + A * theta).norm() / (A * theta).norm()
        assert post.mode_gap == pytest.approx(float(gap), rel=1e-8)


def test_the_tempered_evidence_of_a_linear_gaussian_model_is_the_integral():
    """N(y; f, σ²)^β is N(y; f, σ²/β) times (2πσ²/β)^½ (2πσ²)^(−β/2) for each target; exact, and tuned by maximize."""
    x = torch.randn(15, 3, generator=seeded(), dtype=DOUBLE)
    y = x.sum(1, keepdim=True) + torch.randn(15, 1, generator=seeded(), dtype=DOUBLE)
    noise, beta, alpha = 0.7, 0.25, 1.5
    lin = co.linearize(nn.Linear(3, 1, bias=False).double(), (x, y), co.likelihoods.Gaussian(noise))
    post = co.laplace(lin, beta * co.GGN(lin), alpha, check_mode=False)
    eye = torch.eye(15, dtype=DOUBLE)

    def exact(alpha):
        normal = torch.distributions.MultivariateNormal(torch.zeros(15).double(), noise / beta * eye + x @ x.mT / alpha)
        constant = 0.5 * math.log(2 * math.pi * noise / beta) - 0.5 * beta * math.log(2 * math.pi * noise)
        return float(normal.log_prob(y[:, 0])) + 15 * constant

    assert float(post.log_evidence(mode="linear")) == pytest.approx(exact(alpha), abs=1e-9)
    best = co.evidence.maximize(post, mode="linear", xtol=1e-6)
    a = float(best.prior_precision)
    assert exact(a) > max(exact(1.01 * a), exact(0.99 * a))
    other = co.evidence.mackay(post, None, 300, xtol=1e-8)
    assert float(other.prior_precision) == pytest.approx(a, rel=1e-3)
    for tune in (lambda: co.evidence.maximize(post, "noise"), lambda: co.evidence.mackay(post, tune_noise=True)):
        with pytest.raises(ValueError, match="tempered|how it was built"):
            tune()


@pytest.mark.parametrize("name", UNKNOWN)
def test_data_that_are_not_counted_once_have_no_evidence(halves, name):
    a, b, _ = halves
    curvature, why = UNKNOWN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is known of the mode, so nothing is said
        post = co.laplace(b, curvature(a, b), prior_precision=1.0)
    assert math.isnan(post.mode_gap)
    for use in (post.log_evidence, lambda: co.evidence.grid(post, [1.0]), lambda: co.evidence.maximize(post)):
        with pytest.raises(ValueError, match=why):
            use()
    assert post.predict(torch.ones(2, 3, dtype=DOUBLE)).variance.isfinite().all()


KINDS = {
    "KFAC": co.KFAC,
    "one-sample KFAC": lambda lin: co.KFAC(lin, fisher="mc", generator=seeded()),
    "heuristic damping": lambda lin: co.KFAC(lin).heuristic_damping(0.1),
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "LowRank": lambda lin: co.low_rank(co.GGN(lin), rank=3, generator=seeded()),
    "low rank of KFAC": lambda lin: co.low_rank(co.KFAC(lin), rank=3, generator=seeded()),
    "low rank with a diagonal": lambda lin: co.low_rank(co.GGN(lin), rank=3, generator=seeded()).with_diagonal(
        co.DiagonalGGN(lin).entries
    ),
    "Subnetwork": lambda lin: co.Subnetwork(co.GGN(lin), torch.arange(lin.num_parameters)),
    "slice": lambda lin: co.GGN(lin)[0 : lin.num_parameters, 0 : lin.num_parameters],
    "Hessian": co.Hessian,
}
CHANGES = {
    "halves": lambda operator: 0.5 * operator + operator * 0.5,
    "copied": copy.deepcopy,
    "pickled": lambda operator: pickle.loads(pickle.dumps(operator)),
    "rebuilt": lambda operator: operator.representation_tree()(*operator.representation()),
}
PICKLED = [name for name in KINDS if name not in ("slice", "Hessian")]  # these hold the model and the data


def evidence(lins, curvature, prior):
    """By its definition, from the dense matrix."""
    theta, D = lins[0].theta, lins[0].num_parameters
    precision = curvature.to_dense() + prior * torch.eye(D, dtype=DOUBLE)
    quadratic = prior * theta.square().sum() + torch.linalg.slogdet(precision)[1] - D * math.log(prior)
    return sum(lin.log_likelihood() for lin in lins) - 0.5 * quadratic


def is_of(lins, given, curvature):
    """Whether the posterior takes these data for those of the curvature."""
    post = co.laplace(given, curvature, prior_precision=1.0, check_mode=False)
    gradient = torch.stack([lin.gradient() for lin in lins]).sum(0)
    assert post.mode_gap == pytest.approx(float((gradient + given.theta).norm() / given.theta.norm()), abs=1e-8)
    found, expected = post.log_evidence().value, evidence(lins, curvature, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def is_refused(given, curvature, why):
    post = co.laplace(given, curvature, prior_precision=100.0)  # definite for a Hessian, too
    assert math.isnan(post.mode_gap)
    with pytest.raises(ValueError, match=why):
        post.log_evidence()


@pytest.mark.parametrize("name", KINDS)
def test_every_curvature_is_of_the_data_that_it_was_made_of(halves, name):
    _, b, both = halves
    curvature = KINDS[name](both)
    is_of([both], both, curvature)
    gap = co.laplace(both, co.GGN, 1.0, check_mode=False).mode_gap
    for change in CHANGES.values() if name in PICKLED else ():
        assert co.laplace(both, change(curvature), 1.0, check_mode=False).mode_gap == gap
        is_refused(b, change(curvature), "other data")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "Hessian"])
def test_scaled_curvatures_and_sums_are_of_their_data_or_refused(halves, name):
    a, b, _ = halves
    first, second = KINDS[name](a), KINDS[name](b)
    for tempered in (0.5 * second, second / 2):
        assert co.laplace(b, tempered, 100.0, check_mode=False).log_evidence().power == pytest.approx(0.5)
    is_refused(b, second + second, "2 times")
    is_refused(b, 2 * first, "other data")
    is_refused(b, second.detached_from_weights(), "detached")
    is_of([a, b], b, co.GGN(a) + second)
    if name not in PICKLED:  # it holds its linearisation
        is_of([a, b], b, first + second)
    else:
        is_refused(b, first + second, "does not keep them")


def test_a_small_curvature_keeps_no_data(halves):
    a, made = halves[0], {}
    for name in PICKLED:
        lin = co.operators.Linearization(a.model, a.data, a.likelihood, a.output_shape, a.engine, a.memory_budget)
        made[name] = weakref.ref(lin), KINDS[name](lin)
        del lin
    gc.collect()
    for name, (gone, curvature) in made.items():
        assert gone() is None, name
        is_of([a], a, curvature)


def data(n=8, shift=0.0):
    x = torch.linspace(-1, 1, 3 * n, dtype=DOUBLE).reshape(n, 3) + shift
    return x, x[:, :2].cos()


def noisy(noise=0.5, shift=0.0, dtype=DOUBLE):
    model = perceptron(3, 4, 2, dtype=dtype)
    x, y = data(shift=shift)
    likelihood = noise if isinstance(noise, co.likelihoods.Likelihood) else co.likelihoods.Gaussian(noise)
    return co.linearize(model, (x.to(dtype), y.to(dtype)), likelihood)


def test_data_linearised_again_are_the_same_data():
    is_of([noisy()], noisy(), co.KFAC(noisy()))
    is_of([noisy()], noisy(), co.GGN(noisy()))


def test_a_subnetwork_of_the_same_data_has_their_likelihood():
    whole, index = noisy(), torch.tensor([1, 5, 17, 20])
    x, y = data()
    part = co.linearize(whole.model.module, (x, y), co.likelihoods.Gaussian(0.5), parameters=index)
    is_of([part], part, co.Subnetwork(co.GGN(whole), index))


def test_converted_data_are_the_same_data():
    single = noisy(torch.tensor(0.3), dtype=torch.float32)
    double = single.cast(DOUBLE)
    is_of([double], double, co.GGN(single).to(DOUBLE))
    is_of([double], double, co.KFAC(single).to(DOUBLE))
    assert not math.isnan(co.laplace(single, co.KFAC(double).to(torch.float32), 1.0, check_mode=False).mode_gap)


@pytest.mark.parametrize("kind", [co.KFAC, co.GGN])
def test_another_likelihood_of_the_same_data_is_refused(kind):
    is_refused(noisy(), kind(noisy(0.4)), "other data")
    is_refused(noisy(), kind(noisy(shift=1e-9)), "other data")

    def distribution(f):
        return torch.distributions.Normal(f, 1.0)

    own = noisy(co.likelihoods.FromDistribution(distribution))
    is_of([own], own, copy.deepcopy(kind(own)) if kind is co.KFAC else kind(own))
    is_refused(own, kind(noisy(co.likelihoods.FromDistribution(lambda f: torch.distributions.Normal(f, 2.0)))), "other")


def test_a_noise_that_changed_since_is_another_likelihood():
    noise = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    lin = noisy(noise)
    with torch.no_grad():
        curvature = co.KFAC(lin)
        is_of([lin], lin, curvature)
        noise.fill_(0.7)
    with torch.no_grad():
        is_refused(lin, curvature, "another likelihood")


def test_a_matrix_of_the_users_own_is_taken_for_that_of_the_data(halves):
    both = halves[2]
    G = co.GGN(both).to_dense()
    for matrix in (co.linalg.Dense(G, psd=True), co.linalg.Diagonal(G.diagonal())):
        is_of([both], both, matrix)
    is_of([both], both, co.GGN(both) + co.linalg.Diagonal(G.diagonal()))  # a prior of the user's own beside it
