"""The package as a whole: its version, what it does in a new process, and the habits a reader relies on.

Tests `version.py`.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

import curvops

ROOT = Path(__file__).resolve().parent.parent


def test_version_is_that_of_the_distribution() -> None:
    assert curvops.__version__ == version("curvops")


def test_the_copies_of_the_version_are_that_of_pyproject() -> None:
    """What an editable install says of itself is as old as the installation."""
    names = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md", "README.md", "docs/comparison.md")
    texts = {name: (ROOT / name).read_text("utf-8") for name in names}
    found = re.search(r'^version = "((\d+\.\d+)\.\d+)"$', texts["pyproject.toml"], re.MULTILINE)
    assert found is not None
    released = re.search(
        rf"^## \[{re.escape(found[1])}\] - (\d{{4}}-\d{{2}}-\d{{2}})$", texts["CHANGELOG.md"], re.MULTILINE
    )
    assert released is not None
    assert f"\nversion: {found[1]}\ndate-released: {released[1]}\n" in texts["CITATION.cff"]
    assert f"curvops-{found[1]}-py3-none-any.whl" in texts["README.md"]
    assert f"| curvops {found[2]} |" in texts["docs/comparison.md"]


PROGRAM = """
import sys, threading, torch, gpytorch
before = set(sys.modules)
import curvops as co
heavy = {"arviz", "IPython", "matplotlib", "pandas", "rich", "scipy", "sklearn", "sympy", "transformers", "typer"}
heavy |= {"numpy.f2py", "numpy.ma", "numpy.testing", "tqdm.auto", "tqdm.notebook"}
added = set(sys.modules) - before
print(*sorted(heavy & (added | {name.split(".")[0] for name in added})))


def network(*layers):
    return torch.nn.Sequential(torch.nn.Linear(4, 3), *layers), (torch.randn(6, 4), torch.arange(6) % 3)


def linearise():
    model, data = network(torch.nn.Tanh(), torch.nn.Linear(3, 3))
    together.wait()
    found.append(co.linearize(model, data, "classification").plan.routes.pushes)


found, together = [], threading.Barrier(4)
threads = [threading.Thread(target=linearise) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*found, sep=", ")

model, data = network(torch.nn.Softmax(-1))
for _ in range(3):
    lin = co.linearize(model, data, "classification", engine="autodiff")
    co.GGN(lin) @ torch.ones(lin.num_parameters)
print(*sorted({"torch._dynamo", "torch._inductor"} & (set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def new_process() -> subprocess.CompletedProcess[str]:
    """A process that imports the library, and linearises first in four threads, and then in a loop."""
    return subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)


def test_import_and_products_add_no_heavy_module_to_torch_and_gpytorch(new_process) -> None:
    """`import curvops` may cost 0.3 s, and each of these would take as much; torch's compiler takes two seconds."""
    imported, _, compiler = new_process.stdout.splitlines()
    assert imported == compiler == ""


def test_threads_that_linearise_first_have_forward_mode_and_a_loop_warns_once(new_process) -> None:
    """Torch prepares forward mode for the process, at the first dual number, of which another thread's is one too many.

    Python forgets which warnings it has shown wherever some are silenced for a while, as these tests' checks do.
    """
    assert new_process.stdout.splitlines()[1] == ", ".join(["forward mode"] * 4)
    assert new_process.stderr.count("NotLogitsWarning") == 1


def test_top_level_folders_are_the_four() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: nothing says which folders are the project's")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {path.split("/")[0] for path in tracked.splitlines() if "/" in path}
    visible = {folder for folder in folders if not folder.startswith(".")}
    assert visible == {"curvops", "tests", "benchmarks", "docs"}


def test_package_is_typed() -> None:
    assert (ROOT / "curvops" / "py.typed").exists()


def shared(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def types(tree: ast.Module) -> Iterator[str]:
    """Classes and aliases of a module: what it assigns to a name in capitals and small letters."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            if target[0].isupper() and not target.isupper():
                yield target


def test_no_two_files_and_no_two_types_share_a_name() -> None:
    """A name that a reader searches for, or sees alone in an error or in a tab of an editor, leads to one place."""
    files = [path for path in (ROOT / "curvops").rglob("*.py") if not path.name.startswith("__")]
    assert len(files) > 150 and shared(path.name for path in files) == []
    assert shared(name for path in files for name in types(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_tests_import_from_faces_and_shelves() -> None:
    """Not from three levels down, so that files may move within their shelf, and change their names."""
    deep = {}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found = set(re.findall(r"(?:from|import) (curvops(?:\.\w+){3,})", text))
        shelves = re.search(r"from curvops\.\w+\.\w+ import", text)
        for node in ast.walk(ast.parse(text)) if shelves else ():
            if isinstance(node, ast.ImportFrom) and re.fullmatch(r"curvops\.\w+\.\w+", shelf := node.module or ""):
                folder, offered = ROOT / shelf.replace(".", "/"), getattr(import_module(shelf), "__all__", ())
                names = {alias.name for alias in node.names if (folder / f"{alias.name}.py").exists()}
                found |= {f"{shelf}.{name}" for name in names.difference(offered)}
        if found:
            deep[str(path.relative_to(ROOT))] = sorted(found)
    assert deep == {}


def test_each_source_file_has_a_test_file_of_its_name_or_is_named_in_one() -> None:
    """In a paragraph of a module docstring that begins with "Tests `", which names no file that is gone."""
    sources = {path.name for path in (ROOT / "curvops").rglob("*.py") if not path.name.startswith("__")}
    tests = list((ROOT / "tests").rglob("test_*.py"))
    texts = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in tests]
    paragraphs = [part for text in texts for part in text.split("\n\n") if part.startswith("Tests `")]
    named = set(re.findall(r"`(\w+\.py)`", "\n".join(paragraphs)))
    assert named - sources == set()
    assert sources - named - {path.name.removeprefix("test_") for path in tests} == set()
