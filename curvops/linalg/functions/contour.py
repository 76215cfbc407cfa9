"""A^½ B and A^-½ B by contour quadrature: x^-½ as a short sum of resolvents, Σ w/(x + σ), on an interval.

x^-½ = (2/π) ∫₀^∞ dt/(t² + x). With t = √m sn(u|k')/cn(u|k') the midpoint rule in u converges geometrically on [m, M],
k² = m/M, at a rate exp(−2π²N/(log(M/m) + 3)) (Hale, Higham & Trefethen 2008, method 3; Pleiss et al. 2020).

Conjugate gradients solve (A + σ I) x = b for all shifts σ ≥ 0 of the rule, at one product per step. The residuals of
all shifts are multiples ζ of that of the smallest shift, so that scalars carry the others (Jegerlehner 1996; Frommer
& Maass 1999). A step costs a product and a few vector updates per shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg.core.memory import Multiply, room_for
from curvops.linalg.core.results import FunctionProduct, Reason, indefinite
from curvops.linalg.core.rounding import NEAR_ZERO
from curvops.linalg.core.usable_columns import UsableColumns
from curvops.linalg.core.vectors import (
    Matrix,
    Vectors,
    as_block,
    as_columns,
    axpy,
    column_bytes,
    columns,
    combine,
    describe_square,
    inner,
    join,
    norm,
    part,
    product,
    put_columns,
    shaped_as,
    zero_block,
)
from curvops.linalg.functions.ritz import ROUNDING, random_signs
from curvops.linalg.solvers.systems import check, iterations_allowed
from curvops.linalg.solvers.verdicts import Callback
from curvops.linalg.spectra.lanczos import lanczos_from
from curvops.progress import at_work, remark

MOST_NODES = 100
SMALLEST_RATIO = 4 * np.finfo(np.float64).eps
PILOT_DEPTH = 12
CHECK_EVERY = 4
GRADIENT_FACTOR = 1e-3
# Below this share of b's residual, a shift adds nothing visible to the sum, even at a condition number of 1/eps.
NEGLIGIBLE = 1e-24


@dataclass(frozen=True, eq=False)
class ContourProduct:
    """A product f(A) B with its quadrature and, if kept, every shifted solution, (n, K) each."""

    product: FunctionProduct
    rule: InverseRootQuadrature | None
    solutions: list[Vectors]


def contour(
    A: Matrix,
    B: Vectors,
    *,
    inverse: bool,
    lower_bound: float | None = None,
    rtol: float = 1e-6,
    maxiter: int | None = None,
    max_matvecs: int | None = None,
    memory_budget: int | None = None,
    callback: Callback | None = None,
    keep: bool = False,
) -> ContourProduct:
    """Compute A^-½ B, or A^½ B = A (A^-½ B); ``keep`` returns the shifted solutions, which a gradient needs.

    The estimate adds the quadrature's error on [smallest, largest eigenvalue], the residuals of all shifts, and the
    drift of the recurrences, which one product with A per column measures.
    """
    facts = describe_square(A)
    check(facts, B, rtol, maxiter, None, memory_budget, max_matvecs)
    most = iterations_allowed(facts.rows, maxiter)
    budget = math.inf if max_matvecs is None else max_matvecs
    # A gradient multiplies the shifted solutions with each other, so each must be more accurate than their sum needs
    # to be.
    aim = GRADIENT_FACTOR * rtol if keep else float(rtol)
    with torch.no_grad(), at_work("inverse_sqrt" if inverse else "sqrt", max_matvecs, None, A):
        usable = UsableColumns.of(as_columns(B))
        live = usable.live
        unit = usable.scale(as_columns(B))
        sizes = norm(unit)
        unit = unit / sizes.to(unit.dtype)
        parts: list[_Part] = []
        rule, spent = None, 0
        trouble = None
        if len(live):
            size, spent, trouble = _size(A, unit)
        if len(live) and trouble is None:
            rule = _rule(size, lower_bound, inverse, aim, torch.finfo(B.dtype).eps)
            vectors = len(rule.shifts) * (2 if keep else 1)
            width = _width(unit, vectors, room_for(A, memory_budget, 0))
            for start in range(0, len(live), width):
                block = part(unit, start, start + width)
                job = _Part(A, block, rule, size, lower_bound, inverse, keep)
                job.solve(float(rtol), aim, most, (budget - spent) / len(live) * block.shape[1], callback)
                spent += job.matvecs
                parts.append(job)
        scale = (sizes.cpu() * usable.heights[live]).to(unit.device, unit.dtype)
        blocks = [job.value for job in parts]
        value, lost = usable.place(join(*blocks) * scale if blocks else zero_block(unit, len(live)))
        solutions: list[Vectors] = []
        if keep and parts:
            joined = zip(*(job.run.solutions for job in parts))
            solutions = [usable.place(join(*blocks) * scale)[0] for blocks in joined]
    reasons, errors = _joined(usable, trouble, parts)
    for j in lost:
        reasons[j], errors[j] = Reason.NON_FINITE, math.inf
    iterations = max((job.run.iteration for job in parts), default=0)
    return ContourProduct(
        FunctionProduct(shaped_as(value, B), errors, tuple(reasons), iterations, spent), rule, solutions
    )


def _size(A: Matrix, unit: Vectors) -> tuple[float, int, Reason | None]:
    """Return a number that A's largest eigenvalue hardly exceeds, from a few Lanczos steps on a mix of the columns.

    The third result is the defect of A, if there is one.
    """
    mixture = combine(unit, torch.arange(1, unit.shape[1] + 1, dtype=torch.float64).cos()[:, None])
    pilot = lanczos_from(mixture if float(norm(mixture)) > 0 else part(unit, 0, 1), A, PILOT_DEPTH)
    if pilot.reason in (Reason.NON_FINITE, Reason.NOT_SYMMETRIC):
        return 1.0, pilot.matvecs, pilot.reason
    values, V = torch.linalg.eigh(pilot.T)
    top = float(values[-1] + pilot.residual_norm * V[-1, -1].abs())
    eps = torch.finfo(unit.dtype).eps
    if float(values[0]) < -NEAR_ZERO * eps * float(values.abs().amax()):
        raise indefinite(f"A is not positive semidefinite: it has an eigenvalue below {float(values[0]):.3e}.")
    return (2 * top if top > 0 else 1.0), pilot.matvecs, None


def _rule(size: float, bound: float | None, inverse: bool, rtol: float, eps: float) -> InverseRootQuadrature:
    """Return a rule down to the lower bound; without one, down to eps ‖A‖ or to where the rest adds little to A^½ b."""
    least = bound or size * (eps if inverse else min(eps, (0.1 * rtol) ** 2))
    return inverse_root_quadrature(least, max(size, 2 * least), 0.25 * rtol)


def _width(unit: Vectors, vectors: int, memory_budget: int | None) -> int:
    if memory_budget is None:
        return unit.shape[1]
    return max(1, min(unit.shape[1], memory_budget // (column_bytes(unit) * (vectors + 7))))


def _joined(usable: UsableColumns, trouble: Reason | None, parts: list[_Part]) -> tuple[list[Reason], Tensor]:
    """Return the reasons and errors of all columns; ``trouble`` is the defect of A, if there is one."""
    K = len(usable.heights)
    reasons = [usable.reasons.get(j, trouble or Reason.ITERATION_LIMIT) for j in range(K)]
    errors = torch.tensor([0.0 if reason is Reason.ZERO_RIGHT_HAND_SIDE else math.inf for reason in reasons]).double()
    reached = (pair for job in parts for pair in zip(job.reasons, job.errors.tolist()))
    for j, (reason, error) in zip(usable.live.tolist(), reached):
        reasons[j], errors[j] = reason, math.inf if reason is Reason.NON_FINITE else error
    return reasons, errors


class _Part:
    """Columns that run together."""

    def __init__(
        self,
        A: Matrix,
        B: Vectors,
        rule: InverseRootQuadrature,
        size: float,
        lower_bound: float | None,
        inverse: bool,
        keep: bool,
    ) -> None:
        self.B, self.rule, self.size, self.bound, self.inverse = B, rule, size, lower_bound, inverse
        self.multiply = product(A)
        self.run = MultiShift(self.multiply, B, rule.shifts, rule.weights, size, keep)
        self.eps = torch.finfo(B.dtype).eps
        K = B.shape[1]
        self.errors = torch.full((K,), math.inf, dtype=torch.float64)
        self.reasons = [Reason.ITERATION_LIMIT] * K
        self.value = self.run.weighted
        self.resolved = torch.zeros(K, dtype=torch.bool)  # whether a column has reached the lower end of the spectrum
        self.matvecs = 0

    def solve(self, rtol: float, aim: float, maxiter: int, budget: float, callback: Callback | None) -> None:
        run, K = self.run, self.B.shape[1]
        limit, next_check = Reason.ITERATION_LIMIT, CHECK_EVERY
        while bool(run.active.any()) and run.iteration < maxiter:
            if run.matvecs + int(run.active.sum()) + K > budget:
                limit = Reason.RANK_CAPPED
                break
            run.step()
            if run.iteration >= next_check or run.iteration == maxiter or not bool(run.active.any()):
                next_check = run.iteration + max(CHECK_EVERY, run.iteration // 10)
                truncation, quadrature = self._estimates()
                self.errors = truncation + quadrature
                run.active &= (truncation > aim / 2) | (quadrature > rtol / 2) & ~self.resolved
                remark(lambda: f"error {float(self.errors.amax()):.1e}")
                if callback is not None:
                    callback(run.iteration, self.errors.clone())
        truncation, quadrature = self._estimates()
        drift = self._finish()
        # A y = 0 for a non-zero y: b is in the null space, and zero is the exact answer.
        null = (run.depths > 0) & ~run.failed & (norm(self.value).cpu() == 0)
        truncation, quadrature, drift = (torch.where(null, 0.0, e) for e in (truncation, quadrature, drift))
        self.errors = (truncation + quadrature + drift).nan_to_num(math.inf, math.inf)
        for k in range(K):
            self.reasons[k] = self._reason(k, rtol, limit, *(float(v[k]) for v in (truncation, quadrature, drift)))
        self.matvecs = run.matvecs + K

    def _reason(self, k: int, rtol: float, limit: Reason, truncation: float, quadrature: float, drift: float) -> Reason:
        if not bool(self.run.depths[k]) and not bool(self.run.failed[k]):
            return limit
        if bool(self.run.failed[k]) or not math.isfinite(truncation + drift):
            return Reason.NON_FINITE
        if truncation + quadrature + drift <= rtol:
            return Reason.CONVERGED
        if truncation > max(rtol / 2, drift) or (quadrature > rtol / 2 and not bool(self.resolved[k])):
            return limit
        return Reason.SINGULAR if self.inverse and quadrature > max(rtol / 2, drift) else Reason.PRECISION_LIMIT

    def _image(self) -> Vectors:
        """Return A Y by the recurrences."""
        run = self.run
        residual = (run.weights[:, None] * run.zeta).sum(0).to(self.B.device, self.B.dtype)
        return self.B * float(run.weights.sum()) - run.R * residual - run.damped

    def _bounds(self, k: int) -> tuple[float, float]:
        """Return the ends of the spectrum as column k shows them so far."""
        low, high, residual = self.run.ends(k)
        near = NEAR_ZERO * self.eps * self.size
        if low < (self.bound or 0.0) - near:
            raise NotPositiveSemidefiniteError(
                f"A has an eigenvalue below {low:.3e}, less than the lower bound {self.bound or 0.0:.3e} of its "
                "spectrum. Add a prior (add_diagonal), or pass a smaller lower_bound."
            )
        self.resolved[k] = residual <= max(0.1 * low, near)
        return self.bound or max(low - residual, 0.0), max(high, self.rule.low)

    def _estimates(self) -> tuple[Tensor, Tensor]:
        """Return errors relative to the value: bounds from the residuals of the shifts, and from the quadrature."""
        run, rule = self.run, self.rule
        truncation, quadrature = torch.zeros(2, self.B.shape[1], dtype=torch.float64)
        sizes = norm(run.weighted if self.inverse else self._image()).cpu()
        residuals = rule.weights[:, None] * run.residual_norms()
        for k in range(self.B.shape[1]):
            (low, high), size = self._bounds(k), float(sizes[k])
            if self.inverse:
                bound = float((residuals[:, k] / (max(low, self.eps * high) + rule.shifts)).sum())
                quadrature[k] = rule.relative_error(low, high) if low > 0 else math.inf
            else:
                bound = float((residuals[:, k] * high / (high + rule.shifts)).sum())
                inside = min(max(low, rule.low), high)
                below = math.sqrt(rule.low) / size if low < 0.99 * rule.low and size else 0.0
                quadrature[k] = rule.relative_error(inside, high) + below
            truncation[k] = bound / size if size else math.inf
        return truncation, quadrature

    def _finish(self) -> Tensor:
        """Compute the value; return its rounding error, from one product per column that shows the drift."""
        run = self.run
        image = self.multiply(run.weighted)
        drift, sizes = norm(image - self._image()).cpu(), norm(run.weighted).cpu()
        self.value = run.weighted if self.inverse else image
        added = torch.zeros_like(drift) if self.inverse else drift / norm(image).cpu()
        # The drift acts as a change of A of the same norm; for A^½ b = A (A^-½ b) it is an error as well.
        for k in range(len(drift)):
            level = max(ROUNDING * self.eps * self._bounds(k)[1], float(drift[k] / sizes[k]))
            sound = math.isfinite(level) and not bool(run.failed[k])
            added[k] += run.sensitivity(k, level, self.inverse) + self.eps if sound else math.inf
        return added


class MultiShift:
    """The sum Σ w x_σ for K unit columns b in lock-step, with its error; scalars are (S, K) or (K,) float64 on the CPU.

    ``weighted`` is Y = Σ w x_σ and ``damped`` Σ w σ x_σ; ``solutions`` holds the x_σ with ``keep``. By the recurrences
    A Y = Σ w b − Σ w ζ R − ``damped``; a product with A shows how far they have drifted.
    """

    def __init__(
        self, multiply: Multiply, B: Float[Vectors, "n K"], shifts: Tensor, weights: Tensor, size: float, keep: bool
    ) -> None:
        self.multiply, self.shifts, self.weights, self.size = multiply, shifts, weights, size
        S, K = len(shifts), B.shape[1]
        self.R = as_block(B)
        self.P = [as_block(B) for _ in range(S)]
        self.weighted, self.damped = zero_block(B, K), zero_block(B, K)
        self.solutions = [zero_block(B, K) for _ in range(S)] if keep else []
        self.zeta, self.zeta_before = torch.ones(2, S, K, dtype=torch.float64)
        self.squared = inner(self.R, self.R)
        self.squared_host = self.squared.cpu()
        self.alpha, self.beta = torch.ones(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        # Plain numbers: small tensors between the vectors of a step would keep the vectors' memory in use.
        self.alphas: list[list[float]] = []
        self.betas: list[list[float]] = [[0.0] * K]
        self.active = torch.ones(K, dtype=torch.bool)
        self.depths = torch.zeros(K, dtype=torch.long)
        self.failed = torch.zeros(K, dtype=torch.bool)
        self.matvecs = 0

    @property
    def iteration(self) -> int:
        return len(self.alphas)

    def _multiplied(self, base: Float[Vectors, "n K"]) -> Float[Vectors, "n K"]:
        """Return A P, with zeros for columns that are no longer active, on which products would be wasted."""
        if bool(self.active.all()):
            return self.multiply(base)
        index = self.active.nonzero().squeeze(1)
        image = zero_block(base, base.shape[1])
        put_columns(image, index, self.multiply(columns(base, index)))
        return image

    def step(self) -> None:
        """Take one step: a product for each active column, one transfer each way; other columns are unchanged."""
        base, active = self.P[0], self.active.to(self.R.device)
        image = self._multiplied(base) + float(self.shifts[0]) * base
        self.matvecs += int(self.active.sum())
        curvature, lengths = inner(base, image), inner(base, base)
        alpha = torch.where(active & (curvature > 0), self.squared / curvature, 0.0)
        axpy(self.R, image, -alpha)
        squared = inner(self.R, self.R)
        curvature_host, lengths_host, squared_host = torch.stack([curvature, lengths, squared]).cpu()
        eps = torch.finfo(self.R.dtype).eps
        if bool((self.active & (curvature_host < -NEAR_ZERO * eps * self.size * lengths_host)).any()):
            raise indefinite("A is not positive semidefinite: a direction p with p'Ap < 0 was found.")
        sound = torch.isfinite(squared_host) & torch.isfinite(curvature_host)
        broken = self.active & ~(sound & (curvature_host > 0))
        self.failed |= broken & ~sound
        self.active &= ~broken
        step = torch.where(self.active, self.squared_host / curvature_host, 0.0)
        self._advance(step, torch.where(self.active, squared_host / self.squared_host, 0.0))
        self.squared, self.squared_host = squared, torch.where(self.active, squared_host, self.squared_host)
        self.depths += self.active
        self.active &= self.squared_host.sqrt() > NEGLIGIBLE

    def _advance(self, alpha: Tensor, beta: Tensor) -> None:
        """Advance the scalar recurrences of every shift, then its vectors."""
        delta = (self.shifts - self.shifts[0])[:, None]
        scaled = self.zeta_before * self.alpha
        bottom = alpha * self.beta * (self.zeta_before - self.zeta) + scaled * (1 + delta * alpha)
        zeta = torch.where(self.active & (bottom != 0), self.zeta * scaled / bottom, self.zeta)
        zeta = torch.where(zeta * self.squared_host.sqrt() > NEGLIGIBLE, zeta, 0.0)
        ratio = torch.where(self.zeta != 0, zeta / self.zeta, 0.0)
        steps, turns = alpha * ratio, beta * ratio.square()
        moving = (steps != 0).any(1)
        on_device = [
            part.to(self.R.device, self.R.dtype)
            for part in (
                steps,
                self.weights[:, None] * steps,
                (self.weights * self.shifts)[:, None] * steps,
                zeta * self.active,
                turns,
            )
        ]
        for s in moving.nonzero().flatten().tolist():
            step, weighted, damped, residual, turn = (part[s] for part in on_device)
            axpy(self.weighted, self.P[s], weighted)
            axpy(self.damped, self.P[s], damped)
            if self.solutions:
                axpy(self.solutions[s], self.P[s], step)
            self.P[s] *= turn
            axpy(self.P[s], self.R, residual)
        self.zeta_before, self.zeta = self.zeta, zeta
        self.alpha, self.beta = torch.where(alpha > 0, alpha, self.alpha), beta
        self.alphas.append(self.alpha.tolist())
        self.betas.append(beta.tolist())

    def residual_norms(self) -> Float[Tensor, "S K"]:
        """Return ‖b − (A + σ) x_σ‖ by the recurrences."""
        return self.zeta * self.squared_host.sqrt()

    def tridiagonal(self, k: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return Lanczos's T for column k and A without a shift: diagonal, off-diagonal, and the next β."""
        m = int(self.depths[k])
        alpha = np.array([a[k] for a in self.alphas[:m]])
        beta = np.array([b[k] for b in self.betas[: m + 1]])
        diagonal = 1 / alpha - float(self.shifts[0])
        diagonal[1:] += beta[1:m] / alpha[:-1]
        roots = np.sqrt(beta[1:]) / alpha
        return diagonal, roots[:-1], float(roots[-1])

    def ends(self, k: int) -> tuple[float, float, float]:
        """Return the smallest and largest Ritz value of A for column k, and the residual of the smallest."""
        from scipy.linalg import eigh_tridiagonal  # a slow import that few calls need

        m = int(self.depths[k])
        if not m:
            return 0.0, self.size, self.size
        diagonal, off, last = self.tridiagonal(k)
        low, vector = eigh_tridiagonal(diagonal, off, select="i", select_range=(0, 0))
        high = eigh_tridiagonal(diagonal, off, eigvals_only=True, select="i", select_range=(m - 1, m - 1))
        return float(low[0]), float(high[0]), abs(float(vector[-1, 0])) * last

    def sensitivity(self, k: int, level: float, inverse: bool) -> float:
        """Return ‖g(T + E) e₁ − g(T) e₁‖/‖g(T) e₁‖ for a fixed E of size ``level`` and the sum g of the shifts."""
        m = int(self.depths[k])
        if not m:
            return math.inf
        diagonal, off, _ = self.tridiagonal(k)
        signs = random_signs(m).numpy()
        moved = diagonal + level * signs[0], off + level * signs[1, : m - 1]
        g, h = self._of_tridiagonal(diagonal, off, inverse), self._of_tridiagonal(*moved, inverse)
        return float(np.linalg.norm(g - h) / np.linalg.norm(g))

    def _of_tridiagonal(self, diagonal: np.ndarray, off: np.ndarray, inverse: bool) -> np.ndarray:
        from scipy.linalg import solve_banded

        first, total = np.eye(len(diagonal), 1)[:, 0], np.zeros(len(diagonal))
        above, below = np.append(0.0, off), np.append(off, 0.0)
        for shift, weight in zip(self.shifts.tolist(), self.weights.tolist()):
            total += weight * solve_banded((1, 1), np.stack([above, diagonal + shift, below]), first)
        if inverse:
            return total
        image: np.ndarray = diagonal * total
        image[:-1] += off * total[1:]
        image[1:] += off * total[:-1]
        return image


