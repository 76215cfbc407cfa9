"""Draws by perturbing and solving: one noise, one answer, whatever the method.

Tests `deviations.py`.
"""

import pytest
import torch
from torch import nn

import curvops as co
from curvops.operators.curvatures import CurvatureRoot
from tests.posterior.trained import problem
from tests.randomness import seeded

DOUBLE = torch.float64


def setting(kind="classification", prior=1.0, curvature=co.GGN, n=30, **options):
    model, x, y = problem(kind, n)
    lin = co.linearize(model, (x, y), co.likelihoods.Gaussian(noise=1.0) if kind == "regression" else kind)
    return co.laplace(
        lin, curvature if isinstance(curvature, type) else curvature(lin), prior, check_mode=False, **options
    )


def vector_prior(post):
    return torch.linspace(0.5, 2, len(post.mean), dtype=DOUBLE)


def dense_deviations(post, noise, k):
    """P⁻¹(Aθ⁰ + Sε) with S from each point's J and H by autograd, the noise's numbers taken as they come."""
    root = CurvatureRoot.of(post.curvature)
    right = noise.of_prior(post.prior, range(k), post.mean)
    right = right + root.to_dense() @ noise.of_data(root.columns_a_point, range(k), post.mean)
    return torch.linalg.solve(post.precision.to_dense(), right).mT


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("prior", [1.0, vector_prior])
def test_methods_find_one_answer_for_one_noise(kind, prior):
    post = setting(kind)
    post = post.with_prior(prior(post)) if callable(prior) else post.with_prior(prior)
    found = post.deviations(3, method="cg", rtol=1e-11, generator=seeded())
    expected = dense_deviations(post, found.noise, 3)
    torch.testing.assert_close(found.draws, expected, rtol=1e-8, atol=1e-9)
    dual = post.deviations(3, found.noise, method="dual", rtol=1e-11)
    torch.testing.assert_close(dual.draws, expected, rtol=1e-8, atol=1e-9)
    assert found.converged and dual.converged
    assert (dual.relative_residuals <= 1e-11).all() and dual.method == "dual"
    for loss in ("low_variance", "standard"):
        options = co.posterior.StochasticDescent(loss, batch_size=15, epochs=40)
        rough = post.deviations(3, found.noise, method=options, rtol=0.2)
        error = post.precision @ (rough.draws - expected).mT
        residuals = error.norm(dim=0) / (post.precision @ expected.mT).norm(dim=0)
        torch.testing.assert_close(residuals, rough.relative_residuals, rtol=1e-6, atol=1e-8)
        assert (residuals <= 0.2).all()


def test_a_step_that_diverges_is_an_error_with_one_to_try():
    post = setting(prior=0.01)
    with pytest.raises(co.errors.DivergenceError, match=r"step_size=1; try "):
        post.deviations(2, method=co.posterior.StochasticDescent(step_size=1.0, batch_size=10), generator=seeded())


