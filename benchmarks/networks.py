"""The networks of the benchmarks at random initial weights, with random data, all from one seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import transformer
from benchmarks.layers import linear_layers

SEED = 0


@dataclass(frozen=True, eq=False)
class Problem:
    """A network in eval mode with N inputs and class labels, (N,) or for sequences (N, T), float32."""

    name: str
    outputs: int
    model: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def label(self) -> str:
        """Network and number of outputs, such as "mlp C=10"."""
        return f"{self.name} C={self.outputs}"

    @property
    def points(self) -> int:
        """N."""
        return len(self.inputs)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, which the gradient is taken with respect to."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def num_parameters(self) -> int:
        """D."""
        return sum(parameter.numel() for parameter in self.parameters)

    def batches(self, count: int = 1) -> list[tuple[Tensor, Tensor]]:
        """The data as a list of `count` batches: its batches are as given, whatever the memory budget is."""
        return list(zip(self.inputs.chunk(count), self.targets.chunk(count)))

    def block(self, columns: int) -> Tensor:
        """Random vectors (D, K), each column contiguous."""
        generator = torch.Generator().manual_seed(SEED + 2)
        return torch.randn(columns, self.num_parameters, generator=generator).mT

    def unit(self) -> Callable[[], object]:
        """The unit of every figure: one gradient of the summed cross-entropy over the same data."""
        loss, parameters, targets = nn.CrossEntropyLoss(reduction="sum"), self.parameters, self.targets.flatten()
        return lambda: torch.autograd.grad(loss(self.model(self.inputs).flatten(0, -2), targets), parameters)


def mlp(outputs: int) -> nn.Module:
    """784-512-512-C with ReLU; 670k parameters at C = 10."""
    return linear_layers(784, 512, 512, outputs, activation=nn.ReLU)


def cnn(outputs: int) -> nn.Module:
    """Two 3 × 3 convolutions (32, 64 channels) with max-pooling, then 128 hidden units; 422k parameters at C = 10."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, outputs),
    )


class Block(nn.Module):
    """The basic residual block (He et al. 2016) with group normalisation in place of batch normalisation."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.GroupNorm(8, outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.GroupNorm(8, outer)
        same = stride == 1 and inner == outer
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Two convolutions and the shortcut."""
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def resnet(outputs: int, stride: int = 1) -> nn.Module:
    """ResNet-18 for 3 × 32 × 32 images; 11.2M parameters at C = 10, whatever the first convolution's stride."""
    shapes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    shapes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride, 1, bias=False),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        *[Block(*shape) for shape in shapes],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, outputs),
    )


def tiny(outputs: int) -> nn.Module:
    """2-16-C with tanh: what an example in one dimension more than a line takes; 218 parameters at C = 10."""
    return linear_layers(2, 16, outputs)


def small(outputs: int) -> nn.Module:
    """64-64-64-C with tanh, for 8 × 8 images; 8,970 parameters at C = 10."""
    return linear_layers(64, 64, 64, outputs)


def wide(outputs: int) -> nn.Module:
    """784-2048-2048-C with ReLU; 5.8M parameters at C = 10, whose factors have some 2,048 rows."""
    return linear_layers(784, 2048, 2048, outputs, activation=nn.ReLU)


def last_layer(outputs: int) -> nn.Module:
    """A classifier on 512 features."""
    return nn.Linear(512, outputs)


# name -> (network, shape of its data)
NETWORKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (1024, 784)),
    "cnn": (cnn, (256, 1, 28, 28)),
    "resnet": (resnet, (32, 3, 32, 32)),
}


# What only `benchmarks.operators` measures on.
OTHERS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "tiny": (tiny, (64, 2)),
    "small": (small, (256, 64)),
    "wide": (wide, (8000, 784)),
    "last": (last_layer, (256, 512)),
    "transformer": (transformer.classifier, (64, 32)),
    "language": (transformer.language, (16, 64)),
}


def build(name: str, outputs: int = 10) -> Problem:
    """A network of the tables with C outputs and its data. Leaves torch's random state as it was."""
    make, shape = (NETWORKS | OTHERS)[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make(outputs).eval()
    generator = torch.Generator().manual_seed(SEED + 1)
    tokens = isinstance(model, transformer.Transformer)
    if tokens:
        inputs = torch.randint(transformer.VOCABULARY, shape, generator=generator)
    else:
        inputs = torch.randn(shape, generator=generator)
    of_targets = shape if name == "language" else shape[:1]
    return Problem(name, outputs, model, inputs, torch.randint(0, outputs, of_targets, generator=generator))
