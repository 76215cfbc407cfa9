"""Data that do not fit into memory: throughput compared with training, and the peak.  python -m benchmarks.streams

The points are in a memory-mapped file; the worker of a DataLoader reads a batch while the previous one is computed.

Throughput: a training epoch (forward, backward, a step of SGD), a GGN product and KFAC's pass, each over the stream and
over the same batches held in memory, in turn, in one process. `kept` is time in memory / time over the stream, the
share of its speed that a computation keeps; a product should keep 0.9 of what training keeps. `overhead` is the
difference of the two times, in microseconds per point.

Memory: one process for N and one for 8 N points runs everything that streams (products, KFAC, diagonals, a low rank,
predictions, evidence), and prints its peak.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
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
from benchmarks.study_page import Study
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


def throughput(name: str, rounds: int, workers: int = 1) -> list[dict[str, Any]]:
    """A row for each computation: points a second over the stream and in memory, and the part of the speed kept."""
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
            {
                "what": f"{name}, {what}",
                "in memory": POINTS / in_memory,
                "streamed": POINTS / streamed,
                "overhead": (streamed - in_memory) / POINTS * 1e6,
                "kept": kept[what],
                "of training": kept[what] / kept["training"],
            }
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
        (found,) = run_apart("benchmarks.streams", "--file", path, workers, prompt=True)
    return found


def measure(rounds: int, points: int) -> dict[str, Any]:
    """The rows of both tables."""
    return {
        "throughput": [row for name in ("mlp", "cnn") for row in throughput(name, rounds)],
        "memory": [memory(count, 1) for count in (points, LARGEST * points)],
    }


SHOWN = {"in memory": ",.0f", "streamed": ",.0f", "overhead": ".1f", "kept": ".2f", "of training": ".2f"}
"""What a page shows of a row, and how."""


def throughput_text(found: Any) -> str:
    heads = ["", "points/s in memory", "over the stream", "overhead, µs a point", "kept", "of training's"]
    rows = [[r["what"], *(format(r[key], form) for key, form in SHOWN.items())] for r in found["throughput"]]
    return table(heads, rows)


def memory_text(found: Any) -> str:
    sizes = ("file", "anonymous", "peak")
    rows = [[f"{r['points']:,}", *(f"{r[name] / MIB:,.0f} MiB" for name in sizes)] for r in found["memory"]]
    return table(["points", "file", "anonymous memory, at most", "resident, at most"], rows)


STUDY = Study(
    name="streams",
    description=__doc__,
    measure=measure,
    sections={"streams: memory": memory_text, "streams: throughput": throughput_text},
    page="docs/scale.md",
    options={"rounds": (9, "times that each computation is run"), "points": (8192, "points of the smaller process")},
)


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--file"]:  # one process of the memory's measurement
        print(json.dumps(everything(Path(sys.argv[2]), int(sys.argv[3]))))
        return
    STUDY.run()


if __name__ == "__main__":
    main()
