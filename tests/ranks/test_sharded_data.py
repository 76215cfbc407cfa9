"""Data shared among processes: every answer is that of one process.

Tests `process_group.py`, `shard.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.ranks.processes import run_on_ranks
from tests.ranks.questions import WIDTHS, answers, answers_of_rank, linearise


@pytest.fixture(scope="module")
def expected():
    return {problem: answers(linearise(problem), linearise(problem, seed=2)) for problem in WIDTHS}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_those_of_one_process(expected, size) -> None:
    found = run_on_ranks(size, answers_of_rank, size)
    wrong = []
    for rank, by_case in found.items():
        assert not isinstance(by_case, str), f"rank {rank}: {by_case}"
        for problem, own in by_case.items():
            assert own.keys() == expected[problem].keys()
            for name, value in own.items():
                truth = expected[problem][name]
                error = np.abs(value - truth).max() / max(1e-300, np.abs(truth).max())
                if not error < 1e-10:
                    wrong.append(f"rank {rank} of {size}, {problem}: {name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)
    first = found[0]
    for rank, by_case in found.items():
        for case, own in by_case.items():
            assert all(np.array_equal(value, first[case][name]) for name, value in own.items()), (rank, case)


def test_the_program_of_the_page_gives_the_same_numbers_for_any_number_of_ranks() -> None:
    def printed(size: int) -> list[str]:
        program = Path(__file__).resolve().parents[2] / "docs" / "many_machines.py"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        return subprocess.run([*torchrun, program], capture_output=True, text=True, check=True).stdout.splitlines()

    one, two = printed(1), printed(2)
    assert one[0] == "1 processes, 301 points, this one has 301"
    assert two[0] == "2 processes, 301 points, this one has 151"
    assert one[1:] == two[1:] and len(two) == 3
