"""Stochastic Lanczos quadrature: one run for log-determinants and effective dimensions at every scalar shift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from curvops.ambient import current_run
from curvops.checkpoint import NOTHING, Checkpoint, begin
from curvops.checks import checked_whole
from curvops.linalg.core.memory import columns_at_a_time
from curvops.linalg.core.probed import Limits, Probed, probing
from curvops.linalg.core.results import Estimate, Reason
from curvops.linalg.core.sharded import algorithm
from curvops.linalg.core.solve_routes import EXACT_SIZE
from curvops.linalg.core.vectors import (
    Given,
    Matrix,
    ScalarFunction,
    Vectors,
    as_matrix,
    describe_square,
    gram,
    product,
)
from curvops.linalg.estimators.brackets import ROUNDING_UNITS, Rules, SpectralQuadrature, log_ratio, positive, rules
from curvops.linalg.estimators.dense_spectrum import KnownSpectrum, known_spectrum
from curvops.linalg.preconditioners.nystrom import Nystrom, grow
from curvops.linalg.spectra.lanczos import LockStep
from curvops.progress import Progress
from curvops.records import from_record, restore, state_of

__all__ = ["SpectralQuadrature", "spectral_quadrature"]

LEAST = 4
STATE = ("rules", "signs", "matvecs", "depth", "capped", "budget")
FIRST_PROBES = 3
TRUSTED_PROBES = 8
FIRST_DEPTH = 6
LEAST_VECTORS = 12
"""The number of vectors that one probe of a few steps takes."""


@algorithm
def spectral_quadrature(
    G: Matrix | Given,
    *,
    shift: float | int,
    probes: int | None = None,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    rank: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> SpectralQuadrature:
    """Run Lanczos on positive semidefinite G for sums over its spectrum such as log det(I + G/μ), at every μ.

    A matrix with n ≤ 256 is formed and decomposed instead, unless probes, rank or a smaller budget were given.

    Args:
        G: (n, n), positive semidefinite.
        shift: the smallest μ of interest. Smaller ones are possible later, with wider brackets.
        probes: their number; None adds probes until the standard error of log det(I + G/shift) is rtol of its value.
        rtol: the relative standard error of log det(I + G/shift) at which no more probes are added.
        max_matvecs: the budget in products, sketch included; by default as many as are needed to meet rtol.
        rank: the rank of the Nyström control variate; None uses one if it is expected to save products.
        generator: source of the probes.
        memory_budget: bytes for the Lanczos bases; limits the depth and the number of probes that run in lock-step.
            None is the rest of the budget of the linearisation behind G.
        progress: as in `cg`.

    The depth grows until the bracket at ``shift`` is half as wide as the expected error of the probes; then probes are
    added. Costs one block product per step.

    Returns:
        A SpectralQuadrature, whose methods give traces, log-determinants and effective dimensions at every μ.

    Raises:
        ValueError: G is not square, a product is not finite, shift is not positive, or the budget is below 4 products.

    Source: Ubaru, Chen & Saad 2017; the control variate as in Adams et al. 2018.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> quadrature = co.linalg.spectral_quadrature(A, shift=1.0)
        >>> [round(float(quadrature.logdet(shift)), 4) for shift in (1.0, 10.0)]
        [4.7875, 0.8765]
    """
    G = as_matrix(G)
    mu, limits, facts = float(positive(shift)), Limits(rtol, max_matvecs, memory_budget), describe_square(G)
    limits.check(LEAST)
    if probes is not None:
        checked_whole("probes", probes)
    exact = probes is None and rank is None and facts.rows <= min(EXACT_SIZE, limits.products) and memory_budget is None
    kept = begin("spectral_quadrature", None, dict, facts.device)
    source = kept.source("generator", generator, facts.device)
    if kept.done:
        return kept.result(KnownSpectrum if exact else SpectralQuadrature)
    if exact:
        current_run().expect(facts.rows)
        with torch.no_grad():
            return kept.finish(known_spectrum(product(G), facts, rtol))
    current_run().expect(max_matvecs)
    with probing(G, source, limits, LEAST_VECTORS) as probed:
        return kept.finish(run(probed, [mu], probes, rank, kept=kept))


def run(
    probed: Probed,
    shifts: Sequence[float],
    probes: int | None = None,
    rank: int | None = None,
    of_shift: Callable[[float], ScalarFunction] = log_ratio,
    kept: Checkpoint = NOTHING,
) -> SpectralQuadrature:
    """Add probes until tr f(G) is accurate to rtol for the f of each shift; the smallest shift decides the depth.

    A checkpoint is written after each group of probes.
    """
    functions, budget = [of_shift(mu) for mu in sorted(shifts)], probed.limits.products
    half = probed.with_half_memory()  # the sketch uses half and stays in memory with the probes
    sketch, known = Sketch(half.apart()), kept.state
    if known is not None and known["sketch"] is not None:
        sketch.made = from_record(Nystrom, known["sketch"])
    elif rank:
        sketch.make(min(rank, budget // 2))
    with torch.no_grad():
        sampler = Sampler((probed if rank == 0 else half).after(sketch.matvecs), min(shifts), functions=functions)

        def save() -> None:
            kept.save(lambda: {"sampler": sampler.state(), "sketch": sketch.made})

        if known is not None:
            sampler.recall(known["sampler"])
        else:
            sampler.first(min(probes or FIRST_PROBES, budget // 2))
            if rank is None and probes is None and (worth := sampler.sketch_rank()):
                sketch.make(worth)
                sampler.budget -= sketch.matvecs
            save()
        sampler.add(probes, sketch, save)
        return sampler.quadrature(sketch, probes is None)


class Sketch:
    """A Nyström approximation that is computed at most once."""

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
    """Probes of one depth and their quadrature rules, on the CPU, for tr f(G) to the tolerance of its limits.

    The first of ``functions`` decides the depth; the number of probes suffices for all of them. With ``keep``,
    ``solves`` stores each probe and its product with (G + ``mu`` I)⁻¹. ``known`` is the part of the trace that needs
    no probes; the tolerance is relative to the whole. ``scale`` is the size of the matrix behind the products, if it
    is larger than they are.
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
        """Return the state on which further probes depend, between two groups; a run that keeps its solves has more."""
        return state_of(self, STATE)

    def recall(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        restore(self, STATE, state)
        self.rules = [Rules(*each) for each in self.rules]

    def goal(self, values: Tensor) -> float:
        return self.rtol * abs(self.known + float(values.mean()))

    def probes(self, count: int) -> Vectors:
        Z = self.probed.probes(count)
        self.signs.append(Z.to(torch.int8))
        return Z

    def affordable(self, count: int, depth: int) -> int:
        """Return how many of ``count`` bases of this depth fit in memory."""
        return columns_at_a_time(count, (depth + 2) * self.facts.vector_bytes, self.memory_budget)

    def first(self, count: int) -> None:
        """Deepen the first probes until their bracket is half as wide as the expected error of the probes."""
        count = self.affordable(count, FIRST_DEPTH)
        steps, memory = self.budget // count, self.memory_budget
        run = LockStep.within(self.probed.multiply, self.probes(count), 4 * FIRST_DEPTH, steps, memory)
        run.extend(FIRST_DEPTH)
        self.capped = not run.deepen(lambda depth: max(FIRST_DEPTH, depth // 4), lambda: self.is_bracketed(run))
        self.keep_solves(run)
        self.depth, self.matvecs = int(run.depths.max()), run.matvecs

    def is_bracketed(self, run: LockStep) -> bool:
        """Return whether the first probes' rules bracket their mean as narrowly as their number justifies."""
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
            run = LockStep(self.probed.multiply, self.probes(count), self.depth)
            run.extend(self.depth)
            self.matvecs += run.matvecs
            self.rules += self.make_rules(run)
            self.keep_solves(run)
            save()

    def probes_needed(self, sketch: Sketch | None) -> int:
        """Return how many probes the tolerance needs, judging by the spread of the present ones."""
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
        """Return the rank that minimises the expected products, from the spectrum of the first probes; 0 for no sketch.

        A sketch of rank r leaves a variance of about 2 Σ_{i>r} f(λᵢ)². It is compared with the probes' own spread:
        random signs are better than that bound if the diagonal dominates, and a sketch then saves nothing.
        """
        upper, lower = self.bounds()
        middle = (upper + lower) / 2
        if len(middle) < 3:
            return 0
        _, seen, captured = self.spectrum()
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

    def spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nodes in falling order, and the sums up to each of eigenvalues counted and of f² over them."""
        nodes = torch.cat([r.gauss for r in self.rules])
        counts = torch.cat([r.gauss_weights for r in self.rules]) / len(self.rules)
        order = nodes.argsort(descending=True)
        nodes, counts = nodes[order], counts[order]
        return nodes, counts.cumsum(0), (counts * self.f(nodes).square()).cumsum(0)

    def preconditioner_pays(self, most: int, left: float) -> bool:
        """Return whether a preconditioner of up to `most` columns saves work, by the spectrum of the first probes.

        It takes a product for each eigenvalue above `left`, and lowers the variance of the probes as in `sketch_rank`,
        and their depth as the root of the condition number. Work is counted in multiply-adds: those of products, and
        of vectors of length n: 10 n r² for the factors of r columns at r, r/2, r/4, … (two QR factorisations and five
        products each), 4 n r for its root on both sides of a product, 2 n m for a Lanczos vector beside m others.
        """
        upper, lower = self.bounds()
        nodes, seen, captured = self.spectrum()
        goal = self.goal((upper + lower) / 2) ** 2
        if len(self.rules) < 2 or float(self.quadrature(None).trace(self.f).bias_bound) ** 2 >= goal:
            return True  # more probes of this depth would not reach the tolerance
        rank = min(most, math.ceil(float(seen[int((nodes > left).sum().clamp_min(1)) - 1])))
        place = min(int((seen <= rank).sum()), len(seen) - 1)
        variance = 2 * max(float(captured[-1]) - 0.8 * float(captured[max(place - 1, 0)]), 0.0)
        depth = max(self.depth * math.sqrt((float(nodes[place]) + self.mu) / (float(nodes[0]) + self.mu)), FIRST_DEPTH)
        n, product = self.facts.rows, self.probed.multiply_adds
        probes = max(TRUSTED_PROBES, variance / goal)
        sketched = rank * (product + 10 * n * rank) + probes * depth * (product + 4 * n * rank + 2 * n * depth)
        further = self.probes_needed(None) - len(self.rules)
        return sketched < further * self.depth * (product + 2 * n * self.depth)

    def make_rules(self, run: LockStep) -> list[Rules]:
        run.check(self.scale)
        return [rules(run, k, self.scale) for k in range(run.K)]

    def quadrature(self, sketch: Sketch | None, tolerance: bool = True) -> SpectralQuadrature:
        columns = [pad_sequence(list(rows), batch_first=True) for rows in zip(*(r[:4] for r in self.rules))]
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
