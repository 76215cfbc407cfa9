"""A Gaussian with a covariance of its own predicts as Laplace's posterior of that precision, and is saved.

Tests `gaussian_posterior.py`.
"""

import pytest
import torch

import curvops as co
from tests.linalg.samples import assert_covariance
from tests.posterior.trained import problem

POINTS = torch.randn(7, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def positive(n: int, seed: int = 0):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.mT / n + torch.eye(n, dtype=torch.float64)


def setting(likelihood="classification"):
    model, x, y = problem(likelihood, steps=20)
    return model, co.linearize(model, (x, y), likelihood), (x, y)


def forms(n: int):
    """Covariances by structure."""
    g = torch.Generator().manual_seed(1)
    spread, U = torch.rand(n, generator=g, dtype=torch.float64) + 0.1, torch.randn(n, 3, generator=g).double()
    left = torch.stack([positive(n // 3, 3)])
    blocks = co.linalg.DirectSum(
        co.linalg.Kronecker(left, torch.stack([positive(3, 4)])), positions=[torch.arange(n).flip(0)]
    )
    return {
        "diagonal": co.linalg.Diagonal(spread),
        "dense": co.linalg.Dense(positive(n), psd=True),
        "low_rank_diagonal": co.linalg.LowRank(U, torch.ones(3).double()).add_diagonal(spread),
        "kronecker": blocks,
        "inverse": co.linalg.Dense(positive(n), psd=True).add_diagonal(0.0).inverse(),
    }


@pytest.mark.parametrize("form", forms(51))
def test_predictions_are_those_of_the_dense_matrix(form, tmp_path) -> None:
    model, lin, _ = setting()
    sigma = forms(51)[form]
    post = co.posterior.GaussianPosterior.of(lin, sigma)
    S, J = sigma.to_dense(), lin.jacobian(POINTS).to_dense()
    joint = J @ S @ J.mT
    blocks = torch.stack([joint[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] for i in range(7)])
    predicted = post.predict(POINTS)
    assert torch.allclose(predicted.mean, lin.predict(POINTS), atol=1e-12)
    assert torch.allclose(predicted.covariance_matrix, blocks, atol=1e-10)
    assert torch.allclose(post.predict(POINTS).variance, blocks.diagonal(dim1=1, dim2=2), atol=1e-10)
    assert torch.allclose(post.predict(POINTS, joint=True).covariance_matrix, joint, atol=1e-10)
    probe = torch.randn(51, dtype=torch.float64)
    assert torch.allclose(post.penalty(lin.theta + probe), 0.5 * probe @ torch.linalg.solve(S, probe), rtol=1e-9)
    P = torch.linalg.inv(S)
    alike = co.laplace(lin, co.linalg.Dense((P + P.mT) / 2 - torch.eye(51).double()), 1.0, check_mode=False)
    assert torch.allclose(post.probabilities(POINTS), alike.probabilities(POINTS), atol=1e-9)
    parts, known = (each.uncertainty(POINTS, generator=torch.manual_seed(0)) for each in (post, alike))
    assert torch.allclose(parts.epistemic, known.epistemic, atol=1e-6)
    post.save(tmp_path / "post")
    loaded = co.load(tmp_path / "post", model)
    assert torch.equal(loaded.predict(POINTS).variance, predicted.variance)
    assert torch.equal(
        loaded.sample(2, torch.Generator().manual_seed(0)), post.sample(2, torch.Generator().manual_seed(0))
    )
    assert torch.equal(loaded.precision @ probe, post.precision @ probe)


@pytest.mark.parametrize("form", forms(51))
def test_draws_have_the_covariance(form) -> None:
    _, lin, _ = setting()
    sigma = forms(51)[form]
    post = co.posterior.GaussianPosterior.of(lin, sigma)
    assert_covariance(lambda k, generator: (post.sample(k, generator) - post.mean).mT, sigma.to_dense())


@pytest.mark.parametrize("form", ["diagonal", "low_rank_diagonal"])
def test_variances_of_structured_covariances_have_slopes_in_the_inputs(form) -> None:
    _, lin, _ = setting()
    post = co.posterior.GaussianPosterior.of(lin, forms(51)[form])
    assert bool((post.predict(POINTS).variance > 0).all())
    x = POINTS[:2].clone().requires_grad_()
    (slope,) = torch.autograd.grad(post.predict(x).variance.sum(), x)
    h = 1e-6 * torch.eye(4).double()[1]
    ahead, behind = (post.predict(POINTS[:2] + sign * h).variance.sum() for sign in (1, -1))
    assert float(slope[:, 1].sum()) == pytest.approx(float(ahead - behind) / 2e-6, rel=1e-5)


def test_it_is_the_prior_of_further_data_and_never_of_its_own() -> None:
    _, lin, _ = setting()
    post = co.posterior.GaussianPosterior.of(lin, forms(51)["dense"])
    model, x, _ = problem("classification", steps=20)
    later = co.linearize(model, (x + 1, torch.arange(30) % 3), "classification")
    after = co.laplace(later, co.GGN, prior_precision=post, check_mode=False)
    G = co.GGN(later).to_dense()
    assert torch.allclose(after.precision.to_dense(), G + torch.linalg.inv(post.covariance.to_dense()), atol=1e-8)
    assert torch.equal(after.prior_mean, post.mean)
