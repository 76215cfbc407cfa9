"""Draws of a posterior whose process is killed at random moments, again and again, and what checkpoints cost.

`python -m benchmarks.killed_runs` kills 20 processes of one run with SIGKILL, lets the last one end, and compares the
bits of its draws with those of a run that was not killed. Then it times the run with and without a checkpoint. Linux.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import curvops as co
from curvops import checkpoint
from curvops.posterior.deviations import Deviations

KILLS = 20


def draws(folder: Path | None) -> Deviations:
    """8 draws, 17,610 weights, as in a new process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10)).double()
    x, y = torch.randn(512, 64, dtype=torch.float64), torch.randint(10, (512,))
    lin = co.linearize(model, (x, y), "classification", memory_budget=2**30)
    post = co.laplace(lin, prior_precision=0.01, check_mode=False)
    generator = torch.Generator().manual_seed(1)
    return post.deviations(8, method="cg", rtol=1e-8, generator=generator, checkpoint=folder)


def timed(folder: Path | None) -> tuple[Deviations, float]:
    begin = time.perf_counter()
    return draws(folder), time.perf_counter() - begin


def killed(folder: Path, longest: float) -> int:
    """How many of the processes were killed before they came to an end, each after a random time."""
    count = 0
    for _ in range(KILLS):
        child = os.fork()
        if not child:
            draws(folder)
            os._exit(0)
        time.sleep(random.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        count += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return count


def main() -> None:
    random.seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        timed(None)
        whole, seconds = timed(root / "whole")
        plain = min(timed(None)[1] for _ in range(2))
        print(f"without a checkpoint {plain:.2f} s, with one {seconds:.2f} s ({whole.matvecs} products)")
        checkpoint.PAUSE, share, checkpoint.SHARE = 0.1, checkpoint.SHARE, 0.5
        count = killed(root / "killed", min(seconds, 1.5))
        found = draws(root / "killed")
        same = torch.equal(found.draws, whole.draws) and torch.equal(found.history, whole.history)
        print(f"{count} of {KILLS} processes killed; the last one ends with the same bits: {same}")
        checkpoint.PAUSE, checkpoint.SHARE = 0.0, share
        often = timed(root / "often")[1]
        print(f"saved as often as a share of {share:.0%} allows: {often:.2f} s, {often / plain - 1:+.1%}")


if __name__ == "__main__":
    main()
