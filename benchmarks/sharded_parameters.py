"""Peak memory and messages of products with parameters and vectors sharded over ranks, compared with one process.

Run `python -m benchmarks.sharded_parameters`. Each row is a separate process: its peak resident memory minus the
resident memory after the imports. The transformer has four blocks; one process holds all its parameters and vectors,
whereas a rank holds its part of them and one layer at a time.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import curvops as co
from benchmarks.study_page import Study
from benchmarks.tables import MIB, table
from tests.ranks.processes import run_on_ranks
from tests.ranks.sharded_models import POSITIONS, Transformer, sharded

TOKENS, DEPTH, POINTS = 1000, 4, 8


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return Transformer(width, 4 * width, DEPTH, TOKENS).eval()


def points(rank: int, size: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randint(TOKENS, (POINTS, POSITIONS), generator=generator), torch.arange(POINTS) % 3
    return x[rank::size].contiguous(), y[rank::size].contiguous()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(group: Any, width: int, columns: int, shards: bool) -> dict[str, Any]:
    """Make a product, and return what it took."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    before = peak()
    model = network(width)
    if shards:
        mesh = init_device_mesh("cpu", (size,))
        sharded(model, mesh)
    lin: Any = co.linearize(model, points(rank, size), "classification", process_group=group, memory_budget=2**26)
    D = lin.num_parameters
    if shards:
        local = torch.ones(columns, -(-D // size) if rank < size - 1 else D - (size - 1) * -(-D // size)).mT
        V: Any = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(D, columns), stride=(1, D))
    else:
        V = torch.ones(columns, D).mT
    G, ranks = co.GGN(lin), (lin.model.ranks if shards else lin.passes.shard.ranks)
    messages, sent, start = ranks.messages, ranks.bytes_sent, time.process_time()
    found = G @ V
    seconds = time.process_time() - start
    norm = float(found.full_tensor().norm() if shards else found.norm()) if D < 2**20 else None
    return {
        "D": D,
        "vector": 4 * D,
        "peak": peak() - before,
        "messages": ranks.messages - messages,
        "sent": ranks.bytes_sent - sent,
        "cpu seconds": seconds,
        "norm": norm,
    }


CASES = ((256, 32), (384, 8))
"""Widths of the transformer, each with its number of vectors."""


def measure() -> list[dict[str, Any]]:
    """A row for each rank of each case."""
    rows = []
    for width, columns in CASES:
        for size, shards in ((1, False), (2, False), (2, True), (3, True)):
            for rank, own in sorted(run_on_ranks(size, measured, width, columns, shards).items()):
                if isinstance(own, str):
                    raise RuntimeError(own)
                rows.append({"width": width, "columns": columns, "ranks": size, "sharded": shards, "rank": rank, **own})
    return rows


def text(found: Any) -> str:
    """A row for each case and number of ranks, of the rank that takes most."""
    heads = ["weights", "vectors", "ranks", "peak of a rank", "bytes sent", "peak in vectors", "messages", "CPU time"]
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for row in found:
        groups.setdefault((row["D"], row["columns"], row["ranks"], row["sharded"]), []).append(row)
    rows = []
    for (D, columns, ranks, shards), of_ranks in groups.items():
        peak, messages, sent, cpu = (
            max(r[key] for r in of_ranks) for key in ("peak", "messages", "sent", "cpu seconds")
        )
        cells = [
            f"{peak / MIB:,.0f} MiB",
            f"{sent / MIB:,.0f} MiB",
            f"{peak / (4 * D):.0f}",
            f"{messages}",
            f"{cpu:.1f} s",
        ]
        rows.append([f"{D:,}", str(columns), f"{ranks}, {'sharded' if shards else 'whole'}", *cells])
    return table(heads, rows)


STUDY = Study(
    name="sharded_parameters",
    description=__doc__,
    measure=measure,
    sections={"sharded parameters": text},
    page="docs/many_machines.md",
)


if __name__ == "__main__":
    STUDY.run()
