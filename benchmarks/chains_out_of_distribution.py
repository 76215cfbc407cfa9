"""Do parallel chains detect unknown inputs?            python -m benchmarks.chains_out_of_distribution

After Duffield et al. 2024, whose network is a language model's last layer. Here a perceptron is trained on five of
scikit-learn's digits, and then sees the other five, and its own five turned by 90 degrees. SGD is the sampler at
temperature 0. Serial draws are draws of one chain at a fixed distance in steps; parallel draws are the last draws of
ten chains. The table and the figure go into the page (`--page`) and next to it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.claims import claims_table, spread
from benchmarks.digits import all_digits, rotate
from benchmarks.layers import perceptron
from benchmarks.tables import tables
from curvops import metrics
from curvops.plots import style
from curvops.posterior.predictions import answers

CHAINS = 10
KNOWN, POINTS, WIDTH, BATCH = 5, 300, 20, 50
STEP_SIZE, FRICTION, PRIOR = 0.2, 0.1, 1.0
STEPS = 500
SPACINGS = (1, 10, 100, STEPS)
"""Steps between two of a serial chain's draws."""
UNKNOWN = ("other digits", "turned digits")
CLAIMED = {"total": 0.90, "epistemic": 0.95}
"""AUROC of parallel chains in the paper; of its serial chain .17."""

Draws = Mapping[str, list[Tensor]]
"""By method the sets of draws (S, d) that repeat it."""


@dataclass(frozen=True, eq=False)
class Task:
    """Training points of the known digits, test points of them, and unknown ones of two kinds."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    unknown: dict[str, Tensor]

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The training points, some at a time; their order is random."""
        return list(zip(*(part.split(BATCH) for part in self.train)))


def task(seed: int, points: int = POINTS) -> Task:
    """Five digits at random are known."""
    generator = torch.Generator().manual_seed(seed)
    images = all_digits()
    digits, order = torch.randperm(10, generator=generator), torch.randperm(len(images), generator=generator)
    place = digits.argsort()[images.y[order]]  # the known digits are 0 … KNOWN − 1
    known = place < KNOWN
    x, y, others = images.x[order][known], place[known], images.x[order][~known][:points]
    training, held_out = slice(0, points), slice(points, 2 * points)
    unknown = dict(zip(UNKNOWN, (others.flatten(1), rotate(x[held_out], 90).flatten(1))))
    return Task((x[training].flatten(1), y[training]), (x[held_out].flatten(1), y[held_out]), unknown)


def network(seed: int) -> nn.Module:
    """Two layers, at a start of their own."""
    torch.manual_seed(seed)
    return perceptron(64, WIDTH, KNOWN).eval()


def drawn(data: Task, seed: int, steps: int = STEPS, spacings: tuple[int, ...] = SPACINGS) -> Draws:
    """The draws of every method: the same sampler at another temperature, from other starts, kept at other steps."""
    models = [network(CHAINS * seed + i) for i in range(CHAINS)]
    density = co.sampling.log_posterior(
        models[0], "classification", prior_precision=PRIOR, data_size=len(data.train[0])
    )
    starts = [dict(model.named_parameters()) for model in models]

    def last(temperature: float, many: bool) -> Any:
        sampler = co.sampling.sghmc(density, STEP_SIZE, alpha=FRICTION, temperature=temperature, momentum_first=True)
        chains = co.sampling.chains(sampler, CHAINS)
        state = chains.init(starts if many else starts[0], torch.Generator().manual_seed(seed))
        return co.sampling.run(chains, state, data.batches, steps=steps, thin=steps)

    cold, single, run = last(0.0, True), last(1.0, False), last(1.0, True)
    found = {
        "SGD": list(cold.theta),
        f"{CHAINS} × SGD": [cold.theta[:, 0]],
        f"parallel, {CHAINS} starts": [run.theta[:, 0]],
        "parallel, one start": [single.theta[:, 0]],
    }
    for spacing in spacings:
        run = co.sampling.run(run.sampler, run.state, data.batches, steps=CHAINS * spacing, thin=spacing)
        found[f"serial, every {spacing}"] = list(run.theta)
    return found


