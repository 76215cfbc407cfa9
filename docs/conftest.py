"""Pages run as for a reader: without the shape checks of the test run, which take longer than the pages themselves.

They draw their figures into the folder where they run: in tests a temporary one, so that no file here changes.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import annotations_unchecked  # noqa: F401 - a fixture, known here by its name

JOBS = {"crystal_potential.md": "chgnet", "pronunciation.md": "g2p_en"}
"""Pages that need a package with a pretrained model, which the test environment has not."""

collect_ignore = ["many_machines.py"]  # a program for torchrun, which tests/ranks runs
collect_ignore += [page for page, package in JOBS.items() if find_spec(package) is None]


@pytest.fixture(autouse=True)
def _as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotations_unchecked: None) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
