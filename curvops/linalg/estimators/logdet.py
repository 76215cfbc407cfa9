"""Estimates of the log-determinant of a positive definite matrix known by its products.

>>> import torch
>>> from curvops.linalg import logdet
>>> G = torch.diag(torch.arange(1.0, 501.0) ** -2)
>>> grid = logdet(G, shift=torch.tensor([0.01, 0.1, 1.0]), generator=torch.Generator().manual_seed(0))
>>> low, high = grid.interval()
>>> exact = torch.stack([(G.diagonal().double() + mu).log().sum() for mu in (0.01, 0.1, 1.0)])
>>> grid.reason.name, bool(((low <= exact) & (exact <= high)).all())
('CONVERGED', True)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Shaped
from linear_operator import LinearOperator
from torch import Tensor

from curvops.ambient import Progress, current_run
from curvops.checks import check_choice, checked_number, shown
from curvops.linalg.core.algorithm import Multiply, algorithm
from curvops.linalg.core.probed import ESTIMATE_VECTORS, Limits, Probed, probing
from curvops.linalg.core.results import Estimate, Reason, accept, indefinite
from curvops.linalg.core.solve_routes import DETERMINANT_RANK
from curvops.linalg.core.vectors import Given, Matrix, Vectors, as_matrix, describe_square, product
from curvops.linalg.estimators.dense_spectrum import DenseSpectrum, dense_spectrum, log_ratio, stack
from curvops.linalg.estimators.quadrature import FIRST_PROBES, LEAST_PRODUCTS, Sampler, run
from curvops.linalg.estimators.trace import VectorPairs, attach_gradient, needs_gradient
from curvops.linalg.preconditioners.factored import FactoredPreconditioner
from curvops.linalg.preconditioners.nystrom import grow
from curvops.linalg.solvers.cg import cg
from curvops.linalg.solvers.systems import shifted
from curvops.linalg.spectra.lanczos import LockStep, depth_within

LEFT = 0.1
"""A preconditioner grows until the eigenvalues that it leaves are below this share of μ: a product for each of the
others, which as many products of probes are given to meet the tolerance before it is made."""


@algorithm
def logdet(
    A: Matrix | Given,
    *,
    shift: float | int | Shaped[Tensor, "*m"] | None = None,
    lower_bound: float | int | Literal["estimate"] | None = None,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    preconditioner: FactoredPreconditioner | str | None = "auto",
    memory_budget: int | None = None,
    progress: Progress = None,
) -> Estimate:
    """Estimate log det(A + shift I) in nats, for symmetric A; exact for an operator with a closed form.

    Without a shift, a closed form (`KFAC(lin).add_diagonal(1.0)`, low rank plus a diagonal) gives the
    value without a product. `A.logdet()`, as of every LinearOperator, is this value as a tensor.

    Args:
        A: (n, n), positive semidefinite, or positive definite if neither shift nor lower_bound is given. The value
            carries gradients for the tensors inside A, from its own probes and solves; the value of a grid does not.
        shift: added to the diagonal. For ``GGN + prior`` pass the GGN and the prior precision: bounds are sharper.
            A tensor (m,) requests a whole grid: value, stderr and interval have shape (m,), all from one run of
            Lanczos on A itself, with a control variate in place of a preconditioner.
        lower_bound: a known positive lower bound of A's spectrum, such as its prior precision. It is not verified.
            If neither is given, a curvature plus a prior (``G.add_diagonal(prior)``) is split into the two.
            "estimate" uses the smallest Ritz value less its residual, after as many Lanczos steps as it needs: if an
            eigenvalue lies below, the value is too high by an unknown amount, so that CONVERGED becomes UNVERIFIED.
        rtol: the goal for standard error and bias bound, each relative to log det(I + (A − lower_bound)/μ),
            μ = shift + lower_bound, at every shift.
        max_matvecs: a limit on products; by default as many as are needed to meet rtol. n or more gives the exact
            value by a dense eigendecomposition, and so do, without a limit, n ≤ 256, and n ≤ 2048 if rtol takes more
            than 4 n products.
        generator: source of the probes.
        preconditioner: "auto" uses a Nyström preconditioner if the spectrum decays and probes without one have not
            met rtol by the products that it takes, with at most half of the budget and rank 400:
            log det A = log det P + tr log P^-½AP^-½ (Wenger et al. 2022). None uses none. An object
            (``nystrom``, ``cholesky``, ``block_jacobi``, ``diagonal_preconditioner``, ``as_preconditioner``) is used
            as it is. The bracket remains a bound; only low-rank ones give Â ≤ A, and with others it is wider.
        memory_budget: bytes for the bases and the sketch; None means the rest of the budget of the linearisation
            behind A.
        progress: as in `cg`.

    Returns:
        An Estimate; ``bias_bound`` is half the width of the Gauss and Gauss–Radau bracket, plus the effect of rounding
        in the products. ``reason`` is CONVERGED only if rtol was met; PRECISION_LIMIT means that rounding alone
        exceeds it, as in float32 with a shift below rounding of the largest eigenvalue.

    Raises:
        NotPositiveSemidefiniteError: an eigenvalue that is not positive was found (it is also a ValueError).
        ValueError: A is not square, options are out of range, a large A that is not a curvature plus a prior is given
            without shift or lower_bound (a singular A could not be detected), or an estimated bound is not positive.

    Examples:
        >>> A = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> round(float(co.linalg.logdet(A).value.exp()), 4)
        5.0
    """
    A = as_matrix(A)
    facts, limits = describe_square(A), Limits(rtol, max_matvecs)
    if not (preconditioner is None or isinstance(preconditioner, FactoredPreconditioner) or preconditioner == "auto"):
        raise TypeError(f'preconditioner must be "auto", None or as_preconditioner(P), got {shown(preconditioner)}.')
    form = A._closed_form() if shift is None and hasattr(A, "_closed_form") else None
    if form is not None:
        limits.check(0)
        exact: Estimate = form.logdet_estimate(limits.tolerance)
        return exact
    limits.check(min(LEAST_PRODUCTS, facts.rows))
    bound, levels = _bound_and_levels(shift, lower_bound)
    grid, estimated, solves = isinstance(shift, Tensor) and shift.ndim > 0, lower_bound == "estimate", needs_gradient(A)
    dense, beside = limits.allow_dense(facts.rows), 0.0
    base: Matrix = A
    offset: Tensor | float = 0.0
    scale: Tensor | None = None
    parts = getattr(A, "shifted_form", lambda: None)() if shift is None and lower_bound is None else None
    if parts is not None:
        base, level, offset, scale = parts
        levels = [level]
        if not dense and scale is not None and isinstance(preconditioner, FactoredPreconditioner):
            bound = float(scale.max()) ** -2  # the preconditioner belongs to P, not to B
            beside = len(scale) * math.log(bound) - float(parts.offset.detach())
            base, levels, offset, scale = A, [bound], 0.0, None
    pairs: VectorPairs | None = None
    current_run().expect(max_matvecs)
    with torch.no_grad():
        if dense:
            spectrum = dense_spectrum(product(base), facts, bound)  # of B, since rounding of P may hide λ
            estimates = [spectrum.logdet(mu, limits.tolerance) for mu in levels]
            estimate = stack(estimates) if grid else estimates[0]
            pairs = None if grid else partial(_dense_pairs, spectrum, levels[0])
        elif min(levels) == 0 and not estimated:
            raise ValueError(
                'a stochastic log-determinant needs shift=, lower_bound= or lower_bound="estimate"; the dense one '
                f"needs max_matvecs >= {facts.rows} (and any memory_budget >= {16 * facts.rows**2} bytes)."
            )
        else:
            with probing(base, generator, limits, ESTIMATE_VECTORS) as probed:
                estimate, pairs = _above(probed, bound, levels, preconditioner, solves, grid, estimated, beside)
    if pairs is None or base is A:
        return estimate + offset if pairs is None else attach_gradient(estimate, A, pairs)
    of_base, rows = pairs, 1.0 if scale is None else scale.unsqueeze(-1)
    return attach_gradient(
        estimate + offset, A, lambda _: ((rows * left, rows * right) for left, right in of_base(base))
    )


def _above(
    probed: Probed,
    bound: float,
    levels: list[float],
    preconditioner: FactoredPreconditioner | str | None,
    solves: bool,
    grid: bool,
    estimated: bool,
    beside: float,
) -> tuple[Estimate, VectorPairs | None]:
    """Estimate log det(A + (μ − bound) I) for one level μ, or for a grid of them, above a bound given or estimated."""
    spent = 0
    if estimated:
        bound, spent = _estimate_bound(probed, min(levels) > 0)
        levels, probed = [bound + level for level in levels], probed.after(spent)
    if grid:
        mus, pairs = torch.tensor(levels, dtype=torch.float64, device=probed.facts.device), None
        excess = replace(probed, multiply=_less(probed.multiply, bound))
        estimate = run(excess, levels).logdet(mus) + probed.facts.rows * mus.log()
    else:
        estimate, pairs = _by_probes(probed, bound, levels[0], preconditioner, solves, beside)
    reason = Reason.UNVERIFIED if estimated and estimate.reason is Reason.CONVERGED else estimate.reason
    return replace(estimate, matvecs=estimate.matvecs + spent, reason=reason), pairs


def _bound_and_levels(
    shift: float | int | Tensor | None, lower_bound: float | int | str | None
) -> tuple[float, list[float]]:
    """Return the lower bound (0 if it is to be estimated), and for each shift the lower bound plus the shift."""
    if isinstance(lower_bound, str):
        check_choice("lower_bound", lower_bound, ("estimate",))
        lower_bound = None
    if isinstance(shift, Tensor) and shift.requires_grad and torch.is_grad_enabled():
        raise ValueError("shift has no gradient here; use logdet(A.add_diagonal(shift)) or detach it.")
    shifts = shift.reshape(-1).tolist() if isinstance(shift, Tensor) else [shift]
    for name, value in (*(("shift", s) for s in shifts), ("lower_bound", lower_bound)):
        if value is not None:
            checked_number(name, value, "[0, inf)")
    bound = float(lower_bound or 0.0)
    return bound, [bound + float(s or 0.0) for s in shifts]


def _solve_pairs(probes: list[Vectors], P: FactoredPreconditioner | None, shift: float) -> VectorPairs:
    """Make pairs for (A + shift I)⁻¹ from probes z, random signs.

    With l = (A + shift I)⁻¹P^½z and r = P^-½z, E l rᵀ = (A + shift I)⁻¹; conjugate gradients in the backward pass solve
    to a relative residual of 1e-6.

    Raises:
        ConvergenceError: a solve fails, in the backward pass.
    """

    def pairs(A: Matrix) -> Iterator[tuple[Tensor, Tensor]]:
        total = sum(signs.shape[1] for signs in probes)
        base, rtol = shifted(A.detach(), shift), 1e-6
        for signs in probes:
            Z = signs.to(A.dtype)
            right, target = (Z, Z) if P is None else (P.sqrt_inverse(Z), P.sqrt(Z))
            yield accept(cg(base, target, preconditioner=P, rtol=rtol), rtol) / total, right

    return pairs


def _dense_pairs(spectrum: DenseSpectrum, mu: float, A: Matrix) -> Iterator[tuple[Tensor, Tensor]]:
    n, _, dtype, device = describe_square(A)
    yield spectrum.inverse(mu, dtype), torch.eye(n, dtype=dtype, device=device)


class ShiftedParts(NamedTuple):
    """The parts of P = S⁻¹ (B + λ I) S⁻¹ with diagonal S (None: I), and log det P = log det(B + λ I) + offset.

    A method `shifted_form` returns them for a matrix stored as a positive semidefinite one plus a positive diagonal.
    """

    base: LinearOperator
    level: float
    offset: Tensor
    scale: Tensor | None


def _estimate_bound(probed: Probed, shifted: bool) -> tuple[float, int]:
    """Return the smallest Ritz value of one start vector less its residual, and the products spent.

    Raises:
        NotPositiveSemidefiniteError: the smallest Ritz value is clearly negative.
        ValueError: it is not clearly positive and no shift was given (with a shift, the bound is then 0).
    """
    facts, limits = probed.facts, probed.limits
    most = min(facts.rows, max(1, limits.products // 4), DETERMINANT_RANK)
    most = depth_within(most, facts.rows, facts.vector_bytes, 1, limits.memory)
    run = LockStep(probed.multiply, probed.probes(1), min(most, LEAST_PRODUCTS))
    while True:
        run.extend(run.capacity)
        run.check()
        nodes, V = torch.linalg.eigh(run.tridiagonal(0))
        lowest, noise = float(nodes[0]), 1e3 * run.eps * run.scale
        if lowest < -noise:
            raise indefinite(f"the operator is not positive semidefinite: it has an eigenvalue below {lowest:.3e}.")
        bound = lowest - float(run.betas[0, -1] * V[-1, 0].abs())
        if bound >= 0.9 * lowest or bool(run.done[0]) or run.capacity >= most:
            break
        run.reserve(min(most, run.capacity + max(LEAST_PRODUCTS, run.capacity // 4)))
    if bound > noise:
        return bound, run.matvecs
    if shifted:
        return 0.0, run.matvecs
    raise ValueError(
        f"{run.matvecs} products show no positive lower bound of the spectrum: the smallest Ritz value is {lowest:.3e} "
        f"± {lowest - bound:.1e}. Give shift or lower_bound, or max_matvecs >= {facts.rows} for the dense value."
    )


def _by_probes(
    probed: Probed,
    bound: float,
    mu: float,
    preconditioner: FactoredPreconditioner | str | None,
    solves: bool,
    beside: float,
) -> tuple[Estimate, VectorPairs | None]:
    """Estimate log det(A + (μ − bound) I), with a tolerance relative to the part above n log μ, plus ``beside``.

    With ``solves``, also return pairs l, r with E Σ l rᵀ = (A + (μ − bound) I)⁻¹.
    """
    excess = replace(probed, multiply=_less(probed.multiply, bound))
    n, budget = probed.facts.rows, probed.limits.products
    P: FactoredPreconditioner | None = None
    sampler: Sampler | None = None
    floor, scale, spent = mu, bound, 0
    if isinstance(preconditioner, FactoredPreconditioner):
        P, floor, smallest = preconditioner, preconditioner.floor(mu), preconditioner.bounds()[0]
        lanczos = LockStep(excess.multiply, excess.probes(1), max(1, min(4, budget // 4)))
        lanczos.extend(lanczos.capacity)
        scale, spent = (bound + mu + lanczos.scale) / smallest if smallest > 0 else 0.0, lanczos.matvecs
    elif preconditioner == "auto":
        P, sampler, scale, spent = _sketched(excess, bound, mu, beside)
    # P^-½(A + shift)P^-½ ≥ floor. The Nyström Ĝ never exceeds G, so that P ≤ (G + μ)/μ for our own P.
    logdet_of_P = 0.0 if P is None else float(P.logdet()) + n * math.log(floor / mu)
    if sampler is None:
        whitened = excess.multiply if P is None else _whiten(excess.multiply, P, mu, floor)
        left = replace(excess.after(spent).with_half_memory(), multiply=whitened)
        sampler = Sampler(left, [log_ratio(floor)], logdet_of_P + beside, scale)
        sampler.first(FIRST_PROBES)
    if not sampler.add(worth=excess.worth(spent + sampler.matvecs)):
        spectrum = dense_spectrum(excess.multiply, excess.facts, 0.0)
        exact = spectrum.logdet(mu, probed.limits.tolerance)
        exact = replace(exact, matvecs=exact.matvecs + spent + sampler.matvecs)
        return exact, partial(_dense_pairs, spectrum, mu) if solves else None
    estimate = sampler.quadrature().logdet(floor)
    estimate = replace(estimate + (logdet_of_P + n * math.log(mu)), matvecs=estimate.matvecs + spent)
    return estimate, _solve_pairs(sampler.signs, P, mu - bound) if solves else None


def _sketched(
    excess: Probed, bound: float, mu: float, beside: float
) -> tuple[FactoredPreconditioner | None, Sampler | None, float, int]:
    """Return a preconditioner, or probes that met the tolerance without one, or neither if the spectrum is flat.

    Also return the size of A + bound, and the products spent beside those of the probes.
    """
    n, budget, memory = excess.facts.rows, excess.limits.products, excess.limits.memory
    most = min(budget // 2, DETERMINANT_RANK, n)
    if memory is not None:
        most = min(most, memory // (6 * excess.facts.vector_bytes))
    if not most:
        return None, None, bound, 0
    pilot_rank = min(most, 8)
    pilot = grow(excess.apart(), None, pilot_rank)
    size, spent = float(pilot.eigenvalues[0]) if len(pilot.eigenvalues) else 0.0, pilot.matvecs
    scale, rank = bound + size, most
    if not (pilot.tail <= 0.5 * size and size >= mu):  # the spectrum is flat, or small
        return None, None, scale, spent
    if pilot.tail == 0 or most == pilot_rank:
        return pilot.preconditioner(mu), None, scale, spent
    if budget // 2 >= min(DETERMINANT_RANK, n):  # otherwise products are kept for the preconditioner
        sampler = Sampler(excess.after(spent).with_half_memory(), [log_ratio(mu)], beside, scale)
        sampler.first(FIRST_PROBES)
        worth = min(most, sampler.eigenvalues_above(LEFT * mu))
        met = not sampler.capped and sampler.add(worth=worth)
        rank = 0 if met else min(most, (budget - spent - sampler.matvecs) // 2)
        if not rank:
            return None, sampler, scale, spent
        spent += sampler.matvecs
        del sampler  # frees its probes
    full = grow(excess.apart(), None, rank, LEFT * mu, 1e12)
    return full.preconditioner(mu), None, scale, spent + full.matvecs


def _less(multiply: Multiply, bound: float) -> Multiply:
    return (lambda V: multiply(V) - bound * V) if bound else multiply


def _whiten(excess: Multiply, P: FactoredPreconditioner, mu: float, floor: float) -> Multiply:
    """Return the product with P^-½(G + μ)P^-½ less its lower bound, which is positive semidefinite."""

    def multiply(V: Vectors) -> Vectors:
        inner = P.sqrt_inverse(V)
        return P.sqrt_inverse(excess(inner) + mu * inner) - floor * V

    return multiply
