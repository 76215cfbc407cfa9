"""What is marked `gpu` runs on any machine with a compiler: in a process of its own, on tensors that say `cuda:0`.

So do the stages of the run that is prepared for a GPU (`rehearsal.py`): one start serves them all.
"""

import subprocess
import sys
from pathlib import Path
from shutil import which

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(which("g++") is None, reason="no g++, which compiles the stand-in for CUDA")
def test_tests_marked_gpu_pass_on_the_stand_in() -> None:
    marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in path.read_text("utf-8")]
    marked.append(Path(__file__).with_name("rehearsal.py"))
    options = [
        "-o",
        "addopts=--import-mode=importlib --strict-markers",
        "-q",
        "-p",
        "tests.cuda.stand_in",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
    ]
    command = [sys.executable, "-m", "pytest", *options, *map(str, marked)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and "skipped" not in found.stdout, found.stdout + found.stderr
