"""Checkpoints of runs that several processes make together: read by any number of them, and whole after any kill.

Tests `checkpoint.py`.
"""

import contextlib
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import curvops as co
from curvops import checkpoint, storage
from tests.ranks.processes import CONTEXT, alone, run_on_ranks, running_apart
from tests.ranks.questions import DOUBLE, SHARDS, linearise, own_points, place_of, seeded

Run = Callable[[co.operators.Linearization, Any], torch.Tensor]


def posterior(lin: co.operators.Linearization, prior: Any = 30.0) -> co.posterior.Laplace:
    return co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)


def solved(lin: co.operators.Linearization, folder: Any) -> torch.Tensor:
    B = torch.randn(lin.num_parameters, 3, generator=seeded(5), dtype=DOUBLE)
    return co.GGN(lin).add_diagonal(torch.tensor(0.1, dtype=DOUBLE)).cg(B, rtol=1e-12, checkpoint=folder).x


def tuned(lin: co.operators.Linearization, folder: Any) -> torch.Tensor:
    options = {"samples": 3, "steps": 2, "prior": "layer"}
    return co.evidence.mackay(posterior(lin), generator=seeded(), checkpoint=folder, **options).prior_precision


def sampled(lin: co.operators.Linearization, folder: Any, exact: bool) -> torch.Tensor:
    points = own_points("labels", *place_of(dist.group.WORLD))
    f = co.sampling.log_posterior(lin, prior_precision=2.0)
    batches = [points] if exact else co.sampling.minibatches(f, points, 4, seeded(6))
    sampler = co.sampling.hmc(f, 0.1) if exact else co.sampling.sgld(f, 0.1)
    return co.sampling.run(sampler, f.params, batches, steps=12, generator=seeded(), checkpoint=folder).theta


RUNS: dict[str, Run] = {
    "cg": solved,
    "eigsh": lambda lin, folder: co.GGN(lin).eigsh(3, rtol=1e-10, generator=seeded(), checkpoint=folder).values,
    "low rank": lambda lin, folder: co.low_rank(co.GGN(lin), 9, generator=seeded(), checkpoint=folder).to_dense(),
    "draws": lambda lin, folder: (
        posterior(lin).deviations(3, rtol=1e-12, generator=seeded(), method="cg", checkpoint=folder).draws
    ),
    "linear mode": lambda lin, folder: posterior(lin).linear_mode(rtol=1e-10, checkpoint=folder).theta,
    "MacKay": tuned,
    "KFAC": lambda lin, folder: co.KFAC(lin, checkpoint=folder).to_dense(),
    "EKFAC": lambda lin, folder: co.EKFAC(lin, fisher="mc", generator=seeded(), checkpoint=folder).to_dense(),
    "sgld": partial(sampled, exact=False),
    "hmc": partial(sampled, exact=True),
}


SAVES = {
    "cg": 9,
    "eigsh": 6,
    "low rank": 2,
    "draws": 2,
    "linear mode": 20,
    "MacKay": 32,
    "KFAC": 2,
    "EKFAC": 4,
    "sgld": 5,
    "hmc": 5,
}
"""After how many saves of a process nothing more is written, as if all had been killed then."""


