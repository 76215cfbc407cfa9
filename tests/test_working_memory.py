"""Peak memory of streams, of algorithms on two million weights, and of five thousand classes, in one process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import many_classes, streams, working_memory
from benchmarks.machine import run_apart
from benchmarks.tables import MIB

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
ALGORITHMS = ["sample", "low_rank", "trace"]
BATCH, POINTS, TIMES = 64, 256, 3
"""The smaller file has four batches of 2 MiB, more than are under way at once; the larger so many times as many."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What this file prints as a program, of two files."""
    files = [tmp_path_factory.mktemp("streams") / name for name in ("small", "large")]
    for times, path in zip((1, TIMES), files):
        with path.open("wb") as file:  # sparse: its points are zeros
            file.truncate(times * POINTS * streams.SHAPE[1] * 4)
    return run_apart("tests.test_working_memory", *files, prompt=True)


def test_the_peak_does_not_grow_with_the_number_of_points(rows: list[dict[str, Any]]) -> None:
    """Of a process that streams from a file, the smaller one first."""
    small, large = (row for row in rows if "points" in row)
    assert large["points"] == TIMES * small["points"] == TIMES * POINTS
    assert large["file"] - small["file"] >= 16 * MIB
    assert large["anonymous"] - small["anonymous"] < 4 * MIB
    assert large["peak"] - small["peak"] < 8 * MIB


def test_algorithms_stay_within_the_memory_budget(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if "algorithm" in row]
    assert [row["algorithm"] for row in found] == ALGORITHMS
    assert not [row for row in found if row["over"] > row["bound"]]


def test_five_thousand_classes_take_no_covariance_of_the_classes(rows: list[dict[str, Any]]) -> None:
    """64 points: the covariances would take 6.4 GB, whatever the number of features."""
    (row,) = (row for row in rows if "classes" in row)
    assert row["over"] <= row["bound"] < 6.4e9


if __name__ == "__main__":
    streams.BATCH, many_classes.FEATURES = BATCH, 128
    for given in sys.argv[1:]:
        print(json.dumps(streams.everything(Path(given), workers=1)))
    working_memory.child("mlp", 128 * working_memory.MIB, ALGORITHMS, threads=1)
    many_classes.child(["draws, diagonal"], 5000, threads=1)
