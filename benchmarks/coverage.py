"""How often do the 95 % intervals hold, and how large are the errors?

    python -m benchmarks.coverage --output docs/estimators.md --results coverage.jsonl

The matrices are dense with a prescribed spectrum, so that the truth is known; float64, fixed seeds. The tables go
between the two comments that name them, as in benchmarks.report. The coverage table takes hours of one core: each count
is printed as soon as it is known and kept in ``--results``, from which the same command continues. `--runs 20` only
checks that everything works.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import curvops as co
from benchmarks.coverage_cells import (
    DIAGONALS,
    ESTIMATORS,
    EXACT,
    HOPELESS,
    LEAST,
    LEVEL,
    LIMITS,
    LOOKS,
    SIZE,
    TRACES,
    Cell,
    Count,
    cells,
    generator,
    matrices,
    spectra,
    study,
)
from benchmarks.machine import facts
from benchmarks.report import fill
from benchmarks.tables import machine_line, table, tables
from curvops.cli.bench.problems import log_spaced, symmetric
from curvops.cli.demo.digits import all_digits
from curvops.cli.demo.network import fit, perceptron
from curvops.linalg import Estimate, logdet, trace

LARGE = 1000
PUBLISHED = {
    "k⁻²": ("6e-2", "2.8e-4", "2.2e-4", "1.8e-4"),
    "0.9ᵏ": ("2.8e-2", "9e-4", "1.9e-4", "5e-6"),
    "flat, 1 to 3": ("9e-4", "2.2e-3", "1.6e-3", "7e-4"),
}


def coverage_table(found: dict[Cell, Count]) -> str:
    """The least coverage over the budgets, and over the tolerances, for each matrix and estimator."""
    budgets, tolerances = (tuple(str(x) for x in LIMITS if name in x) for name in ("max_matvecs", "rtol"))

    def least(matrix: str, estimator: str, limits: tuple[str, ...]) -> str:
        counts = [found[c] for c in (Cell(matrix, estimator, limit) for limit in limits) if c in found]
        return f"{100 * min(count.share for count in counts):.0f}" if counts else "–"

    rows = [
        [name, *(" / ".join(least(name, e, limits) for limits in (budgets, tolerances)) for e in ESTIMATORS)]
        for name in matrices(SIZE)
    ]
    runs, least_of_all = sum(count.runs for count in found.values()), min(count.share for count in found.values())
    text = f"""\
The tables give the least coverage in per cent, over budgets of 10, 30, 100 and 300 products / over rtol = 0.1 and 0.01,
for n = {SIZE} and μ a hundredth of the mean eigenvalue. All runs count, whatever their reason. There are {len(found):,}
cells and {runs:,} runs, each with its own seed; the least coverage of all cells is {100 * least_of_all:.1f} %.

