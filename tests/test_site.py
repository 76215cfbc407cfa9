"""The built site: no formula loses its signs, no link is dead, and each public name has its signature."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import curvops as co

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 84
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """What a reader meets in a page: its links, ids, emphasised texts, signatures and blocks of code."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.emphasised: list[tuple[str, str]] = []
        """The character before an emphasised text, and the text."""
        self.letters = 0
        """How many characters the article has."""
        self.described: list[str] = []
        """The objects whose heading is followed by a signature."""
        self._heading = ""
        self._open: list[tuple[str, str]] = []
        self._before = " "
        self._text: dict[int, list[str]] = {}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.ids.add(given.get("id", ""))
        self.links += [given[name] for name in ("href", "src") if name in given]
        kind = given.get("class", "")
        if "doc-signature" in kind and self._heading:
            self.described.append(self._heading)
            self._heading = ""
        if tag not in VOID:
            self._open.append((tag, self._before))
            self._text[len(self._open)] = []

    def handle_data(self, text: str) -> None:
        self._before = text[-1:]
        if any(tag == "article" for tag, _ in self._open):
            self.letters += len(" ".join(text.split()))
        for depth in range(1, len(self._open) + 1):
            self._text[depth].append(text)

    def handle_endtag(self, tag: str) -> None:
        while self._open:
            opened, before = self._open[-1]
            text = "".join(self._text.pop(len(self._open)))
            self._open.pop()
            if opened == "h3":
                self._heading = text.strip().removesuffix("¶").strip()
            if opened in ("em", "strong"):
                self.emphasised.append((before, text))
            if opened == tag:
                return


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    site = tmp_path_factory.mktemp("built") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


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
        for before, text in page.emphasised
        if swallowed_signs(before, text)
    ]
    assert not swallowed, "\n".join(swallowed)


def test_links_and_pictures_are_there(pages) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            target, anchor = urldefrag(unquote(link))
            if target.startswith(("http:", "https:", "mailto:", "data:")):
                continue
            there = (path.parent / target).resolve() if target else path
            there = there / "index.html" if there.is_dir() else there
            if not there.exists() or (anchor and there in pages and anchor not in pages[there].ids):
                dead.append(f"{path.parent.name}: {link}")
    assert not dead, "\n".join(dead)


def test_a_page_of_the_reference_is_read_in_five_screens(pages) -> None:
    """Of 1,280 by 900 pixels: lists of parameters have at least 1,600 characters on each."""
    long = {path.parent.name: page.letters for path, page in pages.items() if "reference" in path.parts}
    assert len(long) > 60
    assert {name: letters for name, letters in long.items() if letters > 8000} == {}


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


def test_each_public_name_has_its_signature_once(pages) -> None:
    places: dict[str, list[str]] = {}
    for path, page in pages.items():
        for name in page.described:
            places.setdefault(name, []).append(path.parent.name)
    missing = [name for name in PUBLIC if len(places.get(name, [])) != 1]
    assert not missing, f"not with a signature on exactly one page: {missing}"


def test_docstrings_are_shown_as_meant(pages) -> None:
    """Sessions stand under Examples, no role of Sphinx is left, and no signature shows a private field."""
    signs = re.compile(
        r"<blockquote>|:(?:class|func|meth):|<span class=\"n\">_[a-z]\w*</span><span class=\"p\">:</span>"
    )
    found = [f"{path.parent.name}: {sign}" for path in pages for sign in signs.findall(path.read_text())]
    assert not found, "\n".join(found)


def public_callables() -> set[str]:
    """Return the full names of the functions, and of the classes that users build: results have no signature."""
    found = set()
    for module in (co, co.operators, co.posterior, co.linalg, co.likelihoods, co.evidence, co.sampling, co.gp):
        for name in module.__all__:
            if module in (co.operators, co.posterior) and name in co.__all__:
                continue
            value = getattr(module, name)
            ours = getattr(getattr(value, "__init__", None), "__module__", "").startswith("curvops.")
            result = dataclasses.is_dataclass(value) or name in co.errors.__all__
            built = isinstance(value, type) and ours and not result
            if built or isinstance(value, types.FunctionType):
                found.add(f"{module.__name__.replace('network.', '')}.{name}")
    return found - {"curvops.low_rank"}  # that of curvops.linalg


PUBLIC = sorted(public_callables())
