"""Peak memory of algorithms on two million weights, and of five thousand classes, in a process of their own."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import many_classes, working_memory
from benchmarks.machine import run_apart

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
ALGORITHMS = ["sample", "low_rank", "trace"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What this file prints as a program."""
    return run_apart("tests.test_working_memory", prompt=True)


def test_algorithms_stay_within_the_memory_budget(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if "algorithm" in row]
    assert [row["algorithm"] for row in found] == ALGORITHMS
    assert not [row for row in found if row["over"] > row["bound"]]


def test_five_thousand_classes_take_no_covariance_of_the_classes(rows: list[dict[str, Any]]) -> None:
    """512 features, 64 points: the covariances would take 6.4 GB."""
    (row,) = (row for row in rows if "classes" in row)
    assert row["over"] <= row["bound"] < 6.4e9


if __name__ == "__main__":
    working_memory.child("mlp", 128 * working_memory.MIB, ALGORITHMS, threads=1)
    many_classes.child(["draws, diagonal"], 5000, threads=1)
