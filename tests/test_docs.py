"""README and documentation: every example runs, and every public name has its place in the reference."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import curvops as co
from curvops import metrics, plots
from curvops.network import likelihoods

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^ *```(.*?)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.skipif(len(PAGES) == 1, reason="not a checkout: the documentation is not here")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a page."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_python_that_runs_or_say_that_they_are_text(page: Path) -> None:
    """Python is a session (`>>>`), which doctest runs; nothing else is shown as Python."""
    for language, text in blocks(page):
        assert language in ("pycon", "text"), language
        assert text.startswith(">>> ") == (language == "pycon"), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_there_and_those_that_a_page_draws_are_shown_on_it(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = {(page.parent / path).resolve() for path in re.findall(r"!\[[^]]+\]\((.+?)\)", text)}
    drawn = {ROOT / "docs" / "figures" / name for name in re.findall(r"plots\.save\(.*?\"(\S+)\"\)", text)}
    assert drawn <= shown
    assert all(path.is_file() for path in shown)


def statements(text: str) -> int:
    """Count the statements of a session, without lines of comments."""
    return sum(line.startswith(">>> ") and not line.startswith(">>> #") for line in text.splitlines())


def test_the_readme_is_short_and_shows_six_lines_with_their_output() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").split()) <= 900
    training, shown = [text for language, text in blocks(readme) if language == "pycon"]
    assert training and statements(shown) <= 6
    assert len(shown.strip().splitlines()) > statements(shown)


def test_the_recipes_are_six_of_at_most_eight_lines() -> None:
    first, *recipes = [text for language, text in blocks(ROOT / "docs" / "recipes.md") if language == "pycon"]
    assert first and max(map(statements, recipes)) <= 8
    assert len(re.findall(r"^## ", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"), re.MULTILINE)) == 6


def test_every_public_name_stands_once_in_the_reference() -> None:
    listed: Counter[str] = Counter()
    for page in (ROOT / "docs" / "reference").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for path, heading in re.findall(r"^::: (\S+)(?:\n +options: \{heading: ([\w.]+))?", text, re.MULTILINE):
            listed[heading or path] += 1
    public = {f"curvops.linalg.{name}" for name in co.linalg.__all__}
    public |= {f"curvops.likelihoods.{name}" for name in likelihoods.__all__}
    public |= {f"curvops.evidence.{name}" for name in co.evidence.__all__}
    public |= {f"curvops.plots.{name}" for name in plots.__all__}
    public |= {f"curvops.sampling.{name}" for name in co.sampling.__all__}
    public |= {f"curvops.gp.{name}" for name in co.gp.__all__}
    public |= {f"curvops.metrics.{name}" for name in metrics.__all__}
    public = {name for name in public if name.rsplit(".", 1)[1] not in co.errors.__all__}
    public |= {f"curvops.errors.{name}" for name in co.errors.__all__}
    for shelf in (co.operators, co.posterior):
        kept = set(shelf.__all__) - set(co.__all__) - set(co.errors.__all__)
        public |= {f"{shelf.__name__}.{name}" for name in kept}
    modules = {name for name in co.__all__ if inspect.ismodule(getattr(co, name))}
    public |= {f"curvops.{name}" for name in set(co.__all__) - modules - {"low_rank"}}  # that of curvops.linalg
    methods = {name for name in listed if name.startswith(("Laplace.", "linalg.Operator."))}
    assert listed - Counter(public | methods) == Counter()
    assert set(listed) >= public
