"""A^-½ b for a matrix that is cheap to multiply by: the Lanczos basis, or contour quadrature's short recurrences.

The matrix is a diagonal of 20,000 entries, so that only the method takes time and memory. Each run has its own process.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

import torch

from benchmarks.machine import reset_peak, resident, run_apart
from benchmarks.networks import SEED
from benchmarks.parts.figures import Figures
from benchmarks.timing import Comparison, Spread, seconds
from curvops.linalg import Diagonal, inverse_sqrt

SIZE = 20_000
MOST_TIME, MOST_MEMORY = 0.5, 0.25
CASES = (
    ("spaced", 1e4, "float64", 1e-6, MOST_TIME),
    ("spaced", 1e4, "float32", 1e-4, MOST_TIME),
    ("spaced", 1e6, "float64", 1e-6, None),
    ("decaying", 1e8, "float64", 1e-6, None),
)
SPECTRA = {"spaced": "evenly spaced logarithms", "decaying": "k⁻² above a prior"}
METHODS = ("contour", "lanczos")


def measure(figures: Figures) -> None:
    """Time, working memory and products of the contour, each as a share of what Lanczos takes."""
    for spectrum, kappa, dtype, rtol, most_time in CASES:
        given: tuple[object, ...] = (spectrum, kappa, dtype, rtol, "--threads", figures.settings.threads)
        ours, theirs = (run_apart("benchmarks.parts.roots", m, *given, prompt=True)[0] for m in METHODS)
        subject = f"{SPECTRA[spectrum]}, κ = {kappa:.0e}, {dtype}, rtol {rtol:.0e}"
        note = f"{subject}: relative error {ours['error']:.0e}, of Lanczos {theirs['error']:.0e} ({theirs['reason']})"
        times = [Spread.of([row["seconds"]]) for row in (ours, theirs)]

        def share(what: str, key: str, target: float | None = None, note: str = "") -> None:
            ratio = Comparison(Spread.of([ours[key] / theirs[key]]), *times, 1)  # noqa: B023
            figures.add(subject, f"{what}, contour", ratio, f"{what}, Lanczos", target, note=note)  # noqa: B023

        share("time", "seconds", most_time, note)
        share("working memory", "over", MOST_MEMORY)
        share("products", "matvecs")


def eigenvalues(spectrum: str, kappa: float) -> torch.Tensor:
    """The diagonal, the largest entry about 1."""
    if spectrum == "spaced":
        return torch.logspace(-math.log10(kappa), 0, SIZE, dtype=torch.float64)
    return torch.arange(1, SIZE + 1, dtype=torch.float64) ** -2 + 1 / kappa


def main() -> None:
    """One method on one case: a row of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts.roots", description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("spectrum", choices=SPECTRA)
    parser.add_argument("kappa", type=float)
    parser.add_argument("dtype", choices=("float32", "float64"))
    parser.add_argument("rtol", type=float)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    values = eigenvalues(options.spectrum, options.kappa).to(getattr(torch, options.dtype))
    source = torch.Generator().manual_seed(SEED)
    B = torch.randn(SIZE, 1, generator=source, dtype=torch.float64).to(values.dtype)
    chosen: dict[str, Any] = {"method": options.method, "rtol": options.rtol}
    few = Diagonal(values[::400].contiguous())
    inverse_sqrt(few, B[::400], lower_bound=float(values.min()), **chosen)  # the code is loaded
    before, found = reset_peak(), []
    taken = seconds(lambda: found.append(inverse_sqrt(Diagonal(values), B, lower_bound=float(values.min()), **chosen)))
    over, result = resident("VmHWM") - before, found[0]
    exact = values.double().rsqrt()[:, None] * B.double()
    row = {"seconds": taken, "over": over, "matvecs": result.matvecs, "reason": result.reasons[0].name}
    print(json.dumps(row | {"error": float((result.value.double() - exact).norm() / exact.norm())}))


if __name__ == "__main__":
    main()
