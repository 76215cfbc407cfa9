"""The share of runs in which a 95 % interval holds: one count for each matrix, estimator and limit.

Every run of every cell has its own seed. A cell ends once its count shows that the share is above 90 %; counts are
kept as JSON lines, from which a later call continues.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binom, t
from torch import Tensor

from benchmarks.machine import commit
from curvops.cli.problems import clusters, flat, geometric, log_spaced, powers, rotation, step, symmetric
from curvops.linalg import Estimate, Reason, diagonal, effective_dimension, frobenius_norm, logdet, trace

SIZE = 512
LIMITS: tuple[dict[str, Any], ...] = (
    *({"max_matvecs": b} for b in (10, 30, 100, 300)),
    *({"rtol": r} for r in (0.1, 0.01)),
)
TRACES = ("hutchinson", "hutch++", "xtrace", "xnystrace")
DIAGONALS = ("bekas", "xdiag", "xnysdiag")
ESTIMATORS = (*TRACES, *DIAGONALS, "frobenius", "frobenius, hutchinson", "logdet", "effective dimension")
Run = Callable[..., Estimate]

LEAST = 0.9
LOOKS = (30, 100, 300, 1000)
"""A cell is judged after so many runs."""
LEVEL, HOPELESS = 0.05, 0.001
"""It ends where a share of 90 % would show so many hits with at most this probability, or so few with at most that."""
EXACT = 4
"""So many first runs without an error at all end it, too."""
PIECE = 100
"""Runs that are written down together."""


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


@cache
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


@cache
def estimators(matrix: str) -> dict[str, tuple[Tensor, Run]]:
    """Truth and one run within a limit of every estimator with an error bar, for this matrix."""
    A = matrices(SIZE)[matrix]
    values = torch.linalg.eigvalsh(A).clamp_min(0)
    mu = float(values.mean()) / 100
    return {
        **{method: (A.trace(), partial(trace, A, method=method)) for method in TRACES},
        **{method: (A.diagonal(), partial(diagonal, A, method=method)) for method in DIAGONALS},
        "frobenius": (A.norm(), partial(frobenius_norm, A, method="xtrace")),
        "frobenius, hutchinson": (A.norm(), partial(frobenius_norm, A, method="hutchinson")),
        "logdet": ((values + mu).log().sum(), partial(logdet, A, shift=mu, rtol=1e-3)),
        "effective dimension": ((values / (values + mu)).sum(), partial(effective_dimension, A, mu, rtol=1e-3)),
    }


@dataclass(frozen=True, order=True)
class Cell:
    """The runs that are counted together."""

    matrix: str
    estimator: str
    limit: str

    @property
    def options(self) -> dict[str, Any]:
        return {str(limit): limit for limit in LIMITS}[self.limit]

    def seed(self, run: int) -> int:
        return zlib.crc32(f"{self.matrix}|{self.estimator}|{self.limit}|{run}".encode())


@dataclass(frozen=True)
class Count:
    """Runs, in how many the interval holds (for diagonals: shares of entries), and the same of those with a claim.

    A run refuses where its reason is neither CONVERGED nor BUDGET_SPENT: it says itself that it fell short.
    """

    runs: int = 0
    held: float = 0.0
    squares: float = 0.0
    claims: int = 0
    claims_held: float = 0.0
    matvecs: int = 0
    exact: bool = False

    def __add__(self, other: Count) -> Count:
        sums = (getattr(self, name) + getattr(other, name) for name in list(asdict(self))[:-1])
        return Count(*sums, exact=self.exact or other.exact)

    @property
    def share(self) -> float:
        return self.held / self.runs

    @property
    def ended(self) -> bool:
        """Whether it is clear on which side of 90 % the cell lies, or all runs are done."""
        if self.exact or self.runs >= LOOKS[-1]:
            return True
        return self.runs >= LOOKS[0] and (self.above(LEVEL) or self.below(HOPELESS))

    def above(self, level: float) -> bool:
        """Whether a share of 90 % would give this count, or a greater one, with at most this probability."""
        if self.squares == self.held:
            return bool(binom.sf(self.held - 1, self.runs, LEAST) <= level)
        return bool(t.sf(self._distance, self.runs - 1) <= level)

    def below(self, level: float) -> bool:
        """Whether a share of 90 % would give this count, or a smaller one, with at most this probability."""
        if self.squares == self.held:
            return bool(binom.cdf(self.held, self.runs, LEAST) <= level)
        return bool(t.cdf(self._distance, self.runs - 1) <= level)

    @property
    def _distance(self) -> float:
        """From 90 %, in standard errors of a mean of shares."""
        variance = (self.squares - self.held**2 / self.runs) / (self.runs - 1)
        return (self.share - LEAST) / math.sqrt(variance / self.runs)


def cells() -> Iterator[Cell]:
    """All of them, in the order of the table."""
    for matrix in matrices(SIZE):
        yield from (Cell(matrix, estimator, str(limit)) for estimator in ESTIMATORS for limit in LIMITS)


def measured(cell: Cell, first: int, last: int) -> Count:
    """Runs number ``first`` up to ``last``."""
    torch.set_num_threads(1)
    count, exact = Count(), first == 0
    truth, run = estimators(cell.matrix)[cell.estimator]
    slack = 1e-11 * truth.abs()
    for number in range(first, last):
        found = run(generator=generator(cell.seed(number)), **cell.options)
        low, high = found.interval()
        held = float(((low - slack <= truth) & (truth <= high + slack)).double().mean())
        claim = found.reason in (Reason.CONVERGED, Reason.BUDGET_SPENT)
        count += Count(1, held, held**2, int(claim), held * claim, found.matvecs)
        exact = exact and found.samples == 0 and held == 1
        if exact and count.runs == EXACT:
            return count + Count(exact=True)
    return count


def read(results: Path) -> dict[Cell, Count]:
    """The counts so far."""
    found: dict[Cell, Count] = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        row = json.loads(line)
        cell = Cell(*row["cell"])
        found[cell] = found.get(cell, Count()) + Count(**row["count"])
    return found


def study(chosen: Iterable[Cell], most: int, results: Path, processes: int) -> dict[Cell, Count]:
    """Count in every cell until it ends, or ``most`` runs; all cells up to one look, then those left up to the next."""
    chosen, found = list(chosen), read(results)
    commit_now = commit()
    pool: AbstractContextManager[ProcessPoolExecutor | None] = nullcontext()
    if processes > 1:
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    with pool as workers, results.open("a") as file:
        for look in sorted({min(look, most) for look in LOOKS}):
            left = [cell for cell in chosen if not found.get(cell, Count()).ended]
            tasks = [
                (cell, first, min(first + PIECE, look))
                for cell in left
                for first in range(found.get(cell, Count()).runs, look, PIECE)
            ]
            apply = map if workers is None else workers.map
            for (cell, *_), more in zip(tasks, apply(measured, *zip(*tasks)) if tasks else ()):
                found[cell] = found.get(cell, Count()) + more
                print(f"{cell.matrix}; {cell.estimator}; {cell.limit}: {found[cell]}", flush=True)
                row = {"cell": list(asdict(cell).values()), "count": asdict(more), "commit": commit_now}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
    return {cell: found[cell] for cell in chosen if cell in found}
