"""Samplers in φ: the leapfrog's limit, laws with and without a Metropolis correction."""

import math

import pytest
import torch
from torch import nn

import curvops as co
from tests.sampling.repriors import NOISE, curve, one, regression


@pytest.mark.parametrize("reg", [None, math.inf], ids=["with T", "without"])
def test_the_leapfrog_is_stable_below_its_law_and_not_above(reg):
    """Step < 2/√λ_max(I + XᵀX/σ²) in the prior's units, and < 2 with T: of a linear model at .99 and 1.01 of it."""
    x, y = regression(outputs=1)
    rep = co.sampling.reprior(nn.Linear(3, 1, bias=False).double(), (x, y), NOISE, reg)
    curvature = 1 + float(torch.linalg.eigvalsh(x.mT @ x)[-1]) / NOISE if reg else 1.0
    errors = {}
    for share in (0.99, 1.01):
        step = share * 2 / curvature**0.5
        sampler = co.sampling.hmc(rep, step, leapfrog_steps=60, sigma=rep.data_size**-0.5)
        state = sampler.init(rep.params, torch.Generator().manual_seed(0))
        errors[share] = abs(float(sampler.update(state)[1].energy_error))
    assert errors[0.99] < 1e4 and errors[1.01] > 1e10  # the error grows as 1.33^(2 · 60) beyond


def test_crank_nicolson_proposes_from_the_prior_of_phi():
    """N(0, I), so that the log ratio of its acceptance is the change of h = log p̃ − log N(φ; 0, I)."""
    rep = curve()
    sampler = co.sampling.pcn(rep, 0.3)
    state = sampler.init(one(rep), torch.Generator().manual_seed(0))
    moved = 0
    for _ in range(6):
        after, info = sampler.update(state)
        if not torch.equal(after.theta, state.theta):
            moved += 1
            change = float(rep.log_ratio(after.params) - rep.log_ratio(state.params))
            assert float(info.energy_error) == pytest.approx(-change, abs=1e-10)
        state = after
    assert moved > 2
