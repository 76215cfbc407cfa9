"""The peak of a process that streams from a file does not grow with the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.machine import run_apart
from benchmarks.streams import SHAPE, everything
from benchmarks.tables import MIB

POINTS = 1024
"""Points of the smaller file: four batches, more than are under way at once. The larger has twice as many."""


def test_the_peak_does_not_grow_with_the_number_of_points(tmp_path: Path) -> None:
    """One process streams both, the smaller first."""
    files = [tmp_path / name for name in ("small", "large")]
    for times, path in enumerate(files, 1):
        with path.open("wb") as file:  # sparse: its points are zeros
            file.truncate(times * POINTS * SHAPE[1] * 4)
    small, large = run_apart("tests.network.data.test_stream_memory", *files, prompt=True)
    assert large["points"] == 2 * small["points"] == 2 * POINTS
    assert large["file"] - small["file"] >= 32 * MIB
    assert large["anonymous"] - small["anonymous"] < 8 * MIB
    assert large["peak"] - small["peak"] < 16 * MIB


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(json.dumps(everything(Path(given), workers=1)))
