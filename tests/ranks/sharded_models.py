"""Networks of several layers to be sharded over ranks, with their data."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.ranks.questions import DOUBLE

TOKENS, POSITIONS, N = 11, 5, 13


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        z = self.before(x)
        heads = (layer(z).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Three blocks between an embedding and a head."""

    def __init__(
        self, width: int = 6, hidden: int = 10, depth: int = 3, tokens: int = TOKENS, classes: int = 3
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(tokens, width), nn.Embedding(POSITIONS, width)
        self.blocks = nn.ModuleList([Block(width, hidden) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device).expand(x.shape))
        for block in self.blocks:
            z = block(z)
        return self.head(self.norm(z).mean(1))


class PerToken(Transformer):
    """Outputs at each position, by the embedding's own weights."""

    def __init__(self) -> None:
        super().__init__(depth=2, classes=TOKENS)
        self.head = nn.Linear(6, TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device).expand(x.shape))
        for block in self.blocks:
            z = block(z)
        return self.head(self.norm(z))


class Convolutions(nn.Module):
    """Convolutions with batch normalisation by its statistics, one of them in groups, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Tanh())])
        self.frozen = nn.Conv2d(4, 3, 1).requires_grad_(False)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.stem(x)
        for block in self.blocks:
            z = z + F.pad(block(z), (1, 1, 1, 1))
        return self.head(self.frozen(z).mean((2, 3)))


def network(problem: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = {"transformer": Transformer, "tied": PerToken, "convolutions": Convolutions}[problem]()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2)
    return model.double().eval()


def sharded(model: Any, mesh: Any, **options: Any) -> nn.Module:
    """Shard each block, and then the model."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data(problem: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if problem == "convolutions":
        return torch.randn(N, 1, 4, 4, generator=generator, dtype=DOUBLE), torch.randn(
            N, 2, generator=generator, dtype=DOUBLE
        )
    x = torch.randint(TOKENS, (N, POSITIONS), generator=generator)
    shape = (N, POSITIONS) if problem == "tied" else (N,)
    return x, torch.randint(3, shape, generator=generator)
