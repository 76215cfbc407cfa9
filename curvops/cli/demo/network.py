"""The demo's network and its training: pretrained weights, then a mode of the posterior around them.

The prior is N(pretrained weights, I / prior precision). It expresses the knowledge of a network trained on most of the
training digits; the posterior adds the rest, so that no digit counts twice. Around zero the same prior would be far
too vague for 100 000 weights, and the evidence would not show it (Lotfi et al. 2022; L2-SP of Li, Grandvalet & Davoine
2018).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm

from curvops.cli.demo.digits import Images

PRETRAINING_DECAY = 0.01
"""Prior precision around zero during pretraining: weak, as in everyday training."""

BATCH = 100
POLISH = 150
"""Maximum number of L-BFGS iterations after Adam: a Laplace posterior needs weights that are a mode."""


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


def pretrain(data: Images, seed: int, epochs: int, width: int = 184) -> nn.Sequential:
    """Train a convolutional network from a random start."""
    torch.manual_seed(seed)
    network = convolutional_network(width)
    _adam(network, data, PRETRAINING_DECAY, epochs, 3e-3, f"pretraining, seed {seed}")
    return network.eval()


def fit_mode(network: nn.Sequential, data: Images, prior_precision: float, epochs: int) -> nn.Sequential:
    """Find the mode of the posterior: corrections to pretrained weights, by Adam and then full-batch L-BFGS."""
    network = add_corrections(network)
    _adam(network, data, prior_precision, epochs, 3e-4, "fitting the mode")
    with tqdm(total=None, desc="polishing the mode", unit=" gradients", disable=None, leave=False) as bar:

        def loss() -> Tensor:
            bar.update()
            return objective(network, data, prior_precision)

        minimize(loss, _weights(network), POLISH, 1e-5)
    return network.eval()


def minimize(loss: Callable[[], Tensor], weights: Iterable[Tensor], steps: int, tolerance: float) -> None:
    """Minimize a loss over weights in place by L-BFGS, until every entry of the gradient is within the tolerance."""
    options: dict[str, Any] = {"history_size": 50, "tolerance_change": 0.0, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS(weights, max_iter=steps, tolerance_grad=tolerance, **options)

    def closure() -> float:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimizer.step(closure)


def _adam(network: nn.Module, data: Images, prior_precision: float, epochs: int, rate: float, title: str) -> None:
    optimizer = torch.optim.Adam(_weights(network), rate)
    steps = epochs * math.ceil(len(data) / BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in tqdm(range(epochs), desc=title, unit="epoch", disable=None, leave=False):
        for chosen in torch.randperm(len(data)).split(BATCH):
            batch = Images(data.x[chosen], data.y[chosen])
            optimizer.zero_grad()
            objective(network, batch, prior_precision, len(data) / len(chosen)).backward()
            optimizer.step()
            schedule.step()


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


def save(network: nn.Module, path: Path) -> None:
    """Write the weights as safetensors."""
    save_file({name: value.detach().contiguous() for name, value in network.state_dict().items()}, path)


def load(path: Path, width: int = 184) -> nn.Sequential:
    """Load a network that `save` wrote."""
    network = add_corrections(convolutional_network(width))
    network.load_state_dict(load_file(path))
    return network.eval()
