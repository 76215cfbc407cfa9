"""Sums of functions of eigenvalues by stochastic Lanczos quadrature; one run is used for every scalar shift.

For positive semidefinite G and a random probe z, Lanczos turns zᵀf(G)z into an integral with m nodes. Two rules
bracket it if the even derivatives of f are negative and the odd ones positive, as for log(1 + x/μ) and x/(x + μ):
Gauss is an upper bound, and Gauss–Radau with a node at the lower end of the spectrum, 0, is a lower bound (Golub &
Meurant 2010, theorem 6.4).

Probes are random signs. Their variance is 2 (‖F‖_F² − Σ F_ii²) for F = f(G); that of Gaussian probes of norm √n is
about 2 (‖F‖_F² − (tr F)²/n), which is never smaller, by Cauchy–Schwarz. For the log-determinant of digits networks'
GGN, signs have 0.1 to 0.9 of the variance of Gaussian probes: a curvature matrix has a strong and uneven diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from curvops.ambient import Progress, columns_at_a_time, current_run
from curvops.checks import check_options, check_shape
from curvops.linalg.core import vectors as vec
from curvops.linalg.core.algorithm import algorithm
from curvops.linalg.core.probed import ESTIMATE_VECTORS, Limits, Probed, probing
from curvops.linalg.core.results import Estimate, Reason, caution, indefinite
from curvops.linalg.core.vectors import Given, Matrix, ScalarFunction, Vectors
from curvops.linalg.estimators.dense_spectrum import ROUNDING_UNITS, dense_spectrum, log_ratio, share, stack
from curvops.linalg.preconditioners.nystrom import Nystrom, grow
from curvops.linalg.spectra.lanczos import LockStep
from curvops.summary import Summarised

LEAST_PRODUCTS = 4
"""The least number of products for an error bar."""
FIRST_PROBES = 3

TRUSTED_PROBES = 8
"""Fewer probes often underestimate the spread: a run goes on, or is judged by its interval."""


@dataclass(frozen=True, eq=False, repr=False)
class SpectralQuadrature(Summarised):
    """Nodes and weights of Gauss and Gauss–Radau quadratures of a spectrum, one row per probe.

    Padding has weight 0. ``control_nodes`` and ``control_weights`` (uᵢᵀz)² belong to a Nyström approximation Ĝ whose
    sum is known exactly and whose probe values are subtracted: tr f(G) = tr f(Ĝ) + E zᵀ[f(G) − f(Ĝ)]z. They are empty
    without a sketch. ``reason`` is CONVERGED, or RANK_CAPPED if the memory or product budget ended the depth too
    early; an estimate has its own reason if a tolerance was set, ``rtol`` of the value plus ``offset``.
    ``rounding`` is the size of the errors in the eigenvalues from the products' dtype. If the matrix was decomposed,
    there is one row, of all its eigenvalues with weight 1, and ``exact`` is True.

    Examples:
        >>> A = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]).double())
        >>> quadrature = co.linalg.spectral_quadrature(A, shift=1.0)
        >>> round(float(quadrature.logdet(1.0)), 4), round(float(quadrature.effective_dimension(1.0)), 4)
        (4.7875, 2.7167)
    """

    gauss_nodes: Float[Tensor, "K m"]
    gauss_weights: Float[Tensor, "K m"]
    radau_nodes: Float[Tensor, "K l"]
    radau_weights: Float[Tensor, "K l"]
    control_nodes: Float[Tensor, " r"]
    control_weights: Float[Tensor, "K r"]
    matvecs: int
    reason: Reason
    rounding: float = 0.0
    rtol: float | None = None
    offset: float = 0.0
    exact: bool = False

    def logdet(self, shift: float | int | Tensor) -> Estimate:
        """Estimate log det(I + G/shift) in nats, for any positive shift, or for each of a tensor (m,)."""
        return self._each(log_ratio, shift)

    def effective_dimension(self, shift: float | int | Tensor) -> Estimate:
        """Estimate tr G (G + shift I)⁻¹ for any positive shift, or for each of a tensor (m,)."""
        return self._each(share, shift)

    def _each(self, of_shift: Callable[[float], ScalarFunction], shift: float | int | Tensor) -> Estimate:
        if not (isinstance(shift, Tensor) and shift.ndim):
            return self.trace(of_shift(positive(shift)))
        return stack([self.trace(of_shift(positive(mu))) for mu in shift.tolist()])

    def trace(self, f: ScalarFunction) -> Estimate:
        """Estimate tr f(G) for f with f(0) = 0 and derivatives of alternating sign, the first positive.

        The value is the middle of the bracket. ``bias_bound`` is half its mean width plus the effect of rounding of the
        products, which changes each eigenvalue by ``rounding``, counted by the weights. The control variate is used
        if it lowers the variance between probes.
        """
        rounded = self._rounding_effect(f)
        if self.exact:
            return Estimate.rounded(f(self.gauss_nodes).sum(), rounded, self.rtol or 0.0, self.matvecs)
        upper, lower = self.bracket(f)
        middle, half = (upper + lower) / 2, ((upper - lower) / 2).clamp_min(0).mean()
        control = f(self.control_nodes)
        corrected = middle - self.control_weights @ control + control.sum()
        count = len(middle)
        samples = corrected if len(control) and count > 1 and corrected.var() < middle.var() else middle
        variance = samples.var() if count > 1 else torch.full_like(half, math.inf)
        if samples is middle:
            variance = variance + self._top_weight_error(f).square()
        estimate = Estimate(
            samples.mean(), (variance / count).sqrt(), count, self.matvecs, half + rounded, widening=caution(count)
        )
        return replace(estimate, reason=self._reason(estimate, float(rounded)))

    def _top_weight_error(self, f: ScalarFunction) -> Tensor:
        """Return the error of the largest eigenvalue's weight, in units of the sum.

        The expectation of the weight is known: it is the multiplicity, a whole number. If one eigenvalue dominates,
        zᵀf(G)z is about χ² with one degree of freedom; if it happens to be small, so is its spread between probes, and
        the tolerance ends the run too early. The spread about the known expectation, which is added to the spread about
        the mean, is not small then. The error is 0 unless all probes found the same eigenvalue.
        """
        top, place = self.gauss_nodes.max(1)
        largest, alike = top.amax(), 1 - 1e-6
        if not bool(top.amin() >= alike * largest):
            return torch.zeros_like(largest)
        weight = self.gauss_weights.gather(1, place[:, None]).mean()
        below = torch.where(self.gauss_nodes < alike * largest, self.gauss_nodes, 0.0).amax()
        return (f(largest) - f(below)) * (weight - weight.round().clamp_min(1))

    def _rounding_effect(self, f: ScalarFunction) -> Tensor:
        x, delta = self.gauss_nodes, self.rounding
        change = torch.maximum(f(x + delta) - f(x), f(x) - f((x - delta).clamp_min(0)))
        return (self.gauss_weights * change).sum(1).mean()

    def _reason(self, estimate: Estimate, rounded: float) -> Reason:
        if self.rtol is None:
            return Reason.BUDGET_SPENT if self.reason is Reason.CONVERGED else self.reason
        goal, spread = self.rtol * abs(self.offset + float(estimate.value)), float(estimate.stderr)
        if 0 < estimate.samples < TRUSTED_PROBES:
            low, high = estimate.interval()
            spread = float(high - low) / 4  # what a standard error would be whose double is the interval's half
        if spread <= goal and float(estimate.bias_bound) <= goal:
            return Reason.CONVERGED
        if rounded > goal:
            return Reason.PRECISION_LIMIT
        return Reason.MATVEC_LIMIT if self.reason is Reason.CONVERGED else self.reason

    def bracket(self, f: ScalarFunction) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Return the upper and lower bound of zᵀf(G)z for each probe."""
        upper = (self.gauss_weights * f(self.gauss_nodes)).sum(1)
        return upper, (self.radau_weights * f(self.radau_nodes)).sum(1)


