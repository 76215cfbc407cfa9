"""The notebooks: cells of their pages, with the outputs that the pages show.

That the code runs is tested with the pages, whose sessions it is. Tests `benchmarks/notebooks.py`.
"""

from __future__ import annotations

import doctest
import re
from pathlib import Path

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
    executed, cells = notebooks.code_cells(written), [c for c in notebooks.cells_of(name) if c.kind == "code"]
    assert [cell.source for cell in executed] == [cell.source for cell in cells], "run `make notebooks`"
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


PAGE = """# Title

[As a notebook](notebooks/page.ipynb).

![drawn](figures/drawn.png)

Prose with a [link](other.md), an [anchor](#here) and \\(x_1\\).

```pycon
>>> def twice(x):
...     # a comment
...
...     return 2 * x
>>> twice(1)
2
>>> twice("a")  # doctest: +SKIP
'aa'
>>> twice()
Traceback (most recent call last):
...
TypeError: ...
>>> figure = None
>>> plots.save(
...     plots.drawn(
...         figure,
...     ),
...     "drawn.png",
... )
>>> figure is None
True

```

```text
a table
```

```text
--8<-- "docs/program.py"
```

```text
torchrun program.py
```

<!-- the notebook ends here -->

The rest.
"""


def test_cells_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "program.py").write_text("import torch\n")
    assert [(cell.kind, cell.source, cell.output) for cell in notebooks.cells_of("page")] == [
        (
            "markdown",
            "# Title\n\n*This notebook is the page [page.md](../page.md).*\n\n"
            "Prose with a [link](../other.md), an [anchor](#here) and $x_1$.",
            "",
        ),
        ("code", "%matplotlib inline\ndef twice(x):\n    # a comment\n\n    return 2 * x\ntwice(1)", "2"),
        ("code", 'twice("a")', "'aa'"),
        ("code", "twice()", "Traceback (most recent call last):\n...\nTypeError: ..."),
        ("code", "figure = None\nplots.drawn(\n    figure,\n)", notebooks.FIGURE),
        ("code", "figure is None", "True"),
        ("markdown", "```text\na table\n```", ""),
        ("code", "%%writefile program.py\nimport torch", ""),
        ("code", "!torchrun program.py", ""),
    ]
