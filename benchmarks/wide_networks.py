"""Sampling wide networks on digits with and without repriorisation, after Hron et al. 2022, at a smaller scale.

    python -m benchmarks.wide_networks --json wide.json     # measure the page's cells: a file that grows cell by cell
    python -m benchmarks.wide_networks --report             # its tables and figures, from benchmarks/measured/

Three hidden layers of GELU, targets one-hot minus .1, noise .1² (a variance of .01), weights N(0, 2/fan-in), biases
N(0, .1²); float32. A cell is one width and one number of points, with T ("readout") and without ("none"). The sampler
is underdamped Langevin with a Metropolis correction. The step size is tuned to the same acceptance for both, and the
share of momentum refreshed per step is 1 − e^−2ε. Both start at the same draws T(φ), φ ~ N(0, I), and two fifths of the
following steps are left out as burn-in. Seconds are those of the process, so that other jobs on the machine do not
count, and the two kinds of step take turns when they are compared. A cell that is in the file is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call

import curvops as co
from benchmarks.digits import load_digits
from benchmarks.figures import save_small
from benchmarks.machine import facts
from benchmarks.report import fill
from benchmarks.study_page import MEASURED
from benchmarks.tables import machine_line, tables
from curvops.plots import style
from curvops.sampling.diagnostics import effective_size, random_projections
from curvops.sampling.reprior import divergence

NOISE, WEIGHT_STD, BIAS_STD = 0.01, 2**0.5, 0.1
TARGET, LEAST, MOST = 0.99, 0.98, 0.995
"""Acceptance that step sizes are tuned to; chains outside the others are run again, with another step, once at most."""
TANGENT_REG = 0.3
"""λ of the tangent-kernel form, which folds at σ²."""
PROJECTIONS, TEST = 32, 32
"""Random projections of θ; held-out points whose outputs are followed."""

MIXED = 1.3
"""R̂² up to which a figure shows a point as one of chains that have mixed."""

PAGE, KEPT = Path("docs/wide_networks.md"), MEASURED / "wide_networks.json"
PLAN = {
    ("mlp", 256, 64): (5_000, 15_000),
    ("mlp", 64, 128): (10_000, 20_000),
    ("mlp", 128, 128): (10_000, 20_000),
    ("mlp", 256, 128): (8_000, 16_000),
    ("mlp", 512, 128): (6_000, 18_000),
    ("mlp", 1024, 128): (4_000, 18_000),
    ("mlp", 256, 256): (7_000, 16_000),
    ("mlp", 256, 512): (8_000, 12_000),
    ("mlp", 256, 1024): (6_000, 9_000),
    ("resnet", 4, 32): (10_000, 16_000),
    ("resnet", 4, 512): (100_000, 130_000),
    ("curve", 16, 12): (3_000, 3_000),
}
"""The cells of the page: network, width and points, with the steps of a chain with T and without."""
CURVE_SEEDS = 3
"""Seeds of the curve; the others have seed 0."""

Draw = dict[str, Tensor]


def mlp(width: int) -> nn.Module:
    """64 pixels, three hidden layers, ten outputs."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (64, width, width):
        layers += [nn.Linear(inputs, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


class Residual(nn.Module):
    """h + a layer of h, both divided by √2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.GELU(), nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        return (h + self.inner(h)) / 2**0.5


def resnet(channels: int) -> nn.Module:
    """Two residual blocks without normalisation on 8 × 8 pixels; the readout takes 16 · channels features."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        Residual(channels),
        nn.AvgPool2d(2),
        Residual(channels),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(16 * channels, 10),
    )


def curve(width: int) -> nn.Module:
    """One hidden layer between two numbers, small enough for the tangent-kernel form; in float64."""
    return nn.Sequential(nn.Linear(1, width), nn.GELU(), nn.Linear(width, 1)).double()


NETWORKS: dict[str, Callable[[int], nn.Module]] = {"mlp": mlp, "resnet": resnet, "curve": curve}
CHANGES = {"readout": None, "none": math.inf, "ntk": TANGENT_REG}
"""λ of each change of variables; None is σ²."""


def digits(points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and targets, and held-out inputs; pixels with mean 0 and variance 1."""
    split = load_digits()
    mean, spread = split.train.x.mean(), split.train.x.std()
    x, y = split.train.x[:points], split.train.y[:points]
    targets = nn.functional.one_hot(y, 10).float() - 0.1
    return ((x - mean) / spread).float(), targets, ((split.test.x[:TEST] - mean) / spread).float()


def sine(points: int) -> tuple[Tensor, Tensor, Tensor]:
    """One number from another, and inputs beyond them."""
    x = torch.linspace(-2, 2, points, dtype=torch.float64).unsqueeze(1)
    return x, (2 * x).sin(), torch.linspace(-2.5, 2.5, TEST, dtype=torch.float64).unsqueeze(1)


def target(network: str, width: int, points: int, change: str) -> tuple[Any, Tensor]:
    """The log posterior in φ, or in white weights without T; and held-out inputs."""
    torch.manual_seed(0)
    model = NETWORKS[network](width)
    x, y, held_out = sine(points) if network == "curve" else digits(points)
    prior = co.sampling.ntk_precision(model, WEIGHT_STD, BIAS_STD)
    form: Any = "ntk" if change == "ntk" else None
    return co.sampling.reprior(model, (x, y), NOISE, CHANGES[change], form, prior_precision=prior), held_out


def first(draws: Draw) -> Draw:
    """The first of stacked draws."""
    return {name: block[0] for name, block in draws.items()}


def langevin(rep: Any, epsilon: float) -> Any:
    """With momenta of mass 1: step sizes in the units of the prior, stable below 2/√λ of −∇² log p̃."""
    return co.sampling.lmc(rep, epsilon, refreshment=1 - math.exp(-2 * epsilon), sigma=rep.data_size**-0.5)


def tuned(rep: Any, start: Draw, guess: float, steps: int, seed: int) -> tuple[float, Any]:
    """The step size of `TARGET` acceptance, and a state from which to go on."""
    epsilon, state = guess, start
    for share in (0.6, 0.4):
        sampler = langevin(rep, epsilon)
        chain = co.sampling.run(
            sampler,
            getattr(state, "params", state),
            steps=1,
            warmup=max(2, int(share * steps)),
            target_acceptance=TARGET,
            generator=torch.Generator().manual_seed(seed),
            progress=False,
        )
        epsilon, state = chain.sampler.step_size(0), chain.state
    return epsilon, state


def chain(rep: Any, held_out: Tensor, start: Draw, epsilon: float, steps: int, thin: int, seed: int) -> dict[str, Any]:
    """Projections of θ and outputs at held-out inputs every `thin` steps, acceptance, and seconds a step."""
    sampler = langevin(rep, epsilon)
    state = sampler.init(start, torch.Generator().manual_seed(seed))
    model, drawn = rep._problem.model.module, torch.Generator().manual_seed(0)
    onto = {
        name: torch.randn(PROJECTIONS, p.numel(), generator=drawn).to(p.dtype) for name, p in model.named_parameters()
    }
    weights, outputs, acceptance, seconds = [], [], 0.0, 0.0
    for step in range(steps):
        begun = time.process_time()
        state, info = sampler.update(state, inplace=True)
        seconds += time.process_time() - begun
        acceptance += float(info.acceptance) / steps
        if (step + 1) % thin == 0:
            with torch.no_grad():
                theta = rep.map(state.params)
                weights.append(sum(onto[name] @ theta[name].flatten() for name in onto))
                outputs.append(functional_call(model, theta, (held_out,)))
    return {
        "weights": torch.stack(weights),
        "outputs": torch.stack(outputs),
        "acceptance": acceptance,
        "seconds": seconds / steps,
        "last": {name: block.clone() for name, block in state.params.items()},
    }


def cell(
    network: str, width: int, points: int, change: str, steps: int, seed: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Effective samples a thousand steps and a second, R̂², acceptance, step size; with T the gaps, too."""
    rep, held_out = target(network, width, points, change)
    exact, _ = target(network, width, points, "readout")
    drawn = exact.normal(options.chains, torch.Generator().manual_seed(seed + 1))
    starts = [{name: block[i] for name, block in drawn.items()} for i in range(options.chains)]
    if change == "none":
        starts = [rep.inverse(exact.map(phi)) for phi in starts]
    if change == "ntk":  # where its T is inverted, the same φ: far from no draw of its own
        starts = [{name: block[i] for name, block in drawn.items()} for i in range(options.chains)]
    guess = options.guess_without if change == "none" else options.guess_with
    epsilon, state = tuned(rep, starts[0], guess, options.warmup, seed)
    starts[0] = state.params
    for part, length in enumerate((steps // 5, steps // 5, steps, steps)):  # the first two are for settling down
        thin = max(1, length // 300)
        seeds = range(1000 * seed + 100 * part, 1000 * seed + 100 * part + options.chains)
        runs = [chain(rep, held_out, start, epsilon, length, thin, seed) for start, seed in zip(starts, seeds)]
        starts = [each["last"] for each in runs]
        rejected = max(1e-6, 1 - sum(each["acceptance"] for each in runs) / len(runs))
        if length == steps and 1 - MOST <= rejected <= 1 - LEAST:
            break
        if part < 3:
            epsilon *= min(2.0, ((1 - TARGET) / rejected) ** (1 / 3))  # the energy's error is of third order
    found: dict[str, Any] = {
        "network": network, "width": width, "points": points, "change": change, "seed": seed,
        "epsilon": epsilon, "chains": options.chains, "steps": steps, "settling": 2 * (steps // 5),
        "acceptance": sum(each["acceptance"] for each in runs) / len(runs),
        "seconds": sum(each["seconds"] for each in runs) / len(runs),
        "parameters": sum(block.numel() for block in starts[0].values()),
        "options": {"warmup": options.warmup, "guess": guess, "draws": options.draws},
    }  # fmt: skip
    for what in ("weights", "outputs"):
        series = torch.stack([each[what] for each in runs])
        looked = random_projections(series, 100, torch.Generator().manual_seed(2))
        found[what] = {
            "ess": float(looked.ess.mean(1).median()) * 1000 / steps,
            "together": float(effective_size(looked.series).median()) * 1000 / steps / options.chains,
            "r_squared": None if looked.r_squared is None else float(looked.r_squared.mean()),
        }
    if change == "readout":
        found |= gaps(rep, options)
    return found


def pace(network: str, width: int, points: int, count: int = 15) -> dict[str, float]:
    """Seconds of a step with and without T, which take turns, and how many times as long the first one is."""
    chains = []
    for change in ("readout", "none"):
        rep, _ = target(network, width, points, change)
        sampler = langevin(rep, 1e-4)
        start = first(rep.normal(1, torch.Generator().manual_seed(0)))
        chains.append([sampler, sampler.init(start, torch.Generator().manual_seed(0)), []])
    for _ in range(count + 2):
        for each in chains:
            sampler, state, seconds = each
            begun = time.process_time()
            each[1], _ = sampler.update(state, inplace=True)
            seconds.append(time.process_time() - begun)
    took = [torch.tensor(seconds[2:], dtype=torch.float64) for _, _, seconds in chains]
    with_t, without = (float(each.median()) for each in took)
    return {"readout": with_t, "none": without, "ratio": float((took[0] / took[1]).median())}


def gaps(rep: Any, options: argparse.Namespace) -> dict[str, Any]:
    """KL(prior ‖ p̃), the standard deviation of h, and the gradient gap at draws of the prior, a weight."""
    gap = rep.gradient_gap(rep.normal(max(2, options.draws // 8), torch.Generator().manual_seed(4)))
    seeds = (torch.Generator().manual_seed(1000 + i) for i in range(options.draws))  # one draw at a time in memory
    h = torch.stack([rep.log_ratio(first(rep.normal(1, seed))) for seed in seeds])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", co.sampling.FewDrawsWarning)
        kl = divergence(h)
    return {
        "kl": [float(kl.value), float(kl.stderr)],
        "spread": float(h.std()),
        "gap": [float(gap.total.value), float(gap.total.stderr)],
        "gap_readout": float(gap.readout.value),
    }


def measure(options: argparse.Namespace) -> None:
    """All cells of the plan that the file lacks, one after another."""
    result = read(options.json)
    result.setdefault("machine", facts(torch.get_num_threads()))
    for (network, width, points), (with_t, without) in PLAN.items():
        of_curve = network == "curve"
        for seed, change in itertools.product(
            range(CURVE_SEEDS if of_curve else 1), CHANGES if of_curve else ("readout", "none")
        ):
            known = {(c["network"], c["width"], c["points"], c["change"], c["seed"]) for c in result["cells"]}
            if network not in options.networks or (network, width, points, change, seed) in known:
                continue
            steps = options.steps or (without if change == "none" else with_t)
            result["cells"].append(cell(network, width, points, change, steps, seed, options))
            options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
            print(json.dumps(result["cells"][-1]), flush=True)
    for network in ("mlp", "resnet"):
        for _, beside in pairs(result, network):
            if "pace" not in beside:
                beside["pace"] = pace(network, beside["width"], beside["points"])
    options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The cells measured so far."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}
    return found


def _key(cell: dict[str, Any]) -> tuple[int, int, int]:
    """The key that two cells share when they are compared."""
    return cell["width"], cell["points"], cell["seed"]


def pairs(result: dict[str, Any], network: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Cells with T beside the same without."""
    with_t = [c for c in result["cells"] if c["network"] == network and c["change"] == "readout"]
    without = {_key(c): c for c in result["cells"] if c["network"] == network and c["change"] == "none"}
    found = [(c, without[_key(c)]) for c in with_t if _key(c) in without]
    return sorted(found, key=lambda pair: (pair[0]["points"], pair[0]["width"]))


def gain(pair: tuple[dict[str, Any], dict[str, Any]], what: str, by: str = "step", of: str = "together") -> float:
    """How many times the effective samples, a step or a second, of chains "together" or of each by itself ("ess")."""
    ratio: float = pair[0][what][of] / pair[1][what][of]
    return ratio if by == "step" else ratio / pair[1]["pace"]["ratio"]


def mixing_table(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """A row a cell."""

    def both(pair: tuple[dict[str, Any], dict[str, Any]], of: Callable[[dict[str, Any]], str]) -> str:
        return f"{of(pair[0])} / {of(pair[1])}"

    rows = [
        [
            f"{pair[0]['width']:,}",
            f"{pair[0]['points']:,}",
            both(pair, lambda c: f"{c['steps']:,}"),
            both(pair, lambda c: f"{c['epsilon']:.3g}"),
            both(pair, lambda c: f"{c['acceptance']:.3f}"),
            both(pair, lambda c: f"{c['weights']['together']:.2g}"),
            both(pair, lambda c: f"{c['weights']['r_squared']:.2f}"),
            both(pair, lambda c: f"{c['outputs']['together']:.2g}"),
            both(pair, lambda c: f"{c['outputs']['r_squared']:.2f}"),
            *(f"{gain(pair, what):.1f} ({gain(pair, what, of='ess'):.1f})" for what in ("weights", "outputs")),
            f"{gain(pair, 'outputs', 'second'):.1f}",
            f"{1e3 * pair[1]['pace']['readout']:.1f} / {1e3 * pair[1]['pace']['none']:.1f}",
            f"{pair[1]['pace']['ratio']:.2f}",
        ]
        for pair in found
    ]
    header = ["width", "points", "steps", "step size", "acceptance", "ESS of θ", "R̂² of θ", "ESS of f", "R̂² of f"]
    header += ["gain θ", "gain f", "a second", "ms a step", "ratio"]
    of_outputs, of_weights = ["gain f", "a second", "ESS of f", "R̂² of f"], ["gain θ", "ESS of θ", "R̂² of θ"]
    of_steps = ["ratio", "ms a step", "steps", "step size", "acceptance"]
    return tables(header, rows, *(["width", "points", *part] for part in (of_outputs, of_weights, of_steps)))


def curves_table(result: dict[str, Any]) -> str:
    """The three changes of variables side by side, for every seed."""
    cells = sorted((c for c in result["cells"] if c["network"] == "curve"), key=lambda c: (c["width"], c["change"]))
    rows = [
        [
            {"readout": "readout", "none": "none", "ntk": f"tangent kernel, λ = {TANGENT_REG}"}[c["change"]],
            f"{c['width']:,}",
            f"{c.get('seed', 0)}",
            f"{c['steps']:,}",
            f"{c['epsilon']:.3g}",
            f"{c['acceptance']:.3f}",
            f"{c['weights']['together']:.2g}",
            f"{c['weights']['r_squared']:.2f}",
            f"{c['outputs']['together']:.2g}",
            f"{c['outputs']['r_squared']:.2f}",
            f"{1e3 * c['seconds']:.1f}",
        ]
        for c in cells
    ]
    header = [
        "change",
        "width",
        "seed",
        "steps",
        "step size",
        "acceptance",
        "ESS of θ",
        "R̂² of θ",
        "ESS of f",
        "R̂² of f",
    ]
    header += ["ms a step"]
    mixed, paid = header[6:10], ["width", "steps", "step size", "acceptance", "ms a step"]
    return tables(header, rows, ["change", "seed", *mixed], ["change", "seed", *paid])


def gaps_table(result: dict[str, Any]) -> str:
    """Tabulate the theory's prediction for each cell, without a chain."""
    cells = [c for c in result["cells"] if c["change"] == "readout" and c["network"] != "curve"]
    rows = [
        [
            c["network"],
            f"{c['width']:,}",
            f"{c['points']:,}",
            f"{c['parameters']:,}",
            f"{c['spread']:.2f}",
            f"{c['kl'][0]:.2f} ± {c['kl'][1]:.2f}",
            f"{c['gap'][0]:.3g} ± {c['gap'][1]:.1g}",
            f"{c['gap_readout']:.1g}",
        ]
        for c in sorted(cells, key=lambda c: (c["network"], c["points"], c["width"]))
    ]
    gaps = ["E‖∇h‖²", "E‖∇h‖², readout"]
    header, key = (
        ["network", "width", "points", "weights", "sd of h", "KL, nats", *gaps],
        ["network", "width", "points"],
    )
    return tables(header, rows, [*key, "KL, nats", "sd of h"], [*key, *gaps, "weights"])


def slices(reach: float = 3.0, count: int = 25) -> dict[str, Tensor]:
    """log densities on a plane through a posterior draw, spanned by two random directions, before and after T.

    Directions are of the readout's and of all other weights, each of length 1: of N(0, I) the contours are circles.
    """
    found = {}
    grid = torch.linspace(-reach, reach, count, dtype=torch.float64)
    for width in (8, 256):
        torch.manual_seed(0)
        model, (x, y, _) = mlp(width).double(), digits(64)
        prior = co.sampling.ntk_precision(model, WEIGHT_STD, BIAS_STD)
        maps = {
            change: co.sampling.reprior(
                model, (x, y), NOISE, math.inf if change == "before" else None, prior_precision=prior
            )
            for change in ("before", "after")
        }
        centre, first_way, second_way = (
            first(maps["after"].normal(1, torch.Generator().manual_seed(seed))) for seed in (0, 1, 2)
        )
        centre = tuned(maps["after"], centre, 0.02, 200, 0)[1].params  # a narrow network's φ are not those of the prior
        readout = maps["after"].readout
        for change, rep in maps.items():
            origin = centre if change == "after" else rep.inverse(maps["after"].map(centre))

            parts = ({n: b for n, b in first_way.items() if n in readout},
                     {n: b for n, b in second_way.items() if n not in readout})  # fmt: skip
            sizes = (torch.stack([b.square().sum() for b in part.values()]).sum().sqrt() for part in parts)
            way = {n: b / size for part, size in zip(parts, sizes) for n, b in part.items()}
            found[f"width {width}, {change} T"] = plane(rep, origin, way, grid)
    return found


@torch.no_grad()
def plane(rep: Any, origin: Draw, way: Draw, grid: Tensor) -> Tensor:
    """log densities at the origin plus a of the readout's way plus b of that of all other weights, (a, b)."""

    def value(a: Tensor, b: Tensor) -> Tensor:
        return -rep.energy({n: o + (a if n in rep.readout else b) * way[n] for n, o in origin.items()})

    return torch.stack([torch.stack([value(a, b) for b in grid]) for a in grid])


def density_figure(planes: dict[str, Tensor], reach: float = 3.0) -> Figure:
    """Contours of the log densities below their maxima."""
    drawn = style.blank(9.6, 2.7)
    for axes, (name, plane) in zip(drawn.subplots(1, len(planes)), planes.items()):
        depth = (plane.max() - plane).numpy()
        levels = [0.5, 2, 4.5, 8, 32, 128, 512]  # the first four are one to four standard deviations of N(0, I)
        grid = torch.linspace(-reach, reach, len(depth)).numpy()
        shown = axes.contour(grid, grid, depth, levels=levels, colors=style.COLOURS[0], linewidths=1.0)
        axes.clabel(shown, fontsize=6, fmt=lambda level: f"{level:g}")
        style.dress(axes, "other weights", "readout", name)
    return drawn


def mixing_figure(result: dict[str, Any], points: int, width: int) -> Figure:
    """Gains against width and number of points, open where a chain has not mixed; the gaps against the width."""
    drawn = style.blank(9.6, 3.2)
    left, middle, right = drawn.subplots(1, 3)
    found = pairs(result, "mlp")
    by_width = [pair for pair in found if pair[0]["points"] == points]
    by_points = [pair for pair in found if pair[0]["width"] == width]
    for axes, rows, key in ((left, by_width, "width"), (middle, by_points, "points")):
        for look, (what, label) in enumerate((("weights", "θ, a step"), ("outputs", "f, a step"))):
            line(axes, look, [p[0][key] for p in rows], [gain(p, what) for p in rows], label)
        line(axes, 2, [p[0][key] for p in rows], [gain(p, "outputs", "second") for p in rows], "f, a second")
        for drawn_line, what in zip(list(axes.lines), ("weights", "outputs", "outputs")):
            unmixed = [max(c[what]["r_squared"] for c in pair) > MIXED for pair in rows]
            at = [(x, y) for x, y, open_ in zip(*drawn_line.get_data(), unmixed) if open_]
            look_like = {"color": drawn_line.get_color(), "marker": drawn_line.get_marker(), "linestyle": "none"}
            if at:
                axes.plot(*zip(*at), **look_like, markerfacecolor="white")
        axes.axhline(1.0, color=style.GREY, linewidth=1, linestyle=":")
    line(right, 0, [p[0]["width"] for p in by_width], [p[0]["spread"] ** 2 / 2 for p in by_width], "½ Var h, nats")
    line(right, 1, [p[0]["width"] for p in by_width], [p[0]["kl"][0] for p in by_width], "KL, from below")
    line(right, 2, [p[0]["width"] for p in by_width], [p[0]["gap"][0] for p in by_width], "E‖∇h‖²")
    style.dress(left, f"width, {points} points", "gain in effective samples")
    style.dress(middle, f"points, width {width}", "gain in effective samples")
    style.dress(right, f"width, {points} points", "distance from the prior")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize=style.SMALL, frameon=False)
    return drawn


def line(axes: Any, look: int, x: list[float], y: list[float], label: str) -> None:
    """One curve in the house style."""
    axes.plot(x, y, color=style.COLOURS[look], marker=style.MARKERS[look], linestyle=style.DASHES[look], label=label)


def texts(result: dict[str, Any]) -> dict[str, str]:
    """The sections of the page."""
    return {
        "mixing": f"{mixing_table(pairs(result, 'mlp'))}\n\n{machine_line(result)}",
        "residual": mixing_table(pairs(result, "resnet")),
        "gaps": gaps_table(result),
        "curves": curves_table(result),
    }


def report(options: argparse.Namespace) -> None:
    """The tables into the page and the figures beside it."""
    result = read(options.json)
    for section, text in texts(result).items():
        fill(options.page, section, text)
    folder = options.page.parent / "figures"
    save_small(mixing_figure(result, 128, 256), folder / "wide_networks.png")
    save_small(density_figure(slices()), folder / "wide_networks_density.png")


def main() -> None:
    """Measure what is missing, or write what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wide_networks", description=__doc__)
    parser.add_argument("--json", type=Path, default=KEPT, metavar="FILE", help="cells measured, and to be added")
    parser.add_argument("--report", action="store_true", help="measure nothing: write what the file holds")
    parser.add_argument("--page", type=Path, default=PAGE, help="whose sections are filled")
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="of these alone")
    parser.add_argument("--steps", type=int, default=None, help="of every chain, in place of the plan's: to try")
    parser.add_argument("--warmup", type=int, default=600, help="steps in which a step size is found")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--draws", type=int, default=400, help="of the prior, for the gaps")
    parser.add_argument("--guess-with", type=float, default=0.02, help="first step size with T")
    parser.add_argument("--guess-without", type=float, default=0.002, help="first step size without")
    options = parser.parse_args()
    if options.report:
        report(options)
    else:
        measure(options)


if __name__ == "__main__":
    main()
