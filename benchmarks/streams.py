"""Data that do not fit into memory: throughput beside training, and the peak.   python -m benchmarks.streams

Points lie in a memory-mapped file, of which the worker of a DataLoader reads a batch while the one before is computed.

Throughput: a training epoch (forward, backward, a step of SGD), a GGN product and KFAC's pass, each over the stream and
over the same batches held in memory, in turn, in one process. `kept` is time in memory / time over the stream, the part
of its speed that a computation keeps; a product should keep 0.9 of what training keeps. `overhead` is the difference of
the two times, microseconds a point.

Memory: a process for N and one for 8 N points does all that streams (products, KFAC, diagonals, a low rank,
predictions, evidence), and says its peak.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import curvops as co
from benchmarks.machine import resident, run_apart
from benchmarks.networks import NETWORKS
from benchmarks.tables import MIB, table

BATCH = 256
POINTS, LARGEST = 4096, 8
"""Points of the throughput's streams; how many times as many points the larger of two processes has."""
SHAPE, CLASSES = (1, 8192), 4
"""What points of the memory's streams are: 32 kB each, so that the file is large and the computation short."""


class Mapped(Dataset[tuple[Tensor, Tensor]]):
    """Points of a file of float32 numbers, mapped into memory where they are read; labels are counted through."""

    def __init__(self, path: Path, shape: tuple[int, ...], classes: int) -> None:
        self.path, self.shape, self.classes = path, shape, classes
        self.points: Any = None

    def __len__(self) -> int:
        return self.path.stat().st_size // (4 * int(np.prod(self.shape)))

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.points is None:
            self.points = np.memmap(self.path, np.float32, "r", shape=(len(self), *self.shape))
        return torch.from_numpy(np.array(self.points[i])), torch.tensor(i % self.classes)


def stream(path: Path, shape: tuple[int, ...], classes: int, workers: int) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Mapped(path, shape, classes), BATCH, num_workers=workers, persistent_workers=workers > 0)


def computations(data: Iterable[Any], model: nn.Module) -> dict[str, Callable[[], object]]:
    """What is done once with all data: a training epoch, and what it is compared with."""
    loss, trained = nn.CrossEntropyLoss(), copy.deepcopy(model)
    optimiser = torch.optim.SGD(trained.parameters(), lr=1e-3)

    def epoch() -> None:
        for x, y in data:
            optimiser.zero_grad()
            loss(trained(x), y).backward()
            optimiser.step()

    lin = co.linearize(model, data, "classification", engine="streamed")
    G, v = co.GGN(lin), torch.randn(lin.num_parameters, 1, generator=torch.Generator().manual_seed(0))
    return {"training": epoch, "product": lambda: G @ v, "KFAC": lambda: co.KFAC(lin)}


def throughput(name: str, workers: int, rounds: int) -> list[list[str]]:
    """Rows of a table: each computation's time over the stream and in memory, and what it keeps of its speed."""
    build, (_, *shape) = NETWORKS[name]
    torch.manual_seed(0)
    model = build(10).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points"
        torch.randn(POINTS, *shape).numpy().tofile(path)
        loader = stream(path, tuple(shape), 10, workers)
        runs = {"stream": computations(loader, model), "memory": computations(list(loader), model)}
        times: dict[tuple[str, str], list[float]] = {}
        for i in range(rounds + 1):
            for what in runs["stream"]:
                for where in runs:
                    begin = time.perf_counter()
                    runs[where][what]()
                    if i > 0:
                        times.setdefault((what, where), []).append(time.perf_counter() - begin)
    kept = {
        what: statistics.median(m / s for m, s in zip(times[what, "memory"], times[what, "stream"]))
        for what in runs["stream"]
    }
    rows = []
    for what in kept:
        in_memory, streamed = (statistics.median(times[what, where]) for where in ("memory", "stream"))
        rows.append(
            [
                f"{name}, {what}",
                f"{POINTS / in_memory:,.0f}",
                f"{POINTS / streamed:,.0f}",
                f"{(streamed - in_memory) / POINTS * 1e6:.1f}",
                f"{kept[what]:.3f}",
                f"{kept[what] / kept['training']:.3f}",
            ]
        )
    return rows


class Peak(threading.Thread):
    """The greatest anonymous memory of this process, looked at every few milliseconds.

    Pages of a mapped file count as resident, too, but the system takes them back when it needs them.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            self.most = max(self.most, resident("RssAnon"))
            time.sleep(0.002)


def everything(path: Path, workers: int) -> dict[str, int]:
    """The peak of a process that does with a file of points all that streams."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.AvgPool1d(128), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    loader = stream(path, SHAPE, CLASSES, workers)
    peak = Peak()
    peak.start()
    lin = co.linearize(model, loader, "classification", engine="streamed", memory_budget=64 * MIB, progress=False)
    G, v = co.GGN(lin), torch.randn(lin.num_parameters, 1)
    for _ in range(2):
        _ = G @ v
    _ = co.DiagonalGGN(lin), co.low_rank(G, 2, generator=torch.Generator().manual_seed(0))
    _ = co.GGN(lin, mc_samples=1) @ v, lin.gradient()
    post = co.laplace(lin, co.KFAC(lin), prior_precision=1.0, check_mode=False)
    _ = post.predict(torch.zeros(4, *SHAPE)), post.log_evidence()
    return {"points": lin.num_data, "file": path.stat().st_size, "anonymous": peak.most, "peak": resident("VmHWM")}


def memory(points: int, workers: int) -> dict[str, int]:
    """What a process of its own says of so many points. The file is sparse: its points are zeros."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "points"
        with path.open("wb") as file:
            file.truncate(points * SHAPE[1] * 4)
        (found,) = run_apart("benchmarks.streams", "--file", path, "--workers", workers, prompt=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=("mlp", "cnn"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--points", type=int, default=8192, help="of the smaller process; the other has 8 times as many"
    )
    parser.add_argument("--file", type=Path, default=None, help="one process of the memory's measurement")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.file is not None:
        print(json.dumps(everything(given.file, given.workers)))
        return
    rows = [row for name in given.networks for row in throughput(name, given.workers, given.rounds)]
    heads = ["", "points/s in memory", "over the stream", "overhead, µs a point", "kept", "of training's"]
    print(table(heads, rows), end="\n\n")
    found = [memory(points, given.workers) for points in (given.points, LARGEST * given.points)]
    cells = [
        [f"{r['points']:,}", *(f"{r[name] / MIB:,.0f} MiB" for name in ("file", "anonymous", "peak"))] for r in found
    ]
    print(table(["points", "file", "anonymous memory, at most", "resident, at most"], cells))


if __name__ == "__main__":
    main()
