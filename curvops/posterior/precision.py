"""The matrix and the preconditioner for a posterior's systems: P = G + A in its cheapest form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.checkpoint import current
from curvops.checks import carries_graph
from curvops.errors import NotPositiveSemidefiniteError
from curvops.linalg import Damped, lanczos
from curvops.linalg.core.algorithm import longest
from curvops.linalg.core.results import Reason
from curvops.linalg.core.solve_routes import (
    CLOSED_FORM,
    DENSE_BLOCK,
    DENSE_SIZE,
    METHODS,
    SKETCH_SERVES,
    UNEVEN,
    PosteriorFacts,
    Route,
    SolvePlan,
    System,
    chosen,
    determinants,
    routes,
)
from curvops.linalg.core.vectors import is_psd
from curvops.linalg.operators.closed_form import ClosedFormPreconditioner
from curvops.operators.curvatures.ggn import root_of
from curvops.operators.function_space.function_space import DualInverse, FunctionSpace
from curvops.posterior.terms import PrecisionTerms

REMEDIES = {
    Reason.ITERATION_LIMIT: (
        "The iterations of an inner solve were spent before its tolerance was reached. A larger prior precision, "
        "weights nearer to a mode, or float64 make it shorter."
    ),
    Reason.STAGNATION: (
        "The residual stopped shrinking far above the rounding level. A larger prior precision, or float64, "
        "improves the conditioning; a curvature made from random draws must give the same product each time."
    ),
    Reason.NOT_POSITIVE_DEFINITE: (
        "Curvature plus prior is not positive definite, or not in this dtype. Use a larger prior precision, co.GGN as "
        "curvature, or float64."
    ),
    Reason.SINGULAR: "Curvature plus prior is singular in this dtype. Use a larger prior precision, or float64.",
}
"""The remedies for solves inside posteriors and their tuning, where callers cannot pass options to the solvers."""
USE_THE_GGN = "use the GGN (co.GGN), which has no negative eigenvalue."


def posterior_system(terms: PrecisionTerms, columns: int = 1, whole: bool = True, **asked: Any) -> System:
    """Return the facts about P X = B, and what is `asked`, from which its routes follow.

    Without `whole` they are only those that cost nothing: room in memory is measured by passes over a few points.
    """
    lin, cache, P, A = terms.lin, terms.cache, terms.precision, terms.A
    base, formed, kernel = P.base if isinstance(P, Damped) else P, cache.peek("formed"), cache.peek("kernel")
    scalar = A is not None and A.ndim == 0
    closed, root = terms.closed_form is not None, root_of(terms.curvature) if whole else None
    return System(
        rows=len(lin.theta),
        columns=columns,
        longest=longest(P) if whole else 0,
        itemsize=lin.theta.itemsize,
        closed_form=closed,
        recorded=carries_graph(P.representation()),
        room=lin.memory.room() if whole and not closed else math.inf,
        **asked,
        posterior=PosteriorFacts(
            name=type(terms.curvature).__name__,
            psd=is_psd(base),
            scalar=scalar,
            diagonal=A is not None,
            root_columns=0 if root is None else root.shape[-1],
            outputs=lin.num_data * lin.num_outputs,
            gram_cost=cache.gram_cost if scalar else math.inf,
            resolved=A is None or A.ndim > 0 or kernel is None or kernel.may_resolve(float(A.detach())),
            budget=lin.memory_budget,
            formed=formed is not None and formed.base is base,
            decomposed=cache.peek("spectrum") is not None,
        ),
    )


def route_of(terms: PrecisionTerms, columns: int, requested: str | None = None) -> Route:
    """Return the route of a system; raise ValueError with the reason if the requested method is not possible.

    A closed form comes first for every method that allows it; the other facts are then skipped.
    """
    if terms.closed_form is not None and (requested is None or CLOSED_FORM in METHODS[requested]):
        return Route(CLOSED_FORM, 0, 0)
    system = posterior_system(terms, columns, requested=requested)
    route = _taken(terms, system)
    if route is None:
        kind = type(terms.curvature).__name__
        why_not = next((route.why_not for route in routes(system) if route.name == requested), "")
        raise ValueError(f"method={requested!r} does not fit {kind} + prior: {why_not}; use method='cg'.")
    return route


def _taken(terms: PrecisionTerms, system: System) -> Route | None:
    """Return the route that is taken; J Jᵀ is formed if it comes first, since only then does it show its rounding."""
    route, facts = chosen(routes(system)), system.posterior
    if facts is None or terms.A is None or route is None or route.name != "formed kernel":
        return route
    if kernel_of(terms).resolves(float(terms.A)):
        return route
    return chosen(routes(replace(system, posterior=replace(facts, resolved=False))))


def plan(terms: PrecisionTerms, columns: int) -> SolvePlan:
    """Return the routes for this many draws or rows of J, and for determinants, without solving anything."""
    system = posterior_system(terms, columns, sketch=terms.precision._takes_sketch)
    tables = {"draws": routes(system), "predictions": routes(replace(system, rows_of_J=True))}
    return SolvePlan(tables if terms.A is None else tables | {"determinants": determinants(system)})


def inverse_of_rows(terms: PrecisionTerms, rows: int, rtol: float | None, moved: bool = False) -> LinearOperator:
    """Return P⁻¹ for solves with rows of J, by the route of the table: a formed operand of P, or J Jᵀ.

    What is formed is kept for later calls; otherwise the route does not depend on earlier ones.

    Args:
        terms: those of P.
        rows: the number of rows.
        rtol: the relative residual of solves; None means their default.
        moved: whether the rows have a gradient in their points.
    """
    P = terms.precision
    if terms.closed_form is None:
        with terms.cache.lock:
            system = posterior_system(terms, rows, whole=False, rows_of_J=True, moved=moved)
            route = _taken(terms, system)
            if route is not None and route.name == "formed matrix":  # its room in memory takes time to measure
                route = _taken(terms, replace(system, room=terms.lin.memory.room()))
            name = "" if route is None else route.name
            if name == "formed kernel" and terms.A is not None:
                return DualInverse(P, *kernel_of(terms).factor_under(float(terms.A)), rtol=rtol)
            if name == "formed matrix":
                P = terms.formed
    inverse: LinearOperator = P.inverse(rtol)
    return inverse


def kernel_of(terms: PrecisionTerms) -> FunctionSpace:
    """Return J Jᵀ of the training points, for whoever took the route "formed kernel"; a checkpoint saves it."""
    cache = terms.cache
    with cache.lock:
        kernel = cache.get("kernel", lambda: FunctionSpace(cache.lin, cache.of_data))
        kernel.keep()
        return kernel


def kernel_of_mode(terms: PrecisionTerms) -> FunctionSpace | None:
    """Return J Jᵀ if it is a possible route to the linear model's mode, and its rounding is well below the prior.

    The Hessian there is that of the GGN plus the prior, whatever the curvature in P is. The result does not depend on
    earlier calls, so that equal seeds continue to give equal draws.
    """
    if terms.A is None or terms.A.ndim:
        return None
    cache, system = terms.cache, posterior_system(terms, whole=False)
    # The factors of an exact GGN serve its determinants, too.
    facts = replace(system.posterior or PosteriorFacts(), gram_cost=min(cache.gram_cost, cache.mode_cost))
    if DENSE_SIZE < facts.outputs <= DENSE_BLOCK:  # a moment, where conjugate gradients take hundreds of products
        facts = replace(facts, fewer_outputs=1)
    table = determinants(replace(system, posterior=facts))
    if not any(route.name == "formed kernel" and route.possible for route in table):
        return None
    kernel = kernel_of(terms)
    # Passes over the data correct what is found with it, so that it needs fewer digits than a solution.
    return kernel if float(terms.A.detach()) >= 10 * kernel.rounding else None


def preconditioner(terms: PrecisionTerms, columns: int, generator: torch.Generator | None = None) -> tuple[Any, int]:
    """Return M ≈ P⁻¹ for `columns` right-hand sides (None if none pays off), and the number of products it took.

    A sketch of A^-½GA^-½ made for one prior is also used for its multiples c·A (all larger ones, and smaller ones down
    to a third), and for priors whose entries scale by factors that differ at most `UNEVEN`-fold. In a run with a
    checkpoint M is that of the run, whatever was sketched before it. A new one is drawn from `generator`.
    """
    cache, P, generator = terms.cache, terms.precision, generator or terms.cache.generator
    is_reusable = isinstance(P, Damped) and P.shift.ndim <= 1 and not carries_graph(P.representation())
    with cache.lock:
        if is_reusable and (not current() or cache.is_kept) and (sketch := cache.peek("sketch")) is not None:
            sketched, served, earlier = sketch
            factors = P.shift.detach() / sketched
            low, high = float(factors.min()), float(factors.max())
            if served * SKETCH_SERVES >= columns and low >= 1 / 3 and high <= UNEVEN * low:
                scale = float(sketched) if sketched.ndim == 0 else 1.0  # under a vector the sketched matrix is whitened
                return earlier.shifted(scale * float(factors.log().mean().exp())), 0
        made = P.preconditioner(columns, generator)
        if is_reusable and made is not None and not isinstance(made, ClosedFormPreconditioner):
            cache.put("sketch", (P.shift.detach().clone(), columns, made))
        return made, 0 if made is None else made.matvecs


def require_usable(terms: PrecisionTerms) -> None:
    """Raise ValueError if G and A do not fit together, NotPositiveSemidefiniteError if G + A proves to be indefinite.

    A G that is known to be psd costs nothing. Any other costs 20 products, once for all priors: a Ritz value θ
    of G with its vector v proves that G + A is indefinite if θ + vᵀAv ≤ 0. The absence of such a value proves nothing;
    solving with an indefinite G + A raises an error later.
    """
    curvature, A = terms.curvature, terms.A
    _ = terms.precision
    if is_psd(curvature):
        return
    lowest, vector = terms.cache.get("lowest", lambda: _least_ritz(curvature))
    with torch.no_grad():
        if lowest + float(vector @ terms.prior.product(vector)) > 0:
            return
    size = "" if A is None else f", the prior precision is {float(A.detach().min()):.3g}"
    raise NotPositiveSemidefiniteError(
        f"{type(curvature).__name__} + prior is indefinite, so there is no Gaussian with that precision: "
        f"the curvature has an eigenvalue of {lowest:.3g} or less{size}. Pass a prior_precision of "
        f"{-1.01 * lowest:.3g} or more, or {USE_THE_GGN}"
    )


@torch.no_grad()
def _least_ritz(curvature: LinearOperator) -> tuple[float, Float[Tensor, " D"]]:
    """Return the smallest Ritz value of G from a short Lanczos run, and its vector."""
    generator = torch.Generator(device=curvature.device).manual_seed(0)  # does not advance the user's
    basis = lanczos(curvature, 20, generator=generator)
    if basis.reason in (Reason.NON_FINITE, Reason.NOT_SYMMETRIC):
        raise ValueError(f"{type(curvature).__name__}: {basis.reason.value}")
    values, vectors = torch.linalg.eigh(basis.T)
    return float(values[0]), basis.Q @ vectors[:, 0].to(basis.Q)


@contextmanager
def naming_the_ggn(curvature: LinearOperator) -> Iterator[None]:
    """Add the name of an indefinite curvature, and the GGN as remedy, to an error of linalg, which has neither."""
    try:
        yield
    except NotPositiveSemidefiniteError as error:
        if is_psd(curvature):
            raise
        raise NotPositiveSemidefiniteError(
            f"{type(curvature).__name__}: {error} For a network, {USE_THE_GGN}"
        ) from error