Each cell is examined after {", ".join(map(str, LOOKS))} runs ({EXACT} if the result is exact). It ends if a coverage
of {100 * LEAST:.0f} % would give so high a count with a probability of at most {100 * LEVEL:.0f} %, or so low a count
with at most {100 * HOPELESS:.1f} %. In simulations of this rule, a cell with a true coverage of 85 % is shown with 90 %
or more with a probability below 1 %, and one of 88 % with 5 %. One of 92 % is shown with less than 90 % with a
probability of 1 %, and one of 93 % never in 4,000. If a cell ended after {LOOKS[0]} runs, all of its intervals held;
its number says no more than that the coverage is above 90 %. For a diagonal the share of entries counts, each run as
one number."""
    parts = [TRACES, DIAGONALS, ESTIMATORS[len(TRACES) + len(DIAGONALS) :]]
    apart = tables(["matrix", *ESTIMATORS], rows, *(["matrix", *part] for part in parts))
    return "\n\n".join([text, apart, *_low(found)])


def _low(found: dict[Cell, Count]) -> list[str]:
    """The cells below 90 %, and those whose claims alone are."""
    rows = []
    for cell, count in found.items():
        claims = count.claims_held / count.claims if count.claims else 1.0
        if count.share < LEAST or (claims < LEAST and count.claims >= LOOKS[0]):
            said = f"{100 * claims:.1f} % of {count.claims}" if count.claims else "none"
            rows.append([cell.matrix, cell.estimator, cell.limit, f"{100 * count.share:.1f} % of {count.runs}", said])
    if not rows:
        return ["No cell is below 90 %, whether all runs count or only those that claim to have met their tolerance."]
    return ["Below 90 %:", table(["matrix", "estimator", "limit", "all runs", "CONVERGED or budget spent"], rows)]


def errors_table(runs: int) -> str:
    """Mean relative errors of the trace beside those published."""
    rows = []
    for name, published in PUBLISHED.items():
        values = spectra(LARGE)[name]
        A = symmetric(values, 1)
        cells = []
        for method, theirs in zip(TRACES, published):
            g = generator(3)
            found = [trace(A, method=method, max_matvecs=120, generator=g).value for _ in range(runs)]
            error = (torch.stack(found) - values.sum()).abs().mean() / values.sum()
            cells.append(f"{error:.1e} ({theirs})")
        rows.append([name, *cells])
    text = f"Mean of |error|/trace over {runs} seeds, n = {LARGE}, 120 products; published figures in brackets."
    return text + "\n\n" + table(["spectrum", *TRACES], rows)


def logdet_table(runs: int) -> str:
    """Log-determinants of a log-spaced spectrum, and of the GGN of a digits network."""
    values = log_spaced(LARGE, 1e6)
    A, exact, rows = symmetric(values, 1), values.log().sum(), []
    for label, options, seeds in (("300 products", {"max_matvecs": 300}, runs), ("rtol = 0.01", {"rtol": 0.01}, 10)):
        found = [logdet(A, lower_bound=1e-6, **options, generator=generator(seed)) for seed in range(min(seeds, runs))]
        rows.append([f"log-spaced, κ = 1e6, {label}", *_cells(found, exact, exact.abs())])
    G = digits_ggn()
    spectrum = torch.linalg.eigvalsh(G.to_dense().double()).clamp_min(0)
    for prior in (1.0, 0.01):
        exact = (spectrum + prior).log().sum()
        options = {"shift": prior, "rtol": 1e-3, "max_matvecs": 400}
        found = [logdet(G, **options, generator=generator(seed)) for seed in range(min(runs, 10))]
        rows.append(
            [f"digits GGN, prior {prior:g}, 400 products", *_cells(found, exact, torch.log1p(spectrum / prior).sum())]
        )
    header = ["problem", "intervals that hold", "mean abs. error", "mean error", "stderr", "bias bound", "products"]
    text = (
        "Figures are in per cent of |log det| (for the GGN, of log det P − log det A), over 30 seeds (300 products) or "
        "10. The mean error is the bias that remains at this depth."
    )
    return text + "\n\n" + table(header, rows)


def _cells(found: list[Estimate], exact: Tensor, unit: Tensor) -> list[str]:
    def mean(numbers: list[Tensor]) -> str:
        return f"{100 * torch.stack([torch.as_tensor(x) for x in numbers]).mean() / unit:.2f} %"

    inside = sum(bool(low <= exact <= high) for low, high in (e.interval() for e in found))
    most = max(e.matvecs for e in found)
    errors = [e.value - exact for e in found]
    columns = [[x.abs() for x in errors], errors, [e.stderr for e in found], [e.bias_bound for e in found]]
    return [f"{inside} of {len(found)}", *map(mean, columns), f"≤ {most}"]


def digits_ggn() -> co.GGN:
    """The GGN of a trained 64-32-10 network on 1400 of scikit-learn's digits, float64."""
    data = all_digits().to(torch.float64).first(1400)
    torch.manual_seed(0)
    model = fit(perceptron(64, 32, 10).double(), data, prior_precision=1.0, steps=300, rate=1e-2)
    return co.GGN(co.linearize(model, (data.x, data.y), "classification"))


def main() -> None:
    """Measure, and write the tables into the page (or print them)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--runs", type=int, default=LOOKS[-1], help="at most so many a cell; other tables at most 30")
    parser.add_argument("--only", choices=["coverage", "errors", "logdet"], default=None, help="one table alone")
    parser.add_argument("--matrix", action="append", choices=list(matrices(SIZE)), help="these alone (repeat it)")
    parser.add_argument("--estimator", action="append", choices=ESTIMATORS, help="these alone (repeat it)")
    parser.add_argument("--results", type=Path, default=None, metavar="FILE", help="counts, read first and added to")
    parser.add_argument("--processes", type=int, default=1, help="of the coverage table, one thread each")
    parser.add_argument("--lock", type=Path, default=None, metavar="FILE", help="held locked (shared) during each cell")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="a page; default: print")
    arguments = parser.parse_args()
    machine = machine_line({"machine": facts(torch.get_num_threads())})

    def coverage(runs: int) -> str:
        chosen = [
            cell
            for cell in cells()
            if cell.matrix in (arguments.matrix or matrices(SIZE))
            and cell.estimator in (arguments.estimator or ESTIMATORS)
        ]
        return coverage_table(study(chosen, runs, arguments.results, arguments.processes, arguments.lock))

    tables = {"coverage": coverage, "errors": errors_table, "logdet": logdet_table}
    for name, make in tables.items():
        if arguments.only in (None, name):
            text = make(arguments.runs if name == "coverage" else min(arguments.runs, 30)) + "\n\n" + machine
            if arguments.output is None:
                print(text, end="\n\n")
            else:
                fill(arguments.output, name, text)


if __name__ == "__main__":
    main()
