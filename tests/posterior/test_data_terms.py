"""The likelihood in the evidence, and at the mode, is that of the data which the curvature is of."""

import math
import warnings

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
    "a low rank of others": (lambda a, b: co.GGN(b) + co.low_rank(co.GGN(a), rank=3), "does not say"),
    "an earlier posterior": (lambda a, b: co.GGN(b) + co.KFAC(a).add_diagonal(1.0), "does not say"),
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


def test_curvatures_that_do_not_say_are_taken_for_those_of_the_data(halves):
    _, _, both = halves
    for curvature in (
        co.KFAC,
        lambda lin: co.low_rank(co.GGN(lin), rank=3),
        lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.KFAC(lin),
    ):
        post = co.laplace(both, curvature(both), prior_precision=1.0)
        assert post.mode_gap < 1e-3 and post.log_evidence().value.isfinite()
