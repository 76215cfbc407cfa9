"""The data, networks and training of `benchmarks.defaults`: small, without network access, trained as people train.

All seeds of a setting are trained side by side: the weights carry a leading dimension, each seed has its own split of
the data, its own start and its own order of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.layers import linear_layers

HELD_OUT = 100
"""Points on which a prior is validated, and training is stopped, where so many can be spared."""
TEST, UNSEEN = 300, 150
"""The most test points and points of unseen classes."""


@dataclass(frozen=True)
class Points:
    """The points of one seed: training, held-out and test points, and inputs unlike those of training."""

    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor
    x_test: Tensor
    y_test: Tensor
    x_unseen: Tensor


@dataclass(frozen=True)
class Setting:
    """Data, a network, and how it is trained."""

    points: Callable[[int, int], Points]
    """Of a number of training points and a seed."""
    network: Callable[[], nn.Module]
    count: int
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer]
    decay: float
    """The weight decay that the optimizer was given; times N it is a prior precision."""
    epochs: int
    batch: int = 32
    stopped: bool = False
    """Whether the epoch of the least held-out loss is kept."""
    before: Callable[[nn.Module], None] | None = None
    """What is done to a new network before it is trained."""


def split(x: Tensor, y: Tensor, unseen: Tensor, count: int, seed: int) -> Points:
    """The points in a random order of the seed: training, then held-out, then test points."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    held = min(HELD_OUT, (len(x) - count) // 2)
    parts = order[:count], order[count : count + held], order[count + held :][:TEST]
    others = unseen[torch.randperm(len(unseen), generator=generator)[:UNSEEN]]
    return Points(*(z[part] for part in parts for z in (x, y)), others)


def digits(count: int, seed: int, wrong: float = 0.0, images: bool = False) -> Points:
    """Digits 0 to 7, a share with random labels in every part; 8 and 9 are unseen."""
    x, y = _bundled("load_digits")
    x = x / 16
    if images:
        x = x.unflatten(1, (1, 8, 8))
    seen = y < 8
    labels = y[seen]
    generator = torch.Generator().manual_seed(seed + 100)
    others = (labels + torch.randint(1, 8, labels.shape, generator=generator)) % 8
    labels = torch.where(torch.rand(len(labels), generator=generator) < wrong, others, labels)
    return split(x[seen], labels, x[~seen], count, seed)


def cancer(count: int, seed: int) -> Points:
    """Breast cancer; unseen are permuted test points."""
    return permuted("load_breast_cancer", count, seed)


def wine(count: int, seed: int) -> Points:
    """Three cultivars of wine; unseen are permuted test points."""
    return permuted("load_wine", count, seed)


def permuted(name: str, count: int, seed: int) -> Points:
    """A table, standardised; unseen are its test points with each feature permuted on its own."""
    x, y = _bundled(name)
    x = (x - x.mean(0)) / x.std(0)
    points = split(x, y, x[:0], count, seed)
    generator = torch.Generator().manual_seed(seed)
    columns = [column[torch.randperm(len(column), generator=generator)] for column in points.x_test.unbind(1)]
    return Points(**{**vars(points), "x_unseen": torch.stack(columns, 1)})


def moons(count: int, seed: int) -> Points:
    """Two moons whose classes overlap; unseen are points far from both."""
    x, y = import_module("sklearn.datasets").make_moons(count + HELD_OUT + TEST, noise=0.3, random_state=seed)
    angle = torch.linspace(0, 2 * math.pi, UNSEEN, dtype=torch.float64)
    ring = torch.stack([0.5 + 4 * angle.cos(), 0.25 + 4 * angle.sin()], 1)
    return split(torch.as_tensor(x), torch.as_tensor(y), ring, count, seed)


WORDS, STRANGE, LENGTH = 12, 4, 8


