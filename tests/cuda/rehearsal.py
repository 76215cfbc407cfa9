"""Stages of the run that is prepared for a GPU, at toy size: what `test_stand_in.py` asks of its process, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import run_stage

pytestmark = pytest.mark.gpu
STAGES = ("right", "profile")
"""Waits are counted in `test_waits.py`, tasks run in `test_rehearsal.py`; `make gpu-rehearsal` runs all stages."""


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_to_its_end(name: str, tmp_path: Path) -> None:
    code = run_stage(name, tmp_path, "stand-in", toy=True)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    failed = {row["name"]: row["error"] for row in found["rows"] if "error" in row}
    assert code == 0 and not failed and found["ended"] and found["rows"], failed
    of_tests = [row["passed"] for row in found["rows"] if "passed" in row]
    assert of_tests == ([1] if name == "right" else [])  # of a file with one test
