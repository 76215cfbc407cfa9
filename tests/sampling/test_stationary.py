"""Stationary laws without chains: a step on a Gaussian is z' = F z + B w, and its law solves V = F V Fᵀ + B Bᵀ.

Tests `langevin.py`, `metropolis.py`.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import scipy.linalg
import torch
from torch import Tensor

import curvops as co
from tests.sampling.gaussians import (
    POINTS,
    SCALED,
    TEMPERATURE,
    Given,
    curvature,
    linear_step,
    log_density,
    matrix,
    preconditioners,
    root,
    seeded,
)

S = co.sampling
EPS, ALPHA, SIGMA = 0.15, 1.3, 0.8
s = SIGMA**-2
POSITION, PHASE = ("theta",), ("theta", "momentum")
Make = Callable[..., Any]


def coefficients(h: Tensor) -> tuple[float, Tensor, float, float]:
    """a, b, c and q of θ += a m, m ← c m − b θ + √q ξ."""
    return EPS * s, EPS * h, 1 - EPS * s * ALPHA, 2 * ALPHA * SCALED * EPS


def langevin(h: Tensor) -> Tensor:
    return SCALED / (h * (1 - EPS * h / 2))


def old_momentum_moves(h: Tensor) -> Tensor:
    a, b, c, q = coefficients(h)
    return a * (1 + c + a * b) / (2 * b) * q / (1 - c**2 - a * b * (1 + 3 * c + a * b) / 2)


def new_momentum_moves(h: Tensor) -> Tensor:
    a, b, c, _ = coefficients(h)
    return SCALED / h / (1 - a * b / (2 * (1 + c)))


def exact(h: Tensor) -> Tensor:
    return SCALED / h


def leapfrog(h: Tensor) -> Tensor:
    """Of proposals that are all accepted."""
    return SCALED / (h * (1 - EPS**2 * s * h / 4))


SAMPLERS: dict[str, tuple[Make, tuple[str, ...], Callable[[Tensor], Tensor]]] = {
    "sgld": (S.sgld, POSITION, langevin),
    "sghmc": (lambda *a, **k: S.sghmc(*a, alpha=ALPHA, sigma=SIGMA, **k), PHASE, old_momentum_moves),
    "momentum first": (
        lambda *a, **k: S.sghmc(*a, alpha=ALPHA, sigma=SIGMA, momentum_first=True, **k),
        PHASE,
        new_momentum_moves,
    ),
    "sgnht": (lambda *a, **k: S.sgnht(*a, alpha=ALPHA, sigma=SIGMA, **k), PHASE, old_momentum_moves),
    "baoa": (lambda *a, **k: S.baoa(*a, alpha=ALPHA, sigma=SIGMA, **k), PHASE, exact),
    "lmc": (lambda *a, **k: S.lmc(*a, sigma=SIGMA, refreshment=0.3, **k), PHASE, leapfrog),
    "hmc": (lambda *a, **k: S.hmc(*a, sigma=SIGMA, leapfrog_steps=3, **k), PHASE, leapfrog),
}
"""How it is made, what its state is, and the variance of θ where the curvature is h."""


def made(name: str, H: Tensor, D: Any = None, step_size: float = EPS) -> Any:
    return SAMPLERS[name][0](log_density(H), step_size, data_size=POINTS, temperature=TEMPERATURE, preconditioner=D)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_law_of_the_implemented_step_is_the_formula(name: str) -> None:
    """For every preconditioner D: with D the law is that without it for D^½HD^½, in the coordinates D^-½θ."""
    d = 6
    H, (_, parts, variance) = curvature(d), SAMPLERS[name]
    for kind, D in preconditioners(d).items():
        step = linear_step(made(name, H, D), d, parts)
        law = torch.from_numpy(scipy.linalg.solve_discrete_lyapunov(step.F.numpy(), step.Q.numpy()))
        half = root(matrix(D, d))
        h, basis = torch.linalg.eigh(half @ H @ half)
        wanted = half @ (basis * variance(h) @ basis.mT) @ half
        assert torch.allclose(law[:d, :d], wanted, rtol=1e-10, atol=1e-12), kind


def test_crank_nicolson_proposals_leave_their_gaussian_as_it_is() -> None:
    d = 6
    H = curvature(d)
    for kind, C in preconditioners(d).items():
        if C is None:
            continue
        sampler = S.pcn(log_density(H), 0.4, covariance=C, data_size=POINTS, temperature=TEMPERATURE)
        step = linear_step(sampler, d, POSITION)
        law = torch.from_numpy(scipy.linalg.solve_discrete_lyapunov(step.F.numpy(), step.Q.numpy()))
        assert torch.allclose(law, TEMPERATURE * matrix(C, d), rtol=1e-10, atol=1e-12), kind


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("kind", ["none", "inverse of Kronecker"])
def test_the_stability_limit_is_where_the_step_stops_to_contract(name: str, kind: str) -> None:
    H = curvature(2) if name != "hmc" else curvature(2)[:1, :1].expand(2, 2) * torch.eye(2)
    D = preconditioners(2)[kind]
    half = root(matrix(D, 2))
    largest = float(torch.linalg.eigvalsh(half @ H @ half).max())
    limit = made(name, H, D).stability_limit(largest)
    parts = SAMPLERS[name][1]
    below, above = (linear_step(made(name, H, D, share * limit), 2, parts).radius for share in (0.99, 1.01))
    assert above > 1.001
    assert below < 1 if name not in ("lmc", "hmc") else below <= 1 + 1e-9


@pytest.mark.parametrize("alpha", [0.4, 6.0])
@pytest.mark.parametrize("momentum_first", [False, True])
def test_the_stability_limit_of_both_orders_at_weak_and_strong_friction(alpha: float, momentum_first: bool) -> None:
    H = torch.eye(2, dtype=torch.float64) * 2.0

    def radius(step_size: float) -> float:
        sampler = S.sghmc(log_density(H), step_size, alpha=alpha, data_size=1, momentum_first=momentum_first)
        return linear_step(sampler, 2, PHASE).radius

    limit = S.sghmc(log_density(H), 1.0, alpha=alpha, data_size=1, momentum_first=momentum_first).stability_limit(2.0)
    assert radius(0.99 * limit) < 1 < radius(1.01 * limit)
    if alpha == 0.4 and not momentum_first:
        assert limit == pytest.approx(alpha / 2.0)  # εh < α


def test_the_noise_of_the_gradient_is_taken_off() -> None:
    """With β the step injects 𝒯ε(2 − 𝒯εβ), so that gradients with noise of variance β𝒯² make it up to 2𝒯ε."""
    H, beta = curvature(2), 3.0
    make: Any = S.sgld(log_density(H), EPS, data_size=POINTS, temperature=TEMPERATURE, beta=beta)
    injected = linear_step(make, 2, POSITION).Q
    of_gradient = EPS**2 * beta * SCALED**2
    eye = torch.eye(2, dtype=torch.float64)
    assert torch.allclose(injected + of_gradient * eye, 2 * SCALED * EPS * eye, rtol=1e-12)
    m = S.sghmc(log_density(H), EPS, data_size=POINTS, temperature=TEMPERATURE, alpha=ALPHA, beta=beta)
    assert torch.allclose(
        linear_step(m, 2, PHASE).Q[2:, 2:] + of_gradient * eye, 2 * ALPHA * SCALED * EPS * eye, rtol=1e-12
    )


def test_the_thermostat_follows_the_temperature_of_the_momenta() -> None:
    H, D = curvature(2), preconditioners(2)["dense"]
    sampler = S.sgnht(
        log_density(H), EPS, alpha=ALPHA, sigma=SIGMA, data_size=POINTS, temperature=TEMPERATURE, preconditioner=D
    )
    state = sampler.init(torch.ones(2, dtype=torch.float64), seeded(0))
    with Given():
        after, _ = sampler.update(state)
    m, x = state.momentum, state.thermostat
    heat = s * float(m @ torch.linalg.solve(matrix(D, 2), m)) / 2
    assert float(after.thermostat) == pytest.approx(float(x) + EPS * (heat - SCALED), rel=1e-12)
    pushed = (1 - EPS * s * x) * m - EPS * matrix(D, 2) @ H @ state.theta
    assert torch.allclose(after.momentum, pushed, rtol=1e-12)
    spread = S.chains(sampler, 400).init(state.theta, seeded(1)).thermostat
    assert abs(float(spread.mean()) - ALPHA) < 5 * math.sqrt(SCALED / 2 / 400)  # false alarms: 6e-7
    assert float(spread.var()) == pytest.approx(SCALED / 2, rel=0.35)  # 5 standard errors


def test_initial_momenta_have_the_temperature_and_the_mass() -> None:
    """m ~ N(0, 𝒯σ²D): B of `init` itself, by unit vectors in place of its noise."""
    d, H = 4, curvature(4)
    for kind, D in preconditioners(d).items():
        sampler = made("baoa", H, D)
        rows = []
        with Given() as given:
            sampler.init(torch.zeros(d, dtype=torch.float64), seeded(0))
        for unit in torch.eye(given.taken, dtype=torch.float64):
            with Given(unit.unsqueeze(0)):
                rows.append(sampler.init(torch.zeros(d, dtype=torch.float64), seeded(0)).momentum)
        B = torch.stack(rows, 1)
        assert torch.allclose(B @ B.mT, SCALED * SIGMA**2 * matrix(D, d), rtol=1e-10, atol=1e-12), kind
    cold = S.baoa(log_density(H), EPS, data_size=1, temperature=0.0).init(torch.zeros(d), seeded(0))
    assert not cold.momentum.any()
