"""The log evidence over a grid of prior precisions, from one set of Lanczos runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvops.linalg import Estimate
from curvops.posterior.laplace import Laplace


def grid(
    post: Laplace,
    prior_precisions: Sequence[float] | Tensor,
    rtol: float = 0.01,
    generator: torch.Generator | None = None,
) -> list[Estimate]:
    """log evidence in nats at each scalar prior precision, the weights held where they are.

    The products are spent once, for the smallest precision; every further value costs none. Raises ValueError for a
    precision that is not positive or an empty grid.
    """
    values = [float(value) for value in prior_precisions]
    if not values or min(values) <= 0:
        raise ValueError(f"prior_precisions must be positive numbers, at least one; got {values}.")
    post.spectrum.prepare(min(values), rtol, generator)
    return [post.with_prior(value).log_evidence(rtol, generator) for value in values]
