"""Which weights to infer: each score against its definition, Wasserstein distances against dense matrices."""

import re
import warnings

import pytest
import torch
from torch import nn

import curvops as co
from curvops.linalg import Reason
from tests.posterior.trained import problem
from tests.randomness import perceptron, seeded

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-8, "atol": 1e-10}


X = torch.randn(5, 4, dtype=DOUBLE, generator=seeded(1))
SNAPSHOTS = torch.randn(9, 51, dtype=DOUBLE, generator=seeded(2)) * torch.linspace(0.1, 2, 51, dtype=DOUBLE)


def definitions(lin):
    G, J = co.GGN(lin).to_dense(), lin.jacobian(X).to_dense()
    return {
        "variance": 1 / (G.diagonal() + 0.7),
        "swag": SNAPSHOTS.var(0),
        "marginal": torch.linalg.inv(G + 0.7 * torch.eye(51, dtype=DOUBLE)).diagonal(),
        "predictive": J.square().sum(0) / (G.diagonal() + 0.7),
        "magnitude": lin.theta.abs(),
        "obd": 0.5 * lin.theta.square() * G.diagonal(),
        "obs": 0.5 * lin.theta.square() / torch.linalg.inv(G + 0.7 * torch.eye(51, dtype=DOUBLE)).diagonal(),
    }


@pytest.mark.parametrize("score", ["magnitude", "marginal", "obd", "obs", "predictive", "swag", "variance"])
@pytest.mark.parametrize("k", [1, 7, 51])
def test_the_largest_scores_are_taken(lin, score, k):
    expected = definitions(lin)[score].topk(k).indices.sort().values
    found = co.select(lin, k, score, prior_precision=0.7, x=X, snapshots=iter(SNAPSHOTS))
    assert torch.equal(found, expected)


def test_each_score_has_its_definition(lin):
    with pytest.raises(ValueError) as caught:
        co.select(lin, 1, "?")
    assert {*re.findall(r"'(\w+)'", str(caught.value))} == {*definitions(lin), "random"}


def test_within_modules_and_at_random(lin):
    head = co.select(lin, 8, modules="2.*")
    assert int(head.min()) >= 30
    values = definitions(lin)["variance"][30:]
    exact = 1 / (1 / values - 0.7 + 1.0)
    assert torch.equal(head, 30 + exact.topk(8).indices.sort().values)
    one, other = (co.select(lin, 10, "random", generator=seeded(seed)) for seed in (0, 1))
    assert torch.equal(one, co.select(lin, 10, "random", generator=seeded())) and not torch.equal(one, other)
    assert len(one.unique()) == 10
    named = [lin.unflatten_tangent(snapshot) for snapshot in SNAPSHOTS]
    assert torch.equal(co.select(lin, 5, "swag", snapshots=named), co.select(lin, 5, "swag", snapshots=SNAPSHOTS))
    farthest = (SNAPSHOTS[0] - SNAPSHOTS[1]).abs().topk(5).indices.sort().values
    assert torch.equal(co.select(lin, 5, "swag", snapshots=SNAPSHOTS[:2]), farthest)


