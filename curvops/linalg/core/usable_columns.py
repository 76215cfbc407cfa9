"""Columns of zeros, NaN or Inf: removed before an algorithm works on right-hand sides, and put back after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.linalg.core.results import Reason
from curvops.linalg.core.vectors import Vectors, columns, largest, part, put, put_columns, zero_block


@dataclass(frozen=True, eq=False)
class UsableColumns:
    """The columns of a block that an algorithm can use, and the reasons for the others, on the CPU."""

    heights: Float[Tensor, " K"]
    """Largest absolute entry of each column."""
    live: Int[Tensor, " k"]
    reasons: dict[int, Reason]

    @classmethod
    def of(cls, B: Float[Vectors, "n K"]) -> UsableColumns:
        """Find the usable columns by their largest entries, with one small transfer."""
        heights = largest(B).cpu()
        reasons = dict.fromkeys((heights == 0).nonzero().squeeze(1).tolist(), Reason.ZERO_RIGHT_HAND_SIDE)
        reasons |= dict.fromkeys((~torch.isfinite(heights)).nonzero().squeeze(1).tolist(), Reason.NON_FINITE)
        live = [j for j in range(len(heights)) if j not in reasons]
        return cls(heights, torch.tensor(live, dtype=torch.long), reasons)

    def scale(self, B: Float[Vectors, "n K"]) -> Float[Vectors, "n k"]:
        """Return the usable columns with a largest entry of 1."""
        return columns(B, self.live) / self.heights[self.live].to(B.device, B.dtype)

    def spread(self, values: Tensor | Sequence[float]) -> Float[Tensor, " K"]:
        """Put a number for each usable column in its place, and 0 for the others."""
        every = torch.zeros(len(self.heights), dtype=torch.float64)
        return every.index_copy(0, self.live, torch.as_tensor(values, dtype=torch.float64))

    def place(self, X: Float[Vectors, "n k"]) -> tuple[Float[Vectors, "n K"], list[int]]:
        """Put solutions in their places among zero (or NaN) columns, and list the columns that are not finite."""
        every = zero_block(X, len(self.heights))
        put_columns(every, self.live, X)
        for j, reason in self.reasons.items():
            if reason is Reason.NON_FINITE:
                put(every, j, part(every, j, j + 1) * math.nan)
        return every, (~torch.isfinite(largest(every))).nonzero().squeeze(1).tolist()
