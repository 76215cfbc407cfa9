"""The benchmark in a tiny setting: every row of its tables runs, counts honestly, and is written and drawn.

Tests `problems.py`, `sweep.py`.
"""

import json
import sys
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from curvops.cli import app
from curvops.cli.problems import DIGITS, KINDS, NAMES, SPECTRA, CountingOperator, build
from curvops.cli.sweep import METHODS, PRECONDITIONERS, BenchEstimator, BenchSolver, Settings, estimate, solve
from curvops.linalg import Dense, as_preconditioner

SIZE = 90
TINY = Settings(size=SIZE, columns=2, budgets=(30,), seeds=2, maxiter=800)
MODULE = """
import torch
from curvops.linalg import Dense
A = torch.diag(torch.linspace(1, 3, 40, dtype=torch.float64))
def dense(): return A, torch.ones(40, 2, dtype=torch.float64)
def vector(): return A, torch.ones(40, dtype=torch.float64)
def damped(): return Dense(A, psd=True).add_diagonal(0.5), torch.ones(40, 1, dtype=torch.float64)
def nonsense(): return 3
def wide(): return A[:20], torch.ones(20, dtype=torch.float64)
def turned(): return A + torch.ones_like(A).triu(1) / 40, torch.ones(40, dtype=torch.float64)
def other_dtype(): return A, torch.ones(40)
def fails(): raise RuntimeError("no data")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_problems.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    yield "my_problems"
    sys.modules.pop("my_problems", None)


@cache
def problem(name="decaying"):
    built = build(name, SIZE, 2, torch.float64)
    assert built.G.counter.count == 0
    return built


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize("name", SPECTRA)
def test_a_spectrum_is_what_it_says(name):
    p = problem(name)
    spectrum, shift, _ = SPECTRA[name]
    values = spectrum(SIZE).sort().values + shift
    torch.testing.assert_close(torch.linalg.eigvalsh(p.dense), values, rtol=1e-10, atol=1e-10)
    assert p.kind == ("symmetric" if name == "indefinite" else "positive semidefinite")
    assert p.lower == pytest.approx(max(float(values[0]), 0.0))
    torch.testing.assert_close(p.exact["trace"], values.sum(), rtol=1e-10, atol=1e-10)
    assert ("logdet" in p.exact) == (name != "indefinite")
    if name != "indefinite":
        torch.testing.assert_close(p.exact["logdet"], values.log().sum(), rtol=1e-6, atol=0)


def test_digits_problem_and_its_layers():
    p = problem(DIGITS)
    assert p.kind == "positive semidefinite" and p.A.shape == (85, 85) and p.lower == p.shift
    torch.testing.assert_close(p.diagonal + p.shift, p.dense.diagonal(), rtol=1e-10, atol=1e-10)
    P, layers = as_preconditioner(p.layers.add_diagonal(p.shift)), torch.zeros_like(p.dense)
    for rows in (slice(0, 65), slice(65, 85)):
        layers[rows, rows] = p.dense[rows, rows]
    torch.testing.assert_close(P @ layers, torch.eye(85).double(), rtol=0, atol=1e-8)


SOLVERS = [name for name, method in METHODS.items() if isinstance(method, BenchSolver)]
ESTIMATORS = [name for name, method in METHODS.items() if isinstance(method, BenchEstimator)]
RUNS = [
    ("decaying", name, preconditioner)
    for name in SOLVERS
    for preconditioner in (PRECONDITIONERS if METHODS[name].preconditioned else ("none",))
]
RUNS += [("indefinite", name, "none") for name in ("minres", "lsmr")]
RUNS += [(DIGITS, "block-cg", preconditioner) for preconditioner in PRECONDITIONERS]


@pytest.mark.parametrize(("of", "name", "preconditioner"), RUNS)
def test_each_solver_with_each_preconditioner(of, name, preconditioner):
    p = problem(of)
    row = solve(p, name, METHODS[name], preconditioner, TINY)
    assert row.outcome.startswith("converged") and row.true_residual <= 1e-6
    assert ("products in float64" in row.outcome) == name.startswith("cg-refine")
    assert row.products > 0 and row.setup_products <= row.products
    products, seconds, residuals = (list(values) for values in zip(*row.trail))
    assert products[-1] == row.products and residuals[-1] == row.true_residual < residuals[0]
    assert products == sorted(products) and seconds == sorted(seconds)
    if preconditioner != "none":
        made = PRECONDITIONERS[preconditioner](p, TINY, torch.Generator().manual_seed(0))
        assert made.matvecs == row.setup_products


@pytest.mark.parametrize("name", ["cg", "block-cg"])
def test_conjugate_gradients_say_that_a_matrix_is_indefinite(name):
    row = solve(problem("indefinite"), name, METHODS[name], "none", TINY)
    assert row.outcome == "not positive definite" and row.true_residual > 1e-6


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solution_tells_its_products_as_they_are_counted(name):
    p = problem()
    p.G.counter.count = 0
    solution = METHODS[name].run(p, None, TINY, lambda *_: None)
    assert solution.matvecs == p.G.counter.count


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator(name):
    method, p = METHODS[name], problem("kappa1e4")
    assert KINDS.index(p.kind) >= KINDS.index(method.needs)
    for preconditioner in PRECONDITIONERS if method.preconditioned else ("none",):
        if preconditioner == "block-jacobi":
            with pytest.raises(ValueError, match="-60"):  # it takes 90 of 30 products
                estimate(p, name, method, preconditioner, 30, TINY)
            continue
        row = estimate(p, name, method, preconditioner, 30, TINY)
        assert row.products <= 30 and row.runs == 2 and len(row.errors) == 2
        assert 0 < row.error < 1 and row.claimed > 0 and 0 <= row.inside <= 1
        assert row.entries == (SIZE if method.quantity == "diagonal" else 1)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimate_tells_its_products_as_they_are_counted(name):
    p = problem("kappa1e4")
    p.G.counter.count = 0
    assert METHODS[name].run(p, None, 30, torch.Generator().manual_seed(0)).matvecs == p.G.counter.count


def test_counting():
    counted = CountingOperator(Dense(torch.eye(6), psd=True))
    counted @ torch.ones(6)
    counted @ torch.ones(6, 3)
    counted._columns(torch.tensor([1, 4]))
    counted.to(torch.float64) @ torch.ones(6, 2).double()
    assert counted.counter.count == 1 + 3 + 2 + 2 and counted.psd and counted.symmetric
    product = CountingOperator(Dense(torch.ones(6, 6).tril()) @ Dense(torch.ones(6, 6)))
    (product.mT @ torch.ones(6)).sum()
    assert product.counter.count == 1 and not product.symmetric


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_command(tmp_path):
    arguments = ["--size", 60, "--columns", 2, "--budget", 20, "--budget", 40, "--seeds", 2]
    for option, names in (("problem", ("decaying", "indefinite")), ("method", ("cg", "block-cg", "logdet"))):
        arguments += [word for name in names for word in (f"--{option}", name)]
    arguments += ["--method", "trace-xtrace", "--preconditioner", "none", "--preconditioner", "block-jacobi"]
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    for text in (
        "true residual",
        "claimed 95 %",
        "converged",
        "block-cg",
        "indefinite is only symmetric; skipped: preconditioner block-jacobi, logdet",
        "not positive definite",
        "decaying: logdet with block-jacobi failed, ValueError",
    ):
        assert text in result.output
    assert result.output.count("logdet with block-jacobi failed") == 2  # 60 products are more than both budgets
    written = json.loads((tmp_path / "results.json").read_text())
    assert set(written["solves"][0]) == {
        "problem", "method", "preconditioner", "iterations", "products", "setup_products", "seconds",
        "true_residual", "outcome", "trail",
    }  # fmt: skip
    assert {row["problem"] for row in written["solves"]} == {"decaying", "indefinite"}
    assert {row["budget"] for row in written["estimates"]} == {20, 40} and written["settings"]["size"] == 60
    for figure in ("solves-decaying", "solves-indefinite"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000


def test_names():
    result = invoke("--list")
    assert all(name in result.output for name in (*NAMES, *METHODS, *PRECONDITIONERS))


def test_a_logdet_without_a_bound_is_a_note(module, tmp_path):
    result = invoke(
        "--problem", f"{module}:dense", "--method", "logdet", "--budget", 20, "--budget", 30, "--output", tmp_path
    )
    assert result.exit_code == 0 and "needs shift=, lower_bound=" in result.output, result.output
    assert result.output.count("logdet failed") == 1  # not once a budget


def test_problems_of_ones_own(module, tmp_path):
    """An operator, one vector, a shift, and a matrix that is not symmetric."""
    names = ("dense", "vector", "damped", "turned")
    arguments = [word for name in names for word in ("--problem", f"{module}:{name}")]
    arguments += ["--method", "block-cg", "--method", "lsmr", "--method", "diagonal-xdiag", "--budget", 20]
    result = invoke(*arguments, "--output", tmp_path / "out")
    assert result.exit_code == 0 and f"{module}:turned is only square; skipped: " in result.output, result.output
    solves = json.loads((tmp_path / "out" / "results.json").read_text())["solves"]
    asked = [(f"{module}:{name}", method) for name in names for method in ("block-cg", "lsmr")]
    assert {(row["problem"], row["method"]) for row in solves} == {*asked} - {(f"{module}:turned", "block-cg")}
    assert all(row["outcome"].startswith("converged") and row["true_residual"] <= 1e-6 for row in solves)
    for name in names:
        assert (tmp_path / "out" / f"solves-{module}-{name}.png").exists()
        p = build(f"{module}:{name}", 0, 0, torch.float64)
        assert p.shift == p.lower == (0.5 if name == "damped" else 0.0)
        assert p.kind == ("square" if name == "turned" else "positive semidefinite")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--problem", "my_problems:nonsense"), "my_problems:nonsense failed: TypeError"),
        (("--problem", "my_problems:wide"), "must return a square operator"),
        (("--problem", "my_problems:other_dtype"), "torch.float32"),
        (("--problem", "my_problems:fails"), "failed: RuntimeError: no data"),
        (("--problem", "my_problems:absent"), "failed: AttributeError"),
        (("--problem", "no_such_module_here:f"), "failed: ModuleNotFoundError"),
        (("--problem", "decayin"), "no problem 'decayin'; choose from decaying"),
        (("--method", "gmres"), "no method 'gmres'; choose from cg"),
        (("--preconditioner", "ilu"), "no preconditioner 'ilu'; choose from none"),
    ],
)
def test_names_and_problems_that_do_not_exist(module, arguments, match, tmp_path):
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 2 and match in result.output
    assert len(result.output.strip().splitlines()) <= 3 and "Traceback" not in result.output
