"""How often do the 95 % intervals hold, and how large are the errors?

    python -m benchmarks.coverage --output docs/estimators.md

Dense matrices of prescribed spectrum, so that the truth is known; float64, fixed seeds. The tables go between the two
comments that name them, as those of benchmarks.report do. `--runs 20` only tries that everything works.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import curvops as co
from benchmarks.machine import facts
from benchmarks.report import filled
from benchmarks.tables import machine_line, table
from curvops.cli.bench.spectra import clusters, flat, geometric, log_spaced, powers, rotation, step, symmetric
from curvops.cli.demo.digits import all_digits
from curvops.cli.demo.network import fit, perceptron
from curvops.linalg import Estimate, diagonal, effective_dimension, frobenius_norm, logdet, trace

SIZE, LARGE = 512, 1000
LIMITS = (*({"max_matvecs": b} for b in (10, 30, 100, 300)), *({"rtol": r} for r in (0.1, 0.01)))
TRACES = ("hutchinson", "hutch++", "xtrace", "xnystrace")
DIAGONALS = ("bekas", "xdiag", "xnysdiag")
PUBLISHED = {
    "k⁻²": ("6e-2", "2.8e-4", "2.2e-4", "1.8e-4"),
    "0.9ᵏ": ("2.8e-2", "9e-4", "1.9e-4", "5e-6"),
    "flat, 1 to 3": ("9e-4", "2.2e-3", "1.6e-3", "7e-4"),
}
Run = Callable[..., Estimate]


def spectra(n: int) -> dict[str, Tensor]:
    """Eigenvalues by name, for random eigenvectors."""
    return {
        "spike n": step(n, 1, n, 1),
        "spike 1e6": step(n, 1, 1e6, 1),
        "k⁻¹": powers(n, -1),
        "k⁻²": powers(n, -2),
        "k⁻⁴": powers(n, -4),
        "0.9ᵏ": geometric(n, 0.9),
        "0.8ᵏ + 1e-3": geometric(n, 0.8) + 1e-3,
        "1 and 1e-6": step(n, n // 2, 1, 1e-6),
        "four clusters": clusters(n, (1, 10, 100, 1000)),
        "step": step(n, n // 6, 100, 1),
        "flat, 1 to 3": flat(n, 1, 3),
        **{f"κ = 1e{p}": log_spaced(n, 10**p) for p in (4, 6, 8)},
    }


def matrices(n: int) -> dict[str, Tensor]:
    """Matrices by name: those of `spectra`, random ones, and such as favour or mislead random signs."""
    k, eye = torch.arange(1, n + 1, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    blocks = torch.block_diag(*[rotation(8, seed) for seed in range(n // 8)])
    ones8 = torch.ones(8, 8, dtype=torch.float64)
    shuffled = torch.randperm(n, generator=generator(3))
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < n:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    return {
        **{name: symmetric(values, 1) for name, values in spectra(n).items()},
        "Marchenko–Pastur, c = ½": wishart(2 * n, n),
        "Marchenko–Pastur, c = 2": wishart(n // 2, n),
        "diagonal, spike n": torch.diag(torch.where(k == 1, float(n), 1.0).double()),
        "diagonal, k⁻²": torch.diag(k**-2),
        "localised eigenvectors": (blocks * (1 / k)[shuffled]) @ blocks.mT,
        "Hadamard eigenvectors": (hadamard * k**-2) @ hadamard.mT / n,
        "spike on a pair": eye + spike(n, 2),
        "spike on three": eye + spike(n, 3),
        "localised blocks": torch.block_diag(*[ones8 * (i % 8 == 0) for i in range(n // 8)]) + eye / 100,
        "11ᵀ + I": 1 + eye,
    }


def spike(n: int, width: int) -> Tensor:
    """n vvᵀ, v spread evenly over the first coordinates."""
    v = torch.zeros(n, dtype=torch.float64)
    v[:width] = (n / width) ** 0.5
    return torch.outer(v, v)


def wishart(rows: int, n: int) -> Tensor:
    """XᵀX/rows of Gaussian X."""
    X = torch.randn(rows, n, dtype=torch.float64, generator=generator(5))
    return X.mT @ X / rows


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def estimators(A: Tensor) -> Iterator[tuple[str, Tensor, Run]]:
    """Name, truth and one run within a limit of every estimator with an error bar, for this matrix."""
    values = torch.linalg.eigvalsh(A).clamp_min(0)
    for method in TRACES:
        yield method, A.trace(), lambda g, m=method, **limit: trace(A, method=m, generator=g, **limit)
    for method in DIAGONALS:
        yield method, A.diagonal(), lambda g, m=method, **limit: diagonal(A, method=m, generator=g, **limit)
    for method in ("xtrace", "hutchinson"):
        name = "frobenius" if method == "xtrace" else "frobenius, hutchinson"
        yield name, A.norm(), lambda g, m=method, **limit: frobenius_norm(A, method=m, generator=g, **limit)
    mu = float(values.mean()) / 100
    yield (
        "logdet",
        (values + mu).log().sum(),
        lambda g, **limit: logdet(A, shift=mu, generator=g, **({"rtol": 1e-3} | limit)),
    )
    yield (
        "effective dimension",
        (values / (values + mu)).sum(),
        lambda g, **limit: effective_dimension(A, mu, generator=g, **({"rtol": 1e-3} | limit)),
    )


def covered(run: Run, truth: Tensor, runs: int, limit: dict[str, float]) -> float:
    """Per cent of the runs (of the entries, for diagonals) whose interval holds the truth."""
    hits, g = [], generator(2)
    for _ in range(runs):
        found = run(g, **limit)
        low, high = found.interval()
        slack = 1e-11 * truth.abs()
        hits.append(((low - slack <= truth) & (truth <= high + slack)).double().mean())
        if len(hits) == 4 and found.samples == 0:
            break  # it comes to the exact value here
    return 100 * float(torch.stack(hits).mean())


def coverage_table(runs: int) -> str:
    """The least coverage over the budgets, and over the tolerances, for each matrix and estimator."""
    rows, header = [], ["matrix"]
    for name, A in matrices(SIZE).items():
        cells, header = [], ["matrix"]
        for estimator, truth, run in estimators(A):
            found = [covered(run, truth, runs, limit) for limit in LIMITS]
            cells.append(f"{min(found[:4]):.0f} / {min(found[4:]):.0f}")
            header.append(estimator)
        rows.append([name, *cells])
    text = (
        "Least coverage in per cent over budgets of 10, 30, 100 and 300 products / over rtol = 0.1 and 0.01; "
        f"n = {SIZE}, {runs} runs a cell; μ is a hundredth of the mean eigenvalue."
    )
    return text + "\n\n" + table(header, rows)


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
    text = f"Mean of |error|/trace over {runs} seeds, n = {LARGE}, 120 products; in brackets the figures to reproduce."
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
    header = ["problem", "mean abs. error", "mean error", "stderr", "bias bound", "products", "intervals that hold"]
    text = (
        "In per cent of |log det|, for the GGN of log det P − log det A, over 30 seeds (300 products) or 10. The mean "
        "error is what the depth leaves of bias."
    )
    return text + "\n\n" + table(header, rows)


def _cells(found: list[Estimate], exact: Tensor, unit: Tensor) -> list[str]:
    def mean(numbers: list[Tensor]) -> str:
        return f"{100 * torch.stack([torch.as_tensor(x) for x in numbers]).mean() / unit:.2f} %"

    inside = sum(bool(low <= exact <= high) for low, high in (e.interval() for e in found))
    most = max(e.matvecs for e in found)
    errors = [e.value - exact for e in found]
    columns = [[x.abs() for x in errors], errors, [e.stderr for e in found], [e.bias_bound for e in found]]
    return [*map(mean, columns), f"≤ {most}", f"{inside} of {len(found)}"]


def digits_ggn() -> co.GGN:
    """The GGN of a trained 64-32-10 network on 1400 of scikit-learn's digits, float64."""
    data = all_digits().to(torch.float64).first(1400)
    torch.manual_seed(0)
    model = fit(perceptron(64, 32, 10).double(), data, prior_precision=1.0, steps=300, rate=1e-2)
    return co.GGN(co.linearize(model, (data.x, data.y), "classification"))


def main() -> None:
    """Measure, and write the tables into the page (or print them)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="runs of the coverage table; the others take at most 30")
    parser.add_argument("--only", choices=["coverage", "errors", "logdet"], default=None, help="one table alone")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="a page; default: print")
    arguments = parser.parse_args()
    machine = machine_line({"machine": facts(torch.get_num_threads())})
    tables = {"coverage": coverage_table, "errors": errors_table, "logdet": logdet_table}
    for name, make in tables.items():
        if arguments.only in (None, name):
            text = make(arguments.runs if name == "coverage" else min(arguments.runs, 30)) + "\n\n" + machine
            if arguments.output is None:
                print(text, end="\n\n")
            else:
                arguments.output.write_text(filled(arguments.output.read_text(), name, text))


if __name__ == "__main__":
    main()
