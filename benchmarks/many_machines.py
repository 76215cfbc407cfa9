"""How GGN products of shared data scale with processes of one thread each, and what a group of one costs.

    .venv/bin/python -m benchmarks.many_machines            # CNN and ResNet-18, one and two processes

Strong scaling: the same data, split evenly. Seconds are medians; the ratio is that of one process to two. A product
sends 2·(D·K + 2)·(r − 1)/r numbers from each of r ranks, in one message, which is counted and checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import curvops as co
from benchmarks.networks import build
from tests.ranks.processes import run_on_ranks

NETWORKS = "cnn", "resnet"


def median_seconds(run: Callable[[], object], count: int) -> float:
    """The median of so many runs, after three that are not counted."""
    taken = []
    for _ in range(count + 3):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[3:])


def products(group: Any, name: str, count: int) -> dict[str, float]:
    """Seconds of a product on this rank's share of the data; of one rank also those without a group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    problem = build(name, 10)
    shard = problem.inputs.chunk(size)[rank], problem.targets.chunk(size)[rank]
    lin = co.linearize(problem.model, shard, "classification", process_group=group)
    G, V = co.GGN(lin), problem.block(1)
    ranks = lin.passes.shard.ranks
    found = {"seconds": median_seconds(lambda: G @ V, count)}
    messages, sent = ranks.messages, ranks.bytes_sent
    _ = G @ V
    expected = (1, (V.numel() + 2) * V.element_size()) if size > 1 else (0, 0)
    assert (ranks.messages - messages, ranks.bytes_sent - sent) == expected
    if size == 1:
        alone = co.GGN(co.linearize(problem.model, shard, "classification"))
        pairs = [(median_seconds(lambda: G @ V, 3), median_seconds(lambda: alone @ V, 3)) for _ in range(count)]
        found["with a group / without"] = statistics.median(a / b for a, b in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=NETWORKS)
    parser.add_argument("--count", type=int, default=15)
    given = parser.parse_args()
    for name in given.networks:
        one, two = (run_on_ranks(size, products, name, given.count) for size in (1, 2))
        errors = [answer for answer in (*one.values(), *two.values()) if isinstance(answer, str)]
        if errors:
            sys.exit(errors[0])
        seconds = max(answer["seconds"] for answer in two.values())
        print(
            f"{name}: one process {one[0]['seconds'] * 1e3:.1f} ms, two {seconds * 1e3:.1f} ms, "
            f"ratio {one[0]['seconds'] / seconds:.2f}; a group of one over none {one[0]['with a group / without']:.3f}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
