"""Inner products over many weights: of a million in float32 a plain sum would be known to a tenth of a nat."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64
from torch import Tensor

ROW = 1024
"""Numbers that are summed in their own dtype; sums of them are summed in float64."""


def long_dot(a: Float[Tensor, "*k d"], b: Float[Tensor, "*k d"]) -> Float64[Tensor, "*k"]:
    """Σ a b along the last dimension: without a copy in float64, which would take several times as long."""
    products = a * b
    rows = products.shape[-1] // ROW
    whole, rest = products.split([rows * ROW, products.shape[-1] - rows * ROW], -1)
    sums = whole.unflatten(-1, (rows, ROW)).sum(-1)
    return torch.cat([sums, rest], -1).sum(-1, dtype=torch.float64)
