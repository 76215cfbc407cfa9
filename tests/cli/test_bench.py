"""The benchmark in a tiny setting: every row of its tables runs, counts honestly, and is written and drawn.

Tests `figures.py`, `measure.py`, `methods.py`, `problem.py`, `problems.py`, `rows.py`, `sweep.py`, `tables.py`.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import peer_estimators, peer_solvers
from curvops.cli import app
from curvops.cli.bench import sweep
from curvops.cli.bench.measure import Peak, Trail
from curvops.cli.bench.methods import (
    ADAPTERS,
    METHODS,
    PRECONDITIONERS,
    BenchEstimator,
    BenchSolver,
    Settings,
    load_peers,
)
from curvops.cli.bench.problem import STRENGTH, CountingOperator, NotApplicableError
from curvops.cli.bench.problems import DIGITS, NAMES, SPECTRA, TALL, build
from curvops.cli.bench.rows import BudgetSpentError, estimate, solve
from curvops.linalg import Dense, Diagonal, as_preconditioner

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
def strings(): return "A", "b"
def wide(): return A[:20], torch.ones(20, dtype=torch.float64)
def turned(): return A + torch.ones_like(A).triu(1) / 40, torch.ones(40, dtype=torch.float64)
def empty(): return A[:0], torch.ones(0, dtype=torch.float64)
def short(): return A, torch.ones(7, dtype=torch.float64)
def other_dtype(): return A, torch.ones(40)
def not_finite(): return A, torch.full((40,), float("nan"), dtype=torch.float64)
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
    found = build(name, SIZE, 2, torch.float64, 0)
    assert found.G.counter.count == 0
    return found


def invoke(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.mark.parametrize("name", SPECTRA)
def test_a_spectrum_is_what_it_says(name):
    p = problem(name)
    values = SPECTRA[name].values(SIZE).sort().values + SPECTRA[name].shift
    torch.testing.assert_close(torch.linalg.eigvalsh(p.dense), values, rtol=1e-10, atol=1e-10)
    assert p.kind == ("symmetric" if name == "indefinite" else "damped" if p.shift else "psd")
    assert p.lower == pytest.approx(max(float(values[0]), 0.0))
    torch.testing.assert_close(p.exact["trace"], values.sum(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(p.exact["Frobenius norm"], values.norm(), rtol=1e-10, atol=0)
    torch.testing.assert_close(p.exact["largest eigenvalues"], values.flip(0)[:5], rtol=1e-10, atol=0)
    assert ("logdet" in p.exact) == (name != "indefinite") and ("effective dimension" in p.exact) == bool(p.shift)
    if name != "indefinite":
        torch.testing.assert_close(p.exact["logdet"], values.log().sum(), rtol=1e-6, atol=0)
    if p.shift:
        dimension = (1 - p.shift / values).sum()
        torch.testing.assert_close(p.exact["effective dimension"], dimension, rtol=1e-8, atol=0)


def test_least_squares_know_their_least():
    p = problem(TALL)
    assert p.kind == "any" and p.A.shape == (180, 90) and set(p.exact) == {"Frobenius norm"}
    best = torch.linalg.lstsq(p.dense, p.B).solution
    start = torch.zeros_like(best)
    assert p.residual(best) <= 1e-12 and p.worst(p.relative_residuals(best)) <= 1e-7
    above = ((p.dense @ best).norm(dim=0) / p.B.norm(dim=0)).max()
    assert p.worst(p.relative_residuals(start)) == pytest.approx(float(above), rel=1e-10)
    assert p.residual(best + 1e-3) > 1e-5 and p.G.counter.count == 0
    r = p.B - p.dense @ (best + 1e-3)
    normal = (p.dense.mT @ r).norm(dim=0) / (torch.linalg.matrix_norm(p.dense, 2) * r.norm(dim=0))
    assert p.residual(best + 1e-3) == pytest.approx(float(normal.max()), rel=0.05)
    assert p.residual(best[:, 1:], 1) <= 1e-12


def test_digits_problem_and_its_layers():
    p = problem(DIGITS)
    assert p.kind == "damped" and p.A.shape == (85, 85) and p.lower == p.shift
    torch.testing.assert_close(p.diagonal + p.shift, p.dense.diagonal(), rtol=1e-10, atol=1e-10)
    P, layers = as_preconditioner(p.layers.add_diagonal(p.shift)), torch.zeros_like(p.dense)
    for rows in (slice(0, 65), slice(65, 85)):
        layers[rows, rows] = p.dense[rows, rows]
    torch.testing.assert_close(P @ layers, torch.eye(85).double(), rtol=0, atol=1e-8)
    torch.testing.assert_close(P.sqrt(P.sqrt(torch.eye(85).double())), layers, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(P.logdet(), torch.logdet(layers))


SOLVERS = [name for name, method in METHODS.items() if isinstance(method, BenchSolver)]
ITERATIVE = [name for name in SOLVERS if name != "dual-descent"]
RUNS = [
    ("decaying", name, preconditioner)
    for name in ITERATIVE
    for preconditioner in (PRECONDITIONERS if METHODS[name].preconditioned else ("none",))
]
RUNS += [("indefinite", name, "none") for name in ("minres", "lsmr")] + [(TALL, "lsmr", "none")]
RUNS += [(DIGITS, "block-cg", preconditioner) for preconditioner in PRECONDITIONERS]


@pytest.mark.parametrize(("of", "name", "preconditioner"), RUNS)
def test_each_solver_with_each_preconditioner(of, name, preconditioner):
    p = problem(of)
    row = solve(p, name, METHODS[name], preconditioner, TINY)
    assert row.outcome.startswith("converged") and row.true_residual <= 1e-6
    assert ("products in float64" in row.outcome) == name.startswith("cg-refine")
    assert row.products > 0 and row.setup_products <= row.products and row.seconds >= row.setup_seconds
    trail = row.trail
    assert trail.products[-1] == row.products and (of == TALL or trail.residuals[-1] == row.true_residual)
    assert trail.residuals[-1] < trail.residuals[0]
    assert trail.products == sorted(trail.products) and trail.seconds == sorted(trail.seconds)
    if preconditioner != "none":
        made = PRECONDITIONERS[preconditioner](p, TINY, torch.Generator().manual_seed(0))
        assert made.matvecs == row.setup_products


@pytest.mark.parametrize("name", ["cg", "block-cg"])
def test_conjugate_gradients_say_that_a_matrix_is_indefinite(name):
    row = solve(problem("indefinite"), name, METHODS[name], "none", TINY)
    assert row.outcome == "not positive definite" and row.true_residual > 1e-6


def test_dual_descent_counts_the_rows_it_reads():
    p, settings = problem("flat"), Settings(**{**vars(TINY), "rtol": 1e-2})
    row = solve(p, "dual-descent", METHODS["dual-descent"], "none", settings)
    assert row.outcome == "converged" and row.true_residual <= 1e-2
    assert row.trail.products == sorted(row.trail.products) and row.trail.products[-1] == row.products > row.iterations
    with pytest.raises(NotApplicableError, match="reads rows"):
        solve(problem(DIGITS), "dual-descent", METHODS["dual-descent"], "none", settings)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solution_tells_its_products_as_they_are_counted(name):
    p = problem()
    p.G.counter.count = 0
    solution = METHODS[name].run(p, None, TINY, Trail(p.G.counter))
    assert solution.matvecs == p.G.counter.count


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if isinstance(method, BenchEstimator)])
def test_each_estimator(name):
    method, done = METHODS[name], []
    p = problem("decaying" if method.needs == "damped" else "kappa1e4")
    assert STRENGTH[p.kind] >= STRENGTH[method.needs]
    for preconditioner in PRECONDITIONERS if method.preconditioned else ("none",):
        if preconditioner == "block-jacobi":
            with pytest.raises(BudgetSpentError, match="90"):
                estimate(p, name, method, preconditioner, 30, TINY, lambda: None)
            continue
        row = estimate(p, name, method, preconditioner, 30, TINY, lambda: done.append(1))
        assert row.products <= 30 and row.runs == 2 and len(row.errors) == 2
        assert 0 < row.error < 1 and row.claimed > 0 and 0 <= row.inside <= 1
        assert row.entries == {"diagonal": SIZE, "largest eigenvalues": 5}.get(method.quantity, 1)
    assert len(done) % 2 == 0 and done


def test_an_estimate_tells_its_products_as_they_are_counted():
    for name, method in METHODS.items():
        if isinstance(method, BenchEstimator):
            p = problem("decaying" if method.needs == "damped" else "kappa1e4")
            p.G.counter.count = 0
            e = method.run(p, None, 30, torch.Generator().manual_seed(0))
            assert e.matvecs == p.G.counter.count, name


@pytest.mark.parametrize("name", peer_solvers.PEERS)
def test_each_peer_solver(name):
    for preconditioner in ("none", "nystrom") if peer_solvers.PEERS[name].preconditioned else ("none",):
        row = solve(problem("decaying"), name, peer_solvers.PEERS[name], preconditioner, TINY)
        assert row.products > 0 and len(row.trail.products) > 1 and row.trail.seconds == sorted(row.trail.seconds)
        assert "reached rtol" in row.outcome and row.true_residual <= 1e-6


def test_a_peer_on_a_rectangular_problem():
    row = solve(problem(TALL), "scipy-lsmr", peer_solvers.PEERS["scipy-lsmr"], "none", TINY)
    assert "reached rtol" in row.outcome and row.true_residual <= 1e-6 and row.products == row.trail.products[-1]


def test_peers_are_found_in_a_clone_and_elsewhere_it_is_said_where_they_are(monkeypatch, tmp_path):
    assert set(load_peers()) == {*peer_solvers.PEERS, *peer_estimators.PEERS}
    for name in ADAPTERS:
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    result = invoke("--quick", "--peers", "--output", tmp_path)
    assert result.exit_code == 2 and "in the root of a clone" in result.output


def test_each_peer_estimator_that_is_installed():
    peer = peer_estimators.PEERS["linear_operator-logdet"]
    row = estimate(problem("kappa1e4"), "linear_operator-logdet", peer, "none", 40, TINY, lambda: None)
    assert 0 < row.error < 1 and row.inside is None and math.isnan(row.claimed) and row.products <= 120


def test_counting():
    counted = CountingOperator(Dense(torch.eye(6), psd=True))
    counted @ torch.ones(6)
    counted @ torch.ones(6, 3)
    counted._columns(torch.tensor([1, 4]))
    counted.to(torch.float64) @ torch.ones(6, 2).double()
    counted.diagonal()
    assert counted.counter.count == 1 + 3 + 2 + 2 and counted.psd and counted.symmetric
    product = CountingOperator(Dense(torch.ones(4, 6)) @ Dense(torch.ones(6, 4)))
    product._diagonal()
    assert product.counter.count == 4
    (product.mT @ torch.ones(4)).sum()
    assert product.counter.count == 5


def test_memory_grows_by_what_is_allocated():
    with Peak(torch.device("cpu")) as peak:
        block = torch.ones(8 * 2**20, dtype=torch.float64)  # 64 MiB
    assert block.sum() > 0 and (peak.bytes is None or 48 * 2**20 < peak.bytes < 128 * 2**20)


@pytest.mark.usefixtures("annotations_unchecked")
def test_the_command(tmp_path):
    arguments = ["--size", 60, "--columns", 2, "--budget", 20, "--budget", 40, "--seeds", 2, "--peers"]
    for option, names in (("problem", ("decaying", "indefinite")), ("method", ("cg", "block-cg", "logdet"))):
        arguments += [part for name in names for part in (f"--{option}", name)]
    arguments += ["--method", next(name for name in METHODS if name.startswith("trace")), "--preconditioner", "none"]
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    for text in (
        "memory:",
        "true residual",
        "claimed 95 %",
        "converged",
        "block-cg",
        "indefinite is not positive definite; skipped: logdet",
        "not positive definite",
    ):
        assert text in result.output
    with (tmp_path / "solves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert set(rows[0]) == {
        "problem", "m", "n", "columns", "method", "preconditioner", "iterations", "products", "setup_products",
        "seconds", "setup_seconds", "true_residual", "memory_bytes", "outcome",
    }  # fmt: skip
    assert {row["problem"] for row in rows} == {"decaying", "indefinite"}
    assert {"cg", "block-cg", "scipy-cg", "linear_operator-cg"} <= {row["method"] for row in rows}
    with (tmp_path / "estimates.csv").open() as file:
        assert {int(row["budget"]) for row in csv.DictReader(file)} == {20, 40}
    with (tmp_path / "trails.csv").open() as file:
        assert set(next(csv.reader(file))) == {"problem", "method", "preconditioner", "products", "seconds", "residual"}
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["settings"]["size"] == 60 and len(written["solves"]) == len(rows)
    for figure in ("solves-decaying", "estimates-decaying", "solves-indefinite", "estimates-indefinite"):
        assert (tmp_path / f"{figure}.png").stat().st_size > 5000


def test_json_alone_on_the_standard_output(tmp_path):
    result = invoke("--problem", "flat", "--size", 30, "--method", "block-cg", "--json", "--output", tmp_path)
    assert json.loads(result.stdout)["solves"][0]["outcome"] == "converged"
    assert not (tmp_path / "estimates.csv").exists()


def test_names():
    result = invoke("--list")
    assert all(name in result.output for name in (*NAMES, *METHODS, *PRECONDITIONERS))


def test_a_logdet_without_a_bound_is_a_note(module, tmp_path):
    result = invoke("--problem", f"{module}:dense", "--method", "logdet", "--budget", 20, "--output", tmp_path)
    assert result.exit_code == 0 and "logdet skipped, it needs a positive lower bound" in result.output
    assert result.output.count("logdet skipped") == 1


@pytest.mark.parametrize("name", ["dense", "vector", "damped"])
def test_a_problem_of_ones_own(module, name, tmp_path):
    result = invoke("--problem", f"{module}:{name}", "--method", "block-cg", "--output", tmp_path / "out")
    assert result.exit_code == 0 and f"{module}:{name}" in result.output, result.output
    assert (tmp_path / "out" / f"solves-{module}-{name}.png").exists() and "converged" in result.output
    p = build(f"{module}:{name}", 0, 0, torch.float64, 0)
    assert p.shift == p.lower == (0.5 if name == "damped" else 0.0)
    assert p.kind == ("damped" if name == "damped" else "psd")


@pytest.mark.parametrize(("name", "lacks"), [("wide", "is not square"), ("turned", "is not symmetric")])
def test_a_rectangular_and_an_asymmetric_problem(module, name, lacks, tmp_path):
    arguments = ["--method", "cg", "--method", "lsmr", "--method", "diagonal-xdiag", "--budget", 20]
    result = invoke("--problem", f"{module}:{name}", *arguments, "--output", tmp_path)
    assert result.exit_code == 0 and "converged" in result.output, result.output
    assert f"{module}:{name} {lacks}; skipped: cg" in result.output
    with (tmp_path / "solves.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["m"], row["n"]) == (("20", "40") if name == "wide" else ("40", "40"))
    assert row["method"] == "lsmr" and float(row["true_residual"]) <= 1e-6


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("nonsense", "must return (operator, right-hand sides), got int"),
        ("strings", "got str and str"),
        ("empty", "must be a floating matrix, got (0, 40)"),
        ("short", "(40,) or (40, K)"),
        ("other_dtype", "torch.float32"),
        ("not_finite", "NaN or Inf"),
        ("fails", "failed: RuntimeError: no data"),
        ("absent", "has no function 'absent'; it has: dense, vector"),
    ],
)
def test_what_a_users_function_may_not_do(module, name, match, tmp_path):
    result = invoke("--problem", f"{module}:{name}", "--output", tmp_path)
    assert result.exit_code == 2 and match in result.output
    assert len(result.output.strip().splitlines()) <= 3 and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--problem", "decayin"), "no problem 'decayin'; choose from decaying"),
        (("--method", "gmres"), "no method 'gmres'; choose from cg"),
        (("--preconditioner", "ilu"), "no preconditioner 'ilu'; choose from none"),
        (("--problem", "no_such_module_here:f"), "cannot import 'no_such_module_here'"),
    ],
)
def test_names_that_are_unknown(arguments, match, tmp_path):
    result = invoke(*arguments, "--output", tmp_path)
    assert result.exit_code == 2 and match in result.output


def test_a_method_that_fails_is_a_note_and_the_rest_goes_on(tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError("no luck")

    monkeypatch.setitem(PRECONDITIONERS, "jacobi", fails)
    choice = sweep.Choice(("flat",), ("block-cg",), ("jacobi", "none"))
    results = sweep.run(choice, TINY, tmp_path, lambda _: None)
    assert results.notes == ["flat: block-cg with jacobi failed, ValueError: no luck"]
    assert [row.preconditioner for row in results.solves] == ["none"]


def test_what_a_problem_or_a_budget_does_not_allow_is_a_note(tmp_path, monkeypatch):
    choice = sweep.Choice(("indefinite",), ("minres", "logdet"), ("none", "jacobi"))
    assert sweep.run(choice, TINY, tmp_path, lambda _: None).notes == [
        "indefinite is not positive definite; skipped: preconditioner jacobi, logdet"
    ]
    monkeypatch.setitem(
        PRECONDITIONERS, "jacobi", lambda problem, *_: problem.G @ torch.zeros_like(problem.G.to_dense())
    )
    choice = sweep.Choice(("flat",), ("logdet",), ("jacobi",))
    (note,) = sweep.run(choice, TINY, tmp_path, lambda _: None).notes
    assert re.fullmatch(r"flat: logdet with jacobi skipped at 30 products: building it takes \d+", note), note


def test_interruption_is_one_line(monkeypatch, tmp_path):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "run", interrupted)
    result = invoke("--output", tmp_path)
    assert result.exit_code == 130 and len(result.output.strip().splitlines()) == 1


def test_diagonal_operators_are_their_own_best_preconditioner():
    assert as_preconditioner(Diagonal(torch.tensor([2.0]))).bounds() == (2.0, 2.0)
