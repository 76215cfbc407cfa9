"""The demo with a short training: what it prints, what it writes, how it ends.

Tests `demo.py`.
"""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from curvops.cli import app, demo
from curvops.cli.demo import Row, Size
from tests import shape_checks
from tests.threads import using_threads

ROOT = Path(__file__).resolve().parents[2]
SHORT = Size(steps=60, epochs=4)


def printed(output: str) -> tuple[bool, str]:
    """Whether the checks of a short demo passed, and what it prints."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(shape_checks, "CALLS", 0)  # as for a user
        passed = demo.run(Path(output), 0, said.append, SHORT)
    return passed, "\n".join(said)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of the short demo in this process, with one thread, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    with using_threads(1):
        passed, text = printed(str(folder))
    assert passed, text
    return folder, text


def test_stories_numbers_and_figures(alone):
    folder, text = alone
    for words in ("1. Error bars", "2. Digits with wrong labels", "3. Digits never seen", "PASS  variances against"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100
    numbers = json.loads((folder / "results.json").read_text())
    assert all(check["error"] <= check["most"] for check in numbers["checks"]) and len(numbers["checks"]) == 3
    for row in (*numbers["regression"], *numbers["digits"]):
        verdict = "better" if Row(**row).is_better else "not better"
        assert f"{row['score']:<32}{row['network']:>10.3f}{row['laplace']:>10.3f}   {verdict}\n" in text
    for figure in ("regression", "reliability", "unseen"):
        assert (folder / f"{figure}.png").stat().st_size > 5000


def test_a_check_that_fails_ends_the_demo_with_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "run", lambda *_: False)
    assert CliRunner().invoke(app, ["demo", "--output", str(tmp_path)]).exit_code == 1


def test_a_wrong_product_or_a_number_that_is_none_does_not_pass():
    check = demo.Check("product", 1e-9, 1e-6)
    assert check.passed
    for wrong in (1e-3, float("nan")):
        assert not replace(check, error=wrong).passed and str(replace(check, error=wrong)).startswith("FAIL")


def test_another_process_prints_the_same(alone, tmp_path):
    folder, text = alone
    program = f"""
import torch
from tests.cli.test_demo import printed
torch.set_num_threads(1)
print(printed({str(tmp_path)!r})[1])
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.replace(str(tmp_path), str(folder)) == text + "\n"
