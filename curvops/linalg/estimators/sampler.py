"""Lanczos probes of a spectrum: their depth, their number, and whether a sketch pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvops.linalg.core.memory import columns_at_a_time
from curvops.linalg.core.probed import Probed
from curvops.linalg.core.results import Estimate, Reason
from curvops.linalg.core.vectors import ScalarFunction, Vectors, gram
from curvops.linalg.estimators.brackets import Rules, SpectralQuadrature, log_ratio, rules
from curvops.linalg.preconditioners.nystrom import Nystrom, grow
from curvops.linalg.spectra.lanczos import LockStep, depth_within, first_capacity
from curvops.records import restore, state_of

FIRST_PROBES = 3
TRUSTED_PROBES = 8
FIRST_DEPTH = 6
# Eigenvalues are known to this many units of rounding of the largest: the products' own errors.
ROUNDING_UNITS = 2.0
STATE = ("rules", "signs", "matvecs", "depth", "capped", "budget")


class Sketch:
    """A Nyström approximation that is made at most once."""

    def __init__(self, probed: Probed) -> None:
        self.probed = probed
        self.made: Nystrom | None = None

    def make(self, rank: int) -> None:
        self.made = grow(self.probed, rank, min(self.probed.facts.rows, rank))

    @property
    def matvecs(self) -> int:
        return 0 if self.made is None else self.made.matvecs

    @property
    def nodes(self) -> Tensor:
        return torch.zeros(0, dtype=torch.float64) if self.made is None else self.made.eigenvalues.cpu()

    def weights(self, Z: Vectors) -> Tensor:
        if self.made is None:
            return torch.zeros(Z.shape[1], 0, dtype=torch.float64)
        return gram(Z, self.made.U).square().cpu()


class Sampler:
    """Probes of one depth and their quadrature rules, on the host, for tr f(G) to the tolerance of its limits.

    The first of ``functions`` decides the depth; the number of probes serves all of them. With ``keep``, ``solves``
    keeps each probe and its product with (G + ``mu`` I)⁻¹. ``known`` is the part of the trace that needs no probes;
    the tolerance is relative to the whole. ``scale`` is the size of the matrix behind the products, where it is larger
    than they are.
    """

    def __init__(
        self,
        probed: Probed,
        mu: float,
        *,
        known: float = 0.0,
        scale: float = 0.0,
        functions: Sequence[ScalarFunction] = (),
        keep: bool = False,
    ) -> None:
        self.probed, self.facts, self.mu, self.rtol = probed, probed.facts, mu, probed.limits.tolerance
        self.functions = tuple(functions) or (log_ratio(mu),)
        self.f, self.keep = self.functions[0], keep
        self.solves: list[tuple[Vectors, Vectors]] = []
        self.known, self.scale = known, scale
        self.budget, self.memory_budget = probed.limits.products, probed.limits.memory
        self.rules: list[Rules] = []
        self.signs: list[Vectors] = []
        self.matvecs, self.depth, self.capped = 0, 0, False

    def state(self) -> dict[str, Any]:
        """All that further probes depend on, between two groups of them; a run that keeps its solves has more."""
        return state_of(self, STATE)

    def recall(self, state: dict[str, Any]) -> None:
        """Go on from this state."""
        restore(self, STATE, state)
        self.rules = [Rules(*each) for each in self.rules]

    def goal(self, values: Tensor) -> float:
        return self.rtol * abs(self.known + float(values.mean()))

    def start(self, count: int, depth: int, most: int | None = None) -> LockStep:
        Z = self.probed.probes(count)
        self.signs.append(Z.to(torch.int8))
        return LockStep(self.probed.multiply, Z, depth, most)

    def affordable(self, count: int, depth: int) -> int:
        """Return how many of ``count`` bases of this depth fit in memory."""
        return columns_at_a_time(count, (depth + 2) * self.facts.rows * self.facts.dtype.itemsize, self.memory_budget)

    def first(self, count: int) -> None:
        """Deepen the first probes until their bracket is half as wide as the error to be expected of probes."""
        n = self.facts.rows
        count = self.affordable(count, FIRST_DEPTH)
        size = self.facts.dtype.itemsize
        deepest = depth_within(self.budget // count, n, size, count, self.memory_budget)
        capacity = first_capacity(4 * FIRST_DEPTH, deepest, n, size, count, self.memory_budget)
        run = self.start(count, 0 if deepest < 1 else capacity, deepest)
        run.reserve(min(deepest, FIRST_DEPTH))
        run.extend(min(deepest, FIRST_DEPTH))
        self.capped = not run.deepen(
            deepest, lambda depth: max(FIRST_DEPTH, depth // 4), lambda: self.is_bracketed(run)
        )
        self.keep_solves(run)
        self.depth, self.matvecs = int(run.depths.max()), run.matvecs

    def is_bracketed(self, run: LockStep) -> bool:
        """Return whether the first probes' rules bracket their mean as narrowly as their number is worth."""
        self.rules = self.make_rules(run)
        upper, lower = self.bounds()
        middle, half = (upper + lower) / 2, float((upper - lower).mean()) / 2
        spread = float(middle.std()) if run.K > 1 else 0.0
        best = spread * math.sqrt(max(run.alphas.shape[1], 1) / self.budget)
        return half <= 0.5 * max(self.goal(middle), best)

    def keep_solves(self, run: LockStep) -> None:
        if self.keep:
            self.solves.append((self.signs[-1], run.inverse_times_start(self.mu)))

    def bounds(self) -> tuple[Tensor, Tensor]:
        upper = torch.stack([(r.gauss_weights * self.f(r.gauss)).sum() for r in self.rules])
        return upper, torch.stack([(r.radau_weights * self.f(r.radau)).sum() for r in self.rules])

    def add(self, probes: int | None, sketch: Sketch | None, save: Callable[[], None] = lambda: None) -> None:
        """Add probes of the same depth until there are ``probes``, or the error is rtol, or the budget ends."""
        most = len(self.rules) + max(0, (self.budget - self.matvecs) // self.depth)
        while len(self.rules) < most:
            wanted = probes or self.probes_needed(sketch)
            count = min(most, wanted, 2 * len(self.rules)) - len(self.rules)
            if count < 1:
                return
            count = self.affordable(count, self.depth)
            run = self.start(count, self.depth)
            run.extend(self.depth)
            self.matvecs += run.matvecs
            self.rules += self.make_rules(run)
            self.keep_solves(run)
            save()

    def probes_needed(self, sketch: Sketch | None) -> int:
        """Return how many probes the tolerance needs, by the spread of the present ones."""
        quadrature = self.quadrature(sketch)
        return max(self._probes_needed(quadrature.trace(f)) for f in self.functions)

    def _probes_needed(self, estimate: Estimate) -> int:
        if estimate.samples < 2:
            return 2
        goal = self.goal(estimate.value)
        # Few probes often underestimate the spread, which would end the run too early.
        if float(estimate.stderr) <= goal:
            return max(estimate.samples, TRUSTED_PROBES)
        ratio = (float(estimate.stderr) / goal) ** 2 if goal else math.inf
        return max(TRUSTED_PROBES, estimate.samples + 1, math.ceil(min(ratio * estimate.samples, 1e9)))

    def sketch_rank(self) -> int:
        """Return the rank that lowers the expected products, by the spectrum of the first probes; 0 if none does.

        A sketch of rank r leaves a variance of about 2 Σ_{i>r} f(λᵢ)². It is compared with the probes' own
        spread: random signs do better than that bound where the diagonal dominates, and a sketch then saves nothing.
        """
        upper, lower = self.bounds()
        middle = (upper + lower) / 2
        if len(middle) < 3:
            return 0
        nodes = torch.cat([r.gauss for r in self.rules])
        counts = torch.cat([r.gauss_weights for r in self.rules]) / len(self.rules)
        order = nodes.argsort(descending=True)
        energy = counts[order] * self.f(nodes[order]).square()
        seen, captured = counts[order].cumsum(0), energy.cumsum(0)
        goal = self.goal(middle) ** 2
        left = self.budget - self.matvecs
        done = len(middle) * self.depth

        def error(variance: float, rank: int) -> tuple[float, float]:
            products = self.depth * variance / goal if goal else math.inf
            reached = variance * self.depth / max(1, left - rank + done)
            return max(reached / goal if goal else math.inf, 1.0), max(products - done, 0.0) + rank

        best, choice = error(float(middle.var()), 0), 0
        for rank in (25, 50, 100, 200, 400, 800):
            if rank > left // 2 or rank > self.facts.rows // 2:
                break
            have = float(captured[int((seen <= rank).sum().clamp(1, len(seen))) - 1])
            trial = error(2 * max(float(captured[-1]) - 0.8 * have, 0.0), rank)
            if trial < best:
                best, choice = trial, rank
        return choice

    def make_rules(self, run: LockStep) -> list[Rules]:
        check_run(run, self.scale)
        return [rules(run, k, self.scale) for k in range(run.K)]

    def quadrature(self, sketch: Sketch | None, tolerance: bool = True) -> SpectralQuadrature:
        columns = [_pad(rows) for rows in zip(*(r[:4] for r in self.rules))]
        sketch = sketch or Sketch(self.probed)
        weights = torch.cat([sketch.weights(signs.to(self.facts.dtype)) for signs in self.signs])
        reason = Reason.RANK_CAPPED if self.capped else Reason.CONVERGED
        gauss, gauss_weights, radau, radau_weights, nodes, control = (
            part.to(self.facts.device) for part in (*columns, sketch.nodes, weights)
        )
        matvecs = self.matvecs + sketch.matvecs
        highest, lowest = max(r.highest for r in self.rules), min(r.lowest for r in self.rules)
        rounding = ROUNDING_UNITS * torch.finfo(self.facts.dtype).eps * max(self.scale, highest)
        return SpectralQuadrature(
            gauss,
            gauss_weights,
            radau,
            radau_weights,
            nodes,
            control,
            matvecs,
            reason,
            max(rounding, -lowest),
            self.rtol if tolerance else None,
            self.known,
        )


def check_run(run: LockStep, scale: float = 0.0) -> None:
    """Raise ValueError where the products were not finite, or not those of a symmetric matrix.

    ``scale`` is the size of the terms of the products; rounding grows with it where it is larger than the products.
    """
    if not bool(torch.isfinite(run.alphas).all() & torch.isfinite(run.betas).all()):
        raise ValueError("a product of the operator holds NaN or Inf; check the parameters and the data.")
    if run.skewed and run.skew > 1e3 * run.eps * scale:
        raise ValueError(Reason.NOT_SYMMETRIC.value)


def _pad(rows: tuple[Tensor, ...]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
