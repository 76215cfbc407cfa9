"""Distances of a reparametrised posterior from its prior: against quadrature, exact cases, and the width.

Tests `reprior.py`.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import curvops as co
from curvops.sampling.reprior import divergence, effective_draws, plain_mean, warn_of_few, weighted_mean
from tests.sampling.repriors import curve, flat, mlp, one, precision, regression, slope


def on_grid(rep, function):
    """A fine grid of u, the prior's weight of each node, and a function of the φ with that u."""
    u = torch.linspace(-8, 8, 2001).double()
    phi = one(rep)
    values = torch.vmap(lambda v: function({**phi, "body.weight": v.view(1, 1)}))(u)
    return u, (-0.5 * u.square()).softmax(0), values


def test_the_divergence_is_that_of_an_integral():
    """Seeded; four standard errors: a false alarm in 15,000 other seeds."""
    rep = curve()
    _, w, h = on_grid(rep, rep.log_ratio)
    exact = (w * h.exp()).sum().log() - (w * h).sum()
    found = rep.divergence(4000, torch.Generator().manual_seed(0))
    assert float(exact) > 0.01 and abs(float(found.value - exact)) < 4 * float(found.stderr) < 0.2 * float(exact)
    assert found.samples == 4000


def test_the_gradient_gap_is_that_of_an_integral():
    """With draws of the prior and their weights. Seeded, four standard errors."""
    rep = curve()
    _, w, h = on_grid(rep, rep.log_ratio)
    u, _, slopes = on_grid(rep, lambda phi: torch.func.grad(rep.energy)(phi)["body.weight"].squeeze())
    exact = (w * h.exp() * (slopes - u).square()).sum() / (w * h.exp()).sum()
    found = rep.gradient_gap(samples=4000, generator=torch.Generator().manual_seed(0))
    assert abs(float(found.total.value - exact)) < 4 * float(found.total.stderr) < 0.2 * float(exact)
    assert float(found.readout) < 1e-20


def test_the_gradient_gap_of_draws_is_their_mean():
    rep = curve()
    draws = rep.normal(5, torch.Generator().manual_seed(0))
    found = rep.gradient_gap(draws)
    each = []
    for i in range(5):
        phi = {name: block[i] for name, block in draws.items()}
        each.append((flat(slope(rep, phi)) - flat(phi)).square().sum())
    torch.testing.assert_close(found.total.value, torch.stack(each).mean())
    torch.testing.assert_close(found.total.stderr, torch.stack(each).std() / 5**0.5)


def test_a_weighted_mean_s_standard_error_is_the_jackknife_s_and_moves_with_no_constant():
    generator = torch.Generator().manual_seed(0)
    values, ratios = (torch.randn(400, generator=generator).double() for _ in range(2))
    found, moved = weighted_mean(values, ratios), weighted_mean(values + 100, ratios)
    torch.testing.assert_close(moved.stderr, found.stderr, rtol=1e-10, atol=0)
    w = ratios.exp()
    left_out = (w @ values - w * values) / (w.sum() - w)
    assert float(found.stderr) == pytest.approx(
        float((399 / 400 * (left_out - left_out.mean()).square().sum()).sqrt()), rel=0.02
    )
    plain, equal = plain_mean(values), weighted_mean(values, 0 * ratios)
    assert float(equal.stderr) == pytest.approx(float(plain.stderr), rel=2e-3)
    torch.testing.assert_close(plain_mean(values + 100).stderr, plain.stderr, rtol=1e-10, atol=0)


def test_effective_draws_are_those_of_equal_weights():
    """Kish's (Σ w)²/Σ w²: of S equal weights S, of k equal ones beside negligible ones k, of any h + c as of h."""
    h = torch.randn(50, generator=torch.Generator().manual_seed(0)).double()
    w = h.exp()
    for moved in (h, h + 3.0, h + 800.0):
        assert effective_draws(moved) == pytest.approx(float(w.sum().square() / w.square().sum()), rel=1e-10)
    for k, few in ((50, False), (21, False), (19, True), (1, True)):
        ratios = torch.zeros(50, dtype=torch.float64)
        ratios[k:] = -800.0
        assert effective_draws(ratios) == pytest.approx(k, rel=1e-10)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            warn_of_few(ratios, "an average")
        assert [each.category for each in seen] == [co.sampling.FewDrawsWarning] * few


def test_the_divergence_s_standard_error_is_the_jackknife_s():
    h = 0.5 * torch.randn(400, generator=torch.Generator().manual_seed(0)).double()
    found, moved = divergence(h), divergence(h + 100)
    w, n = h.exp(), len(h)
    left_out = ((w.sum() - w) / (n - 1)).log() - (h.sum() - h) / (n - 1)
    spread = ((n - 1) / n * (left_out - left_out.mean()).square().sum()).sqrt()
    assert float(found.stderr) == pytest.approx(float(spread), rel=0.02) and found.matvecs == 0
    torch.testing.assert_close(moved.value, found.value, rtol=1e-10, atol=0)
    torch.testing.assert_close(moved.stderr, found.stderr, rtol=1e-10, atol=0)


def test_both_fall_with_the_width():
    """From width 8 to 128: a gap of means of many standard errors."""
    found = []
    for width in (8, 128):
        model = mlp(3, width, 1)
        rep = co.sampling.reprior(model, regression(5, outputs=1), 0.5, prior_precision=precision(model))
        generator = torch.Generator().manual_seed(0)
        found.append((rep.divergence(400, generator), rep.gradient_gap(samples=200, generator=generator).total))
    (narrow_kl, narrow_gap), (wide_kl, wide_gap) = found
    assert float(wide_kl.value + 2 * wide_kl.stderr) < 0.5 * float(narrow_kl.value - 2 * narrow_kl.stderr)
    assert float(wide_gap.value + 2 * wide_gap.stderr) < 0.5 * float(narrow_gap.value - 2 * narrow_gap.stderr)


def test_few_effective_draws_are_said_to_be_few():
    rep = curve(noise=1e-4)
    with pytest.warns(co.sampling.FewDrawsWarning, match="is too low, a lower bound"):
        rep.divergence(30, torch.Generator().manual_seed(0))
    with pytest.warns(co.sampling.FewDrawsWarning, match="not a reliable mean under p̃"):
        rep.gradient_gap(samples=30, generator=torch.Generator().manual_seed(0))


def test_samples_of_a_linear_model_are_the_posterior():
    """Moments of 4,000 exact draws, seeded: each of 9 is off by 5 standard errors in 200,000 seeds once."""
    x, y = regression(outputs=1)
    rep = co.sampling.reprior(nn.Linear(3, 1, bias=False).double(), (x, y), 0.3)
    drawn = rep.sample(4000, torch.Generator().manual_seed(0))["weight"].squeeze(1)
    sigma = torch.linalg.inv(torch.eye(3).double() + x.mT @ x / 0.3)
    mean = (sigma @ x.mT @ y / 0.3).squeeze(1)
    assert bool(((drawn.mean(0) - mean).abs() < 5 * (sigma.diagonal() / 4000).sqrt()).all())
    spread = ((sigma.square() + sigma.diagonal()[:, None] * sigma.diagonal()) / 4000).sqrt()
    assert bool(((drawn.mT.cov() - sigma).abs() < 5 * spread).all())
    assert math.isclose(float(drawn[:, 0].std()), float(sigma[0, 0].sqrt()), rel_tol=0.1)
