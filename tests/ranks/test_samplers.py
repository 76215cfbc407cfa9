"""Samplers whose log posterior is added up over ranks: every chain is that of one process, and equal on all ranks.

Tests `log_density.py`.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

import curvops as co
from tests.ranks.processes import LONGEST, assert_said, assert_those_of_one_process, by_problem, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, data, linearise, own_points, seeded
from tests.ranks.test_refusals import outcome

S, STEPS = co.sampling, 8
PROBLEMS = {2: ("labels",), 3: ("numbers",)}
"""What each number of ranks is asked of: one of the three has no data."""
STOCHASTIC = {
    "sgld": partial(S.sgld, step_size=0.05),
    "sghmc": partial(S.sghmc, step_size=0.1),
    "sghmc, momentum first": partial(S.sghmc, step_size=0.1, momentum_first=True),
    "sgnht": partial(S.sgnht, step_size=0.1),
    "baoa": partial(S.baoa, step_size=0.2),
    "optimizer": partial(S.optimizer, torch.optim.Adam, lr=0.01),
    "vi": partial(S.vi, lr=0.01, draws=2),
}
EXACT = {
    "hmc": partial(S.hmc, step_size=0.1, leapfrog_steps=3),
    "lmc": partial(S.lmc, step_size=0.2),
    "pcn": partial(S.pcn, step_size=0.2),
}


def states(problem: str, size: int, rank: int, group: Any) -> Iterator[tuple[str, Any]]:
    """Runs of every sampler on the points of this rank; minibatches and tuning are the same for many."""
    X, y = own_points(problem, size, rank)
    lin = linearise(problem, SHARDS[size], group, rank)
    f = S.log_posterior(lin, prior_precision=2.0, prior_mean=0.1)
    P = co.linalg.Dense(co.KFAC(lin).add_diagonal(0.5).to_dense().detach(), psd=True)
    under_P = S.log_posterior(lin, prior_precision=P)
    run = partial(S.run, start=f.params, steps=STEPS, generator=seeded())
    for name, make in STOCHASTIC.items():
        yield name, run(make(f), batches=[(X, y)])
        if name in ("sgld", "sgnht", "vi"):
            yield f"{name}, minibatches", run(make(f), batches=S.minibatches(f, (X, y), 4, seeded(6)))
    for name, make in EXACT.items():
        yield name, run(make(f), batches=[(X, y)])
    yield "hmc, tuned", run(EXACT["hmc"](f), batches=[(X, y)], warmup=10, target_acceptance=0.7)
    yield "a Dataset", run(S.sgld(f, 0.05), batches=S.minibatches(f, TensorDataset(X, y), 4, seeded(6)))
    yield "an operator as prior", run(S.hmc(under_P, 0.1), batches=[(X, y)])
    yield "a preconditioner", run(S.sgld(f, 0.1, preconditioner=P.inverse()), batches=[(X, y)])
    yield "chains", run(S.chains(S.hmc(f, 0.1), 3), batches=[(X, y)])
    yield "chains, one by one", run(S.chains(S.sgld(f, 0.1), 3, vectorized=False), batches=[(X, y)])


def of_the_function(problem: str, size: int, rank: int, group: Any) -> Iterator[tuple[str, Tensor]]:
    """What else a log posterior over ranks answers."""
    X, y = own_points(problem, size, rank)
    lin = linearise(problem, SHARDS[size], group, rank)
    f = S.log_posterior(lin, prior_precision=2.0, prior_mean=0.1)
    params = {name: (value + 0.1).requires_grad_() for name, value in f.params.items()}
    value = f(params, (X, y))
    yield "value", value.detach()
    yield "likelihood", f.log_likelihood(params, (X, y)).detach()
    for name, gradient in zip(params, torch.autograd.grad(value, list(params.values()))):
        yield f"gradient in {name}", gradient
    chain = S.run(S.chains(S.hmc(f, 0.1), 2), f.params, [(X, y)], steps=6, generator=seeded())
    for name, scores in S.diagnostics.scores(f, chain, [(X, y)]).items():
        yield f"scores of {name}", scores
    new = torch.randn(5, 4, generator=seeded(), dtype=DOUBLE)
    yield "prediction by draws", S.empirical(lin, chain).predict(new).covariance_matrix


def answers(problem: str, size: int = 1, rank: int = 0, group: Any = None) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, chain in states(problem, size, rank, group):
        traces = {"draws": chain.theta, "log posterior": chain.log_posterior, "acceptance": chain.acceptance}
        found |= {f"{name}: {what}": each.numpy() for what, each in traces.items() if each is not None}
    return found | {name: value.numpy() for name, value in of_the_function(problem, size, rank, group)}


def answers_of_rank(group: Any, size: int) -> dict[str, dict[str, np.ndarray]]:
    return {problem: answers(problem, size, dist.get_rank(group), group) for problem in PROBLEMS[size]}


def whole() -> dict[str, dict[str, np.ndarray]]:
    """The answers of one process."""
    return {problem: answers(problem) for problem in ("labels", "numbers")}


@pytest.mark.parametrize("size", LONGEST)
def test_chains_are_those_of_one_process(expected, size) -> None:
    for problem, found in by_problem(run_on_ranks(size, answers_of_rank, size)).items():
        assert_those_of_one_process(found, expected[problem], size_of=lambda truth: 1.0)


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    rank = dist.get_rank(group)
    X, y = own_points("labels", 2, rank)
    lin = linearise("labels", SHARDS[2], group, rank)
    f, ranks = S.log_posterior(lin), lin.passes.shard.ranks
    run = partial(S.run, start=f.params, batches=[(X, y)], steps=5)
    found = {
        "other priors": outcome(lambda: S.log_posterior(lin, prior_precision=1.0 + rank)),
        "other seeds": outcome(lambda: run(S.sgld(f, 0.1), generator=seeded(rank))),
        "other steps": outcome(lambda: run(S.sgld(f, 0.1 * (1 + rank)), generator=seeded())),
        "other seeds of minibatches": outcome(lambda: S.minibatches(f, (X, y), 4, seeded(rank))),
        "other sizes of minibatches": outcome(lambda: S.minibatches(f, (X, y), 4 + rank, seeded())),
        "all points in minibatches": outcome(lambda: S.minibatches(f, data("labels"), 4, seeded())),
        "minibatches for Metropolis": outcome(
            lambda: run(S.hmc(f, 0.1), batches=S.minibatches(f, (X, y), 4, seeded()), generator=seeded())
        ),
        "part of a shard": outcome(lambda: f(f.params, (X[:3], y[:3]))),
        "a filter": outcome(lambda: S.ekf(f)),
        "a linearised batch": outcome(lambda: f.linearize(lin.theta, (X, y))),
    }
    many = S.chains(S.hmc(f, 0.1, leapfrog_steps=3), 2)
    state, before, batch = many.init(f.params, seeded()), ranks.messages, (X, y)
    for _ in range(5):
        state, _ = many.update(state, batch, inplace=True)
    found["messages of 5 steps of HMC"] = str(ranks.messages - before)
    state = S.sgld(f, 0.1).init(f.params, seeded())
    before, sent = ranks.messages, ranks.bytes_sent
    S.sgld(f, 0.1).update(state, (X, y))
    found["messages of a step of SGLD"] = f"{ranks.messages - before}, {ranks.bytes_sent - sent} bytes"
    return found


REFUSED = {
    "other priors": "RanksDifferError: the prior's precision: Tensor(",
    "other seeds": "RanksDifferError: the chains' seeds, from generator",
    "other steps": "RanksDifferError: the sampler's step_size",
    "other seeds of minibatches": "RanksDifferError: the seed of minibatches",
    "other sizes of minibatches": "RanksDifferError: the size of minibatches: 4 on rank 0, but 5 on rank 1",
    "all points in minibatches": "ValueError: data have 14 points, but the log posterior was built for",
    "minibatches for Metropolis": "ValueError: this batch has 4 of the 14 points",
    "part of a shard": "ValueError: this batch has 3 of the ",
    "a filter": "ValueError: ekf is not for a log posterior over a process group",
    "a linearised batch": "ValueError: over a process group no batch is linearised",
    "messages of 5 steps of HMC": str(5 * 3 + 1),
    "messages of a step of SGLD": f"1, {(43 + 1) * 8} bytes",
}


def test_what_differs_is_named() -> None:
    assert_said(run_on_ranks(2, refusals), REFUSED)
