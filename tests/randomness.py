"""Sources of random numbers, and networks drawn from them."""

from itertools import pairwise

import torch
from torch import nn


def seeded(seed: int = 0) -> torch.Generator:
    """Torch's generator with this seed."""
    return torch.Generator().manual_seed(seed)


def perceptron(
    *widths: int, activation: type[nn.Module] = nn.Tanh, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Sequential:
    """Linear layers of these widths with an activation between them; torch's own generator goes on from this seed."""
    torch.manual_seed(seed)
    layers = [layer for m, n in pairwise(widths) for layer in (nn.Linear(m, n), activation())]
    return nn.Sequential(*layers[:-1]).to(dtype)
