"""Small networks with repriors of them, and derivatives of their maps by autograd alone."""

import itertools

import torch
from torch import Tensor, nn

import curvops as co

NOISE = 0.05


class Curve(nn.Module):
    """f = v tanh(u x): two weights, so that integrals over them can be taken on a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


X = torch.tensor([[-1.0], [0.5], [2.0]]).double()


def curve(noise: float = 0.5, reg: float | None = None) -> co.sampling.Reprior:
    """A reprior of `Curve` with three points, `X`."""
    return co.sampling.reprior(Curve(), (X, torch.tensor([[-1.0], [0.2], [0.9]]).double()), noise, reg)


def mlp(*widths: int, seed: int = 0, bias: bool = True) -> nn.Sequential:
    """Linear layers with tanh between them, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after, bias=bias), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def regression(n: int = 6, outputs: int = 2, inputs: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and real targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, outputs, generator=generator, dtype=torch.float64)


def classes(n: int = 6, outputs: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and labels."""
    return regression(n)[0], torch.arange(n) % outputs


def precision(model: nn.Module) -> dict[str, float]:
    """A tangent-kernel prior."""
    return co.sampling.ntk_precision(model, weight_std=2**0.5, bias_std=0.3)


def one(rep: co.sampling.Reprior, seed: int = 0) -> dict[str, Tensor]:
    """A draw φ ~ N(0, I)."""
    drawn = rep.normal(1, torch.Generator().manual_seed(seed))
    return {name: block[0] for name, block in drawn.items()}


def flat(blocks: dict[str, Tensor]) -> Tensor:
    return torch.cat([block.flatten() for block in blocks.values()])


def named(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([block.numel() for block in like.values()])
    return {name: part.view(block.shape) for (name, block), part in zip(like.items(), parts)}


def jacobian(rep: co.sampling.Reprior, phi: dict[str, Tensor]) -> Tensor:
    """∂θ/∂φ by a backward pass a row."""
    found: Tensor = torch.autograd.functional.jacobian(lambda v: flat(rep.map(named(v, phi))), flat(phi))
    return found


def slope(rep: co.sampling.Reprior, phi: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of the energy."""
    leaves = {name: block.detach().requires_grad_() for name, block in phi.items()}
    return dict(zip(leaves, torch.autograd.grad(rep.energy(leaves), list(leaves.values()))))
