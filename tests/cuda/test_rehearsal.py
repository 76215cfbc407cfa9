"""The run that is prepared for a GPU, `python -m benchmarks.gpu`, at toy size on the stand-in for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("right", "profile")
"""Waits are counted in `test_waits.py`, tasks run below; `make gpu-rehearsal` runs all stages, in some minutes."""


def rehearse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu", "--rehearse", "--output", str(folder), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(which("g++") is None, reason="no g++, which compiles the stand-in for CUDA")
def test_stages_run_on_the_stand_in(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--device", "stand-in", "--stages", ",".join(STAGES))
    found = {stage: json.loads((tmp_path / f"{stage}.json").read_text()) for stage in STAGES}
    failed = {row["name"]: row["error"] for stage in found.values() for row in stage["rows"] if "error" in row}
    assert done.returncode == 0 and not failed, (done.stdout[-3000:], done.stderr[-3000:], failed)
    assert all(stage["ended"] and stage["rows"] for stage in found.values())


def test_a_stage_that_fails_says_so_and_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text("not JSON")
    (tmp_path / "waits.json").write_text(json.dumps({"ended": True, "rows": []}))
    done = rehearse(tmp_path, "--stages", "tasks,waits")
    assert done.returncode == 1 and "tasks: FAILED" in done.stdout and "waits: done before" in done.stdout
