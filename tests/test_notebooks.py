"""The notebooks: cells of their pages, with the outputs that the pages show.

That the code runs is tested with the pages, whose sessions it is. Tests `benchmarks/notebooks.py`.
"""

import doctest
import re

import nbformat
import pytest

from benchmarks import notebooks

FOLDER = notebooks.DOCS / "notebooks"
MOST = 150_000
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def test_the_page_lists_the_notebooks_and_their_pages_link_them() -> None:
    assert sorted(notebooks.names()) == sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    for name in notebooks.names():
        assert f"](notebooks/{name}.ipynb)" in (notebooks.DOCS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", notebooks.names())
def test_a_notebook_has_the_cells_and_the_outputs_of_its_page(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    written = nbformat.read(path, 4)
    nbformat.validate(written)
    shown = notebooks.cells_of(name)
    kinds_and_sources = [(cell.kind, cell.source) for cell in shown]
    assert [(cell.cell_type, cell.source) for cell in written.cells] == kinds_and_sources, "run `make notebooks`"
    executed, cells = notebooks.code_cells(written), [cell for cell in shown if cell.kind == "code"]
    for number, (found, cell) in enumerate(zip(executed, cells), start=1):
        kinds = [output.output_type for output in found.outputs]
        assert found.execution_count == number and ("error" in kinds) == cell.raises
        if cell.output == notebooks.FIGURE:
            assert any("image/png" in output.get("data", {}) for output in found.outputs)
        elif cell.output and not cell.raises:
            assert doctest.OutputChecker().check_output(cell.output + "\n", text_of(found), SAME), found.source
    text = path.read_text(encoding="utf-8")
    assert len(text.encode()) < MOST and not re.search(r"ipykernel|site-packages|/home/|/tmp/|/root/", text)


def text_of(cell: nbformat.NotebookNode) -> str:
    """Return what a cell printed, and its value."""
    return "".join(
        output.text if output.output_type == "stream" else output.data["text/plain"] + "\n"
        for output in cell.outputs
        if output.get("name") != "stderr" and output.output_type != "error"
    )
