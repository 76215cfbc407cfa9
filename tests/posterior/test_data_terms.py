"""The likelihood in the evidence, and at the mode, is that of the data which the curvature is of."""

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

DOUBLE = torch.float64


def trained(x, y, prior):
    """A network at a mode of the posterior of all data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-9)

    def loss():
        optimizer.zero_grad()
        data = nn.functional.cross_entropy(model(x), y, reduction="sum")
        value = data + 0.5 * prior * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimizer.step(loss)
    return model


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
    expected = co.laplace(both, prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a mode of all data, of neither half alone
        post = co.laplace(b, SUMS[name](a, b), prior_precision=1.0)
    assert post.mode_gap == pytest.approx(expected.mode_gap, abs=1e-9)
    torch.testing.assert_close(post.log_evidence().value, expected.log_evidence().value, rtol=1e-10, atol=1e-10)
    tuned, reference = co.evidence.maximize(post), co.evidence.maximize(expected)
    torch.testing.assert_close(tuned.prior_precision, reference.prior_precision, rtol=1e-6, atol=0)


def test_a_half_that_is_no_mode_of_its_own_still_warns(halves):
    with pytest.warns(co.NotAMode):
        co.laplace(halves[1], prior_precision=1.0)


UNKNOWN = {
    "half": (lambda a, b: 0.5 * co.GGN(b), "0.5 times"),
    "twice": (lambda a, b: co.GGN(b) + co.GGN(b), "2 times"),
    "uneven": (lambda a, b: co.GGN(b) + 0.5 * co.GGN(a), "0.5 times"),
    "other data": (lambda a, b: co.GGN(a), "other data"),
    "a low rank of others": (lambda a, b: co.GGN(b) + co.low_rank(co.GGN(a), rank=3), "does not keep"),
    "an earlier posterior": (lambda a, b: co.GGN(b) + co.KFAC(a).add_diagonal(1.0), "does not keep"),
    "a diagonal of others": (lambda a, b: co.GGN(b) + co.DiagonalGGN(a), "does not keep"),
    "the other order, too": (lambda a, b: co.DiagonalGGN(a) + co.GGN(b), "does not keep"),
    "a diagonal in an earlier posterior": (
        lambda a, b: (co.GGN(b) + 2 * co.DiagonalGGN(b)).add_diagonal(1.0) - co.GGN(b),
        "2 times",
    ),
    "a detached diagonal": (lambda a, b: co.DiagonalGGN(b) + co.DiagonalGGN(a).detached_from_weights(), "detached"),
    "a matrix beside it": (lambda a, b: co.KFAC(b) + torch.eye(26, dtype=DOUBLE), "does not say"),
    "a matrix under it": (lambda a, b: co.linalg.Dense(torch.eye(26, dtype=DOUBLE)) + co.DiagonalGGN(b), "not say"),
    "a detached one": (lambda a, b: co.GGN(b) + co.GGN(a).detached_from_weights(), "detached"),
    "a detached one alone": (lambda a, b: co.KFAC(b).detached_from_weights(), "detached"),
    "a Hessian too": (lambda a, b: co.GGN(b) + co.EmpiricalFisher(b), "2 times"),
}


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
    "one-sample KFAC": lambda lin: co.KFAC(lin, fisher="mc", generator=seed()),
    "heuristic damping": lambda lin: co.KFAC(lin).heuristic_damping(0.1),
    "EKFAC": co.EKFAC,
    "DiagonalGGN": co.DiagonalGGN,
    "BlockDiagonal": co.BlockDiagonal,
    "LowRank": lambda lin: co.low_rank(co.GGN(lin), rank=3, generator=seed()),
    "low rank of KFAC": lambda lin: co.low_rank(co.KFAC(lin), rank=3, generator=seed()),
    "low rank with a diagonal": lambda lin: co.low_rank(co.GGN(lin), rank=3, generator=seed()).with_diagonal(
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


def seed():
    return torch.Generator().manual_seed(0)


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
    gap = co.laplace(both, co.GGN, check_mode=False).mode_gap
    for change in CHANGES.values() if name in PICKLED else ():
        assert co.laplace(both, change(curvature), check_mode=False).mode_gap == gap
        is_refused(b, change(curvature), "other data")


@pytest.mark.parametrize("name", [name for name in KINDS if name != "Hessian"])
def test_scaled_curvatures_and_sums_are_of_their_data_or_refused(halves, name):
    a, b, _ = halves
    first, second = KINDS[name](a), KINDS[name](b)
    is_refused(b, 0.5 * second, "0.5 times")
    is_refused(b, second / 4, "0.25 times")
    is_refused(b, second + second, "2 times")
    is_refused(b, 2 * first, "other data")
    is_refused(b, second.detached_from_weights(), "detached")
    is_of([a, b], b, co.GGN(a) + second)
    if name not in PICKLED:  # it holds its linearisation
        is_of([a, b], b, first + second)
    else:
        is_refused(b, first + second, "does not keep them")


@pytest.mark.parametrize("name", PICKLED)
def test_a_small_curvature_keeps_no_data(halves, name):
    a = halves[0]
    lin = co.Linearization(a.model, a.data, a.likelihood, a.output_shape, a.engine, a.memory_budget)
    gone, curvature = weakref.ref(lin), KINDS[name](lin)
    del lin
    gc.collect()
    assert gone() is None
    is_of([a], a, curvature)


def data(n=8, shift=0.0):
    x = torch.linspace(-1, 1, 3 * n, dtype=DOUBLE).reshape(n, 3) + shift
    return x, x[:, :2].cos()


def noisy(noise=0.5, shift=0.0, dtype=DOUBLE):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
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
    assert not math.isnan(co.laplace(single, co.KFAC(double).to(torch.float32), check_mode=False).mode_gap)


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


@pytest.mark.parametrize("method", ["nystrom", "lanczos"])
def test_a_low_rank_part_that_would_lose_a_gradient_is_refused(method):
    lin = noisy(torch.tensor(0.5, dtype=DOUBLE, requires_grad=True))
    for operator in (co.GGN(lin), 2 * co.GGN(lin), torch.eye(4, dtype=DOUBLE).requires_grad_()):
        with pytest.raises(ValueError, match=r"low_rank has no gradient.*detach"):
            co.low_rank(operator, rank=1, method=method)
        with torch.no_grad():
            assert co.low_rank(operator, rank=1, method=method).values.isfinite().all()
