"""Long runs whose process is killed at random moments, again and again, and what checkpoints cost.

`python -m benchmarks.killed_runs` kills 20 processes in all with SIGKILL. It kills some processes of each run, one
after the other, lets the last one finish, and compares the bits of its result with those of a run that was not killed.
Then it times the checkpoint calls in draws that take some minutes. Linux only.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import curvops as co
from benchmarks.layers import linear_layers
from curvops import checkpoint
from curvops.storage import record_of

KILLS = 20
LONG = 8192
"""Points of the run whose checkpoint is timed."""


def posterior(points: int = 512, hidden: tuple[int, int] = (128, 64), batches: int = 1, prior: float = 0.01) -> Any:
    """Make the posterior as a new process would; 17,610 weights by default."""
    torch.manual_seed(0)
    x, y = torch.randn(points, 64, dtype=torch.float64), torch.randint(10, (points,))
    data = list(zip(x.chunk(batches), y.chunk(batches)))
    lin = co.linearize(linear_layers(64, *hidden, 10).double(), data, "classification", memory_budget=2**30)
    return co.laplace(lin, co.GGN, prior_precision=prior, check_mode=False)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def draws(folder: Path | None, k: int = 8) -> Any:
    return posterior().deviations(k, method="cg", rtol=1e-8, generator=seeded(), checkpoint=folder).draws


def formed(folder: Path | None) -> Any:
    return posterior(256).deviations(8, rtol=1e-8, generator=seeded(), checkpoint=folder).draws


def descent(folder: Path | None) -> Any:
    post, options = posterior(hidden=(32, 16), prior=1.0), co.posterior.StochasticDescent(batch_size=128, epochs=60)
    return post.deviations(4, method=options, rtol=0.1, generator=seeded(), checkpoint=folder).draws


def mode(folder: Path | None) -> Any:
    return record_of(posterior(hidden=(32, 16)).linear_mode(rtol=1e-8, checkpoint=folder))


def tuned(folder: Path | None) -> Any:
    post = posterior(hidden=(32, 16), prior=1.0)
    found = co.evidence.mackay(post, 4, 6, "layer", rtol=1e-5, generator=seeded(), checkpoint=folder)
    return [found.prior_precision, *map(record_of, found.tuning.steps)]


def factors(folder: Path | None) -> Any:
    return list(co.KFAC(posterior(4096, batches=32).lin, checkpoint=folder).representation())


def corrected(folder: Path | None) -> Any:
    lin = posterior(4096, batches=32).lin
    return list(co.EKFAC(lin, fisher="mc", generator=seeded(), checkpoint=folder).representation())


RUNS: dict[str, Callable[[Path | None], Any]] = {
    "deviations, cg": draws,
    "deviations, J Jᵀ formed": formed,
    "deviations, sgd": descent,
    "linear mode": mode,
    "mackay": tuned,
    "KFAC": factors,
    "EKFAC of draws": corrected,
}


def equal(one: Any, other: Any) -> bool:
    """Whether these have the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def timed(run: Callable[[Path | None], Any], folder: Path | None) -> tuple[Any, float]:
    begin = time.perf_counter()
    return run(folder), time.perf_counter() - begin


def killed(run: Callable[[Path | None], Any], folder: Path, kills: int, longest: float) -> int:
    """How many of the processes were killed before they came to an end, each after a random time."""
    count = 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            run(folder)
            os._exit(0)
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        count += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return count


def kills_of(name: str, kills: int, root: Path) -> int:
    """Kill one run so many times, print what became of it, and return how many processes were killed."""
    run = RUNS[name]
    timed(run, None)
    whole, seconds = timed(run, root / "whole")
    count = killed(run, root / "killed", kills, seconds / kills)
    found, left = timed(run, root / "killed")
    print(
        f"{name}: {seconds:.2f} s; {count} of {kills} processes killed; the last one takes {left:.2f} s and ends with "
        f"the same bits: {equal(found, whole)}",
        flush=True,
    )
    return count


def share_of_a_long_run(folder: Path) -> tuple[float, float]:
    """Seconds of draws with a checkpoint, and the share of them spent in its own calls: opening, saving, ending."""
    spent, inside = 0.0, False

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal spent, inside
            if inside:
                return function(*args, **options)
            inside, begin = True, time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                inside, spent = False, spent + time.perf_counter() - begin

        return call

    post = posterior(LONG)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("__init__", "also", "save", "finish", "forget"):
            patch.setattr(checkpoint.Checkpoint, name, watched(getattr(checkpoint.Checkpoint, name)))
        run = partial(post.deviations, 8, method="cg", rtol=1e-8, generator=seeded())
        _, seconds = timed(lambda place: run(checkpoint=place), folder)
    return seconds, spent / seconds


def main() -> None:
    random.seed(0)
    torch.set_num_threads(1)
    pause, share = checkpoint.PAUSE, checkpoint.SHARE
    checkpoint.PAUSE, checkpoint.SHARE = 0.1, 0.5
    count = 0
    for index, name in enumerate(RUNS):
        kills = KILLS // len(RUNS) + (index < KILLS % len(RUNS))
        with tempfile.TemporaryDirectory() as place:
            count += kills_of(name, kills, Path(place))
    print(f"{count} of {KILLS} processes killed")
    checkpoint.PAUSE, checkpoint.SHARE = pause, share
    with tempfile.TemporaryDirectory() as place:
        seconds, taken = share_of_a_long_run(Path(place) / "long")
    print(f"draws from {LONG:,} points: {seconds:.0f} s, of which the checkpoint's own calls take {taken:.2%}")


if __name__ == "__main__":
    main()
