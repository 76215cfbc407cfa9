"""Sources of random numbers."""

from __future__ import annotations

import torch


def seeded(seed: int = 0) -> torch.Generator:
    """Torch's generator with this seed."""
    return torch.Generator().manual_seed(seed)
