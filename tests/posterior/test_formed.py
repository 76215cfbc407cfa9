"""The curvature of a small network, formed for many right-hand sides: every answer against the dense matrix."""

import copy
import warnings
from unittest.mock import patch

import pytest
import torch

import curvops as co
from curvops.linalg.operators import ColumnNoise, normal
from tests.posterior.trained import problem
from tests.randomness import seeded

DOUBLE = torch.float64
TIGHT = {"rtol": 1e-8, "atol": 1e-10}
X = torch.randn(20, 4, dtype=DOUBLE, generator=seeded(1))


@pytest.fixture(scope="module")
def lin():
    """323 weights: more than every solve forms, fewer than eight times the columns of X."""
    model, x, y = problem(width=40)
    return co.linearize(model, (x, y), "classification")


def vector(lin):
    return torch.linspace(0.5, 2.0, lin.num_parameters, dtype=DOUBLE)


def root(lin):
    return torch.randn(lin.num_parameters, 4, dtype=DOUBLE, generator=seeded())


CURVATURES = {
    "ggn": co.GGN,
    "sampled": lambda lin: co.GGN(lin, mc_samples=2, generator=seeded()),
    "empirical": co.EmpiricalFisher,
    "tempered": lambda lin: 0.5 * co.GGN(lin),
    "sum": lambda lin: 0.5 * co.GGN(lin) + 0.5 * co.KFAC(lin),
    "damped": lambda lin: co.GGN(lin).add_diagonal(0.3),
}
PRIORS = {
    "number": lambda lin: 1.3,
    "vector": vector,
    "low rank": lambda lin: co.linalg.LowRank(root(lin), torch.ones(4, dtype=DOUBLE)).add_diagonal(vector(lin)),
    "matrix": lambda lin: co.linalg.Dense(
        root(lin) @ root(lin).mT + torch.eye(lin.num_parameters, dtype=DOUBLE), psd=True
    ),
}


@pytest.mark.parametrize(
    ("curvature", "prior"), [*((name, "number") for name in CURVATURES), *(("ggn", name) for name in PRIORS)]
)
def test_covariances_equal_the_dense_definition(lin, curvature, prior):
    post = co.laplace(lin, CURVATURES[curvature](lin), PRIORS[prior](lin), check_mode=False)
    P = post.precision.to_dense()
    J = lin.jacobian(X).to_dense()
    expected = J @ torch.linalg.solve(P, J.mT)
    blocks = expected.unflatten(0, (20, 3)).unflatten(2, (20, 3)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(post.predict(X).covariance_matrix, blocks, **TIGHT)
    torch.testing.assert_close(post.predict(X, joint=True).covariance_matrix, expected, **TIGHT)
    variance = blocks.diagonal(dim1=1, dim2=2)
    probit = (lin.predict(X) / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(post.probabilities(X), probit, **TIGHT)


@pytest.mark.parametrize("curvature", ["ggn", "tempered"])
def test_a_small_prior_in_single_precision_is_no_rounding(lin, curvature):
    """Entries are summed in float64, so that 1e-5 beside an eigenvalue of 100 is known."""
    posts = [
        co.laplace(network, CURVATURES[curvature](network), 1e-5, check_mode=False)
        for network in (lin, lin.cast(torch.float32))
    ]
    exact, found = (post.log_evidence().log_determinant_ratio for post in posts)
    assert abs(found.value - exact.value) <= found.bias_bound < 1e-2
    exact, found = (post.predict(X.to(post.lin.theta)).variance.double() for post in posts)
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
def test_draws_have_the_covariance_of_the_dense_matrix(lin, prior):
    """An identity: Lᵀ of a deviation is the seed's noise. Equal seeds give equal draws whatever was asked before."""
    post = co.laplace(lin, co.GGN, PRIORS[prior](lin), check_mode=False)
    found = post.deviations(60, generator=seeded())
    white = torch.linalg.cholesky(post.precision.to_dense()).mT @ found.draws.mT
    columns = ColumnNoise.of(found.noise.generator(lin.theta.device), 60, lin.theta.device)
    torch.testing.assert_close(white, normal(lin.num_parameters, 60, DOUBLE, lin.theta.device, columns), **TIGHT)
    few = co.laplace(lin, co.GGN, PRIORS[prior](lin), check_mode=False).sample(3, seeded())
    _ = post.predict(X).variance
    torch.testing.assert_close(post.sample(3, seeded()), few, rtol=0, atol=0)


def test_it_is_formed_once_for_all_priors_and_answers(lin):
    post = co.laplace(lin, co.GGN, 1.3, check_mode=False)
    with patch.object(torch.linalg, "cholesky_ex", wraps=torch.linalg.cholesky_ex) as factorised:
        _ = post.predict(X).variance, post.predict(X, joint=True).covariance_matrix, post.sample(60)
        assert factorised.call_count == 1
    other = post.with_prior(vector(lin))
    assert other.plan(60).tables["draws"][1].products == 0  # which forming takes
    dense = co.GGN(lin).to_dense() + torch.diag(vector(lin))
    J = lin.jacobian(X).to_dense()
    expected = (J @ torch.linalg.solve(dense, J.mT)).diagonal().reshape(20, 3)
    torch.testing.assert_close(other.predict(X).variance, expected, **TIGHT)
    copied = copy.deepcopy(post)
    torch.testing.assert_close(copied.predict(X).variance, post.predict(X).variance, **TIGHT)


def test_gradients_are_those_of_the_dense_definition():
    model, x, y = problem("regression", width=40)
    noise = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=noise))
    prior = torch.tensor(1.3, dtype=DOUBLE, requires_grad=True)
    J, Jx = lin.jacobian().to_dense(), lin.jacobian(X).to_dense()
    P = J.mT @ J / noise + prior * torch.eye(323, dtype=DOUBLE)
    expected = (Jx @ torch.linalg.solve(P, Jx.mT)).diagonal().sum()
    post = co.laplace(lin, co.GGN, prior, check_mode=False)
    with torch.no_grad():  # formed: what is asked for next has gradients all the same
        torch.testing.assert_close(post.predict(X).variance.sum(), expected, **TIGHT)
    found = torch.autograd.grad(post.predict(X).variance.sum(), (prior, noise))
    for one, other in zip(found, torch.autograd.grad(expected, (prior, noise))):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)
    before = post.predict(X).variance.detach()
    with torch.no_grad():
        lazily = post.predict(X)
    torch.testing.assert_close(torch.autograd.grad(lazily.variance.sum(), prior)[0], found[0], rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        noise.fill_(0.6)
        assert float((post.predict(X).variance - before).abs().max()) > 1e-3
        fresh = co.laplace(
            co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=0.6)), co.GGN, 1.3, check_mode=False
        )
        torch.testing.assert_close(post.predict(X).variance, fresh.predict(X).variance, **TIGHT)