def scored(theta: Tensor, data: Task) -> dict[str, float]:
    """Accuracy and loss of known test digits, and how well total and epistemic uncertainty rank the unknown."""
    model = network(0)
    names, shapes = zip(*((name, p.shape) for name, p in model.named_parameters()))

    def parts(x: Tensor) -> answers.Uncertainty:
        def outputs(weights: Tensor) -> Tensor:
            pieces = weights.split([shape.numel() for shape in shapes])
            params = {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes)}
            return torch.func.functional_call(model, params, (x,))

        return answers.decompose_labels(co.likelihoods.Categorical(), torch.vmap(outputs)(theta))

    known = parts(data.test[0])
    found = {
        "accuracy": float(metrics.accuracy(known.mean, data.test[1])),
        "loss": float(metrics.nll(known.mean, data.test[1])),
    }
    for kind, x in data.unknown.items():
        strange = parts(x)
        labels = torch.arange(len(known.total) + len(x)) >= len(known.total)
        for part in CLAIMED if len(theta) > 1 else ("total",):
            values = torch.cat([getattr(known, part), getattr(strange, part)])
            found[f"{kind}, {part}"] = float(metrics.auroc(values, labels))
    return found


def study(seeds: int) -> dict[str, dict[str, Tensor]]:
    """By method and score its values, (seeds,): means over the chains where several of a split repeat the method."""
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        data, start = task(seed), time.perf_counter()
        for method, sets in drawn(data, seed).items():
            each = [scored(theta, data) for theta in sets]
            rows = found.setdefault(method, {name: [] for name in each[0]})
            for name, values in rows.items():
                values.append(sum(one[name] for one in each) / len(each))
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", flush=True)
    return {method: {name: torch.tensor(v) for name, v in rows.items()} for method, rows in found.items()}


def results_table(found: Mapping[str, Mapping[str, Tensor]]) -> str:
    """A row a method."""
    names = list(found[f"{CHAINS} × SGD"])
    rows = [[method, *(spread(row[name]) if name in row else "–" for name in names)] for method, row in found.items()]
    seeds = len(found["SGD"][names[0]])
    said = f"Mean ± standard deviation over {seeds} seeds, which vary the known digits, the points and the starts."
    apart = tables(["method", *names], rows, ["method", *names[:2]], ["method", *names[2:]])
    return f"{said} The second table gives the AUROC of the unknown digits.\n\n{apart}"


def claims(found: Mapping[str, Mapping[str, Tensor]]) -> str:
    """The paper's claims, one by one."""
    parallel, single, serial = (
        found[name] for name in (f"parallel, {CHAINS} starts", "SGD", f"serial, every {SPACINGS[1]}")
    )
    each = []
    for kind in UNKNOWN:
        total, epistemic = f"{kind}, total", f"{kind}, epistemic"
        each += [
            (f"{kind}: parallel chains, epistemic above total", parallel[epistemic] - parallel[total]),
            (f"{kind}: parallel chains above SGD, total", parallel[total] - single[total]),
            (f"{kind}: parallel epistemic above SGD's total", parallel[epistemic] - single[total]),
            (f"{kind}: serial below parallel, epistemic", parallel[epistemic] - serial[epistemic]),
            (f"{kind}: serial worse than chance, epistemic", 0.5 - serial[epistemic]),
        ]
    return claims_table(each, "AUROC")


def curves(found: Mapping[str, Mapping[str, Tensor]], spacings: Sequence[int] = SPACINGS) -> Figure:
    """AUROC of serial draws against the steps between them, beside parallel chains and SGD."""
    figure = style.blank(8.6, 3.6)
    panels = figure.subplots(1, len(UNKNOWN), sharey=True)
    looks = style.looks(CLAIMED)
    for axes, kind in zip(panels, UNKNOWN):
        for part, look in looks.items():
            name = f"{kind}, {part}"
            rows = [found[f"serial, every {spacing}"][name] for spacing in spacings]
            means = [float(values.mean()) for values in rows]
            spreads = [float(values.std()) for values in rows]
            axes.errorbar(spacings, means, spreads, label=f"serial, {part}", capsize=2, **look._asdict())
            mean = float(found[f"parallel, {CHAINS} starts"][name].mean())
            axes.axhline(mean, color=look.color, linestyle=look.linestyle, linewidth=1, label=f"parallel, {part}")
        axes.axhline(float(found["SGD"][f"{kind}, total"].mean()), color=style.GREY, linestyle=":", label="SGD, total")
        axes.set_xscale("log")
        axes.set_xticks(spacings, [f"{spacing}" for spacing in spacings])
        axes.xaxis.set_minor_locator(NullLocator())
        style.dress(axes, "steps between serial draws", "AUROC" if kind == UNKNOWN[0] else "", kind)
    panels[0].legend(fontsize=style.SMALL, frameon=False, loc="lower right")
    return figure


STUDY = study_page.Study(
    "chains_out_of_distribution",
    __doc__,
    study,
    {"chains_out_of_distribution": lambda found: f"{results_table(found)}\n\n{claims(found)}"},
    "docs/samplers_measured.md",
    figures={"chains_out_of_distribution": curves},
    options={"seeds": (5, "splits and networks")},
)

if __name__ == "__main__":
    STUDY.run()
