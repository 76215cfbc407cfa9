"""Which digits to label next?     python -m benchmarks.active_learning

A network learns from few labelled digits and asks for ten more at a time: those with the largest epistemic part of
`post.uncertainty`, those with the largest total entropy, or random ones. The study runs once with scikit-learn's
digits, and once with as many blends of two digits among them, whose label is one of the two at random: nothing can be
learnt from these. After an interruption the same command continues with the next seed.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import product
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.digits import Images, load_digits
from benchmarks.layers import linear_layers
from benchmarks.tables import table
from curvops.plots import style

START, TOGETHER, ROUNDS, CANDIDATES = 20, 10, 10, 300
"""Labels at first, labels a round, rounds, and points of the pool that a round looks at."""
WIDTH, STEPS = 50, 60
TASKS = ("digits", "digits and blends")
METHODS = ("epistemic", "total entropy", "at random")


def blends(images: Images, generator: torch.Generator) -> Images:
    """Means of two digits of different classes, each with the label of one of the two."""
    first, second = (torch.randperm(len(images), generator=generator) for _ in range(2))
    apart = images.y[first] != images.y[second]
    first, second = first[apart], second[apart]
    either = torch.rand(len(first), generator=generator) < 0.5
    x = (images.x[first] + images.x[second]) / 2
    return Images(x, torch.where(either, images.y[first], images.y[second]))


def pool(task: str, seed: int) -> Images:
    """What may be labelled, in random order: of the second task half are blends."""
    generator, images = torch.Generator().manual_seed(seed), load_digits().train
    if task == TASKS[1]:
        mixed = blends(images, generator)
        images = Images(torch.cat([images.x, mixed.x]), torch.cat([images.y, mixed.y]))
    order = torch.randperm(len(images), generator=generator)
    return Images(images.x[order].flatten(1), images.y[order])


def train(network: nn.Module, data: Images, prior: float) -> None:
    """To near a mode of the posterior."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        squares = torch.stack([p.square().sum() for p in network.parameters()]).sum()
        value = nn.functional.cross_entropy(network(data.x), data.y, reduction="sum") + 0.5 * prior * squares
        value.backward()
        return value.detach()

    optimizer.step(loss)


def scores(method: str, post: co.posterior.Laplace, x: Tensor, generator: torch.Generator) -> Tensor:
    """How much each point is asked for."""
    if method == "at random":
        return torch.rand(len(x), generator=generator)
    found = post.uncertainty(x, generator=generator)
    return found.epistemic if method == "epistemic" else found.total


def run(task: str, method: str, seed: int, test: Images) -> tuple[list[float], float]:
    """Test accuracy before each round and after the last, and the share of blends among the points asked for."""
    torch.manual_seed(seed)
    generator, images = torch.Generator().manual_seed(seed), pool(task, seed)
    network, prior = linear_layers(64, WIDTH, 10), 0.1
    chosen = list(range(START))
    accuracy = []
    for _ in range(ROUNDS + 1):
        known = Images(images.x[chosen], images.y[chosen])
        train(network, known, prior)
        with torch.no_grad():
            accuracy.append(float((network(test.x.flatten(1)).argmax(1) == test.y).double().mean()))
        lin = co.linearize(network, (known.x, known.y), "classification")
        post = co.evidence.maximize(co.laplace(lin, co.KFAC, prior, check_mode=False))
        prior = float(post.prior_precision)
        left = torch.tensor(sorted(set(range(len(images))) - set(chosen)))
        some = left[torch.randperm(len(left), generator=generator)[:CANDIDATES]]
        best = scores(method, post, images.x[some], generator).topk(TOGETHER).indices
        chosen += some[best].tolist()
    clean = {tuple(row) for row in load_digits().train.x.flatten(1).tolist()}
    asked = images.x[chosen[START : START + ROUNDS * TOGETHER]].tolist()
    return accuracy, sum(tuple(row) not in clean for row in asked) / len(asked)


def cell(task: str, method: str, seed: int) -> dict[str, Any]:
    """The accuracies, the share of blends and the seconds of one run."""
    start = time.process_time()
    accuracy, share = run(task, method, seed, load_digits().test)
    print(seed, task, method, [round(value, 3) for value in accuracy], share, flush=True)
    return {"accuracy": accuracy, "blends": share, "seconds": time.process_time() - start}


def study(seeds: int) -> dict[str, Any]:
    """By task and method the accuracies (seeds, rounds + 1), shares of blends (seeds,) and seconds a run (seeds,)."""
    found: dict[str, Any] = {task: {method: [] for method in METHODS} for task in TASKS}
    for seed, task, method in product(range(seeds), TASKS, METHODS):
        name = f"{seed}, {task}, {method}"
        found[task][method].append(study_page.part("active_learning", name, partial(cell, task, method, seed)))
    return {task: {method: columns(rows) for method, rows in each.items()} for task, each in found.items()}


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """By key the values of all rows."""
    return {key: [row[key] for row in rows] for key in rows[0]}


def results_table(found: dict[str, Any]) -> str:
    """Accuracies at some numbers of labels, mean ± standard error over seeds."""
    rounds = (0, ROUNDS // 3, 2 * ROUNDS // 3, ROUNDS)
    rows = []
    for task in TASKS:
        for method in METHODS:
            values = 100 * found[task][method]["accuracy"]
            error = values.std(0) / len(values) ** 0.5
            cells = [f"{values.mean(0)[r]:.1f} ± {error[r]:.1f}" for r in rounds]
            share = f"{100 * found[task][method]['blends'].mean():.0f}" if task == TASKS[1] else "–"
            rows.append([f"{task}, {method}", *cells, share, f"{found[task][method]['seconds'].mean():.1f}"])
    header = ["asked for", *(f"{START + TOGETHER * r} labels" for r in rounds), "blends (%)", "s"]
    text = (
        f"Accuracy in per cent on 500 test digits, mean ± standard error over {len(values)} seeds (the order of the "
        "pool and the start of the network). *Blends*: their share among the points asked for. *s*: seconds of a core "
        "for a run."
    )
    return f"{table(header, rows)}\n\n{text}"


def curves(found: dict[str, Any]) -> Figure:
    """Accuracy against the number of labels, with standard errors over seeds, a panel a task."""
    figure = style.blank(9, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    counts = START + TOGETHER * torch.arange(ROUNDS + 1)
    for axes, task in zip(panels, TASKS):
        for i, (method, look) in enumerate(style.looks(METHODS).items()):
            values = 100 * found[task][method]["accuracy"]
            options = look._asdict() | {"label": method, "markersize": 4, "linewidth": 1.5, "capsize": 2}
            axes.errorbar(counts + 0.6 * (i - 1), values.mean(0), values.std(0) / len(values) ** 0.5, **options)
        style.dress(axes, "labels", "test accuracy (%)" if axes is panels[0] else "", task)
    panels[1].legend(fontsize=style.SMALL, frameon=False, loc="lower right")
    return figure


STUDY = study_page.Study(
    "active_learning",
    __doc__,
    study,
    {"active_learning": results_table},
    "docs/active_learning.md",
    figures={"active-learning": curves},
    options={"seeds": (10, "runs of each method on each task")},
)

if __name__ == "__main__":
    STUDY.run()
