"""Data shared among processes: every answer is that of one process.

Tests `process_group.py`, `shard.py`.
"""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.processes import alone, assert_those_of_one_process, by_problem, run_on_ranks, run_programs
from tests.ranks.questions import WIDTHS, answers, answers_of_rank, linearise


def whole() -> dict[str, Any]:
    """The answers of one process."""
    return {problem: answers(linearise(problem), linearise(problem, seed=2)) for problem in WIDTHS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return alone(whole)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_answers_are_those_of_one_process(expected, size) -> None:
    for problem, found in by_problem(run_on_ranks(size, answers_of_rank, size)).items():
        assert_those_of_one_process(found, expected[problem])


PROGRAM = Path(__file__).resolve().parents[2] / "docs" / "many_machines.py"


def printed() -> str:
    """What the program of the page prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return text.getvalue()


def test_the_program_of_the_page_gives_the_same_numbers_for_any_number_of_ranks() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
    two = subprocess.run(torchrun, capture_output=True, text=True, check=True).stdout.splitlines()
    one, (three, *others) = run_programs(1, printed)[0].splitlines(), run_programs(3, printed)
    assert one[0] == "1 processes, 301 points, this one has 301"
    assert two[0] == "2 processes, 301 points, this one has 151"
    assert one[1:] == two[1:] == three.splitlines()[1:] and len(two) == 3
    assert others == ["", ""]
