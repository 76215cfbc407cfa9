"""Five tasks one after another: what remains of the first ones?     python -m benchmarks.continual

Split digits: the classes 0 and 1, then 2 and 3, …; each task has two outputs of its own and no data of the earlier
tasks. The weights after each task come from a penalised training, whose penalty is the posterior of the earlier tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.digits import Digits, Images, load_digits
from benchmarks.tables import table
from curvops.plots import style

TASKS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
WIDTH = 50
STEPS = 60
RANK = 20
PRIOR = 0.1
STRENGTHS = (1.0, 10.0, 100.0, 1000.0)
"""What the penalty may be multiplied by: 1 is the posterior's own, EWC and its followers choose it."""
TUNING = (100, 101)
"""Seeds of the networks that choose among these on the validation part."""


class Heads(nn.Module):
    """Two shared layers, and two outputs for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in TASKS)


class OfTask(nn.Module):
    """The outputs of one task."""

    def __init__(self, network: Heads, task: int) -> None:
        super().__init__()
        self.network, self.task = network, task

    def forward(self, x: Tensor) -> Tensor:
        """Two logits."""
        return self.network.heads[self.task](self.network.body(x))


def of_task(images: Images, task: int) -> Images:
    """The points of a task, its classes called 0 and 1."""
    own = (images.y == TASKS[task][0]) | (images.y == TASKS[task][1])
    return Images(images.x[own], images.y[own] - TASKS[task][0])


Next = Callable[[co.posterior.Laplace | None, co.operators.Linearization, torch.Generator], co.posterior.Laplace]
"""From yesterday's posterior and the network linearised on today's data, today's posterior."""


def _first_or(
    update: Callable[[co.posterior.Laplace, co.operators.Linearization, torch.Generator], co.posterior.Laplace],
    curvature: Any,
) -> Next:
    def step(
        post: co.posterior.Laplace | None, lin: co.operators.Linearization, generator: torch.Generator
    ) -> co.posterior.Laplace:
        if post is None:
            return co.laplace(lin, curvature, PRIOR, check_mode=False)
        return update(post, lin, generator)

    return step


METHODS: dict[str, Next | None] = {
    "plain": None,
    "diagonal": _first_or(lambda post, lin, _: post.update(lin, check_mode=False), co.DiagonalGGN),
    "KFAC": _first_or(lambda post, lin, _: post.update(lin, form="kronecker", check_mode=False), co.KFAC),
    f"low rank ({RANK})": _first_or(
        lambda post, lin, g: post.update(lin, rank=RANK, generator=g, check_mode=False), co.GGN
    ),
    f"low rank ({RANK}) + diagonal": _first_or(
        lambda post, lin, g: post.update(lin, rank=RANK, form="low_rank_diagonal", generator=g, check_mode=False),
        co.GGN,
    ),
}
JOINT = "joint (all data)"


