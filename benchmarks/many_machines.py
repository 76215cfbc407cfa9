"""How GGN products with shared data scale with processes of one thread each, and where the rest of the time goes.

    .venv/bin/python -m benchmarks.many_machines            # CNN and ResNet-18; a quiet machine of two cores
    .venv/bin/python -m benchmarks.many_machines --report   # the page's tables, and the model for up to 64 GPUs

Two processes take turns at the following, so that all figures come from the same stretch of time; seconds are medians.

- alone: one process, all data, no group, while the other waits.
- half: one process, half the data, while the other waits. 2 · half / alone − 1 is work independent of the data.
- ceiling: both processes, half the data each, without a group: what two processes could gain at most on this machine.
- strong: the same with a group; alone / strong is the gain. weak: all data on each rank.
- message: the all-reduce of a product by itself. A product must send as many bytes as the formula says, which is
  checked; "bytes / formula" is the traffic of the loopback device meanwhile, with headers and all other users of it.
- a group of one over none: the same product in one process, with and without a group, in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import curvops as co
from benchmarks.networks import build
from benchmarks.study_page import Study
from benchmarks.tables import table
from tests.ranks.processes import run_on_ranks

CASES = (("cnn", 1, 1), ("resnet", 1, 1), ("cnn", 8, 1), ("cnn", 1, 4), ("resnet", 1, 4), ("cnn", 1, 16))
"""Networks, numbers of vectors, and how often the points of the other benchmarks are taken."""
WARM = 4
"""Rounds that are not counted, in which engines are built."""
RANKS = 1, 2, 8, 16, 64
TIMED = "alone", "half", "ceiling", "strong", "weak", "message"


class Link(NamedTuple):
    """A connection of GPUs: gigabytes a second that a GPU sends, microseconds of a step, and where these stand."""

    gigabytes: float
    microseconds: float
    source: str


LINKS = {
    "NVLink 4": Link(450, 5, "NVIDIA, H100 datasheet: 900 GB/s of both directions"),
    "InfiniBand NDR": Link(50, 10, "NVIDIA, ConnectX-7 datasheet: 400 Gb/s a port"),
    "10 Gb Ethernet": Link(1.25, 50, "IEEE 802.3ae: 10 Gb/s"),
}
"""Peaks as published; the microseconds are assumed."""
A_NODE = 8
"""GPUs that NVLink connects."""


def sent_by_a_rank(numbers: int, itemsize: int, ranks: int) -> float:
    """Bytes that each rank of a ring all-reduce sends, 2·b·(r − 1)/r."""
    return 2 * numbers * itemsize * (ranks - 1) / ranks


def modelled(seconds: float, fixed: float, numbers: int, itemsize: int, ranks: int, link: Link) -> float:
    """Seconds of a product over ranks: the work of its shard, the work of D, and a ring of 2·(r − 1) steps."""
    message = sent_by_a_rank(numbers, itemsize, ranks) / (link.gigabytes * 1e9)
    return (seconds - fixed) / ranks + fixed + message + 2 * (ranks - 1) * link.microseconds * 1e-6


def model() -> str:
    """A table of strong scaling by `modelled`, for a product that takes one GPU a second and has 1 % of fixed work."""
    rows = []
    for name, numbers in (("ResNet-18, 11 M", 11_200_000), ("transformer, 125 M", 125_000_000)):
        for through, link in LINKS.items():
            gains = [1.0 / modelled(1.0, 0.01, numbers, 4, r, link) for r in RANKS]
            shown = [f"{g:.1f}" if r <= A_NODE or through != "NVLink 4" else "" for g, r in zip(gains, RANKS)]
            rows.append([f"{name}, {through}", *shown])
    return table(["gain of r GPUs over one (a model)", *map(str, RANKS)], rows)


def seconds_of(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def in_turn(group: Any, name: str, count: int, columns: int, times: int) -> dict[str, float]:
    """Median seconds of what the module's docstring lists, on this rank; 0 for what it waits through."""
    warnings.simplefilter("ignore", co.errors.NoProcessGroupWarning)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    problem = build(name, 10)
    inputs = torch.cat([problem.inputs + 0.1 * i for i in range(times)])  # no two points are equal
    V, whole = problem.block(columns), (inputs, problem.targets.repeat(times))
    half = tuple(part.chunk(size)[rank] for part in whole)
    others = inputs + 0.01 * rank, whole[1]

    def of(data: Any, process_group: Any = None) -> co.GGN:
        return co.GGN(co.linearize(problem.model, data, "classification", process_group=process_group))

    ours, weak, large, small = of(half, group), of(others, group), of(whole), of(half)
    buffer = torch.zeros(V.numel())
    runs: dict[str, tuple[Callable[[], object], tuple[int, ...]]] = {
        "alone": (lambda: large @ V, (0,)),
        "half": (lambda: small @ V, (0,)),
        "ceiling": (lambda: small @ V, (0, 1)),
        "strong": (lambda: ours @ V, (0, 1)),
        "weak": (lambda: weak @ V, (0, 1)),
        "message": (lambda: dist.all_reduce(buffer, group=group), (0, 1)),
    }
    times: dict[str, list[float]] = {what: [] for what in runs}
    for i in range(count + WARM):
        for what, (run, who) in runs.items():
            dist.barrier(group)
            if rank in who:
                seconds = seconds_of(run)
                times[what] += [seconds] if i >= WARM else []
    found = {what: statistics.median(each) if each else 0.0 for what, each in times.items()}
    return found | {"bytes / formula": bytes_over_formula(ours, group, V)}


