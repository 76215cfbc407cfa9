"""The demo's network: a small convolutional classifier, trained to a mode of its posterior."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvops.cli.demo.digits import Split

BATCH = 125
"""Points a step of the stochastic phase."""

Loss = Callable[[], Tensor]


def build(widths: tuple[int, int, int], generator: torch.Generator) -> nn.Sequential:
    """Convolution, max-pooling, convolution, two linear layers; `widths` are the channels of both and the hidden units.

    Biases start at zero, weights as He et al. 2015, drawn from `generator`: the same seed gives the same network.
    """
    first, second, hidden = widths
    model = nn.Sequential(
        nn.Conv2d(1, first, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=generator)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def train(
    model: nn.Module, data: Split, prior_precision: float, epochs: int, polish: int, generator: torch.Generator
) -> None:
    """Minimise −log posterior / N = mean cross-entropy + ½ weight_decay ‖θ‖², where weight_decay = prior precision / N.

    Adam in minibatches with a cosine schedule, then at most `polish` steps of full-batch L-BFGS: a Laplace posterior
    belongs to a mode, and minibatch noise stops short of one.
    """
    parameters = list(model.parameters())
    weight_decay = prior_precision / len(data)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in parameters), torch.zeros(()))
        return nn.functional.cross_entropy(model(x), y) + 0.5 * weight_decay * penalty

    steps = -(-len(data) // BATCH)
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    for _ in tqdm(range(epochs), desc="training", leave=False, disable=None):
        for chosen in torch.randperm(len(data), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss(data.x[chosen], data.y[chosen]).backward()
            optimizer.step()
            schedule.step()
    _polish(parameters, lambda: loss(data.x, data.y), polish)
    model.eval()


def _polish(parameters: list[nn.Parameter], loss: Loss, steps: int) -> None:
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        history_size=50,
        tolerance_grad=1e-6,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def save(model: nn.Module, path: str) -> None:
    """Write the weights, in safetensors' format."""
    from safetensors.torch import save_model

    save_model(model, path)


def load(path: str, widths: tuple[int, int, int]) -> nn.Sequential:
    """A network with the weights that `save` wrote, ready for prediction."""
    from safetensors.torch import load_model

    model = build(widths, torch.Generator())
    load_model(model, path)
    model.eval()
    return model
