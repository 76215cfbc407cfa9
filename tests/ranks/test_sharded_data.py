"""Data shared among processes: every answer is that of one process.

Tests `process_group.py`, `shard.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.processes import assert_those_of_one_process, by_problem, run_on_ranks
from tests.ranks.questions import WIDTHS, answers, answers_of_rank, linearise


@pytest.fixture(scope="module")
def expected():
    return {problem: answers(linearise(problem), linearise(problem, seed=2)) for problem in WIDTHS}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_those_of_one_process(expected, size) -> None:
    for problem, found in by_problem(run_on_ranks(size, answers_of_rank, size)).items():
        assert_those_of_one_process(found, expected[problem])


def test_the_program_of_the_page_gives_the_same_numbers_for_any_number_of_ranks() -> None:
    def printed(size: int) -> list[str]:
        program = Path(__file__).resolve().parents[2] / "docs" / "many_machines.py"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        return subprocess.run([*torchrun, program], capture_output=True, text=True, check=True).stdout.splitlines()

    one, two = printed(1), printed(2)
    assert one[0] == "1 processes, 301 points, this one has 301"
    assert two[0] == "2 processes, 301 points, this one has 151"
    assert one[1:] == two[1:] and len(two) == 3
