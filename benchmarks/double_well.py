"""Serial chain, parallel chains or an ensemble: which finds the modes of a double well, and their widths?

    python -m benchmarks.double_well

Figure 2 of Duffield et al. 2024, log p(x) = −Σ x⁴/10 + Σ x² in two dimensions: four modes, whose masses are equal and
whose variance is a quadrature. Each method uses the same number of gradients: one long chain, 64 chains from dispersed
starts, and gradient ascent with momentum from the same starts (τ = 0). The chains use the paper's SGHMC and BAOA, whose
error is of second order in the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from torch import Tensor

import curvops as co
from benchmarks import study_page
from benchmarks.claims import spread
from benchmarks.tables import table
from curvops.plots import style

CHAINS, STEPS, SHOWN = 64, 600, 700
STEP_SIZE, FRICTION, KEPT = 0.05, 1.0, 200
"""The last KEPT steps of each parallel chain count; of the serial one those after as many more. SHOWN are drawn."""
MODES = 4


def log_density(params: dict[str, Tensor], batch: object) -> Tensor:
    """Up to its constant."""
    x = params["x"]
    return (x.square() - x**4 / 10).sum()


def width() -> float:
    """The variance of a coordinate within a mode, x > 0."""

    def moment(k: int) -> float:
        return float(quad(lambda x: x**k * math.exp(x**2 - x**4 / 10), 0, 10)[0])

    return moment(2) / moment(0) - (moment(1) / moment(0)) ** 2


@dataclass(frozen=True, eq=False)
class Found:
    """Draws (n, 2) of one method and seed."""

    draws: Tensor

    @property
    def modes(self) -> Tensor:
        """The mode of each draw, by the signs."""
        return (self.draws[:, 0] > 0).long() + 2 * (self.draws[:, 1] > 0).long()

    @property
    def shares(self) -> Tensor:
        """The shares of the draws in each mode; a quarter is right."""
        return self.modes.bincount(minlength=MODES) / len(self.draws)

    @property
    def variance(self) -> float:
        """The variance of a coordinate within a mode, averaged over the modes found."""
        found = [self.draws[self.modes == mode] for mode in range(MODES)]
        return float(torch.stack([each.var(0) for each in found if len(each) > 1]).mean())


def serial(seed: int, method: Any) -> Found:
    """One chain with as many gradients as all the others together."""
    generator = torch.Generator().manual_seed(seed)
    sampler = method(log_density, STEP_SIZE, alpha=FRICTION, data_size=1)
    start = _start(generator)
    burned, steps = CHAINS * (STEPS - KEPT), CHAINS * KEPT
    chain = co.sampling.run(sampler, start, steps=steps, warmup=burned, generator=generator, progress=False)
    return Found(chain.theta[0])


def parallel(seed: int, method: Any, temperature: float = 1.0) -> Found:
    """Chains from dispersed starts; at temperature 0 an ensemble of modes."""
    generator = torch.Generator().manual_seed(seed)
    one = method(log_density, STEP_SIZE, alpha=FRICTION, data_size=1, temperature=temperature)
    starts = [_start(generator) for _ in range(CHAINS)]
    chain = co.sampling.run(
        co.sampling.chains(one, CHAINS),
        starts,
        steps=KEPT,
        warmup=STEPS - KEPT,
        thin=KEPT // 10,
        generator=generator,
        progress=False,
    )
    return Found(chain.theta.flatten(0, 1))


def _start(generator: torch.Generator) -> dict[str, Tensor]:
    return {"x": 6 * torch.rand(2, generator=generator, dtype=torch.float64) - 3}


def study(seeds: int) -> dict[str, Any]:
    """By method the modes found, the largest error of a share and the variance of each seed; draws of the first."""
    found: dict[str, Any] = {}
    for name, method in METHODS.items():
        runs = [method(seed) for seed in range(seeds)]
        draws = runs[0].draws
        found[name] = {
            "modes": [int((each.shares > 0).sum()) for each in runs],
            "error": [float((each.shares - 1 / MODES).abs().max()) for each in runs],
            "variance": [each.variance for each in runs],
            "draws": [[round(float(x), 3) for x in draw] for draw in draws[:: max(1, len(draws) // SHOWN)]],
        }
    return found


METHODS: dict[str, Callable[[int], Found]] = {
    "serial, SGHMC": lambda seed: serial(seed, co.sampling.sghmc),
    "serial, BAOA": lambda seed: serial(seed, co.sampling.baoa),
    "parallel, SGHMC": lambda seed: parallel(seed, co.sampling.sghmc),
    "parallel, BAOA": lambda seed: parallel(seed, co.sampling.baoa),
    "ensemble": lambda seed: parallel(seed, co.sampling.baoa, temperature=0.0),
}


def report(found: dict[str, Any]) -> str:
    """A row a method, and whether the claim held."""
    rows = []
    for name, row in found.items():
        fewest, most = int(row["modes"].min()), int(row["modes"].max())
        cells = [f"{fewest}–{most}" if fewest < most else f"{most}", f"{100 * float(row['error'].mean()):.1f} %"]
        rows.append([name, *cells, spread(row["variance"])])
    heads = ["method", "modes found, of 4", "largest error of a mode's share", f"variance in a mode ({width():.3f})"]
    seeds = len(found["ensemble"]["variance"])
    said = f"The largest error is the mean over {seeds} seeds; the variance is the mean ± standard deviation over them."
    return f"{said}\n\n{table(heads, rows)}"


def figure(found: dict[str, Any]) -> Figure:
    """The draws of the first seed over the density's contours."""
    drawn = style.blank(9.6, 3.9)
    shown = [name for name in found if "BAOA" not in name]
    grid = torch.linspace(-4.5, 4.5, 181, dtype=torch.float64)
    well = grid.square() - grid**4 / 10
    density = (well[:, None] + well[None, :]).exp()
    for axes, name in zip(drawn.subplots(1, 3, sharex=True, sharey=True), shown):
        axes.contour(grid, grid, density, levels=6, colors=style.GREY, linewidths=0.7)
        axes.plot(*found[name]["draws"].T, ".", color=style.COLOURS[0], markersize=2.5, alpha=0.6)
        style.dress(axes, "x₁", "x₂" if name == shown[0] else "", name)
        axes.set_box_aspect(1)
    return drawn


STUDY = study_page.Study(
    "double_well",
    __doc__,
    study,
    {"double_well": report},
    "docs/samplers_measured.md",
    figures={"double_well": figure},
    options={"seeds": (8, "runs of each method")},
)

if __name__ == "__main__":
    STUDY.run()
