"""The run that is prepared for a GPU, `python -m benchmarks.gpu`: one stage after the other, even if one fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_stage_that_fails_says_so_and_the_next_begins(tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text("not JSON")
    (tmp_path / "waits.json").write_text(json.dumps({"ended": True, "rows": []}))
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--output", str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = [*command, "--stages", "tasks,waits"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1 and "tasks: FAILED" in done.stdout and "waits: done before" in done.stdout
