"""The run that is prepared for a GPU, `python -m benchmarks.gpu`: one stage after the other, even if one fails."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import run_stages


def test_a_stage_that_fails_says_so_and_the_next_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        begun.append(command[command.index("--stage") + 1])
        return subprocess.CompletedProcess(command, int(begun[-1] == "right"))

    monkeypatch.setattr(subprocess, "run", run)
    (tmp_path / "tasks.json").write_text("not JSON")
    (tmp_path / "waits.json").write_text(json.dumps({"ended": True, "rows": []}))
    assert run_stages(tmp_path, ["right", "tasks", "waits"], "cpu", toy=True) == 1
    said = capsys.readouterr().out
    assert begun == ["right", "tasks"] and "right: FAILED" in said and "waits: done before" in said
