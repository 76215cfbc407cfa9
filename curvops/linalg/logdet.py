"""The log-determinant of a positive definite matrix known by its products."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from curvops.linalg.brackets import Function
from curvops.linalg.lanczos import LockStep
from curvops.linalg.nystrom import grow
from curvops.linalg.preconditioners import FactoredPreconditioner
from curvops.linalg.probing import FIRST_PROBES, Sampler, Sketch
from curvops.linalg.results import Estimate, NotPositiveSemidefinite
from curvops.linalg.vectors import Description, Matrix, describe_square, product, random_block

EXACT_SIZE = 256
MOST_MATVECS = 2000
MOST_RANK = 400
PILOT_RANK = 8
SIZING = 4


def logdet(
    A: Matrix,
    *,
    shift: float | int | None = None,
    lower_bound: float | int | None = None,
    rtol: float = 0.01,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    preconditioner: FactoredPreconditioner | str | None = "auto",
    memory_budget: int | None = None,
) -> Estimate:
    """Log det(A + shift I) in nats, for symmetric A.

    Args:
        A: (n, n), positive semidefinite, or positive definite where neither shift nor lower_bound is given.
        shift: added to the diagonal. Of ``GGN + prior`` pass the GGN and the prior precision: bounds are sharper.
        lower_bound: a known positive lower bound of A's spectrum, such as its prior precision. It is trusted.
        rtol: aim for the standard error, relative to log det(I + (A − lower_bound)/(shift + lower_bound)).
        max_matvecs: the budget in products, 2000 by default. A budget of n or more gives the exact value by a dense
            eigendecomposition, and so does n ≤ 256 without a budget.
        preconditioner: "auto" takes a Nyström preconditioner where the spectrum decays, at most half of the budget and
            rank 400: log det A = log det P + tr log P^-½AP^-½ (Wenger et al. 2022). None takes none. One of your own
            (``nystrom``, ``cholesky``, ``block_jacobi``, ``diagonal_preconditioner``, ``as_preconditioner``) is used as
            it is. The bracket stays a bound: a low-rank one says Â ≤ A, others only ‖P‖, which makes it wider.
        memory_budget: bytes for the bases and the sketch.

    Returns:
        An Estimate; ``bias_bound`` is half the width of the Gauss and Gauss–Radau bracket. One shift is served; for
        many use ``spectral_quadrature``.

    Raises:
        NotPositiveSemidefinite: an eigenvalue that is not positive was met (it is also a ValueError).
        ValueError: A is not square, options are out of range, or a large A comes without shift or lower_bound: then no
            bound exists, and a singular A could not be told from a regular one.
    """
    n = describe_square(A).rows
    bound, mu = _bounds(shift, lower_bound)
    _check_preconditioner(preconditioner)
    exact = n <= (EXACT_SIZE if max_matvecs is None else max_matvecs)
    if memory_budget is not None and 16 * n * n > memory_budget:
        exact = False
    with torch.no_grad():
        if exact:
            return _exact(A, bound, mu)
        if mu == 0:
            raise ValueError(
                "a stochastic log-determinant needs shift or lower_bound, a positive bound of the spectrum. "
                f"Give one, or max_matvecs >= {n} for the dense value."
            )
        budget = MOST_MATVECS if max_matvecs is None else max_matvecs
        return _stochastic(A, bound, mu, float(rtol), budget, generator, preconditioner, memory_budget)


def _check_preconditioner(preconditioner: object) -> None:
    if isinstance(preconditioner, str) and preconditioner != "auto":
        raise ValueError(f'preconditioner must be "auto", None or an object, got {preconditioner!r}.')
    if not (preconditioner is None or isinstance(preconditioner, (str, FactoredPreconditioner))):
        raise TypeError(
            f"a log-determinant needs the preconditioner's own root and log-determinant, which {type(preconditioner)} "
            "does not offer; wrap an operator or tensor P close to A in curvops.linalg.as_preconditioner(P)."
        )


def _bounds(shift: float | int | None, lower_bound: float | int | None) -> tuple[float, float]:
    for name, value in (("shift", shift), ("lower_bound", lower_bound)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {value}.")
    bound = float(lower_bound or 0.0)
    return bound, bound + float(shift or 0.0)


def _exact(A: Matrix, bound: float, mu: float) -> Estimate:
    n, _, dtype, device = describe_square(A)
    dense = product(A)(torch.eye(n, dtype=dtype, device=device)).double()
    if not bool(torch.isfinite(dense).all()):
        raise ValueError("a product of A holds NaN or Inf; check the parameters and the data.")
    values = torch.linalg.eigvalsh((dense + dense.mT) / 2) - bound
    rounding = n * torch.finfo(dtype).eps * float(values.abs().amax())
    # With a shift, an eigenvalue within rounding of zero counts as zero; without one nothing can vouch for it.
    if mu > 0 and float(values[0]) >= -rounding:
        values = values.clamp_min(0)
    elif float(values[0]) + mu <= rounding:
        raise NotPositiveSemidefinite(
            f"A is not positive definite to working precision: an eigenvalue is {float(values[0]) + bound:.3e}. "
            "Give a shift (the prior precision), or use the GGN in place of the Hessian."
        )
    value = (values + mu).log().sum()
    return Estimate(value, torch.zeros_like(value), 0, n)


def _stochastic(
    A: Matrix,
    bound: float,
    mu: float,
    rtol: float,
    budget: int,
    generator: torch.Generator | None,
    preconditioner: FactoredPreconditioner | str | None,
    memory_budget: int | None,
) -> Estimate:
    facts, multiply = describe_square(A), product(A)

    def excess(V: Tensor) -> Tensor:
        return multiply(V) - bound * V if bound else multiply(V)

    most = min(budget // 2, MOST_RANK, facts.rows)
    if memory_budget is not None:
        most = min(most, memory_budget // (6 * facts.rows * torch.finfo(facts.dtype).bits // 8))
    # P^-½(A + shift)P^-½ ≥ floor. The Nyström Ĝ never exceeds G, so that P ≤ (G + μ)/μ for one of our own.
    P, floor, scale, spent = None, mu, bound, 0
    if isinstance(preconditioner, FactoredPreconditioner):
        P, floor = preconditioner, preconditioner.floor(mu)
        size, spent = _size(excess, facts, min(SIZING, budget // 4), generator)
        smallest = P.bounds()[0]
        scale = (bound + size) / smallest if smallest > 0 else 0.0
    elif preconditioner is not None and most:
        P, size, spent = _preconditioner(excess, facts, mu, most, generator)
        scale = bound + size
    whitened = excess if P is None else _whitened(excess, P, mu, floor)
    known = 0.0 if P is None else float(P.logdet()) + facts.rows * math.log(floor / mu)
    memory = None if memory_budget is None else memory_budget // 2
    sampler = Sampler(whitened, facts, floor, rtol, budget - spent, generator, memory, known, scale)
    sampler.first(min(FIRST_PROBES, budget - spent))
    none = Sketch(None, None, None)
    sampler.add(None, none)
    estimate = sampler.quadrature(none).logdet(floor)
    total = estimate + (known + facts.rows * math.log(mu))
    return replace(total, matvecs=estimate.matvecs + spent)


def _whitened(excess: Function, P: FactoredPreconditioner, mu: float, floor: float) -> Function:
    """What P^-½(G + μ)P^-½ exceeds its lower bound by: positive semidefinite."""

    def multiply(V: Tensor) -> Tensor:
        inner = P.sqrt_inverse(V)
        return P.sqrt_inverse(excess(inner) + mu * inner) - floor * V

    return multiply


def _size(excess: Function, facts: Description, steps: int, generator: torch.Generator | None) -> tuple[float, int]:
    """The size of the largest eigenvalue, by a few steps of Lanczos, and the products they took."""
    start = random_block(facts.rows, 1, dtype=facts.dtype, device=facts.device, generator=generator)
    run = LockStep(excess, start, max(1, steps))
    run.extend(max(1, steps))
    return run.scale, run.matvecs


def _preconditioner(
    excess: Function, facts: Description, mu: float, most: int, generator: torch.Generator | None
) -> tuple[FactoredPreconditioner | None, float, int]:
    """A preconditioner, the largest eigenvalue, the products spent; none for a spectrum that starts flat or below μ."""
    pilot = grow(excess, facts, None, min(most, PILOT_RANK), 0.0, 1, generator)
    size = float(pilot.eigenvalues[0]) if len(pilot.eigenvalues) else 0.0
    if pilot.tail > 0.5 * size or size < mu:
        return None, size, pilot.matvecs
    if pilot.tail == 0 or most <= PILOT_RANK:
        return pilot.preconditioner(mu), size, pilot.matvecs
    # Depth and variance both fall with the rank until the tail is well below μ: as many right-hand sides as one likes.
    full = grow(excess, facts, None, most, 0.1 * mu, 1e12, generator)
    return full.preconditioner(mu), size, full.matvecs + pilot.matvecs
