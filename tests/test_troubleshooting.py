"""The page on troubleshooting has each warning, error and reason of the library, and no others.

Tests `errors.py`.
"""

import re
from collections.abc import Iterator
from enum import Enum
from operator import attrgetter
from pathlib import Path

import pytest

import curvops as co
from curvops.checkpoint import UnidentifiedValueError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout: the documentation is not here")
CAUGHT_INSIDE = {UnidentifiedValueError}
ENDINGS = {
    "Reasons of linear algebra": co.linalg.Reason,
    "Endings of a tuning": co.evidence.Ending,
    "Endings of a variational fit": co.sampling.FitEnding,
}


def kinds(base: type) -> Iterator[type]:
    """The classes of the library below this one; those of the command line are printed, never raised to a user."""
    for kind in base.__subclasses__():
        if kind.__module__.startswith("curvops.") and not kind.__module__.startswith("curvops.cli"):
            yield kind
        yield from kinds(kind)


def section(title: str, level: str = "##") -> str:
    """The text of the page under a heading, to the next one of its level."""
    page = PAGE.read_text(encoding="utf-8") + f"\n{level} "
    found = re.search(rf"^{level} {title}\n(.*?)(?=^#{{2,{len(level)}}} )", page, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def entries(title: str) -> dict[str, tuple[str, str]]:
    """The entries of a section: from the name in its heading to the full name, and the text behind it."""
    found = re.findall(r"^### (\w+)\n\n`co\.([\w.]+)`\. (.*?)(?=^###|\Z)", section(title), re.MULTILINE | re.DOTALL)
    return {name: (path, text) for name, path, text in found}


@pytest.mark.parametrize(("title", "base"), [("Warnings", Warning), ("Errors", Exception)])
def test_each_class_has_its_entry_and_each_entry_its_class(title: str, base: type) -> None:
    classes = {kind for kind in kinds(base) if title == "Warnings" or not issubclass(kind, Warning)} - CAUGHT_INSIDE
    listed = entries(title)
    assert len(listed) == section(title).count("\n### ")
    assert {attrgetter(path)(co) for path, _ in listed.values()} == classes
    assert all(path.split(".")[-1] == name for name, (path, _) in listed.items())
    assert all(re.search(r"\*Cause:\*\s.*\*Cure:\*\s", text, re.DOTALL) for _, text in listed.values())


def test_each_reason_has_its_row_and_each_row_its_reason() -> None:
    with_text = {kind for kind in kinds(Enum) if all(isinstance(member.value, str) for member in kind)}
    assert set(ENDINGS.values()) == with_text
    for title, kind in ENDINGS.items():
        rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", section(title, "###"), re.MULTILINE)
        assert [name for name, _, _ in rows] == list(kind.__members__)
