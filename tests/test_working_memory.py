"""Peak memory of algorithms on two million weights, measured in a process of their own."""

import sys

import pytest

from benchmarks import working_memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_algorithms_stay_within_the_memory_budget():
    names = ["sample", "low_rank", "trace"]
    for row in working_memory.rows(128 * working_memory.MIB, names):
        assert row["over"] <= row["bound"], row
