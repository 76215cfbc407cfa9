"""Layers whose rows belong to points unevenly: atoms of graphs, packed sequences, tokens that a mask selects.

A layer that is called with m rows for n points, in any order, is a layer at T positions of each point once its rows
stand in a table (n, T), filled up with zeros; T is the largest number of rows of a point. Sums over positions then have
the same terms as before. The point of a row is the one whose outputs depend on it, which backward passes show.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from curvops.network.engines.rules import SingleRows

BASE = 16
"""The points that one backward pass tells apart, by weights of 1, 2, 4, ...: products with powers of two are exact."""
MOST_PADDING = 8.0
"""How many times as large as its rows a table may be; otherwise fewer points are taken at a time."""


class RaggedRows:
    """The rows of one call of a layer, in a table of points.

    `kept` (n, T, *a) are the rows' inputs, and `inside` (n, T) says which entries of the table are rows.
    """

    def __init__(self, form: SingleRows, points: Int[Tensor, " m"], num_points: int) -> None:
        counts, order = torch.bincount(points, minlength=num_points), points.argsort(stable=True)
        self.width = max(1, int(counts.max()))
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[points[order]]
        self._split, self.places = form.split, points * self.width + position
        self.inside: Bool[Tensor, "n T"] = torch.arange(self.width, device=order.device) < counts.unsqueeze(1)
        self.kept = self._table(form.kept)

    def sensitivities(self, delta: Float[Tensor, "R *out"]) -> Float[Tensor, "n R T *b"]:
        """Return δ of the rows in the table from that of the call's output."""
        return self._table(self._split(delta).transpose(0, 1)).transpose(1, 2)

    def _table(self, rows: Tensor) -> Tensor:
        flat = rows.new_zeros(self.inside.numel(), *rows.shape[1:]).index_copy(0, self.places, rows)
        return flat.unflatten(0, self.inside.shape)


def digit_weights(num_points: int, like: Tensor) -> Float[Tensor, "k n"]:
    """Return weights that tell points apart: ones, and for each digit of their numbers 2 to the power of it."""
    points = torch.arange(num_points, device=like.device)
    exponents = [torch.zeros_like(points)]
    while BASE ** (len(exponents) - 1) < num_points:
        exponents.append(points // BASE ** (len(exponents) - 1) % BASE)
    return (1 << torch.stack(exponents)).to(like.dtype)


def points_of_rows(deltas: Float[Tensor, "k m *b"], num_points: int, rounding: float) -> Int[Tensor, " m"] | None:
    """Return the point of each row from δ of outputs with `digit_weights`; None if a row belongs to several points.

    If only outputs of point n depend on a row, each δ of the row is that of ones times a weight of n. The point of a
    row on which no output depends is -1.
    """
    k, m = deltas.shape[:2]
    rows = deltas.flatten(2)
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny) if m else rows
    first, others, size = rows[0], rows[1:], rows[0].norm(dim=1)
    silent = size <= rounding * size.amax() if m else size > 0
    ratio = (others * first).sum(2) / size.square().masked_fill(silent, 1)
    digits = ratio.clamp(1, 2 ** (BASE - 1)).log2().round().long()
    weights = (1 << digits).to(rows.dtype)
    gap = (others - weights.unsqueeze(2) * first).norm(dim=2) / weights
    points = (digits * BASE ** torch.arange(k - 1, device=rows.device).unsqueeze(1)).sum(0)
    single = (gap <= rounding**0.5 * size).all(0) & (points < num_points)
    return points.masked_fill(silent, -1) if bool((single | silent).all()) else None


def beside_others(points: Int[Tensor, " m"], num_points: int) -> Int[Tensor, " m"]:
    """Return a point for each row: those without one (-1) belong beside the row before them."""
    m, rows = len(points), torch.arange(len(points), device=points.device)
    silent = points < 0
    if bool(silent.all()):
        return rows * num_points // max(1, m)
    return points[torch.where(silent, -1, rows).cummax(0).values.clamp_min((~silent).int().argmax())]
