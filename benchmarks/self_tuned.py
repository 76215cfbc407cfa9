"""Does training that tunes its own prior precision recover a weight decay that is far off?

    python -m benchmarks.self_tuned        # prints the table, three minutes on one core

A 64-16-10 network on 200 of scikit-learn's digits, from prior precisions over four orders of magnitude, held or tuned
after every five epochs; accuracy and negative log-likelihood at 800 others. Means over three seeds.
"""

from __future__ import annotations

import torch
from torch import nn

import curvops as co
from curvops.cli.demo.digits import load_digits

STARTS = (0.02, 0.2, 2.0, 20.0, 200.0)
SEEDS = (0, 1, 2)
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


def table() -> str:
    """A row for each start and structure."""
    lines = ["| from | tuned | prior precision in the end | accuracy | NLL |", "|---|---|---|---|---|"]
    for name, over in TUNED.items():
        for start in STARTS:
            runs = [measure(start, over, seed) for seed in SEEDS]
            last = torch.tensor([precisions for precisions, *_ in runs]).log().mean(0).exp()
            right, loss = (sum(run[i] for run in runs) / len(runs) for i in (1, 2))
            ends = ", ".join(f"{precision:.2g}" for precision in last.tolist())
            lines.append(f"| {start:g} | {name} | {ends} | {100 * right:.1f} % | {loss:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
