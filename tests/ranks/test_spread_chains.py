"""Chains spread over ranks, each on all data: they are the chains of one process, and so are their diagnostics.

Tests `process_group.py`.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import curvops as co
from tests.ranks.processes import alone, assert_said, assert_those_of_one_process, largest, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, data, linearise, own_points, seeded
from tests.ranks.test_refusals import outcome
from tests.ranks.test_samplers import EXACT, STOCHASTIC

S, K, STEPS = co.sampling, 5, 8
DATA = [data("labels")]


def density() -> Any:
    return S.log_posterior(linearise("labels"), prior_precision=2.0)


def readout(points: Any) -> Any:
    """The weights of repriorisation, for these points."""
    return S.reprior(linearise("labels").model.module, points, noise=0.3, likelihood="classification")


def of_chains(group: Any) -> Iterator[tuple[str, Any]]:
    f, P = density(), co.KFAC(linearise("labels")).add_diagonal(0.5)
    chains = partial(S.chains, k=K, process_group=group)

    def run(sampler: Any, **given: Any) -> Any:  # each from the same seed, so that a part of the list can be asked
        return S.run(sampler, **({"start": f.params, "batches": DATA, "steps": STEPS, "generator": seeded()} | given))

    for name in ("sgnht", "hmc"):  # chains of one kind of sampler run as of another
        yield name, run(chains((STOCHASTIC | EXACT)[name](f)))
    tuned = run(chains(S.lmc(f, 0.3)), warmup=10, target_acceptance=0.7)
    yield "tuned", tuned
    yield "continued", S.run(chains(S.lmc(f, 0.3)), tuned.state, DATA, steps=5, thin=2)
    starts = [{name: value + 0.1 * i for name, value in f.params.items()} for i in range(K)]
    yield "starts of their own", run(chains(S.sgld(f, 0.05)), start=starts)
    yield "one by one", run(chains(S.sgld(f, 0.05), vectorized=False))
    yield "minibatches", run(chains(S.sgld(f, 0.05)), batches=S.minibatches(f, DATA[0], 4, seeded(6)))
    yield "a preconditioner", run(chains(S.sgld(f, 0.1, preconditioner=P.inverse())))
    yield (
        "a density without data",
        S.run(
            chains(S.hmc(lambda x, _: -x.square().sum(), 0.3, data_size=1)),
            torch.ones(3, dtype=DOUBLE),
            steps=9,
            generator=seeded(),
        ),
    )
    wide = readout(DATA[0])
    yield "reprior", S.run(chains(S.hmc(wide, 0.1)), wide.params, steps=STEPS, generator=seeded())
    whole = run(chains(S.hmc(f, 0.1)))
    yield "rhat", S.diagnostics.rhat(whole)
    yield "ess", S.diagnostics.ess(whole)
    own = {} if group is None else {"gather": False}
    yield "projections", S.diagnostics.random_projections(run(chains(S.hmc(f, 0.1), **own)), 7, seeded(8))
    new = torch.randn(5, 4, generator=seeded(), dtype=DOUBLE)
    yield "prediction", {"covariance": S.empirical(linearise("labels"), whole).predict(new).covariance_matrix}


def answers(group: Any = None) -> dict[str, np.ndarray]:
    found: dict[str, Tensor] = {}
    for name, value in of_chains(group):
        if isinstance(value, Mapping):
            found |= {f"{name}: {key}": each for key, each in value.items()}
            continue
        for what in ("theta", "log_posterior", "acceptance", "r_squared", "ess", "series"):
            if (each := getattr(value, what, None)) is not None:
                found[f"{name}: {what}"] = each
    return {name: value.numpy() for name, value in found.items()}


def test_chains_are_those_of_one_process() -> None:
    found, size_of = run_on_ranks(3, answers), lambda truth: max(1.0, largest(truth))
    assert_those_of_one_process(found, alone(answers), size_of=size_of)


def of_shard(group: dist.ProcessGroup) -> Any:
    """Chains of repriorisation, to which each rank gives its own shard of the data."""
    wide = readout(own_points("labels", 2, dist.get_rank(group)))
    many = S.chains(S.hmc(wide, 0.1), K, process_group=group)
    return S.run(many, wide.params, steps=2, generator=seeded())


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    rank, f = dist.get_rank(group), density()
    sampler = S.sgld(f, 0.1)
    many = S.chains(sampler, K, process_group=group)
    own = S.run(S.chains(sampler, K, process_group=group, gather=False), f.params, DATA, steps=8, generator=seeded())
    shared = S.log_posterior(linearise("labels", SHARDS[2], group, rank))
    found = {
        "fewer chains than ranks": outcome(lambda: S.chains(sampler, 1, process_group=group)),
        "other numbers of chains": outcome(lambda: S.chains(sampler, K + rank, process_group=group)),
        "other seeds": outcome(lambda: many.init(f.params, seeded(rank))),
        "other starts": outcome(lambda: many.init({n: v + rank for n, v in f.params.items()}, seeded())),
        "data shared by the same ranks": outcome(lambda: S.chains(S.sgld(shared, 0.1), K, process_group=group)),
        "a checkpoint": outcome(lambda: S.run(many, f.params, DATA, steps=5, checkpoint="nowhere")),
        "rhat of one rank's chains": outcome(lambda: S.diagnostics.rhat(own)),
        "predictions of one rank's chains": outcome(lambda: S.empirical(linearise("labels"), own)),
        "other projections": outcome(lambda: S.diagnostics.random_projections(own, 3, seeded(rank))),
        "reprior of a shard": outcome(lambda: of_shard(group)),
    }
    ranks = many.spread.ranks
    before = ranks.messages
    state = many.init(f.params, seeded())
    started = ranks.messages
    chain = S.run(many, state, DATA, steps=10)
    found["messages"] = f"{started - before} at the start, {ranks.messages - started} of a run"
    found["own chains"] = f"{len(own.theta)} of {len(chain.theta)}"
    return found


REFUSED = {
    "fewer chains than ranks": "ValueError: 1 chains are fewer than the 2 ranks",
    "other numbers of chains": "RanksDifferError: the number of chains",
    "other seeds": "RanksDifferError: the chains' seeds, from generator",
    "other starts": "RanksDifferError: the params to start from",
    "data shared by the same ranks": "ValueError: the ranks of process_group share the data of log_posterior",
    "a checkpoint": "ValueError: checkpoint= is not for chains that ranks share",
    "rhat of one rank's chains": "ValueError: draws hold the chains of this rank alone",
    "predictions of one rank's chains": "ValueError: draws hold the chains of this rank alone",
    "other projections": "RanksDifferError: the projections, from count and generator",
    "reprior of a shard": "RanksDifferError: the params to start from",
    "messages": "2 at the start, 4 of a run",
    "own chains": "of 5",
}


def test_what_differs_is_named() -> None:
    assert_said(run_on_ranks(2, refusals), REFUSED)


def of_a_mesh(world: dist.ProcessGroup) -> np.ndarray:
    """Chains over the columns of a mesh of ranks (2, 2), data over its rows."""
    rank = dist.get_rank(world)
    rows, columns = ([dist.new_group(ranks) for ranks in each] for each in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    data_group, chain_group = rows[rank // 2], columns[rank % 2]
    f = S.log_posterior(linearise("labels", SHARDS[2], data_group, rank % 2), prior_precision=2.0)
    sampler = S.chains(S.hmc(f, 0.1), K, process_group=chain_group)
    batches = [own_points("labels", 2, rank % 2)]
    return S.run(sampler, f.params, batches, steps=STEPS, generator=seeded()).theta.numpy()


def test_chains_and_data_over_a_mesh_of_ranks() -> None:
    f = density()
    alone = S.run(S.chains(S.hmc(f, 0.1), K), f.params, DATA, steps=STEPS, generator=seeded()).theta.numpy()
    for theta in run_on_ranks(4, of_a_mesh).values():
        np.testing.assert_allclose(theta, alone, rtol=0, atol=1e-10)
