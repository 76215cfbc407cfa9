"""Layers whose rows belong to points unevenly: atoms of graphs, packed sequences, tokens that a mask selects.

A layer that is called with m rows for n points, in any order, is a layer at T positions of each point once its rows
stand in a table (n, T), filled up with zeros; T is the largest number of rows of a point. Sums over positions then have
the same terms as before. The point of a row is the one whose outputs depend on it, which backward passes show.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from curvops.network.engines.rules import SingleRows

MOST_DIGITS = 16
"""The most points that one backward pass tells apart, by weights of 1, 2, 4, ..., whose products are exact."""
SILENT, SEVERAL = -1, -2
"""The points of a row on which no output depends, and of one on which outputs of several points depend."""
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


def digits_of(dtype: torch.dtype) -> int:
    """Return the number of points that one backward pass tells apart; half of a dtype's range is left to the model."""
    return min(MOST_DIGITS, int(math.log2(torch.finfo(dtype).max)) // 2)


def digit_weights(num_points: int, like: Tensor) -> Float[Tensor, "k n"]:
    """Return weights that tell points apart: ones, and for each digit of their numbers 2 to the power of it."""
    points, base = torch.arange(num_points, device=like.device), digits_of(like.dtype)
    exponents = [torch.zeros_like(points)]
    while base ** (len(exponents) - 1) < num_points:
        exponents.append(points // base ** (len(exponents) - 1) % base)
    return (1 << torch.stack(exponents)).to(like.dtype)


def points_of_rows(deltas: Float[Tensor, "k m *b"], num_points: int, rounding: float) -> Int[Tensor, " m"]:
    """Return the point of each row from δ of outputs with `digit_weights`, or `SILENT`, or `SEVERAL`.

    If only outputs of point n depend on a row, each δ of the row is that of ones times a weight of n. Nothing is known
    of rows whose δ overflow: they are `SEVERAL`, too.
    """
    (k, m), base = deltas.shape[:2], digits_of(deltas.dtype)
    if not m or not bool(deltas.isfinite().all()):
        return torch.full((m,), SEVERAL, device=deltas.device)
    rows = deltas.flatten(2).to(torch.promote_types(deltas.dtype, torch.float32))  # squares, too, are in range
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    first, others, size = rows[0], rows[1:], rows[0].norm(dim=1)
    silent = size <= rounding * size.amax()
    ratio = (others * first).sum(2) / size.square().masked_fill(silent, 1)
    digits = ratio.clamp(1, 2 ** (base - 1)).log2().round().long()
    weights = (1 << digits).to(rows.dtype)
    gap = (others - weights.unsqueeze(2) * first).norm(dim=2) / weights
    points = (digits * base ** torch.arange(k - 1, device=rows.device).unsqueeze(1)).sum(0)
    single = (gap <= rounding**0.5 * size).all(0) & (points < num_points)
    return points.masked_fill(~single, SEVERAL).masked_fill(silent, SILENT)


def beside_others(points: Int[Tensor, " m"], num_points: int) -> Int[Tensor, " m"]:
    """Return a point for each row: those without one (`SILENT`) belong beside the row before them."""
    m, rows = len(points), torch.arange(len(points), device=points.device)
    silent = points == SILENT
    if bool(silent.all()):
        return rows * num_points // max(1, m)
    return points[torch.where(silent, -1, rows).cummax(0).values.clamp_min((~silent).int().argmax())]
