"""What the default posterior of a regression is worth: log losses beside those of the network and of other priors.

python -m benchmarks.defaults_regression             # a few minutes on one core
python -m benchmarks.defaults_regression --report
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import curvops as co
from benchmarks import study_page
from benchmarks.layers import linear_layers
from benchmarks.tables import table

Split = tuple[Tensor, Tensor, Tensor, Tensor]
HELD_OUT = 60
"""The points that are left out of training and of the test."""


def diabetes() -> Split:
    """Return scikit-learn's diabetes data, inputs and targets standardised: 250 points to train on."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.as_tensor(part).float() for part in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = (x / x.std(0))[order], ((y - y.mean()) / y.std()).unsqueeze(1)[order]
    return x[:250], y[:250], x[250:], y[250:]


def sine() -> Split:
    """Return 100 points of a sine with a gap, with noise of standard deviation 0.2, and others over all of it."""

    def points(n: int, low: float, high: float) -> tuple[Tensor, Tensor]:
        x = low + (high - low) * torch.rand(n, 1)
        return x, torch.sin(2 * x) + 0.2 * torch.randn(n, 1)

    x, y = (torch.cat(parts) for parts in zip(points(50, -3, -1), points(50, 1, 3)))
    return x, y, *points(360, -3, 3)


def ridge() -> Split:
    """Return 200 points of tanh(w · x) in eight dimensions, with noise of standard deviation 0.3."""
    w, x = torch.randn(8, 1), torch.randn(660, 8)
    y = torch.tanh(x @ w) + 0.3 * torch.randn(660, 1)
    return x[:200], y[:200], x[200:], y[200:]


DATA: dict[str, Callable[[], Split]] = {"diabetes": diabetes, "sine with a gap": sine, "ridge": ridge}
ACTIVATIONS, EPOCHS = (nn.Tanh, nn.ReLU), (100, 500)
NETWORK, DEFAULT, CHECKED = "the network, its mean squared residual", "`co.laplace(lin)`", "`validation=`, 60 points"
RULES = (NETWORK, "the network, the estimated noise", "prior 1", "evidence at the weights", DEFAULT, CHECKED)


def measure(seeds: int) -> dict[str, Any]:
    """Return the log loss of test points of each network, by data and rule."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, draw in DATA.items():
        rows: dict[str, list[float]] = {rule: [] for rule in RULES}
        for activation in ACTIVATIONS:
            for epochs in EPOCHS:
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    for rule, loss in zip(RULES, losses(draw(), activation, epochs)):
                        rows[rule].append(loss)
        found[name] = rows
    return found


def losses(split: Split, activation: type[nn.Module], epochs: int) -> tuple[float, ...]:
    """Train as usual, by AdamW on batches of 50 points, and return the log loss under each rule."""
    x, y, others, targets = split
    model = linear_layers(x.shape[1], 30, 30, 1, activation=activation)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
            optimizer.step()
    held_out, new = (others[:HELD_OUT], targets[:HELD_OUT]), (others[HELD_OUT:], targets[HELD_OUT:])
    lin = co.linearize(model, (x, y), "regression")
    one = co.laplace(lin, co.KFAC, prior_precision=1.0, check_mode=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the evidence at weights that are no mode, and of limits of the searches
        at_weights = co.evidence.maximize(one, mode="map")
        chosen, checked = co.laplace(lin), co.laplace(lin, validation=held_out)
    posts = one, at_weights, chosen, checked
    deviations = float((model(x) - y).square().mean().sqrt()), float(one.observation_noise) ** 0.5
    alone = [log_loss(model(new[0]).detach(), torch.tensor(deviation), new[1]) for deviation in deviations]
    predicted = [post.predict(new[0], noise=True) for post in posts]
    return (*alone, *(log_loss(found.mean, found.stddev, new[1]) for found in predicted))


def log_loss(mean: Tensor, deviation: Tensor, y: Tensor) -> float:
    """Return −log p(y) in nats, the mean over points."""
    return -float(torch.distributions.Normal(mean, deviation).log_prob(y).mean())


def section(found: Any) -> str:
    """Return the mean and the worst log loss of each rule, by data."""
    rows = []
    for rule in RULES:
        columns = [[float(loss) for loss in found[name][rule]] for name in DATA]
        rows.append((rule, *(f"{sum(each) / len(each):.2f}; {max(each):.2f}" for each in columns)))
    return table(("log loss: mean; worst network", *DATA), rows)


STUDY = study_page.Study(
    name="defaults_regression",
    description=__doc__,
    measure=measure,
    sections={"defaults: regression": section},
    page="docs/defaults.md",
    options={"seeds": (3, "networks of each kind")},
)

if __name__ == "__main__":
    STUDY.run()
