"""Does training that tunes its own prior precision recover a weight decay that is far off?

    python -m benchmarks.self_tuned        # three minutes on one core

A 64-16-10 network on 200 of scikit-learn's digits, from prior precisions over four orders of magnitude, which are fixed
or tuned after every five epochs; accuracy and negative log-likelihood at 800 other digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import curvops as co
from benchmarks import study_page
from benchmarks.claims import spread
from benchmarks.digits import load_digits
from benchmarks.tables import table

STARTS = (0.02, 0.2, 2.0, 20.0, 200.0)
EPOCHS = 150
TUNED = {"held": None, "one number": "scalar", "one a layer": "layers"}


def measure(start: float, over: str | None, seed: int) -> tuple[list[float], float, float]:
    """The prior precisions in the end, and accuracy and loss at the test digits."""
    data = load_digits(200)
    train, test = data.train.to(torch.float64), data.test.to(torch.float64).first(800)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
    post = co.evidence.train(
        model,
        (train.x, train.y),
        "classification",
        epochs=EPOCHS,
        every=EPOCHS + 1 if over is None else 5,
        prior_precision=start,
        over=over or "scalar",
        batch_size=100,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        generator=torch.Generator().manual_seed(seed),
    )
    with torch.no_grad():
        logits = model(test.x)
    right = float((logits.argmax(1) == test.y).double().mean())
    return post.prior_precision.unique().tolist(), right, float(nn.functional.cross_entropy(logits, test.y))


def study(seeds: int) -> dict[str, Any]:
    """By structure and start the prior precisions in the end, accuracies and losses, one a seed."""
    found: dict[str, Any] = {}
    for name, over in TUNED.items():
        for start in STARTS:
            runs = [measure(start, over, seed) for seed in range(seeds)]
            row = dict(zip(("precisions", "accuracy", "loss"), (list(column) for column in zip(*runs))))
            found[f"{name}, {start:g}"] = row
            print(name, start, row, flush=True)
    return found


def results_table(found: dict[str, Any]) -> str:
    """A row for each start and structure: geometric means of precisions, means of scores."""
    rows = []
    for case, row in found.items():
        name, start = case.rsplit(", ", 1)
        ends = ", ".join(
            f"{float(f'{precision:.2g}'):g}" for precision in row["precisions"].log().mean(0).exp().tolist()
        )
        rows.append([start, name, ends, f"{100 * float(row['accuracy'].mean()):.1f} %", spread(row["loss"], 2)])
    seeds = len(next(iter(found.values()))["loss"])
    said = f"Means over {seeds} seeds; for the NLL, ± the standard deviation over them."
    return f"{said}\n\n{table(['from', 'tuned', 'prior precision in the end', 'accuracy', 'NLL'], rows)}"


STUDY = study_page.Study(
    "self_tuned",
    __doc__,
    study,
    {"self_tuned": results_table},
    "docs/evidence.md",
    options={"seeds": (3, "networks of each case")},
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    STUDY.run()