class InverseRootQuadrature(NamedTuple):
    """Shifts σ > 0 in ascending order and weights w > 0, for eigenvalues in [low, high]."""

    shifts: Float[Tensor, " S"]
    weights: Float[Tensor, " S"]
    low: float
    high: float

    def __call__(self, x: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
        """Return Σ w/(x + σ) ≈ x^-½."""
        return (self.weights / (x[:, None] + self.shifts)).sum(1)

    def relative_error(self, low: float, high: float) -> float:
        """Return the largest |√x Σ w/(x + σ) − 1| on [low, high]."""
        x = torch.logspace(math.log10(low), math.log10(high), 400, dtype=torch.float64)
        return float((x.sqrt() * self(x) - 1).abs().amax())


def inverse_root_quadrature(low: float, high: float, rtol: float) -> InverseRootQuadrature:
    """Return the rule with the fewest nodes whose relative error on [low, high] is at most rtol, or `MOST_NODES`."""
    # 1 − k² must be a number that float64 holds.
    ratio = 1.0 - (1.0 - max(min(low / high, 1.0), SMALLEST_RATIO))
    low = ratio * high
    rate = 2 * math.pi**2 / (math.log(high / low) + 3)
    count = max(1, int(math.log(1 / min(max(rtol, 1e-15), 0.5)) / rate))
    while True:
        rule = _midpoint(ratio, low, high, count)
        if count >= MOST_NODES or rule.relative_error(low, high) <= rtol:
            return rule
        count += 1


def _midpoint(ratio: float, low: float, high: float, count: int) -> InverseRootQuadrature:
    from scipy.special import ellipj, ellipkm1

    period = float(ellipkm1(ratio))  # K(k')
    u = (np.arange(count) + 0.5) * period / count
    # Beyond the middle, sn/cn(K' − u) = 1/(k sn/cn(u)) keeps its digits if k' is 1 to rounding.
    mirrored = u > period / 2
    sn, cn, dn, _ = ellipj(np.where(mirrored, period - u, u), 1.0 - ratio)
    scale = math.sqrt(ratio * high)
    t, slope = scale * sn / cn, scale * dn / cn**2
    product = scale * math.sqrt(high)
    t, slope = np.where(mirrored, product / t, t), np.where(mirrored, product * slope / t**2, slope)
    weights = 2 / math.pi * period / count * slope
    return InverseRootQuadrature(torch.from_numpy(t**2), torch.from_numpy(weights), low, high)
