"""Ranks that were given something else: all of them refuse it, and name it."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import curvops as co
from tests.ranks.processes import assert_said, run_apart, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, N, data, linearise, seeded

SIZE = 2
RANDOM: dict[str, Callable[..., Any]] = {
    "a trace": lambda A, random: co.linalg.trace(A, method="hutchinson", max_matvecs=10, generator=random),
    "a sketch": lambda A, random: co.linalg.nystrom(A, 5, generator=random),
    "a spectral density": lambda A, random: co.linalg.spectral_density(A, probes=2, steps=5, generator=random),
    "an eigenvector": lambda A, random: co.linalg.eigsh(A, 1, generator=random),
}
"""Calls on a matrix that draw vectors for its products."""


def network(seed: int = 0, layer: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh() if layer is None else layer, nn.Linear(5, 3)).double()


def placed(device: str) -> nn.Module:
    """A network that keeps its device as an attribute, as many do."""
    found = network()
    vars(found).update(device=device, place=torch.device(device))
    return found


def shard(rank: int) -> tuple[Tensor, Tensor]:
    x, y = data("labels")
    return x[rank::SIZE], y[rank::SIZE]


def outcome(function: Callable[[], Any]) -> str:
    """What a call ended with, as text."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(warning.message) for warning in seen) or repr(found)


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    rank = dist.get_rank(group)

    def linearize(**changed: Any) -> co.operators.Linearization:
        given = {"model": network(), "data": shard(rank), "likelihood": "classification", "process_group": group}
        return co.linearize(**given | changed)

    lin, weighted = linearize(), (*shard(rank), torch.ones(N // SIZE, dtype=DOUBLE))
    repeated = TensorDataset(*(part[: N - 1] for part in data("labels")))
    sampler = DistributedSampler(repeated, SIZE, rank, shuffle=False)
    post = co.laplace(lin, co.GGN, prior_precision=1.0, check_mode=False)
    ranks = lin.passes.shard.ranks
    x, _ = shard(rank)
    tuned = co.laplace(
        linearize(data=(x, x[:, :3]), likelihood=co.likelihoods.Gaussian(1.0)), co.GGN, 1.0, check_mode=False
    )
    kfac = co.KFAC(lin).detached_from_weights()
    found = {
        "other weights": outcome(lambda: linearize(model=network(seed=rank))),
        "other parameters": outcome(lambda: linearize(parameters="0.*" if rank else "2.*")),
        "other likelihood": outcome(
            lambda: linearize(likelihood=co.likelihoods.Categorical(label_smoothing=rank / 10))
        ),
        "other engine": outcome(lambda: linearize(engine="streamed" if rank else "auto")),
        "no data at all": outcome(lambda: linearize(data=(shard(0)[0][:0], shard(0)[1][:0]))),
        "other seeds": outcome(lambda: post.sample(1, seeded(rank))),
        "other seeds of a sample of targets": outcome(
            lambda: co.linalg.draw(co.TangentKernel(lin, 2.0), 1, seeded(rank))
        ),
        **{
            f"other seeds of {name}": outcome(lambda ask=ask: ask(1.0 * co.GGN(lin) + 0.5 * kfac, seeded(rank)))
            for name, ask in RANDOM.items()
        },
        "no group": outcome(lambda: co.linearize(network(), shard(rank), "classification").num_data),
        "weights on one rank": outcome(lambda: linearize(data=weighted if rank else weighted[:2], weights=bool(rank))),
        "other subsets": outcome(lambda: co.subsample(lin, 5, generator=seeded(rank))),
        "repeated points": outcome(lambda: linearize(data=DataLoader(repeated, 4, sampler=sampler))),
        "minibatches": outcome(lambda: post.deviations(1, method="sgd", generator=seeded())),
        "another dtype": outcome(lambda: lin.cast(torch.float32)),
        "a pickle": outcome(lambda: __import__("pickle").dumps(co.GGN(lin))),
        "no group again": outcome(lambda: co.linearize(network(), shard(rank), "classification").num_data),
        "another budget": outcome(lambda: linearize(memory_budget=10**8 + rank)),
        "another device": outcome(lambda: linearize(model=network().to("meta") if rank else network())),
        "shuffled on each rank": outcome(lambda: linearize(data=taken(torch.randperm(N, generator=seeded(rank))))),
        "shards that overlap": outcome(lambda: linearize(data=many(torch.arange(100)[35 * rank : 60 + 40 * rank]))),
        "two points of both": outcome(lambda: linearize(data=many(torch.arange(60)[30 * rank : 32 + 28 * rank]))),
        "repeated points, dealt out": outcome(
            lambda: linearize(data=many(torch.randperm(60, generator=seeded()).repeat(4)[rank::SIZE] // 2)).num_data
        ),
        "another curvature": outcome(lambda: co.KFAC(lin, "empirical" if rank else "exact")),
        "another class": outcome(
            lambda: co.laplace(lin, co.GGN if rank else co.EmpiricalFisher, 1.0, check_mode=False)
        ),
        "another seed of draws": outcome(lambda: co.KFAC(lin, "mc", generator=seeded(rank))),
        "another factor": outcome(lambda: co.laplace(lin, (1.0 + rank) * co.GGN(lin), 1.0, check_mode=False)),
        "another prior later": outcome(lambda: post.with_prior({"0.*": 1.0 + rank, "2.*": 1.0})),
        "another kind of prior": outcome(lambda: post.with_prior(kfac.add_diagonal(1.0) if rank else 1.0)),
        "another mean": outcome(lambda: post.with_prior(1.0, 0.1 * rank)),
        "another temperature": outcome(lambda: co.laplace(lin, co.KFAC, 1.0, 0.0, 1.0 + rank, check_mode=False)),
        "another noise": outcome(lambda: tuned.with_noise(1.0 + rank)),
        "another setting": outcome(lambda: linearize(model=network(layer=nn.Softplus(1.0 + rank)))),
        "a device of its own": outcome(lambda: linearize(model=placed(f"cuda:{rank}"))),
        "a checkpoint on a file": outcome(lambda: co.low_rank(co.GGN(lin), 2, checkpoint=__file__)),
    }
    G, V = co.GGN(lin), torch.ones(lin.num_parameters, 3, dtype=DOUBLE)
    messages, sent = ranks.messages, ranks.bytes_sent
    product = G @ V
    found["messages of a product"] = f"{ranks.messages - messages}, {ranks.bytes_sent - sent} bytes"
    small = linearize(memory_budget=1, data=[shard(rank)])
    found["a budget below one batch"] = f"{torch.allclose(co.GGN(small) @ V, product, rtol=1e-10, atol=1e-12)}"
    found["after all of these"] = f"{torch.equal(G @ V, product)}"
    return found


def taken(positions: Tensor) -> tuple[Tensor, Tensor]:
    x, y = data("labels")
    return x[positions], y[positions]


def many(positions: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.randn(100, 4, dtype=DOUBLE, generator=seeded())
    return x[positions], torch.arange(100)[positions] % 3


REFUSED = {
    "other weights": "RanksDifferError: the network's tensors",
    "other parameters": "RanksDifferError: the parameters",
    "other likelihood": "RanksDifferError: the likelihood",
    "other engine": "RanksDifferError: the engine",
    "no data at all": "NoDataError: the shards of all 2 ranks hold no points",
    "other seeds": "RanksDifferError: the random numbers, from generator or torch.manual_seed: ",
    "other seeds of a sample of targets": "RanksDifferError: the random numbers, from generator",
    **{f"other seeds of {name}": "RanksDifferError: the random numbers, from generator" for name in RANDOM},
    "no group": "linearises this process's data alone",
    "weights on one rank": "RanksDifferError: whether points have weights",
    "other subsets": "RanksDifferError: the chosen points",
    "repeated points": "ValueError: this DistributedSampler repeats points",
    "minibatches": "ValueError: minibatches are not available for data of a process group",
    "another dtype": "ValueError: data of a process group cannot be converted",
    "a pickle": "TypeError: a linearisation over a process group cannot be pickled",
    "no group again": "7",
    "another budget": "RanksDifferError: memory_budget: 100000000 on rank 0, but 100000001 on rank 1",
    "another device": "RanksDifferError: the kind of device: ['cpu'] on rank 0, but ['meta'] on rank 1",
    "shuffled on each rank": "RanksDifferError: ranks 0 and 1 hold the same data: 14 of the 14 compared points",
    "shards that overlap": "RanksDifferError: ranks 0 and 1 hold the same data: 25 of the 60 compared points of rank 0",
    "two points of both": "2 of the 30 compared points of rank 1 are also on rank 0, and would count twice",
    "repeated points, dealt out": "240",
    "another curvature": "RanksDifferError: fisher of co.KFAC: 'exact' on rank 0, but 'empirical' on rank 1",
    "another class": "RanksDifferError: the operator: co.EmpiricalFisher on rank 0, but co.GGN on rank 1",
    "another seed of draws": "RanksDifferError: generator of co.KFAC",
    "another factor": "RanksDifferError: the curvature: Scaled(GGN)",
    "another prior later": "RanksDifferError: the prior's precision",
    "another kind of prior": "RanksDifferError: the prior's precision",
    "another mean": "RanksDifferError: the prior's mean",
    "another temperature": "RanksDifferError: the temperature: 1.0 on rank 0, but 2.0 on rank 1",
    "another noise": "RanksDifferError: the likelihood",
    "another setting": "RanksDifferError: the network's modules and their settings",
    "a device of its own": "Linearization(",
    "a checkpoint on a file": "FileExistsError",
    "a budget below one batch": "True",
    "after all of these": "True",
    "messages of a product": f"1, {43 * 3 * 8} bytes",
}


def test_what_differs_is_named() -> None:
    found = run_apart(SIZE, refusals)
    assert not any(isinstance(told, str) for told in found.values()), found
    assert_said(found, REFUSED)


def saved(group: dist.ProcessGroup, folder: str) -> np.ndarray:
    lin = linearise("labels", SHARDS[SIZE], group, dist.get_rank(group))
    post = co.laplace(lin, co.KFAC, prior_precision=2.0, check_mode=False)
    post.save(folder)
    return post.predict(data("labels")[0]).covariance_matrix.numpy()


def test_one_file_is_written_and_read_by_one_process(tmp_path: Path) -> None:
    found = run_on_ranks(SIZE, saved, str(tmp_path / "posterior"))
    lin = linearise("labels")
    post = co.load(tmp_path / "posterior", lin.model.module)
    np.testing.assert_allclose(post.predict(data("labels")[0]).covariance_matrix, found[1], rtol=1e-12)
