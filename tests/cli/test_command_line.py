"""The commands themselves: versions, what they say when interrupted, and where matplotlib is missing."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from curvops.cli import app, demo, sweep

WITHOUT_MATPLOTLIB = """
import sys
sys.modules["matplotlib"] = None
import curvops
from typer.testing import CliRunner
from curvops.cli import app
for command in (["demo"], ["bench", "--quick"]):
    result = CliRunner().invoke(app, command)
    print(result.exit_code, result.output.strip())
for name in ("plots", "plot"):
    try:
        getattr(curvops, name)
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"curvops {version('curvops')} (torch {version('torch')}, Python 3.")


def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(tmp_path: Path) -> None:
    run = [sys.executable, "-c", WITHOUT_MATPLOTLIB]
    lines = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    needs = "curvops.plots needs matplotlib: pip install 'curvops[demo]'"
    assert lines == [
        f"1 {needs}",
        f"1 {needs}",
        f"ModuleNotFoundError {needs}",
        "AttributeError module 'curvops' has no attribute 'plot'",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("command", "module"), [("demo", demo), ("bench", sweep)])
def test_interruption_is_one_line(command, module, monkeypatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run", interrupted)
    result = CliRunner().invoke(app, [command, "--output", str(tmp_path)])
    assert result.exit_code == 130
    assert len(result.output.strip().splitlines()) == 1
