"""The work of J Jᵀ by layer, of whose three forms the cheapest is taken, and the layers that are held together.

Two points whose rows are Σ_t δ_t ⊗ a_t, with t positions, p × q weights and C columns each, take

- by rows: C²pq multiply-adds, after each row has been formed once, in tpq;
- by pairs of positions, Σ_tu (δ_t·δ'_u)(a_t·a'_u): t²q + C²t²p, and passes over C²t² numbers;
- by images, Σ_t δ_t·(Σ_u (a_t·a'_u) δ'_u): t²q + Ct²p + C²tp, and passes over Ctp numbers.

For a kernel of k pixels with stride 1, the patches' t²q are t²q/k with their pixels, and passes over t² numbers.

Matrix products of a few columns run more slowly than large ones, which constants take into account.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from curvops.network import Layer, Plan

RowForm = Literal["rows", "pairs", "images"]

PASS, TOUCHED = 1.5, 90.0
"""Thirds of a gradient in the time of a pass for δ; multiply-adds in that of what a gradient does per layer output."""
PRODUCT = 1.35
"""Multiply-adds of a gradient in the time of one of a matrix product: 1.0 to 1.6, by processor and network."""
FORMING, FORMED = 2.0, 80.0
"""Multiply-adds of large matrix products in the time of one that forms rows, and of the passes over one number."""
PAIRED = 200.0
"""Multiply-adds in the time of the passes over one product of two sensitivities."""
IMAGED, IMAGE = 1.6, 240.0
"""Multiply-adds in the time of one that makes an image of δ', and of what each of its columns takes beside these."""
SHIFTED = 20.0
"""Multiply-adds in the time of the passes over one product of two pixels, for each pixel of a side of the kernel."""
HELD, HELD_OF_SOME, OTHERS, WORK = 5 / 8, 3 / 8, 1 / 4, 3 / 8
"""Shares of the memory: for rows of all points, or of some points and of others beside them; for their products."""


class Sizes(NamedTuple):
    """Sizes of one layer's rows on both sides: g groups, t and u positions, p × q weights, r and s columns."""

    g: int
    t: int
    u: int
    p: int
    q: int
    r: int
    s: int
    pixels: float = math.inf
    """Multiply-adds of (a_t·a'_u) from the pixels of patches; ∞ if there are none."""

    @property
    def by_pixels(self) -> bool:
        """Whether (a_t·a'_u) takes less work from pixels than from patches."""
        return self.pixels < self.t * self.u * self.q

    def work(self, n: int, m: int) -> dict[RowForm, float]:
        """Return the multiply-adds, or their time's worth, of the rows of n points with those of m by each form."""
        g, t, u, p, q, r, s, pixels = self
        inner = n * m * min(t * u * q, pixels)
        return {
            "rows": g * p * q * (n * m * r * s + n * r * (FORMING * t + FORMED) + m * s * (FORMING * u + FORMED)),
            "pairs": g * (inner + n * m * t * u * r * s * (p + PAIRED)),
            "images": g * (inner + n * m * s * p * (t * (IMAGED * u + r) + IMAGE)),
        }

    def form(self, n: int, m: int) -> RowForm:
        """Return the form that takes least; with one position each, images of δ' are of no use."""
        work = self.work(n, m)
        return min(("rows", "pairs") if self.t * self.u == 1 else work, key=work.__getitem__)


def work_of_pixels(x: int, y: int, c: int, q: int, dims: int) -> float:
    """Return the multiply-adds of (a_t·a'_u) from x and y pixels of c channels, if a patch has q numbers."""
    return x * y * (c + SHIFTED * dims * (q / c) ** (1 / dims)) if dims else math.inf


def gram_cost(plan: Plan, points: int) -> float:
    """Return how many gradients of the data J Jᵀ costs, under a prior that is constant on each tensor.

    It counts the passes for δ, once for each set of layers or panel of points, and the products. Parameters without a
    layer rule take passes over each point alone instead. The result is ∞ if the work of a gradient is unknown.
    """
    if not plan.forward:
        return math.inf
    columns, room = plan.num_outputs, plan.memory_budget // 2
    ruled = {name: layer.shape_of(local).numel() for layer in plan.layers for local, name in layer.names.items()}
    others = plan.size - sum(ruled.values())
    sets, share = layer_sets(plan, points, room)
    walks, together = float(len(sets)), points
    if share == HELD_OF_SOME:
        held = (columns * others + sum(_numbers(layer, columns) for layer in plan.layers)) * plan.itemsize * points
        panels = min(points, math.ceil(held / max(1, share * room)))  # a point at a time if there is room for none
        walks, together = (panels + 1) / 2, math.ceil(points / panels)
    pairs = sum(_least(layer, columns, together) for layer in plan.layers) * (points / together) ** 2 / 2
    pairs += others * (columns * points) ** 2 / 2
    gradient = points * (3 * plan.forward + TOUCHED * sum(layer.output[1:].numel() for layer in plan.layers))
    each = PASS * (1 + columns) / 3
    if plan.others:
        each += plan.cost_to_build("formed", points) / (1 + plan.overhead(1.0, points))
    return walks * each + PRODUCT * pairs / gradient


def layer_sets(plan: Plan, points: int, most_bytes: int) -> tuple[list[Collection[str] | None], float]:
    """Return the parameters whose rows are held together, walk by walk (None: all), and the share of memory for them.

    The rows of all points are held if those of each layer fit. Otherwise some points are held at a time, and their rows
    are formed again for each pair of such panels.
    """
    layers = _tied(plan.layers)
    sizes = [sum(_numbers(layer, plan.num_outputs) for layer in some) * plan.itemsize * points for some in layers]
    most = HELD * most_bytes
    if plan.others or max(sizes, default=0) > most:
        return [None], HELD_OF_SOME
    if sum(sizes) <= most:
        return [None], HELD
    found: list[set[str]] = [set()]
    held = 0.0
    for some, size in zip(layers, sizes):
        if held + size > most:
            found.append(set())
            held = 0.0
        held += size
        found[-1].update(name for layer in some for name in layer.names.values())
    return [*found], HELD


def _tied(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Return the layers in lists, of which no two share a parameter."""
    found: list[list[Layer]] = []
    for layer in layers:
        names = set(layer.names.values())
        mine = [some for some in found if any(names & set(other.names.values()) for other in some)]
        found = [some for some in found if not any(some is one for one in mine)]
        found.append([*(other for some in mine for other in some), layer])
    return found


def _numbers(layer: Layer, columns: int) -> int:
    """Return the numbers per point that are held of a layer: its rows, or a and δ."""
    return columns * layer.size if layer.as_rows(columns) else columns * layer.output[1:].numel() + layer.inputs


def _least(layer: Layer, columns: int, points: int) -> float:
    """Return the multiply-adds of one layer for all pairs of points."""
    positions = layer.multiply_adds // layer.shape_of("weight").numel() if "weight" in layer.names else 0
    if layer.as_rows(columns) or not positions:
        return float(columns * (points**2 * columns * layer.size + 2 * points * layer.multiply_adds))
    groups, (channels, *kernel) = getattr(layer.module, "groups", 1), layer.shape_of("weight")[1:] or (1,)
    x = layer.inputs // (groups * channels)
    pixels = work_of_pixels(x, x, channels, layer.width, len(kernel))
    sizes = Sizes(groups, positions, positions, layer.height // groups, layer.width, columns, columns, pixels)
    return sizes.work(points, points)[sizes.form(points, points)]
