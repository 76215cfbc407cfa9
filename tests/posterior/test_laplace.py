"""The linearised Laplace posterior against its dense definition."""

import copy
import pickle
import warnings

import pytest
import torch

import curvops as co
from tests.posterior.trained import Counted, problem


@pytest.fixture(scope="module")
def classification():
    model, x, y = problem()
    lin = co.linearize(model, (x, y), "classification")
    return lin, co.laplace(lin, co.GGN, prior_precision=1.0), x, y


def test_nothing_is_solved_before_the_covariance_is_used(classification):
    lin, _, x, _ = classification
    curvature = Counted(co.GGN(lin).to_dense())
    predicted = co.laplace(lin, curvature, prior_precision=1.0, check_mode=False).predict(x[:2])
    assert predicted.mean.shape == (2, 3) and curvature.products == 0
    assert bool((predicted.variance > 0).all()) and curvature.products > 0


def test_inputs_that_change_after_predict_change_nothing(classification):
    _, post, x, _ = classification
    new = x[:2].clone()
    predicted, expected = post.predict(new), post.predict(x[:2]).variance
    new.zero_()
    torch.testing.assert_close(predicted.variance, expected, rtol=1e-12, atol=0)


def test_the_predictive_from_draws_has_the_moments_of_the_functions_drawn(classification):
    """About the mean, which is known."""
    lin, post, x, _ = classification
    draws = post.sample(7, torch.Generator().manual_seed(0))
    assert draws.shape == (7, 51)
    gaps = (post.functions(x[:5], 7, samples=draws) - lin.predict(x[:5])).flatten(1)
    joint, points = (post.predict(x[:5], joint=joint, samples=draws) for joint in (True, False))
    torch.testing.assert_close(joint.covariance_matrix, gaps.mT @ gaps / 7, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(points.variance.flatten(), gaps.square().mean(0), rtol=1e-10, atol=1e-12)


def test_weights_that_are_not_a_mode_tell_how_far(classification):
    lin, post, _, _ = classification
    assert post.mode_gap < 1e-3
    far = co.laplace(lin, co.GGN, prior_precision=0.01)
    expected = (lin.gradient() + 0.01 * lin.theta).norm() / (0.01 * lin.theta).norm()
    assert far.mode_gap == pytest.approx(float(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        co.laplace(lin, co.GGN, prior_precision=0.01, check_mode=False)


def test_outputs_that_are_nan_at_some_points_are_no_mode():
    x, y = torch.linspace(3, -1, 9, dtype=torch.float64).unsqueeze(1), torch.zeros(9, 1, dtype=torch.float64)
    lin = co.linearize(
        (lambda p, x: p["w"] * x.sqrt(), {"w": torch.zeros(1, dtype=torch.float64)}), (x, y), "regression"
    )
    with pytest.raises(ValueError, match="holds NaN or Inf.*lin.outputs"):
        co.laplace(lin, co.GGN, prior_precision=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lin = co.linearize(
            (lambda p, x: p["w"] * x, {"w": torch.zeros(1, dtype=torch.float64)}),
            (x, y),
            co.likelihoods.Gaussian(noise=1.0),
        )
        assert co.laplace(lin, co.GGN, prior_precision=1.0).mode_gap == 0  # weights of zero are a mode here


def test_the_evidence_of_single_precision_under_a_strong_prior():
    """Its interval tells nothing of rounding, so the sums must not be in single precision."""
    model, x, y = problem(steps=5)
    model = model.float()
    values = []
    for dtype in (torch.float32, torch.float64):
        lin = co.linearize(model.to(dtype), (x.to(dtype), y), "classification")
        values.append(co.laplace(lin, co.GGN, prior_precision=1e6, check_mode=False).log_evidence().value)
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-3)


def test_arrays_of_numpy_are_inputs_and_targets(classification):
    _, post, x, y = classification
    torch.testing.assert_close(post.predict(x.numpy()).variance, post.predict(x).variance, rtol=0, atol=0)
    given = ((x.numpy(), y.numpy()), (x.float().numpy(), y.int().numpy()), (x.float(), y))
    found = [post.log_likelihood(*each, generator=torch.Generator().manual_seed(0)).value for each in given]
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=0)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda post: pickle.loads(pickle.dumps(post))])
@pytest.mark.parametrize("curvature", [co.GGN, co.KFAC])
def test_a_posterior_can_be_copied_and_pickled_before_and_after_its_use(classification, curvature, copied):
    lin, _, x, _ = classification
    for used in (False, True):
        post = co.laplace(lin, curvature, 1.0, check_mode=False)
        if used:
            post.log_evidence(), post.sample(1), post.predict(x).variance, post.mode_gap
        other = copied(post)
        for quantity in (lambda p: p.log_evidence().value, lambda p: p.predict(x).variance, lambda p: p.mean):
            torch.testing.assert_close(quantity(other), quantity(post), rtol=1e-10, atol=1e-12)
        seeds = (torch.Generator().manual_seed(0) for _ in range(2))
        torch.testing.assert_close(*(p.sample(2, seed) for p, seed in zip((post, other), seeds)), rtol=1e-8, atol=1e-8)
