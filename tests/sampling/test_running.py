"""`run`: what it keeps, that it goes on after a kill with the same bits, and that divergence is an error."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import curvops as co
from curvops.sampling.running import largest_curvature
from tests.linalg.interrupted import Killed
from tests.sampling.gaussians import curvature, log_density, preconditioners, seeded

S = co.sampling
H = curvature(4)
START = torch.zeros(4, dtype=torch.float64)


def regression(batch_size: int = 4) -> tuple[Any, DataLoader[Any]]:
    g = seeded(0)
    X, y = torch.randn(10, 3, dtype=torch.float64, generator=g), torch.randn(10, 1, dtype=torch.float64, generator=g)
    model = torch.nn.Linear(3, 1).double()
    f = S.log_posterior(model, co.likelihoods.Gaussian(noise=1.0), data_size=10)
    loader = DataLoader(TensorDataset(X, y), batch_size, shuffle=True, generator=seeded(5))
    return f, loader


def test_draws_are_the_states_after_warm_up() -> None:
    f, loader = regression()
    sampler = S.chains(S.baoa(f, 0.2), 2)
    start = sampler.init(f.params, seeded(1))
    chain = S.run(sampler, start, loader, steps=9, warmup=4, thin=3)
    f_again, again = regression()
    by_hand, states, infos = start, [], []
    for _ in range(5):  # passes of three batches
        for batch in again:
            by_hand, info = S.chains(S.baoa(f_again, 0.2), 2).update(by_hand, batch)
            states.append(by_hand.theta)
            infos.append(info.log_posterior)
    assert chain.theta.shape == (2, 3, 4)
    for i in range(3):
        assert torch.equal(chain.theta[:, i], states[4 + 3 * (i + 1) - 1])
    assert torch.equal(chain.log_posterior, torch.stack(infos[4:13], 1))
    assert torch.equal(chain.state.theta, states[12]) and int(start.step) == 0
    assert chain.params["weight"].shape == (2, 3, 1, 3)
    assert chain.acceptance is None


SAMPLERS = {
    "sgld": lambda f: S.sgld(f, 0.1),
    "sgnht": lambda f: S.chains(S.sgnht(f, 0.1), 2),
    "lmc": lambda f: S.lmc(f, 0.3),
    "adam": lambda f: S.optimizer(torch.optim.Adam, f, lr=0.1),
    "low rank family": lambda f: S.vi(f, "low_rank_diagonal", lr=1e-2),
    "Kronecker family": lambda f: S.vi(f, "kronecker", lr=1e-2),
    "filter": lambda f: S.ekf(f, "low_rank_diagonal", rank=3),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_killed_run_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    f, loader = regression()
    full = name == "lmc"
    options: dict[str, Any] = {"steps": 10, "warmup": 5, "thin": 2}
    if full:
        options["target_acceptance"] = 0.8

    def source() -> Any:
        by_weight = WeightedRandomSampler(torch.ones(10), 10, generator=seeded(5))
        drawn = DataLoader(loader.dataset, 4, sampler=by_weight) if name == "filter" else regression()[1]
        return list(regression(10)[1]) if full else drawn

    def ran(**changed: Any) -> Any:
        return S.run(SAMPLERS[name](f), f.params, source(), **{"generator": seeded(3)} | options | changed)

    whole = ran()
    for at in (3, 12) if name in ("sgld", "lmc", "filter") else (12,):  # amid warm-up, and amid the draws
        place = tmp_path / f"{name}-{at}"

        def kill(what: str, done: int, total: int | None, at: int = at) -> None:
            if done == at:
                raise Killed

        with pytest.raises(Killed):
            ran(checkpoint=place, progress=kill)
        rest = ran(checkpoint=place)
        assert torch.equal(whole.theta, rest.theta) and torch.equal(whole.log_posterior, rest.log_posterior)
        assert torch.equal(whole.state.random, rest.state.random) and int(rest.state.step) == 15
        known = ran(checkpoint=place)
        assert torch.equal(known.theta, whole.theta)
        assert known.sampler.step_length(0) == whole.sampler.step_length(0)
        further, _ = known.sampler.update(known.state, next(iter(source())))
        assert int(further.step) == 16
    with pytest.raises(ValueError, match="another problem"):
        ran(checkpoint=place, generator=seeded(4))
    with pytest.raises(ValueError, match="steps"):
        ran(checkpoint=place, steps=12)


def test_momenta_have_the_shapes_of_the_parameters() -> None:
    f, loader = regression()
    sampler = S.sghmc(f, 0.1)
    state, _ = sampler.update(sampler.init(f.params, seeded(1)), next(iter(loader)))
    assert {name: tuple(m.shape) for name, m in state.momenta.items()} == {"weight": (1, 3), "bias": (1,)}
    assert torch.equal(torch.cat([m.flatten() for m in state.momenta.values()]), state.momentum)


def test_a_run_goes_on_from_a_state() -> None:
    sampler = S.sghmc(log_density(H), 0.1, data_size=1)
    whole = S.run(sampler, START, steps=10, generator=seeded(0))
    first = S.run(sampler, START, steps=6, generator=seeded(0))
    second = S.run(sampler, first.state, steps=4)
    assert torch.equal(whole.theta, torch.cat([first.theta, second.theta], 1))


DIVERGING = {
    "sgld": (lambda e, D: S.sgld(log_density(H), e, data_size=9, preconditioner=D)),
    "sghmc": (lambda e, D: S.sghmc(log_density(H), e, alpha=0.8, data_size=9, preconditioner=D)),
    "first": (lambda e, D: S.sghmc(log_density(H), e, momentum_first=True, data_size=9, preconditioner=D)),
    "baoa": (lambda e, D: S.baoa(log_density(H), e, data_size=9, preconditioner=D)),
}


@pytest.mark.parametrize(("name", "share"), [("sgld", 1.1), ("sghmc", 2.0), ("first", 4.0), ("baoa", 1.1)])
def test_divergence_is_found_within_100_steps_with_a_step_that_works(name: str, share: float) -> None:
    # At 1.1 a step of sghmc multiplies (θ, m) by 1.007 alone: no energy shows that within 100.
    D = preconditioners(4)["dense"]
    largest = float(torch.linalg.eigvals(D.to_dense() @ H).real.max())
    limit = DIVERGING[name](1.0, D).stability_limit(largest)
    start = torch.ones(4, dtype=torch.float64)
    with pytest.raises(co.errors.DivergenceError, match="try step_size=") as raised:
        S.run(DIVERGING[name](share * limit, D), start, steps=120, generator=seeded(0))
    named = [float(x) for x in re.findall(r"(?:up to|step_size=)(?: )?([\d.e+-]*\d)", str(raised.value))]
    assert named[1] == pytest.approx(limit, rel=0.02)
    steps = re.search(r"within (\d+) steps", str(raised.value))
    assert steps is not None and int(steps[1]) <= 100
    S.run(DIVERGING[name](named[-1], D), start, steps=100, generator=seeded(0))


@pytest.mark.parametrize("name", DIVERGING)
def test_no_false_alarm_just_below_the_limit(name: str) -> None:
    """At .99 of it the variance of a mode of SGLD is 100 times the posterior's."""
    largest = float(torch.linalg.eigvalsh(H).max())
    limit = DIVERGING[name](1.0, None).stability_limit(largest)
    chain = S.run(S.chains(DIVERGING[name](0.99 * limit, None), 4), START + 1, steps=150, generator=seeded(0))
    assert bool(chain.theta.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("distance", [0.0, 1e4])
def test_the_largest_curvature_is_that_of_the_preconditioned_hessian(distance: float, dtype: torch.dtype) -> None:
    """20 power iterations come within a hundredth where the next eigenvalue is half of it, however far the weights."""
    h = torch.tensor([3.0, 1.5, 0.5, 0.1], dtype=dtype)
    D = torch.tensor([2.0, 1.0, 0.4, 1.0], dtype=dtype)
    sampler = co.sampling.lmc(lambda p, b: -0.5 * (h * p.square()).sum(), 0.1, data_size=1, preconditioner=D)
    state = sampler.init(torch.full((4,), distance, dtype=dtype), seeded(0))
    assert largest_curvature(sampler, state.theta, state, None) == pytest.approx(6.0, rel=1e-2)
    flat = co.sampling.lmc(lambda p, b: 0.0 * p.sum(), 0.1, data_size=1)
    assert largest_curvature(flat, state.theta, state, None) == 0


def test_a_metropolis_sampler_that_accepts_nothing_is_an_error() -> None:
    with pytest.raises(co.errors.DivergenceError, match=r"100 proposals with step_size=50.*try step_size="):
        S.run(S.lmc(log_density(H), 50.0, data_size=1), START + 1, steps=120, generator=seeded(0))


def test_numbers_that_become_infinite_are_an_error_in_update() -> None:
    sampler = S.sgld(log_density(H), 1e30, data_size=1)
    state = sampler.init(START + 1, seeded(0))
    with pytest.raises(co.errors.DivergenceError, match=r"at step \d+ with step_size=1e\+30.*try step_size=2.5e\+29"):
        for _ in range(50):
            state, _ = sampler.update(state)


def test_progress_is_told() -> None:
    seen: list[tuple[str, int, int | None]] = []
    S.run(S.sgld(log_density(H), 0.1, data_size=1), START, steps=3, warmup=1, progress=lambda *a: seen.append(a))
    assert seen == [("sampling", i, 4) for i in (1, 2, 3, 4)]


def test_a_pass_of_minibatches_has_each_point_once_in_another_order() -> None:
    """The same of a Dataset as of its tensors."""
    f, _ = regression()
    X, y = torch.arange(30.0).double().view(10, 3), torch.zeros(10, 1).double()
    parts, of_dataset = (S.minibatches(f, data, 4, seeded(0)) for data in ((X, y), TensorDataset(X, y)))
    passes, others = ([torch.cat([x for x, _ in each]) for _ in range(2)] for each in (parts, of_dataset))
    assert len(parts) == 3 and [len(y) for _, y in parts] == [4, 4, 2]
    assert not torch.equal(*passes)
    for one, other in zip(passes, others):
        assert torch.equal(one.sort(0).values, X) and torch.equal(one, other)