@contextlib.contextmanager
def saved_at_once() -> Iterator[None]:
    """Save whenever a run may, without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "PAUSE", 0.0)
        patch.setattr(checkpoint, "SHARE", float("inf"))
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@saved_at_once()
def answers(group: Any, folder: str, saved: bool = False) -> dict[str, np.ndarray]:
    """The answers of all runs, with the messages that each took, continued from what is `saved` or left amid."""
    rank, size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    lin, found = linearise("labels", SHARDS[size], group, rank), {}
    for name, run in RUNS.items():
        with stopped(SAVES[name]) if not saved else contextlib.nullcontext(), warnings.catch_warnings():
            warnings.simplefilter("ignore", co.evidence.MaxStepsWarning)
            before = lin.ranks.messages if lin.ranks else 0
            found[name] = run(lin, Path(folder) / name).numpy()
            found[f"messages of {name}"] = np.array(lin.ranks.messages - before if lin.ranks else 0)
    return found


@contextlib.contextmanager
def stopped(most: int) -> Iterator[None]:
    """Write no more after so many saves."""
    plain, saves = (storage.save, storage.discard), 0

    def save(*given: Any) -> None:
        nonlocal saves
        saves += 1
        if saves <= most:
            plain[0](*given)

    storage.save, storage.discard = save, lambda *given: None if saves >= most else plain[1](*given)
    try:
        yield
    finally:
        storage.save, storage.discard = plain


def test_a_checkpoint_is_read_by_any_number_of_processes(tmp_path: Path) -> None:
    whole = run_on_ranks(2, answers, str(tmp_path / "left"))
    for size in (1, 2, 3):
        folder = shutil.copytree(tmp_path / "left", tmp_path / str(size))
        found = run_on_ranks(size, answers, folder, True) if size > 1 else {0: alone(answers, None, folder, True)}
        for rank, own in found.items():
            for name in RUNS:
                what = f"{name} on rank {rank} of {size}"
                np.testing.assert_allclose(own[name], whole[0][name], rtol=1e-10, atol=1e-12, err_msg=what)
                assert size != 2 or np.array_equal(own[name], whole[rank][name]), what
                if size == 2 and name in ("cg", "eigsh", "linear mode", "MacKay", "sgld", "hmc"):
                    messages = f"messages of {name}"
                    assert own[messages] < whole[0][messages], f"{what}: products were made twice"


KILLS = int(os.environ.get("KILLS", "1"))
MOST_SAVES = 30
"""The largest number of saves before a kill."""


@saved_at_once()
def told_run(group: dist.ProcessGroup, folder: str, saves: Any = None) -> np.ndarray:
    """MacKay's steps, which are a mode, draws and solves, with a note of each save."""
    lin, plain = linearise("labels", SHARDS[2], group, dist.get_rank(group)), storage.save

    def save(*given: Any) -> None:
        saves.release()
        plain(*given)

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore", co.evidence.MaxStepsWarning)
        if saves is not None:
            patch.setattr(storage, "save", save)
        return tuned(lin, folder).numpy()


def reached(moment: int, saves: Any, answers: Any) -> bool:
    """Whether a run saves so often, rather than end before."""
    for _ in range(moment):
        while not saves.acquire(timeout=0.05):
            if not answers.empty():
                return False
    return True


def test_a_run_killed_at_random_moments_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """A random one of two processes ends within, before or after a random save; the other one does not hang."""
    chance, kills, folder = random.Random(0), 0, str(tmp_path / "killed")
    whole = run_on_ranks(2, told_run, str(tmp_path / "whole"))
    while kills < KILLS:
        moment, victim, saves = chance.randint(1, MOST_SAVES), chance.randrange(2), CONTEXT.Semaphore(0)
        with running_apart(2, told_run, folder, saves) as (processes, answers):
            if not reached(moment, saves, answers):
                shutil.rmtree(folder)
                continue
            time.sleep(0.01 * chance.random())
            processes[victim].kill()
            killed = time.monotonic()
            rank, said = answers.get(timeout=60)
            took = time.monotonic() - killed
            processes[rank].kill()  # at its end it would wait for the other one
        kills += 1
        ended = isinstance(said, np.ndarray) and np.array_equal(said, whole[rank])  # it needed nothing more
        assert rank != victim and (ended or "RuntimeError" in said), said
        assert took < 30
        for each in Path(folder).rglob("curvops.json"):
            if each.parent.name.startswith(storage.SCRATCH):
                continue  # what a kill left of a save, which does no harm
            storage.load(each.parent, checkpoint.KIND, checkpoint.VERSION)
    found = run_on_ranks(2, told_run, folder)
    assert all(np.array_equal(found[rank], whole[rank]) for rank in range(2))
