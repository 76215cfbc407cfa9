"""How large are the errors of traces and log-determinants?   python -m benchmarks.estimate_errors

Traces of dense matrices with a prescribed spectrum, beside the errors that are published for them. Log-determinants of
such a matrix, and of the GGN of a network of digits; float64, fixed seeds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import curvops as co
from benchmarks.coverage_cells import TRACES, generator, spectra
from benchmarks.digits import all_digits
from benchmarks.layers import fit, perceptron
from benchmarks.study_page import Study
from benchmarks.tables import table
from curvops.cli.problems import log_spaced, symmetric
from curvops.linalg import Estimate, logdet, trace

SIZE, FEW = 1000, 10
PUBLISHED = {
    "k⁻²": ("6e-2", "2.8e-4", "2.2e-4", "1.8e-4"),
    "0.9ᵏ": ("2.8e-2", "9e-4", "1.9e-4", "5e-6"),
    "flat, 1 to 3": ("9e-4", "2.2e-3", "1.6e-3", "7e-4"),
}


def measure(runs: int) -> dict[str, Any]:
    """Relative errors of every trace, by spectrum and method; log-determinants, a row each."""
    return {"traces": {name: traces(spectra(SIZE)[name], runs) for name in PUBLISHED}, "logdets": logdets(runs)}


def traces(values: Tensor, runs: int) -> dict[str, Tensor]:
    """|error| / trace after 120 products, by method; the seeds of a method follow each other."""
    A, errors = symmetric(values, 1), {}
    for method in TRACES:
        g = generator(3)
        found = [trace(A, method=method, max_matvecs=120, generator=g).value for _ in range(runs)]
        errors[method] = (torch.stack(found) - values.sum()).abs() / values.sum()
    return errors


def logdets(runs: int) -> list[dict[str, Any]]:
    """Log-determinants of a log-spaced spectrum, and of the GGN of a digits network."""
    values = log_spaced(SIZE, 1e6)
    A, exact, rows = symmetric(values, 1), values.log().sum(), []
    for label, options, seeds in (("300 products", {"max_matvecs": 300}, runs), ("rtol = 0.01", {"rtol": 0.01}, FEW)):
        found = [logdet(A, lower_bound=1e-6, **options, generator=generator(seed)) for seed in range(min(seeds, runs))]
        rows.append(row(f"log-spaced, κ = 1e6, {label}", found, exact, exact.abs()))
    G = digits_ggn()
    spectrum = torch.linalg.eigvalsh(G.to_dense().double()).clamp_min(0)
    for prior in (1.0, 0.01):
        exact = (spectrum + prior).log().sum()
        options = {"shift": prior, "rtol": 1e-3, "max_matvecs": 400}
        found = [logdet(G, **options, generator=generator(seed)) for seed in range(min(runs, FEW))]
        rows.append(
            row(f"digits GGN, prior {prior:g}, 400 products", found, exact, torch.log1p(spectrum / prior).sum())
        )
    return rows


def row(problem: str, found: list[Estimate], exact: Tensor, unit: Tensor) -> dict[str, Any]:
    """Figures of each seed, relative to the unit."""
    return {
        "problem": problem,
        "errors": torch.stack([(e.value - exact) / unit for e in found]),
        "stderr": torch.stack([torch.as_tensor(e.stderr) / unit for e in found]),
        "bias_bound": torch.stack([torch.as_tensor(e.bias_bound) / unit for e in found]),
        "matvecs": max(e.matvecs for e in found),
        "held": sum(bool(low <= exact <= high) for low, high in (e.interval() for e in found)),
    }


def digits_ggn() -> co.GGN:
    """The GGN of a trained 64-32-10 network on 1400 of scikit-learn's digits, float64."""
    data = all_digits().to(torch.float64).first(1400)
    torch.manual_seed(0)
    model = fit(perceptron(64, 32, 10).double(), data, prior_precision=1.0, steps=300, rate=1e-2)
    return co.GGN(co.linearize(model, (data.x, data.y), "classification"))


def errors_table(found: dict[str, dict[str, Tensor]]) -> str:
    """Mean relative errors of the trace beside those published."""
    rows = [
        [name, *(f"{errors.mean():.1e} ({theirs})" for errors, theirs in zip(found[name].values(), published))]
        for name, published in PUBLISHED.items()
    ]
    seeds = len(found["k⁻²"]["hutchinson"])
    text = f"Mean of |error|/trace over {seeds} seeds, n = {SIZE}, 120 products; published figures in brackets."
    return text + "\n\n" + table(["spectrum", *TRACES], rows)


def logdet_table(rows: list[dict[str, Any]]) -> str:
    """Means over the seeds of each problem."""
    cells = []
    for each in rows:
        means = [each["errors"].abs(), each["errors"], each["stderr"], each["bias_bound"]]
        numbers = [f"{100 * values.mean():.2f} %" for values in means]
        inside = f"{each['held']} of {len(each['errors'])}"
        cells.append([each["problem"], inside, *numbers, f"≤ {each['matvecs']}"])
    header = ["problem", "intervals that hold", "mean abs. error", "mean error", "stderr", "bias bound", "products"]
    text = (
        "Figures are in per cent of |log det| (for the GGN, of log det P − log det A). The mean error is the bias that "
        "remains at this depth."
    )
    return text + "\n\n" + table(header, cells)


STUDY = Study(
    name="estimate_errors",
    description=__doc__,
    measure=measure,
    sections={
        "errors": lambda found: errors_table(found["traces"]),
        "logdet": lambda found: logdet_table(found["logdets"]),
    },
    page="docs/estimators.md",
    options={"runs": (30, "seeds of a trace and of the first log-determinant; at most 10 of the others")},
)

if __name__ == "__main__":
    STUDY.run()