def positive(shift: float | int | Tensor) -> float:
    """Return a positive shift; raise ValueError for any other value."""
    if not bool(shift > 0):
        raise ValueError(f"shift must be positive, got {float(shift)}.")
    return float(shift)


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

    Unless probes or rank were given, a matrix with n ≤ 256 or n ≤ ``max_matvecs`` is formed and decomposed instead;
    without a limit also one with n ≤ 2048 if rtol takes more than 4 n products.

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
    G = vec.as_matrix(G)
    mu, limits, n = positive(shift), Limits(rtol, max_matvecs), vec.describe_square(G).rows
    limits.check(LEAST_PRODUCTS)
    check_options(probes=probes)
    exact = probes is None and rank is None and limits.allow_dense(n)
    current_run().expect(n if exact else max_matvecs)
    with torch.no_grad(), probing(G, generator, limits, ESTIMATE_VECTORS) as probed:
        return decompose(probed) if exact else run(probed, [mu], probes, rank)


@algorithm
def effective_dimension(
    G: Matrix | Given,
    prior: float | int | Float[Tensor, ""] | Float[Tensor, " n"],
    *,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate tr (G + A)⁻¹G, the number of directions that the data determine, for A = prior · I or diag(prior).

    A vector prior is whitened: tr (G' + I)⁻¹G' with G' = A^-½GA^-½.

    Args:
        G: (n, n), positive semidefinite.
        prior: the prior precision, a positive number (`logdet` calls it shift) or a vector (n,).
        rtol: the goal for standard error and bias bound, each relative to the value.
        max_matvecs: a limit on products; by default as many as are needed to meet rtol. With n or more the value is
            exact by a dense eigendecomposition; without a limit for n ≤ 256, and for n ≤ 2048 if rtol takes more than
            4 n products.
        generator: source of the probes.
        memory_budget: bytes for the Lanczos bases; None is the rest of the budget of the linearisation behind G.
        progress: as in `cg`.

    Returns:
        An Estimate; ``bias_bound`` is half the width of the Gauss and Gauss–Radau bracket, plus rounding. For a whole
        grid of scalar priors from one run, use ``spectral_quadrature(G, shift=smallest).effective_dimension(grid)``.

    Raises:
        NotPositiveSemidefiniteError: an eigenvalue below zero was found (it is also a ValueError).
        ValueError: G is not square, a product is not finite, or an option is out of range.

    Source: stochastic Lanczos quadrature as in ``spectral_quadrature``.

    Examples:
        >>> G = torch.diag(torch.tensor([9.0, 1.0, 0.0]))
        >>> round(float(co.linalg.effective_dimension(G, 1.0)), 4)
        1.4
    """
    G = vec.as_matrix(G)
    n, _, dtype, device = vec.describe_square(G)
    limits = Limits(rtol, max_matvecs)
    limits.check(min(LEAST_PRODUCTS, n))
    precision = torch.as_tensor(prior, dtype=dtype, device=device).detach()
    if precision.ndim:
        check_shape("prior", precision, (n,))
    if not bool(((precision > 0) & torch.isfinite(precision)).all()):
        raise ValueError(f"prior must be positive and finite, got {float(precision.amin())}.")
    plain, mu = vec.product(G), float(prior) if precision.ndim == 0 else 1.0
    scale = precision.rsqrt()[:, None] if precision.ndim else None

    def multiply(V: Vectors) -> Vectors:
        return plain(V) if scale is None else scale * plain(scale * V)

    exact = limits.allow_dense(n)
    current_run().expect(n if exact else max_matvecs)
    with torch.no_grad(), probing(G, generator, limits, ESTIMATE_VECTORS, multiply) as probed:
        quadrature = decompose(probed) if exact else run(probed, [mu], of_shift=share)
        return quadrature.effective_dimension(mu)


def decompose(probed: Probed) -> SpectralQuadrature:
    """Compute the eigenvalues of positive semidefinite G by n products; those within rounding of zero become 0.

    Raises:
        NotPositiveSemidefiniteError: an eigenvalue is clearly below zero.
        ValueError: G is not finite or not symmetric.
    """
    dense, n = dense_spectrum(probed.multiply, probed.facts, 0.0), probed.facts.rows
    lowest, size = float(dense.values[0]), float(dense.values.abs().amax())
    if lowest < -n * dense.eps * size:
        raise indefinite(f"G is not positive semidefinite: an eigenvalue is {lowest:.3e}.")
    nodes = dense.values.clamp_min(0)[None]
    weights, nothing = torch.ones_like(nodes), nodes.new_zeros(1, 0)
    rounding, rtol = max(ROUNDING_UNITS * dense.eps * size, -lowest), probed.limits.tolerance
    return SpectralQuadrature(
        *(nodes, weights, nodes, weights, nothing[0], nothing),
        matvecs=n,
        reason=Reason.CONVERGED,
        rounding=rounding,
        rtol=rtol,
        exact=True,
    )


def run(
    probed: Probed,
    shifts: Sequence[float],
    probes: int | None = None,
    rank: int | None = None,
    of_shift: Callable[[float], ScalarFunction] = log_ratio,
) -> SpectralQuadrature:
    """Add probes until tr f(G) is accurate to rtol for the f of each shift; the smallest shift decides the depth."""
    half = probed.with_half_memory()  # the sketch uses half and stays in memory with the probes
    apart, sketch, spent = half.apart(), None, 0
    if rank:
        rank = min(rank, probed.limits.products // 2)
        sketch = grow(apart, rank, min(probed.facts.rows, rank))
        spent = sketch.matvecs
    sampler = Sampler((probed if rank == 0 else half).after(spent), [of_shift(mu) for mu in sorted(shifts)])
    sampler.first(probes or FIRST_PROBES)
    if rank is None and probes is None and (pays := sampler.sketch_rank()):
        sketch = grow(apart, pays, min(probed.facts.rows, pays))
        spent = sketch.matvecs
        sampler.budget -= spent
    worth = math.inf if probes else probed.worth(spent + sampler.matvecs)
    if not sampler.add(probes, sketch, worth):
        exact = decompose(probed)
        return replace(exact, matvecs=exact.matvecs + spent + sampler.matvecs)
    return sampler.quadrature(sketch, probes is None)


class Sampler:
    """Probes of one depth and their quadrature rules, on the CPU, for tr f(G) to the tolerance of its limits.

    The first of ``functions`` decides the depth; the number of probes suffices for all of them. ``offset`` is the part
    of the trace that needs no probes; the tolerance is relative to the whole. ``scale`` is the size of the matrix
    behind the products, if it is larger than they are. ``signs`` are the probes.
    """

    def __init__(
        self,
        probed: Probed,
        functions: Sequence[ScalarFunction],
        offset: float = 0.0,
        scale: float = 0.0,
    ) -> None:
        self.probed, self.facts, self.rtol = probed, probed.facts, probed.limits.tolerance
        self.functions, self.offset, self.scale = functions, offset, scale
        self.budget, self.memory_budget = probed.limits.products, probed.limits.memory
        self.rules: list[Rules] = []
        self.signs: list[Vectors] = []
        self.matvecs, self.depth, self.capped = 0, 0, False

    def _probes(self, count: int, depth: int) -> Vectors:
        """Draw ``count`` probes, or as many as have room for bases of this depth."""
        width = columns_at_a_time(count, (depth + 2) * self.facts.vector_bytes, self.memory_budget)
        Z = self.probed.probes(width)
        self.signs.append(Z.to(torch.int8))
        return Z

    def _collect(self, lanczos: LockStep, before: Sequence[Rules] = ()) -> SpectralQuadrature:
        """Set the rules to those before and those of further probes; return the quadrature."""
        lanczos.check(self.scale)
        fresh = [rules_of(lanczos, k, size, self.scale) for k, size in enumerate(lanczos.sizes.tolist())]
        self.rules = [*before, *fresh]
        return self.quadrature()

    def first(self, count: int) -> None:
        """Deepen the first probes until their bracket is half as wide as the expected error of the probes."""
        least = 6  # the depth of the first look, and the fewest steps between two
        few = min(self.budget, max(2, self.budget // 2))  # two, for an error bar, if there are two products
        Z = self._probes(min(count, few), least)
        steps = self.budget // Z.shape[1]
        lanczos = LockStep.within(self.probed.multiply, Z, 4 * least, steps, self.memory_budget)

        def is_bracketed() -> bool:
            upper, lower = self._collect(lanczos).bracket(self.functions[0])
            middle = (upper + lower) / 2
            spread = float(middle.std()) if len(middle) > 1 else 0.0
            best = spread * math.sqrt(lanczos.depth / self.budget)
            return float((upper - lower).mean()) <= max(self._goal(middle.mean()), best)

        lanczos.extend(least)
        self.capped = not lanczos.deepen(lambda depth: max(least, depth // 4), is_bracketed)
        self.matvecs += lanczos.matvecs
        self.depth = int(lanczos.depths.max())

    def _goal(self, value: Tensor) -> float:
        return self.rtol * abs(self.offset + float(value))

    def add(self, probes: int | None = None, sketch: Nystrom | None = None, worth: float | int = math.inf) -> bool:
        """Add probes of the same depth until there are ``probes``, or the error is rtol, or the budget ends.

        Returns False, before another product, once rtol needs more than ``worth`` products.
        """
        worth += self.matvecs
        while True:
            missing = (probes or self.probes_needed(sketch)) - len(self.rules)
            if self.matvecs + missing * self.depth > worth:
                return False
            count = min(missing, len(self.rules), (self.budget - self.matvecs) // self.depth)
            if count < 1:
                return True
            lanczos = LockStep(self.probed.multiply, self._probes(count, self.depth), self.depth)
            lanczos.extend(self.depth)
            self._collect(lanczos, self.rules)
            self.matvecs += lanczos.matvecs

    def probes_needed(self, sketch: Nystrom | None = None) -> int:
        """Return how many probes the tolerance needs, judging by the spread of the present ones."""
        count, quadrature = len(self.rules), self.quadrature(sketch)
        if count < 2:
            return 2
        ratios = []
        for estimate in map(quadrature.trace, self.functions):
            goal, stderr = self._goal(estimate.value), float(estimate.stderr)
            ratios.append((stderr / goal) ** 2 if goal else math.inf if stderr else 0.0)
        worst = max(ratios)
        return max(TRUSTED_PROBES, count if worst <= 1 else max(count + 1, math.ceil(min(worst * count, 1e9))))

    def sketch_rank(self) -> int:
        """Return the rank that minimises the expected products, from the spectrum of the first probes; 0 for no sketch.

        A sketch of rank r leaves a variance of about 2 Σ_{i>r} f(λᵢ)². It is compared with the probes' own spread:
        random signs are better than that bound if the diagonal dominates, and a sketch then saves nothing.
        """
        if len(self.rules) < 3:
            return 0
        upper, lower = self.quadrature().bracket(self.functions[0])
        middle = (upper + lower) / 2
        goal, left, done = self._goal(middle.mean()) ** 2, self.budget - self.matvecs, len(middle) * self.depth
        nodes, counts = self.eigenvalues()
        seen, captured = counts.cumsum(0), (counts * self.functions[0](nodes).square()).cumsum(0)

        def error(variance: float, rank: int) -> tuple[float, float]:
            """Return the error within the budget, if it is above the tolerance, and the products to the tolerance."""
            if not goal:
                return math.inf, math.inf
            reached = variance * self.depth / max(1, left - rank + done)
            return max(reached / goal, 1.0), max(self.depth * variance / goal - done, 0.0) + rank

        best, choice = error(float(middle.var()), 0), 0
        for rank in (25, 50, 100, 200, 400, 800):
            if rank > min(left, self.facts.rows) // 2:
                break
            below = float(captured[int((seen <= rank).sum().clamp(1, len(seen))) - 1])
            expected = error(2 * max(float(captured[-1]) - 0.8 * below, 0.0), rank)
            if expected < best:
                best, choice = expected, rank
        return choice

    def eigenvalues_above(self, level: float) -> float:
        """Return the expected number of eigenvalues above a level, at least 1."""
        nodes, counts = self.eigenvalues()
        return max(1.0, float(counts[nodes > level].sum()))

    def eigenvalues(self) -> tuple[Tensor, Tensor]:
        """Return the nodes in falling order, and the expected number of eigenvalues at each."""
        nodes = torch.cat([r.gauss for r in self.rules])
        counts = torch.cat([r.gauss_weights for r in self.rules]) / len(self.rules)
        order = nodes.argsort(descending=True)
        return nodes[order], counts[order]

    def quadrature(self, sketch: Nystrom | None = None, tolerance: bool = True) -> SpectralQuadrature:
        """Return the rules of all probes, padded to one length, on the device of the matrix."""
        columns = [pad_sequence(list(rows), batch_first=True) for rows in zip(*(r[:4] for r in self.rules))]
        nodes, control = torch.zeros(0, dtype=torch.float64), torch.zeros(len(self.rules), 0, dtype=torch.float64)
        if sketch is not None:
            nodes = sketch.eigenvalues
            control = torch.cat([vec.gram(Z.to(self.facts.dtype), sketch.U).square() for Z in self.signs])
        highest, lowest = max(r.highest for r in self.rules), min(r.lowest for r in self.rules)
        rounding = ROUNDING_UNITS * torch.finfo(self.facts.dtype).eps * max(self.scale, highest)
        device = self.facts.device
        gauss, gauss_weights, radau, radau_weights = (values.to(device) for values in columns)
        return SpectralQuadrature(
            gauss,
            gauss_weights,
            radau,
            radau_weights,
            nodes.to(device),
            control.to(device),
            matvecs=self.matvecs + (0 if sketch is None else sketch.matvecs),
            reason=Reason.RANK_CAPPED if self.capped else Reason.CONVERGED,
            rounding=max(rounding, -lowest),
            rtol=self.rtol if tolerance else None,
            offset=self.offset,
        )


class Rules(NamedTuple):
    """The quadrature rules of one probe with nodes clamped at 0, and the extreme Ritz values before clamping."""

    gauss: Tensor
    gauss_weights: Tensor
    radau: Tensor
    radau_weights: Tensor
    lowest: float
    highest: float


def rules_of(lanczos: LockStep, k: int, size: float, scale: float) -> Rules:
    """Return the rules of Gauss and of Gauss–Radau with a node at 0 for start vector k, whose length is given.

    ``scale`` is the size of the terms of the products; their rounding may look like a negative eigenvalue.

    Raises:
        NotPositiveSemidefiniteError: a Ritz value is clearly below zero.
    """
    T, eps = lanczos.tridiagonal(k), lanczos.eps
    m = len(T)
    beta, (nodes, V) = float(lanczos.betas[k, m - 1]), torch.linalg.eigh(T)
    lowest, highest = float(nodes[0]), float(nodes.abs().amax())
    noise = 1e3 * eps * max(highest, scale)
    # ‖Gz‖² ≤ ‖G‖ zᵀGz for a positive semidefinite G; an image of z without curvature along z disproves it.
    if lowest < -noise or (highest == 0 and beta > noise):
        raise indefinite(f"A is not positive semidefinite, or lower_bound is too large: {lowest:.3e} is below.")
    gauss = nodes.clamp_min(0), size**2 * V[0].square()
    if beta == 0 or highest == 0:
        return Rules(*gauss, *gauss, lowest, highest)
    # A node slightly below 0 bounds, too, and T minus it stays regular if 0 is itself a Ritz value.
    below = min(lowest, 0.0) - eps * abs(float(nodes[-1]))
    eye, last = torch.eye(m, dtype=T.dtype), torch.zeros_like(nodes)
    last[-1] = beta**2
    shifted, info = torch.linalg.solve_ex(T - below * eye, last)
    if bool(info != 0) or not math.isfinite(shifted[-1]):
        # Rounding in T put a Ritz value there, as in steps within an exact null space: move past it.
        below -= m * eps * highest
        shifted = torch.linalg.solve(T - below * eye, last)
    extended = T.new_zeros(m + 1, m + 1)
    extended[:m, :m], extended[m, m] = T, below + shifted[-1]
    extended[m, m - 1] = extended[m - 1, m] = beta
    nodes, V = torch.linalg.eigh(extended)
    return Rules(*gauss, nodes.clamp_min(0), size**2 * V[0].square(), lowest, highest)
