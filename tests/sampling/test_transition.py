"""The protocol: what two states share, in place against functional, what optimisers are at temperature 0.

Tests `state.py`, `torch_optimizer.py`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import curvops as co
from curvops.sampling import Transition
from tests.sampling.gaussians import curvature, log_density, preconditioners, seeded

S = co.sampling
H = curvature(4)
D = preconditioners(4)["inverse of Kronecker"]
START = torch.linspace(-1, 1, 4, dtype=torch.float64)

ALL: dict[str, Callable[[Any], Any]] = {
    "sgld": lambda f: S.sgld(f, 0.1, data_size=3),
    "sgld preconditioned": lambda f: S.sgld(f, 0.1, data_size=3, preconditioner=D),
    "sghmc": lambda f: S.sghmc(f, 0.1, data_size=3, preconditioner=D),
    "sgnht": lambda f: S.sgnht(f, S.RobbinsMonro(0.1), data_size=3),
    "baoa": lambda f: S.baoa(f, 0.1, data_size=3, preconditioner=D),
    "hmc": lambda f: S.hmc(f, 0.5, leapfrog_steps=3, data_size=3, preconditioner=D),
    "lmc": lambda f: S.lmc(f, 1.2, data_size=3),
    "pcn": lambda f: S.pcn(f, 0.7, covariance=0.5, data_size=3),
    "optimizer": lambda f: S.optimizer(torch.optim.AdamW, f, lr=0.1),
    "momentum": lambda f: S.optimizer(torch.optim.SGD, f, lr=S.Cosine(0.1, 10), momentum=0.9),
}


def tensors(state: Any) -> Iterator[Tensor]:
    def inside(value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            for each in value.values():
                yield from inside(each)

    for each in fields(state):
        yield from inside(getattr(state, each.name))


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return all(torch.equal(x, y) or (bool(x.isnan().all()) and bool(y.isnan().all())) for x, y in pairs)


@pytest.mark.parametrize("name", ALL)
def test_fresh_states_share_no_memory(name: str) -> None:
    sampler, params = ALL[name](log_density(H)), START.clone()
    states = [sampler.init(params, seeded(0)), sampler.init(params, seeded(0)), sampler.init(params, seeded(1))]
    places = [tensor.untyped_storage().data_ptr() for state in states for tensor in tensors(state) if tensor.numel()]
    assert len(set(places)) == len(places)
    assert params.untyped_storage().data_ptr() not in places
    assert same(states[0], states[1])
    assert not torch.equal(states[0].random, states[2].random)


@pytest.mark.parametrize("name", ALL)
def test_chains_by_vmap_and_by_a_loop_and_alone_draw_the_same(name: str) -> None:
    sampler = ALL[name](log_density(H))
    together, apart = S.chains(sampler, 3, vectorized=True), S.chains(sampler, 3, vectorized=False)
    a = together.init(START, seeded(4))
    b, alone = a.clone(), [sampler.init(START) for _ in range(3)]
    for i, single in enumerate(alone):
        for mine, its in zip(tensors(single), tensors(a)):
            mine.copy_(its if its.ndim == 0 else its[i])
    for _ in range(5):
        a, _ = together.update(a)
        b, _ = apart.update(b)
        alone = [sampler.update(single)[0] for single in alone]
    assert torch.equal(a.random, b.random)
    assert torch.equal(a.random, torch.stack([single.random for single in alone]))
    assert torch.allclose(a.theta, b.theta, rtol=1e-12)
    assert torch.allclose(a.theta, torch.stack([single.theta for single in alone]), rtol=1e-12)


def test_parameters_are_any_tree() -> None:
    def value(params: Any, batch: Any) -> Tensor:
        (a, b), c = params
        return -(a["w"].square().sum() + b.square().sum() + (c - 1).square())

    params = (({"w": torch.ones(2, 3)}, torch.zeros(2)), torch.tensor(5.0))
    sampler = S.sgld(value, 0.2, temperature=0.0, data_size=1)
    state = sampler.init(params)
    assert state.theta.shape == (9,)
    for _ in range(100):
        state, _ = sampler.update(state, inplace=True)
    (a, _), c = state.params
    assert a["w"].shape == (2, 3) and float(a["w"].abs().max()) < 1e-8 and float(c) == pytest.approx(1)
    chain = S.run(S.chains(sampler, 2), params, steps=4)
    assert chain.params[0][0]["w"].shape == (2, 4, 2, 3)


def network() -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    g = seeded(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=g)
    X, y = torch.randn(12, 3, dtype=torch.float64, generator=g), torch.randint(0, 2, (12,), generator=g)
    log_posterior = S.log_posterior(model, "classification", prior_precision=0.5, data_size=12)
    return model, log_posterior, [(X[:8], y[:8]), (X[8:], y[8:])]


EPS, ALPHA, SIGMA = 0.3, 0.7, 0.9
s = SIGMA**-2
MU = math.exp(-ALPHA * s * EPS)
COLD: dict[str, tuple[Callable[[Any], Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgld": (lambda f: S.sgld(f, EPS, temperature=0.0), lambda p: torch.optim.SGD(p, lr=EPS)),
    "momentum-first sghmc": (
        lambda f: S.sghmc(f, EPS, alpha=ALPHA, sigma=SIGMA, momentum_first=True, temperature=0.0),
        lambda p: torch.optim.SGD(p, lr=EPS**2 * s, momentum=1 - EPS * s * ALPHA),
    ),
    "baoa": (
        lambda f: S.baoa(f, EPS, alpha=ALPHA, sigma=SIGMA, temperature=0.0),
        lambda p: torch.optim.SGD(p, lr=EPS**2 * s * (1 + MU) / 2, momentum=MU),
    ),
    "adamw": (
        lambda f: S.optimizer(torch.optim.AdamW, f, lr=0.05, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_at_temperature_0_a_sampler_is_the_optimiser_of_torch(name: str) -> None:
    """From m = 0; BAOA's positions are those between its two half steps of the optimiser's."""
    make, of_torch = COLD[name]
    _, log_posterior, batches = network()
    sampler = make(log_posterior)
    state = sampler.init(log_posterior.params)
    params = {key: value.requires_grad_() for key, value in log_posterior.params.items()}
    optimizer = of_torch(list(params.values()))
    for step in range(20):
        batch = batches[step % 2]
        state, _ = sampler.update(state, batch)
        optimizer.zero_grad()
        (-log_posterior(params, batch)).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in params.values()])
    assert torch.allclose(state.theta, flat, rtol=1e-13, atol=1e-14)


FITS: dict[str, Callable[[Any], Any]] = {
    **{f"vi {family}": partial(S.vi, family=family, lr=1e-2) for family in ("diagonal", "dense", "kronecker")},
    "vi low rank": partial(S.vi, family="low_rank_diagonal", lr=1e-2),
    **{f"ekf {form}": partial(S.ekf, form=form) for form in ("diagonal", "dense")},
    "ekf low rank": partial(S.ekf, form="low_rank_diagonal", rank=3),
}


@pytest.mark.parametrize("name", [*ALL, *FITS])
def test_in_place_and_functional_are_the_same_bits_and_share_nothing(name: str) -> None:
    if name in FITS:
        _, log_posterior, batches = network()
        runs, params = [FITS[name](log_posterior)], log_posterior.params
    else:
        runs, params, batches = [ALL[name](log_density(H)), S.chains(ALL[name](log_density(H)), 3)], START, [None, None]
    for run in runs:
        first = run.init(params, seeded(0))
        inplace, functional = first.clone(), first
        for step in range(6):
            before = functional.clone()
            after, info = run.update(functional, batches[step % 2])
            assert same(before, functional), "the functional form wrote into its argument"
            inplace, other = run.update(inplace, batches[step % 2], inplace=True)
            assert name in FITS or torch.equal(info.log_posterior, other.log_posterior)
            functional = after
        assert same(inplace, functional)
        assert int(functional.step.max()) == 6
        assert not torch.equal(functional.theta, first.theta)


def test_a_random_state_is_left_alone() -> None:
    _, log_posterior, batches = network()
    before = torch.get_rng_state()
    sampler = S.sgld(log_posterior, 0.1)
    state = sampler.init(log_posterior.params, seeded(0))
    sampler.update(state, batches[0])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("method", [S.sgld, S.baoa])
def test_chains_decompose_a_dense_preconditioner_once(method: Any) -> None:
    sampler = S.chains(method(log_density(H), 0.1, data_size=3, preconditioner=preconditioners(4)["dense"]), 3)
    with patch.object(torch.linalg, "eigh", wraps=torch.linalg.eigh) as decomposed:
        S.run(sampler, START, steps=4)
    assert decomposed.call_count == 1


def test_a_new_preconditioner_and_a_new_step_take_the_state_on() -> None:
    sampler = S.sgld(log_density(H), 0.1, data_size=3)
    state = sampler.init(START, seeded(0))
    moved, _ = sampler.with_preconditioner(D).with_step_size(0.2).update(state)
    direct, _ = S.sgld(log_density(H), 0.2, data_size=3, preconditioner=D).update(state)
    assert torch.equal(moved.theta, direct.theta)
    assert isinstance(sampler, Transition)


def test_each_chain_begins_where_it_was_told_to() -> None:
    starts = [torch.full((2,), float(i)) for i in range(3)]
    state = S.chains(S.sgld(lambda p, b: -p.square().sum(), 1e-3, data_size=1), 3).init(starts)
    assert torch.equal(state.params, torch.stack(starts))
    state.theta.zero_()
    assert starts[1].tolist() == [1.0, 1.0]
