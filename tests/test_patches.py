"""No test sets a constant of the library or replaces one of its functions: what is shrunk is given as a user gives it.

Budgets are given as `memory_budget`, or other vectors hold the rest of them (`lin.memory.holding`); time passes on a
clock of the tests (`times.py`); runs end in the progress function, or in the network itself.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ALLOWED = {
    "cli/test_demo.py": "an interruption, and checks that fail",
    "cuda/test_face.py": "the way in which a CPU draws many numbers, so that it draws those of a GPU",
    "linalg/samples.py": "the sources of random numbers, in whose place unit vectors show a draw's matrix",
    "posterior/test_combinations.py": "the sources of random numbers, in whose place unit vectors show a draw's matrix",
    "ranks/test_saved_runs.py": "saves, at which processes are killed",
    "sampling/gaussians.py": "the sources of random numbers, in whose place unit vectors show a step's matrix",
    "test_counts.py": "products, which are counted",
}
"""The files that do it all the same, and what they replace."""


def patched(tree: ast.Module) -> Iterator[str]:
    """Yield what of the library is replaced: by `setattr`, `setitem`, `patch` or `patch.object`."""
    ours = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "curvops":
            ours |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            ours |= {name.asname or name.name: name.name for name in node.names if name.name.startswith("curvops")}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args):
            continue
        call, target = ast.unparse(node.func), node.args[0]
        if not (call.endswith((".setattr", ".setitem", "patch.object")) or call == "patch"):
            continue
        if isinstance(target, ast.Constant):
            if str(target.value).startswith("curvops"):
                yield str(target.value)
            continue
        name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else "?"
        inside = {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
        face = isinstance(target, ast.Name) and ours.get(target.id) == "curvops" and not str(name).startswith("_")
        if not face and (inside & ours.keys() or "lin" in inside):
            yield f"{ast.unparse(target)}.{name}"


def test_nothing_of_the_library_is_replaced() -> None:
    found = {}
    for path in HERE.rglob("*.py"):
        text = path.read_text()
        if ("patch" in text or "setattr" in text) and (names := sorted(set(patched(ast.parse(text))))):
            found[str(path.relative_to(HERE))] = names
    assert {file: names for file, names in found.items() if file not in ALLOWED} == {}
    assert ALLOWED.keys() <= found.keys(), "these need no exception"
