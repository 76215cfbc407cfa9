"""The face of the floor: what the floors above may know of the network stands in `curvops.network`, and is little."""

import ast
from collections.abc import Iterator
from pathlib import Path

import curvops
from curvops import network

ROOT = Path(curvops.__file__).parent
MOST = 19
"""Names that operators may need."""


def imports(folder: str) -> Iterator[tuple[str, str]]:
    """(module, name) of what a floor imports from the network."""
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "curvops.network" in text else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("curvops.network"):
                yield from ((node.module or "", alias.name) for alias in node.names)


def test_operators_import_few_names_and_all_from_the_face() -> None:
    found = set(imports("operators"))
    assert {module for module, _ in found} == {"curvops.network"}, sorted(found)
    assert len(found) <= MOST, sorted(name for _, name in found)


def test_each_name_of_the_face_is_asked_for_above() -> None:
    asked = {name for folder in ("operators", "posterior", "sampling", "evidence") for _, name in imports(folder)}
    assert set(network.__all__) <= asked, sorted(set(network.__all__) - asked)