def train(network: Heads, loss: Callable[[], Tensor]) -> None:
    """To a mode of the posterior, near enough, by L-BFGS on all points at once."""
    optimizer = torch.optim.LBFGS(network.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimizer.step(closure)


def misfit(network: Heads, images: Images, task: int) -> Tensor:
    """Summed cross-entropy of one task, in nats."""
    return nn.functional.cross_entropy(OfTask(network, task)(images.x), images.y, reduction="sum")


def decay(network: Heads) -> Tensor:
    """½ λ ‖θ‖²."""
    return 0.5 * PRIOR * torch.stack([p.square().sum() for p in network.parameters()]).sum()


@torch.no_grad()
def accuracy(network: Heads, images: Images, seen: int) -> float:
    """The mean over the tasks seen of the share of points that are classified rightly."""
    shares = []
    for task in range(seen):
        own = of_task(images, task)
        shares.append((OfTask(network, task)(own.x).argmax(1) == own.y).float().mean())
    return float(torch.stack(shares).mean())


def run(method: str, seed: int, strength: float, data: Digits, part: Images) -> tuple[list[float], list[float]]:
    """Accuracy on a part after each task, and the error that each update's compression made."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network, step = Heads(), METHODS.get(method)
    post: co.posterior.Laplace | None = None
    found, errors = [], []
    for task in range(len(TASKS)):
        own = of_task(data.train, task)
        seen = [(t, of_task(data.train, t)) for t in (range(task + 1) if method == JOINT else [task])]

        def loss(post: co.posterior.Laplace | None = post, seen: Any = seen, task: int = task) -> Tensor:
            total = torch.stack([misfit(network, images, t) for t, images in seen]).sum()
            if post is None:
                return total + decay(network)
            named = {f"network.{name}": value for name, value in network.named_parameters()}
            return total + strength * post.penalty(named)

        train(network, loss)
        found.append(accuracy(network, part, task + 1))
        if step is not None:
            lin = co.linearize(OfTask(network, task), (own.x, own.y), "classification")
            post = step(post, lin, generator)
            if post.compression is not None:
                errors.append(float(post.compression))
    return found, errors


def tuned(method: str, data: Digits) -> dict[float, float]:
    """By strength the mean accuracy on the validation part after the last task."""
    if METHODS.get(method) is None:
        return {1.0: 0.0}

    def score(strength: float) -> float:
        return sum(run(method, seed, strength, data, data.validation)[0][-1] for seed in TUNING) / len(TUNING)

    return {strength: score(strength) for strength in STRENGTHS}


def study(seeds: int) -> dict[str, Any]:
    """Accuracies of every method, (seeds, tasks), its strength, its mean error of compression and its seconds."""
    data, found = load_digits(), {}
    for method in [*METHODS, JOINT]:
        scores = tuned(method, data)
        strength, start = max(scores, key=scores.__getitem__), time.process_time()
        runs = [run(method, seed, strength, data, data.test) for seed in range(seeds)]
        last = [errors[-1] for _, errors in runs if errors]
        found[method] = {
            "strength": strength,
            "scores": {f"{strength:g}": value for strength, value in scores.items()},
            "accuracy": torch.tensor([accuracies for accuracies, _ in runs]),
            "error": sum(last) / len(last) if last else None,
            "seconds": (time.process_time() - start) / seeds,
        }
        print(f"{method}: {found[method]['accuracy'].mean(0).tolist()}, validation {scores}", flush=True)
    return found


def results_table(found: dict[str, Any]) -> str:
    """Mean ± standard deviation over networks."""
    last, rows, earlier = len(TASKS), [], []
    for method, row in found.items():
        mean, spread = 100 * row["accuracy"].mean(0), 100 * row["accuracy"].std(0)
        *before, end = [f"{m:.1f} ± {s:.1f}" for m, s in zip(mean, spread)]
        error = "–" if row["error"] is None else f"{row['error']:.2f}"
        untuned = f"{100 * row['scores']['1']:.1f}" if METHODS.get(method) is not None else "–"
        rows.append([method, end, untuned, f"{row['strength']:g}", error, f"{row['seconds']:.1f}"])
        earlier.append([method, *before])
    seeds = len(found[JOINT]["accuracy"])
    text = (
        "Accuracy in per cent on test digits, as the mean over the tasks seen; mean ± standard deviation over "
        f"{seeds} networks, which differ in their starts; all have one split. *Strength*: the factor of the penalty, "
        f"the best of {len(STRENGTHS)} on the validation part after the last task, with {len(TUNING)} other networks. "
        f"*Untuned*: the accuracy there with strength 1, the posterior as it is. The prior precision is {PRIOR:g} for "
        "all. *Left out*: the relative Frobenius error of the last compression. *s*: seconds of a core for all tasks."
    )
    parts = [
        table(["training", f"after task {last}", "untuned", "strength", "left out", "s"], rows),
        text,
        "The accuracy after each of the earlier tasks:",
        table(["training", *(f"task {t}" for t in range(1, last))], earlier),
    ]
    return "\n\n".join(parts)


def curves(found: dict[str, Any]) -> Figure:
    """Accuracy against the number of tasks seen, with the standard deviation over networks."""
    figure, axes = style.panel(5.6, 3.6)
    counts = range(1, len(TASKS) + 1)
    for i, (method, look) in enumerate(style.looks(found).items()):
        values = 100 * found[method]["accuracy"]
        places = [count + 0.04 * (i - len(found) / 2) for count in counts]
        bars = look._asdict() | {"label": method, "markersize": 5, "linewidth": 1.6, "capsize": 2}
        axes.errorbar(places, values.mean(0), values.std(0), **bars)
    style.dress(axes, "tasks learnt", "test accuracy, mean over tasks (%)")
    axes.set_xticks(list(counts))
    axes.legend(fontsize=style.SMALL, frameon=False, loc="lower left")
    return figure


STUDY = study_page.Study(
    "continual",
    __doc__,
    study,
    {"continual": results_table},
    "docs/continual.md",
    figures={"continual": curves},
    options={"seeds": (5, "networks a method")},
)

if __name__ == "__main__":
    STUDY.run()
