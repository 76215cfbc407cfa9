"""The log evidence: what it spends, and that it is what the dense definition says whichever way it comes."""

import functools

import pytest
import torch

import curvops as co
from curvops.linalg import Reason
from tests.randomness import perceptron, seeded


def network(hidden, n=60):
    """A network of 8·hidden + 3 weights whose curvature has at most 2·n eigenvalues that are not zero."""
    model = perceptron(4, hidden, 3)
    x = torch.randn(n, 4, dtype=torch.float64)
    return co.linearize(model, (x, x[:, :3].argmax(1)), "classification")


@pytest.fixture(scope="module")
def lin():
    return network(40)


@pytest.fixture(scope="module")
def dense(lin):
    return co.GGN(lin).to_dense()


@pytest.fixture(scope="module")
def large():
    """1,027 weights, more than the whole spectrum is taken of, and too few for function space at 300 outputs."""
    lin = network(128, 100)
    return lin, co.GGN(lin) @ torch.eye(1027, dtype=torch.float64)


def expected(lin, dense, prior):
    P = dense + prior * torch.eye(len(dense), dtype=torch.float64)
    logs = P.logdet() - len(dense) * torch.tensor(prior, dtype=torch.float64).log()
    return lin.log_likelihood() - 0.5 * (prior * lin.theta.square().sum() + logs)


def within(estimate, value):
    low, high = estimate.interval(0.9999)
    return bool(low - 1e-8 <= value <= high + 1e-8)


@pytest.mark.parametrize("prior", [1e-3, 1.0])
def test_up_to_a_thousand_weights_it_is_exact_for_as_many_products_as_weights(lin, dense, prior):
    post = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)
    found = post.log_evidence(rtol=1e-3)
    assert found.reason is Reason.CONVERGED and found.stderr == 0 and found.matvecs == lin.num_parameters
    torch.testing.assert_close(found.value, expected(lin, dense, prior), rtol=1e-10, atol=1e-8)
    count = torch.linalg.solve(dense + prior * torch.eye(len(dense)).double(), dense).trace()
    torch.testing.assert_close(post.effective_parameters(rtol=1e-3).value, count, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("own", [0.5, "vector"])
def test_a_curvature_with_a_diagonal_of_its_own_counts_it_once(lin, dense, own):
    own = torch.linspace(0.1, 1, len(dense), dtype=torch.float64) if own == "vector" else torch.tensor(own).double()
    prior = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    whole = dense + own.expand(len(dense)).diag()
    post = co.laplace(lin, co.GGN(lin).add_diagonal(own), prior_precision=prior, check_mode=False)
    found, reference = post.log_evidence().value, expected(lin, whole, 2.0)
    torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-8)
    (slope,) = torch.autograd.grad(found, prior)
    P = whole + 2.0 * torch.eye(len(dense)).double()
    by_hand = -0.5 * (lin.theta.square().sum() + P.inverse().trace() - len(dense) / 2.0)
    torch.testing.assert_close(slope, by_hand, rtol=1e-8, atol=1e-8)
    with torch.no_grad():
        effective = post.effective_parameters(rtol=1e-3).value
    torch.testing.assert_close(effective, torch.linalg.solve(P, whole).trace(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("prior", [1e-2, 1.0])
def test_by_probes_it_reaches_its_tolerance_or_becomes_exact(large, prior):
    """Intervals of level 0.9999: a false alarm once in 2,500, both priors and forms together."""
    lin, dense = large
    post = co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)
    found = post.log_evidence(rtol=1e-3, generator=seeded())
    assert found.reason is Reason.CONVERGED and found.matvecs <= lin.num_parameters
    assert within(found, expected(lin, dense, prior))
    vector = co.laplace(lin, co.GGN, prior_precision=torch.full_like(lin.theta, prior), check_mode=False)
    by_vector = vector.log_evidence(rtol=1e-2, generator=seeded())
    assert within(by_vector, expected(lin, dense, prior))


def test_a_range_is_prepared_for_once(large):
    lin, dense = large
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    curve = co.evidence.grid(post, [3.0, 30.0], rtol=0.05, generator=seeded())
    for value, point in zip((3.0, 30.0), curve):
        assert within(point, expected(lin, dense, value))


@functools.cache
def at_scale(scale, dtype):
    """A small network and data of this scale, in either dtype of the same numbers."""
    model = perceptron(4, 6, 3)
    x = torch.randn(20, 4, dtype=torch.float64) * scale
    return co.linearize(model.to(dtype), (x.to(dtype), x[:, :3].to(dtype)), co.likelihoods.Gaussian(noise=1.0))


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN, co.EmpiricalFisher])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e2])
@pytest.mark.parametrize("kind", ["number", "vector", "operator"])
def test_effective_parameters_in_single_precision_are_within_their_error(curvature, scale, kind):
    """Large inputs under a weak prior: rounding decides what counts; small ones under a strong prior: 1 − 1 is left."""
    prior, found = scale**-1.5, []
    for dtype in (torch.float64, torch.float32):
        lin = at_scale(scale, dtype)
        given = torch.full_like(lin.theta, prior)
        if kind == "operator":
            given = co.linalg.Diagonal(given)
        post = co.laplace(lin, curvature, prior if kind == "number" else given, check_mode=False)
        found.append(post.effective_parameters())
    exact, single = found
    gap = abs(float(single.value) - float(exact.value))
    assert gap <= float(single.bias_bound) + float(exact.bias_bound) + 1e-4 * abs(float(exact.value)), found
    for each in found:
        assert (each.reason is Reason.CONVERGED) == (each.stderr == 0), each
