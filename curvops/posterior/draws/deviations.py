"""Draws of N(0, T P⁻¹) by perturbing and solving: P z = Aθ⁰ + Sε, in weight space or in function space.

Papandreou & Yuille 2010; for linearised networks Antorán et al. 2023. G = S Sᵀ is the curvature with its square root,
a block of columns per point; ε is standard normal and θ⁰ ~ N(0, A⁻¹). A given noise has one solution, whatever the
method.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current
from curvops.checks import carries_graph, check_choice
from curvops.errors import NotSolvedError
from curvops.linalg import Diagonal, Estimate, Reason, cg, draw
from curvops.linalg.core.memory import PRODUCT_VECTORS, hold
from curvops.linalg.core.results import Reasoned, Solution
from curvops.linalg.core.solve_routes import CLOSED_FORM, METHODS, SKETCHED, directions_pay
from curvops.linalg.core.vectors import inner, norm
from curvops.linalg.estimators.hutchinson import sample_mean
from curvops.linalg.solvers.systems import join_solutions
from curvops.posterior.core.terms import PrecisionTerms
from curvops.posterior.draws.noise import Noise, Systems
from curvops.posterior.draws.stochastic_descent import StochasticDescent
from curvops.posterior.solves.function_space import REMEDIES
from curvops.posterior.solves.precision import for_columns, preconditioner, route_of
from curvops.summary import Summarised


@dataclass(frozen=True, eq=False, repr=False)
class Deviations(Summarised, Reasoned):
    """Draws of a posterior minus its mean, with a report on how they were computed.

    ``draws`` (k, D) are distributed as N(0, T P⁻¹). ``relative_residuals`` are ‖b − P z‖/‖b‖ of each draw's own
    system, recomputed by a product in weight space for every method. ``matvecs`` counts products with the curvature,
    including checks (in function space, products with its Gram matrix, which cost as much; for "sgd", passes over the
    data). ``history`` holds the relative residuals of the method's own recursion, a row per iteration ("sgd": per
    check). ``noise`` gives the same draws again, or the corresponding ones under another prior precision.

    Examples:
        >>> deviations = post.deviations(3, generator=torch.Generator().manual_seed(0))
        >>> deviations.draws.shape, deviations.reasons[0].name
        (torch.Size([3, 17]), 'CONVERGED')
    """

    draws: Float[Tensor, "k D"]
    noise: Noise
    method: str
    reasons: tuple[Reason, ...]
    relative_residuals: Float[Tensor, " k"]
    matvecs: int
    history: Float[Tensor, "steps k"]

    def _numbers(self) -> dict[str, Tensor]:
        return {"relative residual": self.relative_residuals}

    @property
    def converged(self) -> bool:
        """Whether every draw reached the tolerance, or the limit of the dtype."""
        return self.accepted


def draw_deviations(
    terms: PrecisionTerms,
    temperature: float,
    k: int,
    noise: Noise,
    method: Any,
    x0: Float[Tensor, "D k"] | None,
    rtol: float,
) -> Deviations:
    """Draw from N(0, T P⁻¹); "cg" and closed forms have gradients in P.

    Raises NotSolvedError if a draw failed, ValueError for a method that does not fit, and TypeError for one that does
    not exist.
    """
    root = math.sqrt(temperature)
    asked = "sgd" if isinstance(method, StochasticDescent) else method
    if not (asked is None or isinstance(asked, str)):
        raise TypeError(
            f"method must be one of {tuple(METHODS)}, a co.posterior.StochasticDescent or None, got {method!r}."
        )
    if asked is not None:
        check_choice("method", asked, METHODS)
    route, why_not = route_of(terms, k, asked)
    if route is None:
        kind = type(terms.curvature).__name__
        raise ValueError(f"method={asked!r} does not fit {kind} + prior: {why_not}; use method='cg'.")
    P = for_columns(terms, k) if route.name == "formed matrix" else terms.precision
    named = asked or next(name for name, served in METHODS.items() if route.name in served)
    x0 = x0 if x0 is None or root == 1 else x0 / root
    if current() and carries_graph(P.representation()):
        raise ValueError(
            "a checkpoint saves no gradient, but the prior precision or the noise requires one: detach it, or leave "
            "out checkpoint."
        )
    if named == CLOSED_FORM:
        found = _by_closed_form(terms, P, k, noise, x0, rtol)
    else:
        chosen = method if isinstance(method, StochasticDescent) else StochasticDescent() if named == "sgd" else named
        found = _solve(Systems(terms, noise, range(k), route.name, P), chosen, x0, rtol)
    draws, history = found.x.mT, found.history
    drawn = Deviations(draws, noise, named, found.reasons, found.relative_residuals, found.matvecs, history)
    if not found.accepted:
        raise NotSolvedError(drawn, rtol, REMEDIES)
    return drawn if root == 1 else replace(drawn, draws=draws * root)


def _solve(systems: Systems, chosen: Any, x0: Tensor | None, rtol: float) -> Solution:
    """Solve for draws at temperature 1, as many at once as fit into memory; failures are returned as reasons."""
    carried = carries_graph(systems.precision.representation())
    width, beside = systems.at_a_time
    if current() or width >= systems.count or carried:
        return _solve_together(systems, chosen, x0, rtol)
    draws, found = systems.like.new_empty(systems.count, systems.precision.shape[-1]), []
    for start in range(0, systems.count, width):
        part = slice(start, start + width)
        with hold(systems.memories, beside):
            guess = None if x0 is None else x0[:, part]
            each = _solve_together(replace(systems, columns=systems.columns[part]), chosen, guess, rtol)
        found.append(replace(each, x=draws[part].copy_(each.x.mT).mT))
        del each  # the solution's own buffers
    return join_solutions(found, draws.mT)


def _solve_together(systems: Systems, chosen: Any, x0: Tensor | None, rtol: float) -> Solution:
    if chosen == "cg":
        return _in_weight_space(systems, x0, rtol)
    if chosen != "dual":
        with torch.no_grad():
            return chosen.solve(systems, x0, rtol)
    block = systems.count * systems.precision.shape[-1] * systems.like.element_size()
    # The vectors of the dual solve are short, so what the products before and after it take is counted here.
    with torch.no_grad(), hold(systems.memories, PRODUCT_VECTORS * block):
        return _in_function_space(systems, x0, rtol)


def _by_closed_form(terms: PrecisionTerms, P: Any, k: int, noise: Noise, x0: Tensor | None, rtol: float) -> Solution:
    """Draw by the closed form's own root of P⁻¹, which loses fewer digits than a perturbation and a solve."""
    if x0 is not None:
        raise ValueError("x0 is the start of an iteration, and a closed form has none: leave x0 out.")
    draws = draw(P.inverse(rtol), k, noise.generator(P.device), frozenset((terms.lin.memory,)))
    none = torch.zeros(k, dtype=torch.float64)
    return Solution(draws, (Reason.CONVERGED,) * k, none == 0, none, none, 0, 0, none.new_zeros(0, k))