def bytes_over_formula(G: co.GGN, group: Any, V: torch.Tensor) -> float:
    """Check a product's messages and bytes; return what all ranks sent through the loopback device over the formula."""
    ranks = G.lin.passes.shard.ranks
    dist.barrier(group)
    before, loopback = (ranks.messages, ranks.bytes_sent), sent_through_loopback()
    _ = G @ V
    dist.barrier(group)
    expected = 1, V.nbytes
    assert (ranks.messages - before[0], ranks.bytes_sent - before[1]) == expected
    sent = sent_by_a_rank(V.numel(), V.element_size(), ranks.size)
    return (sent_through_loopback() - loopback) / (ranks.size * sent)


def sent_through_loopback() -> int:
    """Bytes that this machine sent to itself so far, by any process. Linux alone says it."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split()[9])


def of_one(group: Any, name: str, count: int, columns: int) -> float:
    """A product's time with a group of one over that without a group, the median of pairs."""
    problem = build(name, 10)
    data, V = (problem.inputs, problem.targets), problem.block(columns)
    with_group, without = (
        co.GGN(co.linearize(problem.model, data, "classification", process_group=g)) for g in (group, None)
    )
    pairs = [(seconds_of(lambda: with_group @ V), seconds_of(lambda: without @ V)) for _ in range(count + WARM)]
    return statistics.median(a / b for a, b in pairs[WARM:])


def row(name: str, count: int, columns: int, times: int) -> dict[str, Any]:
    """A network's figures with so many columns and so many times its points; each time is that of the slower rank."""
    answers, one = run_on_ranks(2, in_turn, name, count, columns, times), run_on_ranks(1, of_one, name, count, columns)
    for answer in (*answers.values(), *one.values()):
        if isinstance(answer, str):
            sys.exit(answer)
    t = {what: max(answer[what] for answer in answers.values()) for what in answers[0]}
    gains = {f"alone/{what}": t["alone"] / t[what] for what in ("half", "ceiling", "strong")}
    return {
        "network": name,
        "points": times * len(build(name, 10).inputs),
        "columns": columns,
        **{what: t[what] * 1e3 for what in TIMED},
        **gains,
        "weak gain": 2 * t["alone"] / t["weak"],
        "a group of one": one[0],
        "bytes / formula": t["bytes / formula"],
    }


def measure(count: int) -> list[dict[str, Any]]:
    """The rows of `CASES`."""
    torch.set_num_threads(1)
    return [row(name, max(5, count // times), columns, times) for name, columns, times in CASES]


def text(found: Any) -> str:
    """The times, and what they say."""
    heads = ["network, points, vectors", *TIMED, "half", "ceiling", "strong", "weak", "group of one", "bytes"]
    cells = []
    for r in found:
        name = f"{r['network']}, {r['points']:,}, {r['columns']}"
        gains = [f"{r[key]:.2f}" for key in ("alone/half", "alone/ceiling", "alone/strong", "weak gain")]
        cells.append([name, *(f"{r[what]:.1f}" for what in TIMED), *gains])
        cells[-1] += [f"{r['a group of one']:.3f}", f"{r['bytes / formula']:.2f}"]
    at = 1 + len(TIMED)
    times, ratios = [[each[0], *each[1:at]] for each in cells], [[each[0], *each[at:]] for each in cells]
    return (
        f"Milliseconds of a product, and of the message by itself:\n\n{table(heads[:at], times)}\n\n"
        "How many times as fast half of the data and the ceiling are, the two gains, the time of a group of one over "
        f"that without one, and the bytes over the formula:\n\n{table([heads[0], *heads[at:]], ratios)}"
    )


STUDY = Study(
    name="many_machines",
    description=__doc__,
    measure=measure,
    sections={"many machines": text},
    page="docs/many_machines.md",
    options={"count": (15, "rounds; fewer where there are more points")},
    elsewhere={"docs/many_machines.md": {"gains of a model": lambda found: model()}},
)


if __name__ == "__main__":
    STUDY.run()