def test_sample_is_the_mean_plus_deviations_at_every_temperature():
    for options in ({}, {"temperature": 2.5}, {"curvature": co.KFAC}):
        post = setting(**options)
        found = post.deviations(4, generator=seeded())
        torch.testing.assert_close(post.sample(4, seeded()), post.mean + found.draws, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("curvature", [co.KFAC, co.DiagonalGGN, lambda lin: co.GGN(lin) + 0.5 * co.KFAC(lin)])
def test_curvatures_without_a_root_by_points_are_drawn_from_and_solved(curvature):
    """Fewer draws are the first ones; under another prior precision the noise scales as the formula says."""
    post = setting(curvature=curvature)
    found = post.deviations(11, method="cg", rtol=1e-11, generator=seeded())
    assert found.converged
    fewer = post.deviations(9, found.noise, method="cg", rtol=1e-11)
    torch.testing.assert_close(fewer.draws, found.draws[:9], rtol=1e-8, atol=1e-9)
    other = post.with_prior(4.0).deviations(11, found.noise, method="cg", rtol=1e-11)
    noise, P = found.noise, post.precision.to_dense()
    of_prior = noise.of_prior(post.prior, range(11), post.mean)
    of_data = P @ found.draws.mT - of_prior  # Sε, which does not depend on the prior
    again = (P + 3 * torch.eye(len(P), dtype=DOUBLE)) @ other.draws.mT
    torch.testing.assert_close(again, of_data + 2 * of_prior, rtol=1e-7, atol=1e-8)


def test_warm_starts_save_products_and_noise_is_reused():
    model = nn.Sequential(nn.Linear(6, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x = torch.randn(200, 6, dtype=DOUBLE)
    lin = co.linearize(model, (x, x[:, :3].argmax(1)), "classification")
    post = co.laplace(lin, co.GGN, prior_precision=0.1, check_mode=False)
    cold = post.deviations(4, method="cg", rtol=1e-8, generator=seeded())
    warm = post.with_prior(0.11).deviations(4, cold.noise, method="cg", rtol=1e-8, x0=cold.draws)
    fresh = post.with_prior(0.11).deviations(4, cold.noise, method="cg", rtol=1e-8)
    torch.testing.assert_close(warm.draws, fresh.draws, rtol=1e-5, atol=1e-6)
    assert warm.matvecs < fresh.matvecs


def test_single_precision_reaches_what_it_can():
    model, x, y = problem()
    lin = co.linearize(model.float(), (x.float(), y), "classification")
    post = co.laplace(lin, co.GGN, prior_precision=0.5, check_mode=False)
    found = post.deviations(2, method="cg", rtol=1e-5, generator=seeded())
    for method in ("dual", co.posterior.StochasticDescent(batch_size=15, epochs=40)):
        other = post.deviations(2, found.noise, method=method, rtol=1e-5 if method == "dual" else 0.2)
        assert other.draws.dtype == torch.float32
        gap = (post.precision @ (other.draws - found.draws).mT).norm(dim=0)
        size = (post.precision @ found.draws.mT).norm(dim=0)
        assert (gap <= (other.relative_residuals + 3e-5) * size).all()


def test_single_precision_does_not_hide_a_small_prior_precision():
    model, x, y = problem()
    lin = co.linearize(model.float(), (x[:2].float(), y[:2]), "classification")
    values, vectors = torch.linalg.eigh(co.GGN(lin).to_dense().double())
    prior = 1e-11 * float(values[-1])
    draws = co.laplace(lin, co.GGN, prior, check_mode=False).deviations(40, method="cg", generator=seeded()).draws
    null = draws.double() @ vectors[:, : len(values) // 2]
    assert 0.5 <= prior * float(null.square().mean()) <= 2


def test_draws_in_groups_are_those_together():
    """Where memory has room for a few columns alone; each has noise of its own."""
    for curvature in (co.GGN, lambda lin: co.GGN(lin) + 0.5 * co.KFAC(lin)):
        whole = setting(curvature=curvature)
        draws = whole.deviations(11, method="cg", rtol=1e-10, generator=seeded())
        fewer = whole.deviations(2, method="cg", rtol=1e-10, generator=seeded()).draws
        torch.testing.assert_close(fewer, draws.draws[:2])
        model, x, y = problem("classification", 30)
        lin = co.linearize(model, (x, y), "classification", memory_budget=2**15)
        narrow = co.laplace(lin, curvature(lin), 1.0, check_mode=False)
        parts = narrow.deviations(11, draws.noise, method="cg", rtol=1e-10, x0=draws.draws)
        torch.testing.assert_close(parts.draws, draws.draws, rtol=1e-8, atol=1e-9)
        assert len(parts.reasons) == len(parts.relative_residuals) == parts.history.shape[1] == 11


def test_traces_of_any_operator():
    """256 draws; four standard errors (Student's t): a false alarm in 10,000."""
    post = setting(temperature=2.0)
    dense = torch.linalg.inv(post.precision.to_dense())
    M = co.linalg.Dense(_random_psd())
    found = post.trace(M, samples=256, generator=seeded(1))
    expected = 2 * (dense @ M.to_dense()).trace()
    assert abs(found.value - expected) <= 4 * found.stderr
    draws = post.deviations(256, generator=seeded(1))
    torch.testing.assert_close(post.trace(M, draws).value, found.value)
    torch.testing.assert_close(post.trace(M, draws.draws + post.mean).value, found.value, rtol=1e-9, atol=0)


def _random_psd():
    A = torch.randn(51, 51, dtype=DOUBLE, generator=seeded(2))
    return A @ A.mT


def test_an_error_of_draws_that_do_not_converge_holds_them():
    post = setting()
    with pytest.raises(co.linalg.ConvergenceError, match="2 of 2 draws did not converge") as caught:
        post.deviations(2, method=co.posterior.StochasticDescent(epochs=1, batch_size=10), rtol=1e-9)
    assert caught.value.deviations.draws.shape == (2, 51)
