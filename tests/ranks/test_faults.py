"""Ranks that fail, end, hang or were given something else: the others are told.

Tests `rank_failures.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import curvops as co
from curvops.rank_failures import TIMEOUT_VARIABLE
from tests.ranks.processes import run_apart, run_on_ranks
from tests.ranks.questions import DOUBLE, SHARDS, N, data, linearise, seeded

SIZE = 2
WRONG_TIMES = ("", "soon", "60s", "0", "-1", "nan", "inf", "1e400")


def network(seed: int = 0, layer: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh() if layer is None else layer, nn.Linear(5, 3)).double()


def placed(device: str) -> nn.Module:
    """A network that keeps its device as an attribute, as many do."""
    found = network()
    vars(found).update(device=device, place=torch.device(device))
    return found


def loss(f: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(f, y, reduction="none")


def other_loss(f: Tensor, y: Tensor) -> Tensor:
    return 2 * loss(f, y)


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


class Disk:
    """Data whose reading fails once it has been read often enough."""

    def __init__(self, rank: int, passes: int, error: type[BaseException] = OSError) -> None:
        self.items, self.left, self.error = [shard(rank)], passes if rank == 1 else 10**6, error

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.left -= 1
        if self.left < 0:
            self.left = 10**6
            raise self.error("the disk is gone")
        return iter(self.items)


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
    x, y = shard(rank)
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
        "the same data": outcome(lambda: linearize(data=shard(0))),
        "no data at all": outcome(lambda: linearize(data=(shard(0)[0][:0], shard(0)[1][:0]))),
        "other seeds": outcome(lambda: post.sample(1, seeded(rank))),
        "other vectors": outcome(lambda: co.GGN(lin) @ torch.full((lin.num_parameters, 1), 1.0 + rank, dtype=DOUBLE)),
        "no group": outcome(lambda: co.linearize(network(), shard(rank), "classification").num_data),
        "not a group": outcome(lambda: linearize(process_group=SIZE)),
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
        "a shard within another": outcome(lambda: linearize(data=taken(torch.arange(5 if rank else N)))),
        "shards that overlap": outcome(lambda: linearize(data=many(torch.arange(100)[35 * rank : 60 + 40 * rank]))),
        "two points of both": outcome(lambda: linearize(data=many(torch.arange(60)[30 * rank : 32 + 28 * rank]))),
        "repeated points, dealt out": outcome(
            lambda: linearize(data=many(torch.randperm(60, generator=seeded()).repeat(4)[rank::SIZE] // 2)).num_data
        ),
        "repeated points in order": outcome(
            lambda: linearize(data=many(torch.arange(60).repeat_interleave(2)[60 * rank :][:60])).num_data
        ),
        "another curvature": outcome(lambda: co.KFAC(lin, "empirical" if rank else "exact")),
        "another class": outcome(
            lambda: co.laplace(lin, co.GGN if rank else co.EmpiricalFisher, 1.0, check_mode=False)
        ),
        "another seed of draws": outcome(lambda: co.KFAC(lin, "mc", generator=seeded(rank))),
        "another factor": outcome(lambda: co.laplace(lin, (1.0 + rank) * co.GGN(lin), 1.0, check_mode=False)),
        "another prior": outcome(lambda: co.laplace(lin, co.KFAC, 1.0 + rank, check_mode=False)),
        "another prior later": outcome(lambda: post.with_prior({"0.*": 1.0 + rank, "2.*": 1.0})),
        "another kind of prior": outcome(lambda: post.with_prior(kfac.add_diagonal(1.0) if rank else 1.0)),
        "another mean": outcome(lambda: post.with_prior(1.0, 0.1 * rank)),
        "another temperature": outcome(lambda: co.laplace(lin, co.KFAC, 1.0, 0.0, 1.0 + rank, check_mode=False)),
        "another noise": outcome(lambda: tuned.with_noise(1.0 + rank)),
        "another activation": outcome(lambda: linearize(model=network(layer=nn.ReLU() if rank else nn.Tanh()))),
        "another setting": outcome(lambda: linearize(model=network(layer=nn.Softplus(1.0 + rank)))),
        "a device of its own": outcome(lambda: linearize(model=placed(f"cuda:{rank}"))),
        "another loss": outcome(lambda: linearize(likelihood=co.likelihoods.FromLoss(loss if rank else other_loss))),
        "a checkpoint on a file": outcome(lambda: co.low_rank(co.GGN(lin), 2, checkpoint=__file__)),
        "a destroyed group": outcome(lambda: destroyed(group, rank)),
        "a time to wait": outcome(lambda: within("7.5", linearize).passes.shard.ranks.timeout),
        "other times to wait": outcome(lambda: within(str(7 + rank), linearize)),
        "its default": outcome(lambda: linearize().passes.shard.ranks.timeout),
    }
    for wrong in WRONG_TIMES:
        found[f"{wrong!r} to wait"] = outcome(lambda wrong=wrong: within(wrong, linearize))
    G, V = co.GGN(lin), torch.ones(lin.num_parameters, 3, dtype=DOUBLE)
    messages, sent = ranks.messages, ranks.bytes_sent
    product = G @ V
    found["messages of a product"] = f"{ranks.messages - messages}, {ranks.bytes_sent - sent} bytes"
    small = linearize(memory_budget=1, data=[shard(rank)])
    found["a budget below one batch"] = f"{torch.allclose(co.GGN(small) @ V, product, rtol=1e-10, atol=1e-12)}"
    with contextlib.suppress(OSError), ranks.guarded():
        raise OSError("on all ranks")
    time.sleep(1.5 * rank)  # long enough for the other one to look why
    found["after an error on all"] = f"{torch.equal(G @ V, product)}"
    found["points of another form"] = outcome(lambda: linearize(data=(x[:, : 4 - rank], y)))
    found["after an error on one"] = outcome(linearize)
    return found


def within(seconds: str, call: Callable[[], Any]) -> Any:
    """What a call returns while this stands in the environment for the time that ranks wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TIMEOUT_VARIABLE, seconds)
        return call()


