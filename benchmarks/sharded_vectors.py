"""How sharded vectors reduce the memory of a rank: a Nyström sketch and a low-rank solve.

    .venv/bin/python -m benchmarks.sharded_vectors          # 1 million weights, one to three processes

For each number of processes, it measures the largest resident set of a rank minus that before the sketch, in units of
D·K numbers, and the bytes that a rank sends. The matrix multiplies whole vectors, and takes little memory. Processes
give large freed blocks back to the system at once (glibc), so that the resident set is what they hold.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import curvops as co
from benchmarks.machine import PROMPT, reset_peak, resident
from benchmarks.study_page import Study
from benchmarks.tables import table
from curvops.ranks.sharded_vectors import RowLayout
from tests.ranks.processes import run_on_ranks


class Decaying(co.linalg.Operator):
    """A diagonal matrix that takes whole vectors, as a network does."""

    @property
    def psd(self) -> bool:
        return True

    def _size(self) -> torch.Size:
        return torch.Size((len(self._args[0]),) * 2)

    def _product(self, block: torch.Tensor) -> torch.Tensor:
        return self._args[0].unsqueeze(1) * block


def sketch(group: Any, rows: int, columns: int) -> tuple[int, int]:
    """The peak of a sketch with a solve, and the bytes that this rank sent."""
    mesh = init_device_mesh("cpu", (group.size(),))
    ranks = RowLayout.on(mesh, rows).ranks
    A = Decaying(torch.linspace(1, 0, rows).square()).sharded(mesh)
    sent = ranks.bytes_sent
    before = reset_peak()
    low = co.low_rank(A, columns, generator=torch.Generator().manual_seed(0))
    low.add_diagonal(0.1).logdet()
    return resident("VmHWM") - before, ranks.bytes_sent - sent


def measure(rows: int) -> list[dict[str, float]]:
    """For each number of columns and of processes, the largest peak and the most bytes sent, in blocks of D·K."""
    os.environ |= PROMPT  # read by the processes that are started from here
    found = []
    for columns in (50, 100):
        block = 4 * rows * columns
        for size in (1, 2, 3):
            answers = run_on_ranks(size, sketch, rows, columns)
            errors = [answer for answer in answers.values() if isinstance(answer, str)]
            if errors:
                sys.exit(errors[0])
            peak, sent = (max(answer[i] for answer in answers.values()) / block for i in (0, 1))
            found.append({"rows": rows, "columns": columns, "processes": size, "peak": peak, "sent": sent})
    return found


def text(found: Any) -> str:
    heads = ["weights", "columns", "processes", "peak of a rank", "sent by a rank"]
    rows = [
        [f"{r['rows']:,}", str(r["columns"]), str(r["processes"]), f"{r['peak']:.1f}", f"{r['sent']:.1f}"]
        for r in found
    ]
    return table(heads, rows)


STUDY = Study(
    name="sharded_vectors",
    description=__doc__,
    measure=measure,
    sections={"sharded vectors": text},
    page="docs/many_machines.md",
    options={"rows": (1_000_000, "weights")},
)


if __name__ == "__main__":
    STUDY.run()
