"""The notebooks that docs/notebooks.md lists:   python -m benchmarks.notebooks [--all]

A page is the source of its notebook. Its prose becomes Markdown cells and its sessions become code cells, one for each
output; a figure that the page saves is shown instead. A program that the page includes becomes a cell that writes it,
and a command line of torchrun one that runs it. Cells are executed if the code has changed, or with --all.
"""

from __future__ import annotations

import argparse
import ast
import base64
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
END = "<!-- the notebook ends here -->"
SHOW_FIGURES = "%matplotlib inline\n"
FIGURE = "a figure"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
INPUT_AND_OUTPUT = re.compile(r"((?:^(?:>>>|\.\.\.)(?: .*)?\n)+)((?:^(?!>>>).*\n)*)", re.MULTILINE)
DIRECTIVE = re.compile(r" +# doctest: .*$", re.MULTILINE)
INCLUDED = re.compile(r'--8<-- "docs/(\S+\.py)"\n')
WHERE_A_WARNING_AROSE = re.compile(r"/\S*/ipykernel_\S+?:\d+: ")
WARNING_OF_ANOTHER_PACKAGE = re.compile(r"^/\S*/site-packages/.*\n(?:(?:\S.*\n)?  .*\n)?", re.MULTILINE)
COLOURS = 64
PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}"


@dataclass(frozen=True)
class Cell:
    """A cell of a notebook, and the output that the page shows for its code."""

    kind: str
    source: str
    output: str = ""

    @property
    def raises(self) -> bool:
        """Whether the code raises an error."""
        return self.output.startswith("Traceback (most recent call last)")


def names() -> list[str]:
    """Return the notebooks that the page lists."""
    return re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", (DOCS / "notebooks.md").read_text(encoding="utf-8"))


def cells_of(name: str) -> list[Cell]:
    """Return the cells that a page stands for."""
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8").split(END)[0]
    for drawn in re.findall(r'"(\S+\.png)"', text):
        text = re.sub(rf"!\[[^]]*\]\(figures/{drawn}\)\n", "", text)
    cells, prose, at = list[Cell](), "", 0
    for block in FENCE.finditer(text):
        prose, at = prose + text[at : block.start()], block.end()
        code = list(_code(*block.groups()))
        if code:
            cells += [Cell("markdown", _prose(prose, name)), *code]
            prose = ""
        else:
            prose += block.group()
    cells.append(Cell("markdown", _prose(prose + text[at:], name)))
    if FIGURE in {cell.output for cell in cells}:
        first = next(cell for cell in cells if cell.kind == "code")
        cells[cells.index(first)] = replace(first, source=SHOW_FIGURES + first.source)
    return [cell for cell in cells if cell.source]


def _prose(text: str, name: str) -> str:
    """Return prose as it is read one folder down, without the figures that the notebook draws."""
    page = f"*This notebook is the page [{name}.md]({name}.md).*\n"
    text = re.sub(r"\[[^]]*\]\(notebooks/\w+\.ipynb\).*\n", page, text)
    text = re.sub(r"\\\((.+?)\\\)", r"$\1$", text)
    text = re.sub(r"\]\((?!https?:|#)", "](../", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _code(language: str, text: str) -> Iterator[Cell]:
    """Split a session after each output and each figure; other blocks are code only if they hold or run a program."""
    if language == "pycon":
        for given, output in INPUT_AND_OUTPUT.findall(text):
            code = DIRECTIVE.sub("", "".join(line[4:] or "\n" for line in given.splitlines(keepends=True)))
            yield from (Cell("code", part, FIGURE if figure else output.strip()) for part, figure in _parts(code))
    elif included := INCLUDED.fullmatch(text):
        path = included[1]
        yield Cell("code", f"%%writefile {path}\n{(DOCS / path).read_text(encoding='utf-8').rstrip()}")
    elif text.startswith("torchrun "):
        yield Cell("code", f"!{text.strip()}")


def _parts(code: str) -> Iterator[tuple[str, bool]]:
    """Split code after each figure that it saves, whose cell ends with the figure itself, which the notebook shows."""
    lines, start = code.rstrip().splitlines(), 0
    for statement in ast.parse(code).body:
        if ast.unparse(statement).startswith("plots.save("):
            figure = statement.value.args[0]  # type: ignore[attr-defined]
            shown = re.sub(rf"^ {{{figure.col_offset}}}", "", ast.get_source_segment(code, figure) or "", flags=re.M)
            yield "\n".join([*lines[start : statement.lineno - 1], shown]), True
            start = statement.end_lineno or start
    if lines[start:]:
        yield "\n".join(lines[start:]), False


def notebook_of(name: str) -> Any:
    """Return the notebook of a page, without outputs."""
    cells = []
    for number, cell in enumerate(cells_of(name)):
        if cell.kind == "markdown":
            made = nbformat.v4.new_markdown_cell(cell.source)
        else:
            made = nbformat.v4.new_code_cell(cell.source)
            made.metadata = {"tags": ["raises-exception"]} if cell.raises else {}
        made.id = str(number)
        cells.append(made)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.v4.new_notebook(cells=cells, metadata=metadata)


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: Any) -> None:
    """Execute the cells in an empty folder, and keep small outputs that do not name this machine."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"record_timing": False, "timeout": 600, "resources": {"metadata": {"path": folder}}}
        NotebookClient(notebook, **options).execute(env=os.environ | {"PATH": PROGRAMS + os.environ["PATH"]})
    notebook.metadata.pop("language_info", None)
    for cell in code_cells(notebook):
        cell.outputs = [output for output in map(_kept, cell.outputs) if output.get("text") != ""]


def _kept(output: Any) -> Any:
    """Return an output without the paths of this machine, and its picture with fewer colours."""
    if output.output_type == "error":
        output.traceback = [f"{output.ename}: {output.evalue}"]
    elif output.output_type == "stream":
        output.text = WHERE_A_WARNING_AROSE.sub("", WARNING_OF_ANOTHER_PACKAGE.sub("", output.text))
    elif "image/png" in output.data:
        output.data["image/png"] = shrunk(output.data["image/png"])
    return output


def shrunk(png: str) -> str:
    """Return a picture in Base64 with fewer colours."""
    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def refresh(name: str, again: bool) -> None:
    """Write the notebook of a page, with its earlier outputs if the code has not changed."""
    path = DOCS / "notebooks" / f"{name}.ipynb"
    notebook = notebook_of(name)
    earlier = code_cells(nbformat.read(path, 4)) if path.exists() else []
    if not again and list(map(_statements, earlier)) == list(map(_statements, code_cells(notebook))):
        for cell, before in zip(code_cells(notebook), earlier):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count
    else:
        print(f"executing {path.name}", flush=True)
        execute(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def _statements(cell: Any) -> str:
    """Return the code of a cell without its comments and layout."""
    magic = re.match(r"(?:[%!].*\n?)*", cell.source).group()
    program = magic.startswith("%%")
    return cell.source if program else magic + ast.unparse(ast.parse(cell.source[len(magic) :]))


def main() -> None:
    """All notebooks of the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.notebooks", description=__doc__)
    parser.add_argument("--all", action="store_true", help="execute those whose code has not changed, too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, as where the others lack a package")
    arguments = parser.parse_args()
    for name in arguments.only or names():
        refresh(name, arguments.all)


if __name__ == "__main__":
    main()