def sequences(count: int, seed: int, related: bool = False, flipped: float = 0.05) -> Points:
    """Sequences whose words have values, the sign of whose sum is the label; unseen are those with unknown words.

    A related task has other values for half of the words.
    """
    values = torch.randn(WORDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if related:
        values[: WORDS // 2] = torch.randn(WORDS // 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(WORDS, (count + HELD_OUT + TEST, LENGTH), generator=generator)
    wrong = torch.rand(len(tokens), generator=generator) < flipped
    strange = torch.randint(WORDS + STRANGE, (4 * UNSEEN, LENGTH), generator=generator)
    strange = strange[(strange >= WORDS).sum(1) >= 3]
    return split(tokens, ((values[tokens].sum(1) > 0) ^ wrong).long(), strange, count, seed)


class Attention(nn.Module):
    """One block: self-attention over the words, then two linear layers, each beside an identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Words (N, T, width) to the same."""
        scores = self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])
        x = x + scores.softmax(-1) @ self.value(x)
        return x + self.down(self.up(x).relu())


class Transformer(nn.Module):
    """Embedding, a block of attention, the mean over words, two logits."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS + STRANGE, width)
        self.block, self.head = Attention(width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (N, 2) of tokens (N, T)."""
        return self.head(self.block(self.words(tokens)).mean(1))


class Adapted(nn.Module):
    """A frozen linear layer plus B A of rank 2, which starts at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and the adapter's."""
        return self.layer(x) + self.up(self.down(x))


def adapter() -> nn.Module:
    """A transformer with adapters on its values and its last linear layers; the head is trained, too."""
    network = Transformer()
    network.requires_grad_(False)
    for module, name in ((network.block, "value"), (network.block, "up"), (network.block, "down")):
        setattr(module, name, Adapted(getattr(module, name)))
    network.head.requires_grad_(True)
    return network


@cache
def pretrained() -> dict[str, Tensor]:
    """The weights of a transformer that was trained on a related task."""
    related = partial(sequences, related=True)
    return train(Setting(related, Transformer, 1000, **adamw(3e-3), epochs=30), [500])[0].state_dict()


def load_pretrained(network: nn.Module) -> None:
    """Give an adapter's network the pretrained weights; a new head is trained with the adapter."""
    own = dict(network.state_dict())
    for name, value in pretrained().items():
        if name.startswith("head"):
            continue
        place = name if name in own else name.replace(".weight", ".layer.weight").replace(".bias", ".layer.bias")
        own[place] = value
    network.load_state_dict(own)


def mlp(*widths: int) -> Callable[[], nn.Module]:
    """Linear layers with ReLU."""
    return partial(linear_layers, *widths, activation=nn.ReLU)


def normalised() -> nn.Module:
    """An MLP whose hidden layers are normalised."""
    layers = [nn.Linear(64, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 24), nn.LayerNorm(24), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(24, 8))


def convolutional() -> nn.Module:
    """Two convolutions, the second with a stride, and a linear layer."""
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(12 * 16, 8))


def train(setting: Setting, seeds: Sequence[int]) -> list[nn.Module]:
    """The trained networks, in eval mode, in double precision."""
    networks = []
    for seed in seeds:
        torch.manual_seed(seed)
        network = setting.network().double()
        if setting.before is not None:
            setting.before(network)
        networks.append(network)
    parts = [setting.points(setting.count, seed) for seed in seeds]
    x, y, x_held, y_held = (torch.stack([getattr(p, name) for p in parts]) for name in ("x", "y", "x_held", "y_held"))
    free = [name for name, p in networks[0].named_parameters() if p.requires_grad]
    states = [network.state_dict() for network in networks]
    state = {name: torch.stack([each[name] for each in states]).clone() for name in states[0]}
    learned = [state[name].requires_grad_(name in free) for name in free]
    optimizer = setting.optimizer(learned)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.vmap(partial(torch.func.functional_call, networks[0]))(state, (x,))
        return torch.vmap(nn.functional.cross_entropy)(outputs, y)

    rows, generator = torch.arange(len(seeds)).unsqueeze(1), torch.Generator().manual_seed(seeds[0])
    least, best = torch.full((len(seeds),), math.inf, dtype=torch.float64), [p.detach().clone() for p in learned]
    for _ in range(setting.epochs):
        order = torch.stack([torch.randperm(setting.count, generator=generator) for _ in seeds])
        for part in order.split(setting.batch, 1):
            optimizer.zero_grad()
            losses(x[rows, part], y[rows, part]).sum().backward()
            optimizer.step()
        with torch.no_grad():
            if not setting.stopped:
                continue
            held = losses(x_held, y_held)
            for kept, p in zip(best, learned):
                kept[held < least] = p[held < least]
            least = torch.minimum(held, least)
    kept = best if setting.stopped else learned
    for i, network in enumerate(networks):
        network.load_state_dict(
            {name: state[name][i].detach() for name in state} | {n: v[i].detach() for n, v in zip(free, kept)}
        )
    return [network.eval() for network in networks]


