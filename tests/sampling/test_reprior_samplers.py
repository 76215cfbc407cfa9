"""Samplers in φ: the leapfrog's limit, laws with and without a Metropolis correction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import curvops as co
from tests.sampling.repriors import NOISE, X, curve, flat, named, one, regression


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


def moments(chain, rep):
    """Mean and second moment of f at two inputs, over chains and draws."""
    draws = chain.theta.flatten(0, 1)
    like = one(rep)
    theta = torch.vmap(lambda v: rep.map(named(v, like)))(draws)
    f = theta["head.weight"][:, 0] * (theta["body.weight"][:, 0] * torch.tensor([0.7, 2.0])).tanh()
    return torch.stack([f, f.square()])


def integrals():
    """The same by a sum over a fine grid of both weights."""
    u, v = torch.meshgrid(*[torch.linspace(-7, 7, 801).double()] * 2, indexing="ij")
    y = torch.tensor([-1.0, 0.2, 0.9]).double()
    misfit = sum((v * (u * float(x)).tanh() - t).square() for x, t in zip(X, y))  # the noise is 1/2
    w = (-misfit - (u.square() + v.square()) / 2).flatten().softmax(0).view_as(u)
    f = torch.stack([v * (u * at).tanh() for at in (0.7, 2.0)], -1)
    return torch.stack([(w[..., None] * f).sum((0, 1)), (w[..., None] * f.square()).sum((0, 1))])


def test_the_law_of_the_weights_is_the_posterior() -> None:
    """At λ = 2, by 250 chains: each of four moments off by 4.5 standard errors in 40,000 seeds once."""
    rep = curve(reg=2.0)
    sampler = co.sampling.chains(co.sampling.lmc(rep, 0.6, refreshment=0.5, sigma=rep.data_size**-0.5), 250)
    generator = torch.Generator().manual_seed(0)
    chain = co.sampling.run(sampler, one(rep), steps=36, thin=4, warmup=24, generator=generator)
    found = moments(chain, rep).unflatten(1, (250, -1)).mean(2)  # of each chain
    mean, stderr = found.mean(1), found.std(1) / 250**0.5
    assert bool(((mean - integrals()).abs() < 4.5 * stderr).all()) and bool((stderr < 0.05).all())


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


def test_without_the_determinant_the_law_would_be_another():
    """What the identities above rest on: at λ = 2, T(φ) weighted without log|det ∂T| has other moments by the grid."""
    rep = curve(reg=2.0)
    u, v = torch.meshgrid(*[torch.linspace(-7, 7, 201).double()] * 2, indexing="ij")

    def parts(a, b):
        phi = {"body.weight": a.view(1, 1), "head.weight": b.view(1, 1)}
        return rep.energy(phi), rep.logdet(phi), flat(rep.map(phi))

    energy, logdet, theta = torch.vmap(parts)(u.flatten(), v.flatten())
    f = theta[:, 1] * (theta[:, 0] * 2.0).tanh()
    right = ((-energy).softmax(0) * f).sum()
    wrong = ((-energy - logdet).softmax(0) * f).sum()
    assert float(right) == pytest.approx(float(integrals()[0, 1]), abs=1e-6)
    assert abs(float(wrong - right)) > 0.01