def taken(positions: Tensor) -> tuple[Tensor, Tensor]:
    x, y = data("labels")
    return x[positions], y[positions]


def many(positions: Tensor) -> tuple[Tensor, Tensor]:
    x = torch.randn(100, 4, dtype=DOUBLE, generator=seeded())
    return x[positions], torch.arange(100)[positions] % 3


def destroyed(group: dist.ProcessGroup, rank: int) -> Any:
    """A product, and a new linearisation, over a group that is no more."""
    own = dist.new_group(list(range(SIZE)))
    lin = co.linearize(network(), shard(rank), "classification", process_group=own)
    dist.destroy_process_group(own)
    at_the_door = outcome(lambda: co.linearize(network(), shard(rank), "classification", process_group=own))
    return f"{at_the_door}; {outcome(lambda: co.GGN(lin) @ lin.theta)}"


REFUSED = {
    "other weights": "RanksDifferError: the network's tensors",
    "other parameters": "RanksDifferError: the parameters",
    "other likelihood": "RanksDifferError: the likelihood",
    "other engine": "RanksDifferError: the engine",
    "the same data": "RanksDifferError: ranks 0 and 1 hold the same data",
    "no data at all": "NoDataError: the shards of all 2 ranks hold no points",
    "other seeds": "RanksDifferError: the vectors of a product differ",
    "other vectors": "RanksDifferError: the vectors of a product differ",
    "no group": "linearises this process's data alone",
    "not a group": "TypeError: process_group must be a process group of torch.distributed",
    "weights on one rank": "RanksDifferError: whether points have weights",
    "other subsets": "RanksDifferError: the chosen points",
    "repeated points": "ValueError: this DistributedSampler repeats points",
    "minibatches": "ValueError: minibatches are not available for data that are shared among the ranks",
    "another dtype": "ValueError: the data of a linearisation over a process group cannot be converted",
    "a pickle": "TypeError: a linearisation over a process group cannot be pickled",
    "no group again": "7",
    "another budget": "RanksDifferError: memory_budget: 100000000 on rank 0, but 100000001 on rank 1",
    "another device": "RanksDifferError: the kind of device: ['cpu'] on rank 0, but ['meta'] on rank 1",
    "shuffled on each rank": "RanksDifferError: ranks 0 and 1 hold the same data: 14 of the 14 compared points",
    "a shard within another": "ranks 0 and 1 hold the same data: 5 of the 5 compared points of rank 1",
    "shards that overlap": "RanksDifferError: ranks 0 and 1 hold the same data: 25 of the 60 compared points of rank 0",
    "two points of both": "2 of the 30 compared points of rank 1 are also on rank 0, and would count twice",
    "repeated points, dealt out": "240",
    "repeated points in order": "120",
    "another curvature": "RanksDifferError: fisher of co.KFAC: 'exact' on rank 0, but 'empirical' on rank 1",
    "another class": "RanksDifferError: the operator: co.EmpiricalFisher on rank 0, but co.GGN on rank 1",
    "another seed of draws": "RanksDifferError: generator of co.KFAC",
    "another factor": "RanksDifferError: the curvature: Scaled(GGN)",
    "another prior": "the prior's precision: Tensor(1.0, torch.float64, ()) on rank 0, but Tensor(2.0, ",
    "another prior later": "RanksDifferError: the prior's precision",
    "another kind of prior": "RanksDifferError: the prior's precision",
    "another mean": "RanksDifferError: the prior's mean",
    "another temperature": "RanksDifferError: the temperature: 1.0 on rank 0, but 2.0 on rank 1",
    "another noise": "RanksDifferError: the likelihood",
    "another activation": "RanksDifferError: the network's modules and their settings",
    "another setting": "RanksDifferError: the network's modules and their settings",
    "a device of its own": "Linearization(",
    "another loss": "RanksDifferError: the likelihood: ",
    "a checkpoint on a file": "FileExistsError",
    "a destroyed group": "RankFailedError: the process group of this linearisation was destroyed",
    "a time to wait": "7.5",
    "other times to wait": "RanksDifferError: CURVOPS_RANK_TIMEOUT gives 7 s on rank 0, but 8 s on rank 1",
    "its default": "60.0",
    **{
        f"{wrong!r} to wait": f"ValueError: the environment variable {TIMEOUT_VARIABLE} must hold"
        for wrong in WRONG_TIMES
    },
    "a budget below one batch": "True",
    "after an error on all": "True",
    "points of another form": "the model failed on inputs (2, 3)",
    "after an error on one": "RankFailedError: rank 1 of 2 raised",
    "messages of a product": f"1, {(43 * 3 + 2) * 8} bytes",
}