def _in_weight_space(systems: Systems, x0: Tensor | None, rtol: float) -> Solution:
    P, right = systems.precision, systems.right_sides()
    if systems.route in (SKETCHED, "cg") and not carries_graph(P.representation()):
        M, spent = preconditioner(systems.terms, systems.count)
        found = cg(P, right, preconditioner=M, rtol=rtol, x0=x0, keep_directions=_directions(systems, M, rtol))
        return replace(found, matvecs=found.matvecs + spent)
    z = P.solve_to(right, rtol)  # exact if P is small or has a closed form; carries its gradient
    with torch.no_grad():
        residuals = _relative(right - P._matmul(z), right)
    reasons = tuple(Reason.CONVERGED if r <= rtol else Reason.PRECISION_LIMIT for r in residuals.tolist())
    none = residuals.new_full(residuals.shape, math.nan)
    matvecs = len(z) + systems.count
    return Solution(z, reasons, residuals <= rtol, residuals, none, 1, matvecs, residuals.unsqueeze(0))


def _directions(systems: Systems, M: Any, rtol: float) -> int | None:
    """Return 0 if conjugation to all directions takes more time, and much memory, than the products that it saves."""
    lin, condition = systems.terms.lin, getattr(M, "condition", math.inf)
    points_a_weight = lin.plan.forward * lin.num_data / lin.num_parameters
    known = points_a_weight > 0 and not lin.plan.others
    return 0 if known and not directions_pay(condition, rtol, systems.count, points_a_weight) else None


def _in_function_space(systems: Systems, x0: Tensor | None, rtol: float) -> Solution:
    """Solve for z = θ⁰ + A⁻¹Sα with (I + SᵀA⁻¹S) α = ε − Sᵀθ⁰ (Matheron's rule).

    The residual of P z is S times that of the dual system, so the tolerance is tightened until the true residual meets
    it.
    """
    S, A = systems.root, systems.terms.A
    assert S is not None and A is not None
    inverse = (1 / A.detach()).expand(S.shape[-2])
    start = inverse.unsqueeze(-1) * systems.of_prior()
    points = systems.of_points(S)
    dual = (S.mT @ Diagonal(inverse) @ S).add_diagonal(1.0)
    wanted = points - S._t_matmul(start)
    guess = None if x0 is None else points - S._t_matmul(x0)  # at the solution α = ε − Sᵀz
    right = start / inverse.unsqueeze(-1) + S._matmul(points)
    spent, goal = systems.count * (2 if guess is None else 3), rtol
    M, sketched = preconditioner(systems.terms, systems.count, dual)
    spent += sketched
    while True:
        found = cg(dual, wanted, preconditioner=M, rtol=goal, x0=guess)
        z = start + inverse.unsqueeze(-1) * S._matmul(found.x)
        residuals = _relative(right - systems.precision._matmul(z), right)
        spent += found.matvecs + 2 * systems.count
        if not found.accepted or bool((residuals <= rtol).all()) or goal <= 4 * torch.finfo(z.dtype).eps:
            break
        goal, guess = max(goal * min(0.1, float(rtol / residuals.max())), 2 * torch.finfo(z.dtype).eps), found.x
    reasons = tuple(
        reason if reason is not Reason.CONVERGED or residual <= rtol else Reason.PRECISION_LIMIT
        for reason, residual in zip(found.reasons, residuals.tolist())
    )
    return Solution(
        z, reasons, residuals <= rtol, residuals, found.backward_errors, found.iterations, spent, found.history
    )


def _relative(residual: Float[Tensor, "D k"], right: Float[Tensor, "D k"]) -> Float[Tensor, " k"]:
    """Return relative norms of columns, on the CPU."""
    return (norm(residual) / norm(right)).double().cpu()


def trace(M: LinearOperator, draws: Float[Tensor, "k D"]) -> Estimate:
    """Estimate tr(T P⁻¹ M) as the mean of zᵀM z over draws, with its standard error."""
    vectors = draws.mT
    samples = inner(vectors, M._matmul(vectors))
    if len(samples) < 2:
        raise ValueError("one draw gives no standard error: use two or more.")
    return sample_mean(samples, len(samples))