def test_inert_weights_are_warned_of_with_their_share():
    """A dead unit: its 5 weights have no curvature and the largest variance of all."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0.0, -1.0
    x = torch.randn(20, 3, dtype=DOUBLE)
    lin = co.linearize(model, (x, x[:, :2]), co.likelihoods.Gaussian(noise=1.0))
    with pytest.warns(co.errors.InertWeightsWarning, match="100% of the 4 weights selected by 'variance'"):
        co.select(lin, 4, "variance")
    with pytest.warns(co.errors.InertWeightsWarning, match="75% of the 8"):  # the dead unit's weights in and out
        co.select(lin, 8, "variance")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.select(lin, 8, "predictive")


@pytest.mark.parametrize("score", ["swag", "magnitude", "random"])
def test_scores_without_curvature_compute_none(score):
    """At millions of weights a diagonal of the GGN takes minutes, which a warning is not worth."""
    model, x, y = problem()
    heard = []
    lin = co.linearize(model, (x, y), "classification", progress=lambda what, *_: heard.append(what))
    heard.clear()
    assert len(co.select(lin, 5, score, snapshots=SNAPSHOTS, generator=seeded())) == 5
    assert heard == []
    co.select(lin, 5, "variance")
    assert heard != []


# Wasserstein distances


def psd_root(A):
    values, vectors = torch.linalg.eigh(A)
    return vectors @ (values.clamp_min(0).sqrt().unsqueeze(-1) * vectors.mT)


def distance(one, other):
    """W₂² of centred Gaussians by their covariances (Gelbrich 1990)."""
    root = psd_root(one)
    return one.trace() + other.trace() - 2 * psd_root(root @ other @ root).trace()


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
@pytest.mark.parametrize("size", [1, 20, 51])
def test_the_distance_is_gelbrichs(lin, curvature, size):
    post = co.laplace(lin, curvature, 0.7, temperature=0.5, check_mode=False)
    chosen = co.select(lin, size, "random", generator=seeded())
    P = post.precision.to_dense()
    own = torch.zeros(51, 51, dtype=DOUBLE)
    own[chosen.unsqueeze(1), chosen] = torch.linalg.inv(P[chosen][:, chosen])
    found = co.wasserstein(post, chosen)
    expected = 0.5 * distance(torch.linalg.inv(P), own)
    torch.testing.assert_close(found.value, expected, rtol=1e-6, atol=1e-6)  # square roots of near-zero eigenvalues
    assert found.stderr == 0
    by_diagonal = co.wasserstein(post, chosen, "diagonal")
    left = torch.ones(51, dtype=torch.bool)
    left[chosen] = False
    torch.testing.assert_close(by_diagonal.value, 0.5 * (1 / P.diagonal())[left].sum(), **TIGHT)
    if curvature is co.DiagonalGGN:
        torch.testing.assert_close(found.value, by_diagonal.value, **TIGHT)


@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC, co.DiagonalGGN])
@pytest.mark.parametrize("prior", [1e-3, 1.0, 1e4])
def test_no_distance_is_negative_or_more_certain_than_its_rounding(curvature, prior):
    """A regression of 31 weights, where tr P⁻¹ is far above the distance; in single precision beside double."""
    found = []
    for dtype in (DOUBLE, torch.float32):
        model = perceptron(4, 5, 1).to(dtype)
        x = torch.randn(20, 4, dtype=DOUBLE).to(dtype)
        lin = co.linearize(model, (x, x[:, :1]), co.likelihoods.Gaussian(noise=1.0))
        post = co.laplace(lin, curvature, prior, check_mode=False)
        found.append([co.wasserstein(post, range(size)) for size in (31, 30, 5)])
        if dtype == DOUBLE:
            P = post.precision.to_dense()
    for size, exact, single in zip((31, 30, 5), *found):
        own = torch.zeros(31, 31, dtype=DOUBLE)
        own[:size, :size] = torch.linalg.inv(P[:size, :size])
        assert exact.samples == 0 and exact.value >= 0 and single.value >= 0
        inverse = torch.linalg.inv(P)
        rounding = max(1e-6, 1e-10 * float(inverse.trace()))  # the reference is a difference of such traces
        torch.testing.assert_close(exact.value, distance(inverse, own), rtol=1e-6, atol=rounding)
        if single.reason is Reason.CONVERGED:
            assert abs(single.value - exact.value) <= 0.01 * exact.value
        else:
            assert single.reason is Reason.PRECISION_LIMIT and single.stderr > 0
    assert found[0][0].value == found[1][0].value == 0


def test_beyond_what_is_formed_the_variances_left_out_are_estimated():
    model, x, y = problem()
    lin = co.linearize(model, (x, y), "classification", memory_budget=2**14)
    post = co.laplace(lin, co.GGN, prior_precision=100.0, check_mode=False)
    inverse = torch.linalg.inv(post.precision.to_dense())
    for size in (50, 5):
        own = torch.zeros(51, 51, dtype=DOUBLE)
        own[:size, :size] = torch.linalg.inv(post.precision.to_dense()[:size, :size])
        found = co.wasserstein(post, range(size), rtol=0.01, generator=seeded())
        # To 1 % of the distance itself, which is a fiftieth of tr P⁻¹ for all weights but one.
        assert abs(found.value - distance(inverse, own)) <= 0.03 * found.value and found.reason is Reason.CONVERGED