def test_a_gradient_in_the_inputs_takes_the_matrix_that_was_formed(lin):
    post = co.laplace(lin, co.GGN, 1.3, check_mode=False)
    dense = co.laplace(lin, co.Subnetwork(co.GGN(lin), torch.arange(323)), 1.3, check_mode=False)
    slopes = []
    for each in (post, dense):
        at = X.clone().requires_grad_()
        slopes.append(torch.autograd.grad(each.predict(at).variance.sum(), at)[0])
    torch.testing.assert_close(*slopes, **TIGHT)


def test_without_memory_for_the_matrix_it_is_solved_with():
    model, x, y = problem(width=40)
    lin = co.linearize(model, (x, y), "classification")
    post = co.laplace(lin, co.GGN, 1.3, check_mode=False)
    with lin.memory.holding(lin.memory.room() - 2_000_000):
        assert post.plan(60).chosen["draws"] == "cg with a sketch"
        found = post.predict(X).variance
    torch.testing.assert_close(found, post.predict(X).variance, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("prior", "warned"), [(1e-6, False), (1e-9, True), (1e-12, True)])
def test_rounding_that_solves_would_report_is_reported(lin, prior, warned):
    """True residuals at the lowest eigenvector, the worst right-hand side, decide as they do where nothing is kept."""
    post = co.laplace(lin, co.GGN, prior, check_mode=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        variance = post.predict(X).variance
    assert ["as rounding in this dtype allows" in str(each.message) for each in found] == [True] * warned
    J, P = lin.jacobian(X).to_dense(), post.precision.to_dense()
    expected = (J @ torch.linalg.solve(P, J.mT)).diagonal().reshape(20, 3)
    torch.testing.assert_close(
        variance, expected, rtol=4 * torch.finfo(DOUBLE).eps * float(torch.linalg.cond(P)), atol=0
    )


def test_no_points_have_no_covariances(lin):
    post = co.laplace(lin, co.GGN, 1.3, check_mode=False)
    _ = post.predict(X).variance  # formed from here on
    assert post.predict(X[:0]).covariance_matrix.shape == (0, 3, 3)