def test_what_differs_is_named() -> None:
    for rank, found in run_apart(SIZE, refusals).items():
        assert not isinstance(found, str), found
        assert found.keys() == REFUSED.keys()
        wrong = {name: said for name, said in found.items() if REFUSED[name] not in said}
        assert not wrong, (rank, wrong)


def product_of(group: dist.ProcessGroup, how: str) -> str:
    """A product while rank 1 raises, ends or hangs; and how the next one ends."""
    rank = dist.get_rank(group)
    disk = Disk(rank, 5, ERRORS.get(how, OSError))
    lin = co.linearize(network(), disk, "classification", engine="streamed", process_group=group)
    ranks, V = lin.passes.shard.ranks, torch.ones(lin.num_parameters, 1, dtype=DOUBLE)
    ranks.timeout = 1 if how == "hangs" else 2
    if rank == 1 and how == "ends":
        os._exit(1)
    if how == "out of memory":
        return outcome(lambda: [co.linalg.nystrom(co.GGN(lin), 6, generator=seeded()) for _ in range(9)])
    if rank == 1 and how == "hangs":
        time.sleep(60)  # until it is killed
    try:
        return outcome(lambda: [co.GGN(lin) @ V for _ in range(10)])
    except KeyboardInterrupt:
        return "interrupted"


ERRORS = {"out of memory": torch.OutOfMemoryError, "is interrupted": KeyboardInterrupt}


@pytest.mark.parametrize(
    "how, said",
    [
        ("raises", "RankFailedError: rank 1 of 2 raised OSError: the disk is gone"),
        ("ends", "has ended: rank 1"),
        ("hangs", "missing: rank 1"),
        ("is interrupted", "RankFailedError: rank 1 of 2 raised KeyboardInterrupt: the disk is gone"),
        ("out of memory", "RankFailedError: rank 1 of 2 raised OutOfMemoryError: the disk is gone"),
    ],
)
def test_a_rank_that_fails_is_named(how, said) -> None:
    own = {"raises": "OSError: the disk is gone", "is interrupted": "interrupted", "out of memory": said}
    found = run_apart(SIZE, product_of, how, expected=SIZE if how in own else 1)
    assert said in found[0], found
    assert how not in own or found[1].startswith(own[how]), found


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
