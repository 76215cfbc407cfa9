"""Small networks of the benchmarks on digits, and their training; a frozen network with corrections to its weights."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.digits import Images


class CorrectedLayer(nn.Module):
    """A frozen pretrained layer plus a correction of the same kind that starts at zero: weights W₀ + δ.

    Linear and convolutional layers are linear in their weights, so the sum of outputs is the layer at W₀ + δ.
    """

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        self.pretrained = copy.deepcopy(layer).requires_grad_(False)
        self.correction = copy.deepcopy(layer)
        for parameter in self.correction.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output at W₀ + δ."""
        return self.pretrained(x) + self.correction(x)


def convolutional_network(width: int = 184) -> nn.Sequential:
    """Make a network of two convolutions and two linear layers, smooth and with 101 042 weights at width 184."""
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    features = first, nn.Tanh(), nn.MaxPool2d(2), second, nn.Tanh(), nn.Flatten()
    return nn.Sequential(*features, *linear_layers(512, width, 10))


def add_corrections(network: nn.Sequential) -> nn.Sequential:
    """Copy a network with each layer's weights frozen and a zero correction added to them."""
    return nn.Sequential(
        *(
            CorrectedLayer(layer) if isinstance(layer, (nn.Linear, nn.Conv2d)) else copy.deepcopy(layer)
            for layer in network
        )
    )


def objective(network: nn.Module, data: Images, prior_precision: float, scale: float = 1.0) -> Float[Tensor, ""]:
    """Compute the negative log posterior up to a constant, in nats: summed cross-entropy + ½ · prior precision · ‖θ‖².

    `scale` is N / batch size for a batch. Divided by N it is the usual objective: a mean loss with weight decay
    prior precision / N.
    """
    penalty = sum((p.square().sum() for p in _weights(network)), start=torch.zeros(()))
    cross_entropy = nn.functional.cross_entropy(network(data.x), data.y, reduction="sum")
    return scale * cross_entropy + 0.5 * prior_precision * penalty


def perceptron(*widths: int) -> nn.Sequential:
    """Make a perceptron: linear layers of these widths with tanh between them, on flattened images."""
    return nn.Sequential(nn.Flatten(), *linear_layers(*widths))


def linear_layers(*widths: int, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Make linear layers of these widths with an activation between them."""
    layers = [part for m, n in pairwise(widths) for part in (nn.Linear(m, n), activation())]
    return nn.Sequential(*layers[:-1])


def fit(
    network: nn.Module, data: Images, prior_precision: float, steps: int, rate: float, cosine: bool = False
) -> nn.Module:
    """Train a small network to near the mode of its posterior, by Adam on all points at once."""
    optimizer = torch.optim.Adam(_weights(network), rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    for _ in range(steps):
        optimizer.zero_grad()
        (objective(network, data, prior_precision) / len(data)).backward()
        optimizer.step()
        if falling is not None:
            falling.step()
    return network.eval()


def _weights(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]
