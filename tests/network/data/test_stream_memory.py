"""The peak of a process that streams from a file does not grow with the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import streams
from benchmarks.machine import run_apart
from benchmarks.tables import MIB

BATCH, POINTS, TIMES = 64, 256, 3
"""The smaller file has four batches of 2 MiB, more than are under way at once; the larger so many times as many."""


def test_the_peak_does_not_grow_with_the_number_of_points(tmp_path: Path) -> None:
    """One process streams both, the smaller first."""
    files = [tmp_path / name for name in ("small", "large")]
    for times, path in zip((1, TIMES), files):
        with path.open("wb") as file:  # sparse: its points are zeros
            file.truncate(times * POINTS * streams.SHAPE[1] * 4)
    small, large = run_apart("tests.network.data.test_stream_memory", *files, prompt=True)
    assert large["points"] == TIMES * small["points"] == TIMES * POINTS
    assert large["file"] - small["file"] >= 16 * MIB
    assert large["anonymous"] - small["anonymous"] < 4 * MIB
    assert large["peak"] - small["peak"] < 8 * MIB


if __name__ == "__main__":
    streams.BATCH = BATCH
    for given in sys.argv[1:]:
        print(json.dumps(streams.everything(Path(given), workers=1)))
