"""The peak of a process that streams from a file does not grow with the file."""

from __future__ import annotations

from benchmarks.streams import memory
from benchmarks.tables import MIB

POINTS, TIMES = 1024, 3
"""Points of the smaller file, four batches, more than are under way at once; how many times as many the larger has."""


def test_the_peak_does_not_grow_with_the_number_of_points() -> None:
    small, large = memory(POINTS, workers=1), memory(TIMES * POINTS, workers=1)
    assert large["points"] == TIMES * small["points"]
    assert large["file"] - small["file"] > 60 * MIB
    assert large["anonymous"] - small["anonymous"] < 8 * MIB
    assert large["peak"] - small["peak"] < 16 * MIB
