"""Posteriors with structured curvatures: predictive, evidence and samples against the dense matrix of each.

Tests `log_evidence.py`.
"""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch

import curvops as co
from tests.posterior.trained import problem

TIGHT = {"rtol": 1e-8, "atol": 1e-10}


def generator():
    return torch.Generator().manual_seed(0)


CURVATURES = {
    "diagonal": co.DiagonalGGN,
    "kfac": co.KFAC,
    "ekfac": co.EKFAC,
    "block_diagonal": co.BlockDiagonal,
    "low_rank": lambda lin: co.low_rank(co.GGN(lin), rank=10, generator=generator()),
    "low_rank_with_diagonal": lambda lin: co.low_rank(co.GGN(lin), rank=10, generator=generator()).with_diagonal(
        co.DiagonalGGN(lin).diagonal()
    ),
    "empirical": co.EmpiricalFisher,
    "mc": lambda lin: co.GGN(lin, mc_samples=2, generator=generator()),
    "sum": lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.KFAC(lin),
}
EXACT = {"diagonal", "kfac", "ekfac", "block_diagonal", "low_rank", "low_rank_with_diagonal"}


@pytest.fixture(scope="module")
def lin():
    model, x, y = problem()
    return co.linearize(model, (x, y), "classification")


@pytest.mark.parametrize("name", CURVATURES)
def test_predictive_and_evidence_equal_the_dense_definition(lin, name):
    curvature = CURVATURES[name](lin)
    post = co.laplace(lin, curvature, prior_precision=1.3, check_mode=False)
    P = curvature.to_dense() + 1.3 * torch.eye(lin.num_parameters, dtype=torch.float64)
    x = torch.randn(4, 4, dtype=torch.float64, generator=generator())
    J = lin.jacobian(x).to_dense()
    expected = J @ torch.linalg.solve(P, J.mT)
    torch.testing.assert_close(post.predict(x, joint=True).covariance_matrix, expected, **TIGHT)
    variances = expected.diagonal().reshape(4, 3)
    torch.testing.assert_close(post.predict(x).variance, variances, **TIGHT)

    log_ratio = torch.logdet(P) - lin.num_parameters * torch.tensor(1.3, dtype=torch.float64).log()
    quadratic = 1.3 * lin.theta.square().sum()
    evidence = lin.log_likelihood() - 0.5 * (quadratic + log_ratio)
    dimension = torch.trace(torch.linalg.solve(P, curvature.to_dense()))
    found, effective = post.log_evidence(1e-3, generator()), post.effective_parameters(1e-3, generator())
    if name in EXACT:
        assert found.stderr == 0 and found.matvecs == 0
        torch.testing.assert_close(found.value, evidence, **TIGHT)
        torch.testing.assert_close(effective.value, dimension, **TIGHT)
    else:
        assert abs(found.value - evidence) <= 4 * found.stderr + 1e-3 * evidence.abs()
        assert abs(effective.value - dimension) <= 4 * effective.stderr + 1e-3 * dimension


@pytest.mark.parametrize("name", sorted(EXACT))
def test_tuning_and_samples_iterate_nowhere(lin, name):
    curvature = CURVATURES[name](lin)
    solving, quadrature = (
        import_module("curvops.linalg.solvers.solve"),
        "curvops.posterior.log_evidence.spectral_quadrature",
    )
    with patch.object(solving, "cg", side_effect=AssertionError), patch(quadrature, side_effect=AssertionError):
        post = co.evidence.maximize(co.laplace(lin, curvature, prior_precision=1.0, check_mode=False))
        curve = co.evidence.grid(post, [0.5 * float(post.prior_precision), 2 * float(post.prior_precision)])
        assert all(point.value < post.log_evidence().value for point in curve)
        assert post.sample(5, generator()).shape == (5, lin.num_parameters)


def test_a_last_layer_is_a_selection():
    model, x, y = problem()
    lin = co.linearize(model, (x, y), "classification", parameters="last_layer")
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    whole = co.GGN(co.linearize(model, (x, y), "classification")).to_dense()[-21:, -21:]
    torch.testing.assert_close(post.curvature.to_dense(), whole, rtol=1e-10, atol=1e-10)
    assert co.KFAC(lin).shape == (21, 21)
    assert float(post.predict(x[:2]).variance.min()) > 0


def test_a_prior_of_one_number_a_layer_keeps_the_closed_form(lin):
    by_layer = torch.cat([torch.full((30,), 0.5), torch.full((21,), 2.0)]).double()
    post = co.laplace(lin, co.KFAC, prior_precision=by_layer, check_mode=False)
    P = post.curvature.to_dense() + torch.diag(by_layer)
    torch.testing.assert_close(post.precision.logdet(), torch.logdet(P), **TIGHT)


def test_all_answers_share_one_factorisation(lin):
    with patch.object(torch.linalg, "cholesky_ex", wraps=torch.linalg.cholesky_ex) as factorised:
        everything = co.Subnetwork(co.GGN(lin), torch.arange(lin.num_parameters))
        post = co.laplace(lin, everything, 1.3, check_mode=False)
        post.log_evidence()
        post.effective_parameters()
        post.sample(2, generator())
        _ = post.predict(torch.ones(2, 4, dtype=torch.float64)).variance
        assert factorised.call_count == 1
