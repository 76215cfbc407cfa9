"""The built site: no formula loses its signs, and docstrings are shown as they are meant."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 84


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, str]:
    """The HTML of each page. A dead link to a page or to a heading is an error of the build."""
    folder = tmp_path_factory.mktemp("built")
    site, config = folder / "site", folder / "mkdocs.yml"
    shorter = (ROOT / "mkdocs.yml").read_text().replace("  - search\n", "")  # its index takes a fifth of the time
    # Each page with all others would take a second, a process that breaks the lines of each signature three.
    shorter = shorter.replace("  features:\n", "  features:\n    - navigation.prune\n")
    shorter = shorter.replace("options:\n", "options:\n            line_length: 10000\n")
    config.write_text(f"docs_dir: {ROOT / 'docs'}\n{shorter}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(config), "-d", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return {path: path.read_text() for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def emphasised(page: str) -> list[tuple[str, str]]:
    """The character before each emphasised text, and the text."""
    plain = re.sub(r"<(?!/?(?:em|strong)\b)[^>]*>", "", page)
    return re.findall(r"(.)<(?:em|strong)>(.*?)</(?:em|strong)>", plain, re.DOTALL)


def letters(page: str) -> int:
    """How many characters the article of a page has."""
    article = re.split("</?article[^>]*>", page)[1]
    return sum(len(" ".join(unescape(text).split())) for text in re.split(r"<[^>]*>", article))


def swallowed_signs(before: str, text: str) -> bool:
    """Say whether a text is emphasised by accident: within a word or a formula, or with half of a pair of brackets."""
    pairs = ("()", "[]", "{}")
    return before.isalnum() or before in "*_)." or any(text.count(a) != text.count(b) for a, b in pairs)


def test_no_formula_became_emphasis(pages) -> None:
    for before, text in (("θ", ") + J(θ − θ"), (" ", "(m − θ"), (".", '"], ["2.'), (".", '": 1.0, "2.')):
        assert swallowed_signs(before, text)
    assert not swallowed_signs(" ", "Ax = b.")
    swallowed = [
        f"{path.parent.name}: {before}[{text}]"
        for path, page in pages.items()
        for before, text in emphasised(page)
        if swallowed_signs(before, text)
    ]
    assert not swallowed, "\n".join(swallowed)


def test_a_page_of_the_reference_is_read_in_five_screens(pages) -> None:
    """Of 1,280 by 900 pixels: lists of parameters have at least 1,600 characters on each."""
    long = {path.parent.name: letters(page) for path, page in pages.items() if "reference" in path.parts}
    assert len(long) > 60
    assert {name: size for name, size in long.items() if size > 8000} == {}


def test_each_figure_is_shown_in_the_gallery() -> None:
    """Of the four figures of scaling one stands for all."""
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    shown = {*re.findall(r"figures/(?:thumbs/)?([\w-]+\.png)", gallery), *(f"scaling-{size}.png" for size in "CDK")}
    assert shown == {path.name for path in (ROOT / "docs" / "figures").glob("*.png")}


def test_code_fits_the_page() -> None:
    """Outputs of programs may be wider: they scroll."""
    wide = [
        f"{page.name}: {line}"
        for page in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md")
        for line in page.read_text().splitlines()
        if line.startswith((">>> ", "... ")) and len(line) > WIDTH
    ]
    assert not wide, "\n".join(wide)


def test_tables_have_at_most_eight_columns() -> None:
    """On a narrow screen they scroll, and the first columns are those that matter."""
    rule = re.compile(r"^\|[-:| ]*\|$", re.MULTILINE)
    pages = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "benchmarks" / "README.md")
    columns = [(row[0].count("|") - 1, page.name) for page in pages for row in rule.finditer(page.read_text())]
    assert len(columns) > 100 and max(columns)[0] <= 8, max(columns)


def test_docstrings_are_shown_as_meant(pages) -> None:
    """Sessions stand under Examples, no role of Sphinx is left; signatures are there, and show no private field."""
    signs = re.compile(
        r"<blockquote>|:(?:class|func|meth):|<span class=\"n\">_[a-z]\w*</span><span class=\"p\">:</span>"
    )
    found = [f"{path.parent.name}: {sign}" for path, page in pages.items() for sign in signs.findall(page)]
    assert not found, "\n".join(found)
    assert sum(page.count("doc-signature") for page in pages.values()) > 350
