"""Pages run as for a reader: without the shape checks of the test run, which take longer than the pages themselves.

They draw their figures into the folder where they run: in tests a temporary one, so that no file here changes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import annotations_unchecked  # noqa: F401 - a fixture, known here by its name

collect_ignore = ["many_machines.py"]  # a program for torchrun, which tests/ranks runs


@pytest.fixture(autouse=True)
def _as_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotations_unchecked: None) -> None:  # noqa: F811
    monkeypatch.chdir(tmp_path)
