"""Peak memory of algorithms on two million weights, measured in a process of their own."""

import sys

import pytest

from benchmarks import many_classes, working_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_algorithms_stay_within_the_memory_budget():
    names = ["sample", "low_rank", "trace"]
    for row in working_memory.rows(128 * working_memory.MIB, names):
        assert row["over"] <= row["bound"], row


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_five_thousand_classes_take_no_covariance_of_the_classes():
    """512 features, 64 points: the covariances would take 6.4 GB."""
    for row in many_classes.rows(["draws, diagonal"]):
        assert row["over"] <= row["bound"], row
