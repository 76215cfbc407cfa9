"""The peak of a process that streams from a file does not grow with the file."""

from __future__ import annotations

from benchmarks.streams import LARGEST, memory
from benchmarks.tables import MIB

POINTS = 1664


def test_the_peak_does_not_grow_with_the_number_of_points() -> None:
    small, large = memory(POINTS, workers=1), memory(LARGEST * POINTS, workers=1)
    assert large["points"] == LARGEST * small["points"]
    assert large["file"] > small["peak"]  # more than all that the smaller run has in memory
    assert large["anonymous"] - small["anonymous"] < 8 * MIB
    assert large["peak"] - small["peak"] < 16 * MIB
