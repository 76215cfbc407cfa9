"""Samplers that accept or reject: the energies, the flip of momenta, and what a state keeps from step to step."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import curvops as co
from curvops.sampling.running import StepSizeSearch
from tests.sampling.gaussians import (
    POINTS,
    SCALED,
    TEMPERATURE,
    curvature,
    log_density,
    matrix,
    preconditioners,
    seeded,
)

S = co.sampling
d = 4
H = curvature(d)
D = preconditioners(d)["dense"]
SIGMA = 0.8


def leapfrog(theta: Tensor, m: Tensor, eps: float, steps: int) -> tuple[Tensor, Tensor]:
    """By the dense matrices."""
    A = matrix(D, d)
    for _ in range(steps):
        m = m - eps / 2 * A @ H @ theta
        theta = theta + eps * SIGMA**-2 * m
        m = m - eps / 2 * A @ H @ theta
    return theta, m


def energy(theta: Tensor, m: Tensor) -> float:
    """H = (−log_posterior + ½ s mᵀD⁻¹m)/𝒯."""
    kinetic = 0.5 * SIGMA**-2 * float(m @ torch.linalg.solve(matrix(D, d), m))
    return (0.5 * float(theta @ H @ theta) + kinetic) / SCALED


@pytest.mark.parametrize("steps", [1, 3])
def test_energy_error_acceptance_and_the_flip(steps: int) -> None:
    options: dict[str, Any] = {"data_size": POINTS, "temperature": TEMPERATURE, "preconditioner": D, "sigma": SIGMA}
    eps = {1: 1.1, 3: 0.7}[steps]
    sampler = replace(S.lmc(log_density(H), eps, refreshment=0.3, **options), leapfrog_steps=steps)
    state = sampler.init(torch.full((d,), 0.3, dtype=torch.float64), seeded(3))
    accepted = rejected = 0
    values, vectors = torch.linalg.eigh(matrix(D, d))
    root = (vectors * values.sqrt()) @ vectors.mT
    for _ in range(40):
        source = torch.Generator()
        source.set_state(state.random)
        xi = root @ torch.empty(d, dtype=torch.float64).normal_(generator=source)
        m0 = (1 - 0.3) ** 0.5 * state.momentum + (0.3 * SCALED) ** 0.5 * SIGMA * xi
        theta, m = leapfrog(state.theta, m0, eps, steps)
        error = energy(theta, m) - energy(state.theta, m0)
        after, info = sampler.update(state)
        assert float(info.energy_error) == pytest.approx(error, abs=1e-10)
        assert float(info.acceptance) == pytest.approx(min(1.0, math.exp(-error)), abs=1e-10)
        if torch.equal(after.theta, state.theta):
            rejected += 1
            assert torch.allclose(after.momentum, -m0, rtol=1e-12)
        else:
            accepted += 1
            assert torch.allclose(after.theta, theta, rtol=1e-12) and torch.allclose(after.momentum, m, rtol=1e-11)
        assert float(info.log_posterior) == pytest.approx(float(log_density(H)(after.theta, None)), rel=1e-12)
        state = after
    assert accepted > 3 and rejected > 3, (accepted, rejected)


def test_a_state_keeps_the_gradient_for_the_same_batch_alone() -> None:
    calls = []

    def value(params: Tensor, batch: Any) -> Tensor:
        calls.append(batch)
        return -0.5 * (batch * params.square()).sum()

    one, two = torch.ones(d, dtype=torch.float64), torch.full((d,), 2.0, dtype=torch.float64)
    sampler = S.lmc(value, 0.1, data_size=1)
    state = sampler.init(torch.ones(d, dtype=torch.float64), seeded(0))
    state, _ = sampler.update(state, one)
    assert len(calls) == 2
    after, _ = sampler.update(state, one)
    assert len(calls) == 3
    sampler.update(after, two)
    assert len(calls) == 5, "another batch"
    one.mul_(3)
    fresh, _ = sampler.update(replace(after, seen=[]), one)
    again, _ = sampler.update(after, one)
    assert torch.equal(fresh.theta, again.theta), "the batch was changed in place"
    other = S.lmc(lambda p, b: 2 * value(p, b), 0.1, data_size=1)
    assert torch.equal(other.update(again, one)[0].theta, other.update(replace(again, seen=[]), one)[0].theta)


def test_crank_nicolson_takes_the_prior_of_the_log_posterior() -> None:
    """With the prior as its Gaussian, acceptance is the likelihood ratio alone; any other gives the same law."""
    model = torch.nn.Linear(2, 1).double()
    X, y = torch.randn(6, 3, dtype=torch.float64, generator=seeded(0)).split([2, 1], 1)
    f = S.log_posterior(model, co.likelihoods.Gaussian(0.5), prior_precision=2.0, prior_mean=0.1, data_size=6)
    sampler = S.pcn(f, 0.5, temperature=0.8)
    state = sampler.init(f.params, seeded(2))
    source = torch.Generator()
    source.set_state(state.random)
    xi = torch.empty(3, dtype=torch.float64).normal_(generator=source)
    proposal = 0.1 + 0.75**0.5 * (state.theta - 0.1) + 0.5 * (0.8 / 2) ** 0.5 * xi
    _, info = sampler.update(state, (X, y))
    names = {"weight": proposal[:2].reshape(1, 2), "bias": proposal[2:]}
    change = float(f.log_likelihood(names, (X, y)) - f.log_likelihood(f.params, (X, y))) * 6 / 0.8
    assert float(info.energy_error) == pytest.approx(-change, rel=1e-10)


def test_a_proposal_that_is_not_finite_is_rejected() -> None:
    def value(params: Tensor, batch: Any) -> Tensor:
        return (1 - params.square().sum()).log()  # NaN outside the unit ball

    sampler = S.lmc(value, 5.0, data_size=1)
    state = sampler.init(torch.full((2,), 0.1, dtype=torch.float64), seeded(0))
    for _ in range(5):
        state, info = sampler.update(state)
        assert bool(state.theta.isfinite().all()) and bool(state.momentum.isfinite().all())
    assert float(info.acceptance) == 0.0


@pytest.mark.parametrize(("name", "target"), [("hmc", 0.9), ("pcn", 0.5)])
def test_warm_up_reaches_the_acceptance_asked_for(name: str, target: float) -> None:
    f = log_density(H)
    made: dict[str, Any] = {
        "hmc": S.hmc(f, 2.0, leapfrog_steps=2, data_size=1),
        "pcn": S.pcn(f, 0.9, covariance=0.5, data_size=1),
    }
    start, options = torch.zeros(d, dtype=torch.float64), {"steps": 30, "warmup": 150, "generator": seeded(0)}
    chain = S.run(S.chains(made[name], 8), start, target_acceptance=target, **options)
    assert chain.acceptance is not None and abs(float(chain.acceptance.mean()) - target) < 0.1
    assert chain.sampler.step_size.value != made[name].step_size.value


@pytest.mark.parametrize(("target", "most"), [(0.8, math.inf), (0.4, 0.6)])
def test_the_search_for_a_step_size_follows_its_equation(target: float, most: float) -> None:
    """The start is forgotten, no trial is beyond the largest step, and a chance that is NaN is that of a rejection."""
    search, log_trial = StepSizeSearch.start(0.5, target, most), math.log(0.5)
    assert math.isclose(search.trial, 0.5)
    trials: list[float] = []
    for t, chance in enumerate((0.9, 0.1, math.nan, 1.0, 0.7), 1):
        search = search.update(chance)
        error = (target - (0.0 if math.isnan(chance) else chance)) / min(target, 1 - target)
        log_trial = min(log_trial - max(-1.0, min(1.0, t**-0.75 * error)), math.log(most))
        trials.append(log_trial)
        assert math.isclose(search.trial, math.exp(log_trial), rel_tol=1e-12)
    shares = [t**-0.75 for t in range(1, 6)]
    left = [math.prod(1 - share for share in shares[t:]) for t in range(1, 6)]
    mean = sum(share * rest * trial for share, rest, trial in zip(shares, left, trials))
    assert math.isclose(search.final, math.exp(mean), rel_tol=1e-12)
