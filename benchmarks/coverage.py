"""How often do the 95 % intervals of the estimators hold?   python -m benchmarks.coverage --processes 2

The matrices are dense with a prescribed spectrum, so that the truth is known; float64, fixed seeds. It takes hours of
one core: each count is printed and kept as soon as it is known, and the same command continues from there. `--runs 20`
only checks that everything works.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    study,
)
from benchmarks.report import MEASURED
from benchmarks.study_page import Study
from benchmarks.tables import table, tables


def measure(runs: int, processes: int) -> dict[str, Any]:
    """The counts of all cells, and what the page says of them."""
    kept = MEASURED / "coverage.parts" / "counts.jsonl"
    kept.parent.mkdir(exist_ok=True)
    found = study(cells(), runs, kept, processes)
    return summary(found) | {"counts": [{"cell": list(vars(cell).values()), **vars(n)} for cell, n in found.items()]}


def summary(found: Mapping[Cell, Count]) -> dict[str, Any]:
    """The least coverage over the budgets, and over the tolerances, by matrix and estimator; what is below 90 %."""
    limits = [[str(limit) for limit in LIMITS if name in limit] for name in ("max_matvecs", "rtol")]
    least: dict[str, dict[str, list[float]]] = {}
    for cell in found:
        shares = [min(found[Cell(cell.matrix, cell.estimator, limit)].share for limit in kind) for kind in limits]
        least.setdefault(cell.matrix, {})[cell.estimator] = shares
    low = [row for cell, count in found.items() if (row := _low(cell, count))]
    runs, least_of_all = sum(count.runs for count in found.values()), min(count.share for count in found.values())
    return {"cells": len(found), "runs": runs, "least": least_of_all, "least by matrix": least, "low": low}


def _low(cell: Cell, count: Count) -> list[str]:
    """A row of a cell below 90 %, or whose claims alone are."""
    claims = count.claims_held / count.claims if count.claims else 1.0
    if count.share >= LEAST and (claims >= LEAST or count.claims < LOOKS[0]):
        return []
    said = f"{100 * claims:.1f} % of {count.claims}" if count.claims else "none"
    return [cell.matrix, cell.estimator, cell.limit, f"{100 * count.share:.1f} % of {count.runs}", said]


def coverage_table(found: Mapping[str, Any]) -> str:
    """The least coverage for each matrix and estimator, with the rule by which a cell ends."""
    rows = [
        [name, *(" / ".join(f"{100 * share:.0f}" for share in by_estimator[e].tolist()) for e in ESTIMATORS)]
        for name, by_estimator in found["least by matrix"].items()
    ]
    count, runs, least = f"{found['cells']:,}", f"{found['runs']:,}", f"{100 * found['least']:.1f} %"
    text = f"""\
The tables give the least coverage in per cent, over budgets of 10, 30, 100 and 300 products / over rtol = 0.1 and 0.01,
for n = {SIZE} and μ a hundredth of the mean eigenvalue. All runs count, whatever their reason. There are {count}
cells and {runs} runs, each with its own seed; the least coverage of all cells is {least}.

Each cell is examined after {", ".join(map(str, LOOKS))} runs ({EXACT} if the result is exact). It ends if a coverage
of {100 * LEAST:.0f} % would give so high a count with a probability of at most {100 * LEVEL:.0f} %, or so low a count
with at most {100 * HOPELESS:.1f} %. In simulations of this rule, a cell with a true coverage of 85 % is shown with 90 %
or more with a probability below 1 %, and one of 88 % with 5 %. One of 92 % is shown with less than 90 % with a
probability of 1 %, and one of 93 % never in 4,000. If a cell ended after {LOOKS[0]} runs, all of its intervals held;
its number says no more than that the coverage is above 90 %. For a diagonal the share of entries counts, each run as
one number."""
    parts = [TRACES, DIAGONALS, ESTIMATORS[len(TRACES) + len(DIAGONALS) :]]
    apart = tables(["matrix", *ESTIMATORS], rows, *(["matrix", *part] for part in parts))
    if not found["low"]:
        low = "No cell is below 90 %, whether all runs count or only those that claim to have met their tolerance."
    else:
        heads = ["matrix", "estimator", "limit", "all runs", "CONVERGED or budget spent"]
        low = f"Below 90 %:\n\n{table(heads, found['low'])}"
    return "\n\n".join([text, apart, low])


STUDY = Study(
    name="coverage",
    description=__doc__,
    measure=measure,
    sections={"coverage": coverage_table},
    page="docs/estimators.md",
    options={
        "runs": (LOOKS[-1], "of a cell at most"),
        "processes": (1, "that count, one thread each"),
    },
)

if __name__ == "__main__":
    STUDY.run()