def adamw(rate: float = 2e-3, decay: float = 0.01) -> dict[str, Any]:
    """Decoupled weight decay, PyTorch's own by default."""
    return {"optimizer": partial(torch.optim.AdamW, lr=rate, weight_decay=decay, fused=True), "decay": decay}


def sgd(rate: float = 0.1, decay: float = 1e-3) -> dict[str, Any]:
    """Momentum of 0.9 and a quadratic penalty on the mean loss."""
    optimizer = partial(torch.optim.SGD, lr=rate, momentum=0.9, weight_decay=decay, fused=True)
    return {"optimizer": optimizer, "decay": decay}


DIGITS, CANCER = mlp(64, 24, 24, 8), mlp(30, 24, 24, 2)
IMAGES = partial(digits, images=True)

SETTINGS = {
    "digits, 200, AdamW": Setting(digits, mlp(64, 12, 12, 8), 200, **adamw(), epochs=60),
    "digits, 500, AdamW": Setting(digits, DIGITS, 500, **adamw(), epochs=60),
    "digits, 900, SGD with decay": Setting(digits, DIGITS, 900, **sgd(), epochs=40),
    "digits, 500, stopped early": Setting(digits, DIGITS, 500, **adamw(), epochs=60, stopped=True),
    "digits, 500, normalised layers": Setting(digits, normalised, 500, **adamw(), epochs=40),
    "10 % wrong labels, 500, AdamW": Setting(partial(digits, wrong=0.1), DIGITS, 500, **adamw(), epochs=40),
    "20 % wrong labels, 900, SGD": Setting(partial(digits, wrong=0.2), DIGITS, 900, **sgd(), epochs=40),
    "10 % wrong labels, 500, stopped": Setting(
        partial(digits, wrong=0.1), mlp(64, 12, 12, 8), 500, **adamw(), epochs=40, stopped=True
    ),
    "CNN, 700 digits, AdamW": Setting(IMAGES, convolutional, 700, **adamw(), epochs=30),
    "CNN, 700, 10 % wrong": Setting(partial(IMAGES, wrong=0.1), convolutional, 700, **adamw(), epochs=30),
    "breast cancer, 300, AdamW": Setting(cancer, CANCER, 300, **adamw(), epochs=60),
    "breast cancer, 150, SGD": Setting(cancer, CANCER, 150, **sgd(0.05), epochs=60),
    "wine, 100, AdamW": Setting(wine, mlp(13, 16, 16, 3), 100, **adamw(), epochs=60),
    "two moons, 100, AdamW": Setting(moons, mlp(2, 24, 24, 2), 100, **adamw(0.01), epochs=150),
    "transformer, 1,500, AdamW": Setting(sequences, Transformer, 1500, **adamw(3e-3), epochs=30),
    "transformer, 400, stopped": Setting(sequences, Transformer, 400, **adamw(3e-3), epochs=50, stopped=True),
    "LoRA, 200, AdamW": Setting(sequences, adapter, 200, **adamw(5e-3), epochs=60, before=load_pretrained),
}


def _bundled(name: str) -> tuple[Tensor, Tensor]:
    x, y = getattr(import_module("sklearn.datasets"), name)(return_X_y=True)
    return torch.as_tensor(x).double(), torch.as_tensor(y).long()
