"""Stages of the run that is prepared for a GPU, at toy size: what `test_stand_in.py` asks of its process, too.

The stage of the tests runs them by the command that has begun this process.
"""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import right
from benchmarks.gpu.__main__ import run_stage

pytestmark = pytest.mark.gpu
STAGES = ("right", "profile")
"""Waits are counted in `test_waits.py`; `make gpu-rehearsal` runs all stages."""


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_runs_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right, "tests", lambda stage: {})
    code = run_stage(name, tmp_path, "stand-in", toy=True)
    found = json.loads((tmp_path / f"{name}.json").read_text())
    failed = {row["name"]: row["error"] for row in found["rows"] if "error" in row}
    assert code == 0 and not failed and found["ended"] and found["rows"], failed
