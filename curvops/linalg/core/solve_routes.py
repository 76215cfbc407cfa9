"""How a system A X = B is solved: the one table of routes, from facts to what is taken, what it costs and why.

`routes` and `determinants` are pure functions of a `System`, so that a rule is one line here, whoever asks: `solve` of
any operator, draws and covariances of a posterior, its evidence. The first possible route is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DENSE_SIZE = 256
"""A matrix of so many rows is formed to be solved with, whoever's it is: no dearer than iterating, with every
gradient."""
EXACT_SIZE = 256
"""An estimator without a budget forms a matrix of so many rows, and its value is exact."""
DENSE_BLOCK = 2048
"""A matrix of so many rows is formed once where it serves many later answers: a block beside others that have closed
forms, a posterior's curvature under many right-hand sides. Where one is at hand, it is factorised, in float64."""
WHOLE = 1024
"""A curvature of so many rows is decomposed for its determinants: probes take 300 to 500 products for one prior
precision, the whole spectrum as many as rows for all of them, and is exact."""
MOST_MATVECS = 4000
"""An evidence is worth no more products: past them the error bar is what it is, and the estimate's reason says so.
Where probes fail within them, as many rows as that are decomposed."""
MOST_SOLVES = 200
"""Solves that the effective dimension under a prior operator may take, one for each probe."""
PRODUCTS_A_SOLVE = 8
"""Products that a column of a block solve takes at least: from rows / 8 columns on, forming the matrix is cheaper."""
GRADIENTS_A_SOLVE = 2.0 * PRODUCTS_A_SOLVE
"""Gradients that solving for one draw takes at least."""
MOST_GRADIENTS = 200.0
"""Gradients that J Jᵀ may cost for determinants of one prior precision, by probes 300 to 500 products, or if asked."""
MOST_OUTPUTS = 6144
"""So many outputs in all are decomposed in minutes, in five matrices of 300 MB."""
FEWER_OUTPUTS = 4
"""So many times fewer outputs than weights make function space the smaller one, its tighter tolerance counted."""
KERNEL_COPIES = 5
"""Matrices (N·C, N·C) in float64 of a formed kernel: K, SᵀS, its eigenvectors and the two that LAPACK works in; later K
and these vectors, and two in a step of Newton's method."""
FORMED_COPIES = 4
"""Matrices of n² numbers in float64 of a formed operator: itself, plus a shift, its factor, and work."""
SOLVE_VECTORS = 16
"""Vectors a column of what ends in a block solve: the right-hand side, the solution, and the solver's."""
MOST_COLUMNS = 128
"""Right-hand sides of one CG block: beyond, the K × K work and the vectors grow faster than the products fall."""
SKETCH_SERVES = 4
"""A sketch serves so many times the columns that it was made for: more of them would pay for a larger one."""
UNEVEN = 4.0
"""A sketch made for one vector of prior precisions serves others that differ from it by factors as uneven as this."""
RESOLVED = 1000
"""Units of J Jᵀ's rounding that a prior precision must be for what is solved with it to be right to three digits."""
EPOCHS = 100
"""Passes over the data of stochastic descent, unless asked otherwise."""

SKETCHED = "cg with a sketch"
NO_GRADIENT = "a gradient is recorded, which it has not"
METHODS = {
    "closed form": ("closed form", "formed matrix"),
    "cg": ("closed form", "dense", "formed matrix", SKETCHED, "cg"),
    "dual": ("formed kernel", "dual"),
    "sgd": ("sgd",),
}
"""The routes that each method of a posterior's draws leaves open."""


@dataclass(frozen=True)
class Posterior:
    """The facts that a posterior adds to those of its precision P = G + A."""

    name: str = "the curvature"
    psd: bool = True
    scalar: bool = True
    """Whether the prior precision A is one number."""
    diagonal: bool = True
    """Whether it is a number or a vector."""
    root_columns: int = 0
    """Columns N·R of the curvature's square root by points; 0 where it has none."""
    outputs: int = 0
    """N·C."""
    gram_cost: float | int = math.inf
    """Gradients that forming J Jᵀ takes; ∞ where the curvature is not the exact GGN of these data alone."""
    resolved: bool = True
    """False where the prior precision is known to lie within the rounding of J Jᵀ."""
    budget: float | int = math.inf
    """The linearisation's whole memory budget."""
    formed: bool = False
    """Whether the curvature is formed as a matrix for earlier systems."""
    decomposed: bool = False
    """Whether all eigenvalues of G are known."""
    prepared: bool = False
    """Whether a quadrature that reaches this prior precision is."""


@dataclass(frozen=True)
class System:
    """The facts about A X = B that decide how it is solved: sizes, structure, memory in bytes, the method asked for."""

    rows: int
    columns: int = 1
    square: bool = True
    longest: int = 0
    """Numbers of the longest vector in a product, where that is more than rows."""
    itemsize: int = 8
    closed_form: bool = False
    at_hand: bool = False
    """Whether the matrix exists, and need not be formed."""
    symmetric: bool = True
    definite: bool = True
    """Whether A is to be solved by CG, for which negative curvature is an error."""
    sketch: bool = True
    """Whether a preconditioner by a sketch is tried."""
    recorded: bool = False
    """Whether a gradient is recorded through A."""
    room: float | int = math.inf
    """Bytes that are left for vectors and for what is formed."""
    asked: str | None = None
    """The method that draws of a posterior are asked for by."""
    posterior: Posterior | None = None

    @property
    def small(self) -> bool:
        """Whether the matrix is formed, or at hand, and factorised by every solve."""
        return self.rows <= (DENSE_BLOCK if self.at_hand else DENSE_SIZE)

    @property
    def may_be_formed(self) -> bool:
        """Whether it is large enough to gain from being formed once, and small enough to be."""
        return DENSE_SIZE < self.rows <= DENSE_BLOCK

    def vectors(self, length: int = 0) -> int:
        """Return the bytes of a block solve with vectors of that length, by default the longest."""
        return SOLVE_VECTORS * self.columns * (length or max(self.rows, self.longest)) * self.itemsize


@dataclass(frozen=True)
class Route:
    """A way to solve, the products that it takes at least (of J Jᵀ, gradients), its bytes, and what is in its way."""

    name: str
    products: float | int
    nbytes: float | int
    why_not: str = ""

    @property
    def method(self) -> str:
        """The method's name, with a sketch or without."""
        return "cg" if self.name == SKETCHED else self.name

    @property
    def possible(self) -> bool:
        """Whether nothing is in its way."""
        return not self.why_not


def _route(name: str, products: float | int, nbytes: float | int, *obstacles: tuple[bool, str]) -> Route:
    """Return a route, closed for the first of the obstacles that there is."""
    return Route(name, products, nbytes, next((why for there, why in obstacles if there), ""))


def routes(system: System) -> tuple[Route, ...]:
    """Return all routes in order of preference; for a posterior whose method is given, the routes of that method."""
    if system.posterior is None:
        return tuple(_operator_routes(system))
    found, asked = _posterior_routes(system, system.posterior), system.asked
    return tuple(route for route in found if asked is None or route.name in METHODS[asked])


def chosen(found: tuple[Route, ...]) -> Route | None:
    """Return the first possible route; None where none is."""
    return next((route for route in found if route.possible), None)


def _operator_routes(s: System) -> Iterator[Route]:
    least, not_square = PRODUCTS_A_SOLVE * s.columns, (not s.square, "least squares are lsmr's")
    yield _closed_form(s)
    yield _dense(s)
    yield from _conjugate_gradients(s, not_square, (not s.definite, "not known to be positive semidefinite"))
    yield _route("minres", least, s.vectors(), not_square, (not s.symmetric, "not symmetric"))
    yield Route("lsmr", 2 * least, s.vectors())


def _posterior_routes(s: System, p: Posterior) -> Iterator[Route]:
    narrow = bool(p.root_columns) and FEWER_OUTPUTS * p.root_columns <= s.rows and p.diagonal
    short = narrow and s.vectors() > s.room and s.columns > 1
    yield _closed_form(s)
    yield _dense(s)
    yield _formed_matrix(s, p)
    most = MOST_GRADIENTS if s.asked == "dual" or short else GRADIENTS_A_SOLVE * s.columns
    yield _formed_kernel(s, p, most, (not p.resolved, "the prior precision lies within the rounding of J Jᵀ"))
    obstacles = (
        (not p.root_columns, f"needs the curvature's square root by points, which {p.name} has not"),
        (s.recorded, "gives no gradient for the prior precision or the noise"),
    )
    dual = _route(
        "dual",
        PRODUCTS_A_SOLVE * s.columns,
        s.vectors(p.root_columns),
        *obstacles,
        (not p.diagonal, "needs a prior precision that is a number or a vector"),
    )
    cg = tuple(_conjugate_gradients(s))
    yield from (dual, *cg) if short else (*cg, dual)
    yield _route("sgd", EPOCHS * s.columns, s.vectors(), *obstacles)


def _conjugate_gradients(s: System, *obstacles: tuple[bool, str]) -> Iterator[Route]:
    """Yield block CG with a sketch, tried where there is a positive shift and grown while it pays, and without."""
    least, no_shift = PRODUCTS_A_SOLVE * s.columns, (not s.sketch, "there is no positive diagonal to add")
    yield _route(SKETCHED, least, s.vectors(), *obstacles, no_shift)
    yield _route("cg", least, s.vectors(), *obstacles)


def _closed_form(s: System) -> Route:
    none, more = (not s.closed_form, "no closed form is known"), "its dense matrix has more gradients"
    return _route("closed form", 0, 0, none, (s.recorded and s.small and s.posterior is None, more))


def _dense(s: System) -> Route:
    most = DENSE_BLOCK if s.at_hand else DENSE_SIZE
    obstacles = (not s.square, "least squares are lsmr's"), (not s.small, f"more than {most:,} rows")
    return _route("dense", 0 if s.at_hand else s.rows, 2 * s.itemsize * s.rows**2, *obstacles)


def _formed_matrix(s: System, p: Posterior) -> Route:
    nbytes = FORMED_COPIES * 8 * s.rows**2
    return _route(
        "formed matrix",
        0 if p.formed else s.rows,
        nbytes,
        (s.closed_form, "the closed form takes no products"),
        (s.rows <= DENSE_SIZE, f"up to {DENSE_SIZE:,} rows each solve forms its own"),
        (not s.may_be_formed, f"more than {DENSE_BLOCK:,} rows"),
        (s.recorded, NO_GRADIENT),
        (not p.psd, "the curvature is not known to be positive semidefinite"),
        (PRODUCTS_A_SOLVE * s.columns < s.rows, f"fewer than rows / {PRODUCTS_A_SOLVE} columns"),
        (nbytes > s.room and not p.formed, "memory has no room for it"),
    )


def _formed_kernel(s: System, p: Posterior, most_gradients: float | int, *obstacles: tuple[bool, str]) -> Route:
    """Return the route by J Jᵀ of all training points, decomposed for every prior precision that is a number."""
    nbytes = KERNEL_COPIES * 8 * p.outputs**2
    return _route(
        "formed kernel",
        p.gram_cost,
        nbytes,
        (not p.scalar, "the prior precision is not one number"),
        (p.gram_cost == math.inf, "it is formed layer by layer, for the exact GGN of these data alone"),
        (s.recorded, NO_GRADIENT),
        (p.outputs > MOST_OUTPUTS, f"more than {MOST_OUTPUTS:,} outputs in all"),
        (FEWER_OUTPUTS * p.outputs > s.rows, f"fewer than {FEWER_OUTPUTS} weights an output"),
        (nbytes > p.budget // 2, "half of the memory budget has no room for it"),
        (p.gram_cost > most_gradients, f"J Jᵀ takes more than {most_gradients:.0f} gradients"),
        *obstacles,
    )


def determinants(system: System) -> tuple[Route, ...]:
    """Return the routes to log det P − log det A and tr P⁻¹G under a prior precision A, a number or a vector."""
    s, p = system, system.posterior or Posterior()
    nbytes = 2 * 8 * s.rows**2
    too_large = (s.rows > WHOLE or nbytes > p.budget) and not (p.decomposed and p.scalar)
    return (
        _closed_form(s),
        _route(
            "spectrum",
            0 if p.decomposed else s.rows,
            nbytes,
            (too_large, f"more than {WHOLE:,} rows, or than memory has room for"),
        ),
        _formed_kernel(s, p, MOST_GRADIENTS),
        _route(
            "quadrature", 0, 0, (s.recorded, NO_GRADIENT), (not p.prepared, "none was prepared for a range of priors")
        ),
        Route("probes", products_of_probes(s.rows), s.vectors()),
    )


def products_of_probes(rows: int) -> int:
    """Return how many products probes for a determinant may take: fewer than rows where all eigenvalues come next."""
    return MOST_MATVECS if rows > MOST_MATVECS else max(4, rows // 2)


def decomposes(system: System) -> bool:
    """Return whether the matrix is decomposed where probes did not reach the tolerance."""
    p = system.posterior or Posterior()
    return p.scalar and system.rows <= MOST_MATVECS and 2 * 8 * system.rows**2 <= p.budget


@dataclass(frozen=True)
class SolvePlan:
    """How each kind of question is answered and why; printing it shows a table for each."""

    tables: Mapping[str, tuple[Route, ...]]
    """The routes in order of preference, the first possible one taken, by the name of the question."""

    @property
    def chosen(self) -> dict[str, str]:
        """The route that is taken, by the name of the question."""
        taken = {question: chosen(found) for question, found in self.tables.items()}
        return {question: route.name for question, route in taken.items() if route is not None}

    def __str__(self) -> str:
        return "\n\n".join(_table(question, found) for question, found in self.tables.items())


def _table(question: str, found: tuple[Route, ...]) -> str:
    taken, rows = chosen(found), [(question, "products", "bytes", "")]
    for route in found:
        verdict = "taken" if route is taken else route.why_not or "possible"
        rows.append((route.name, _number(route.products), _number(route.nbytes), verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _number(count: float | int) -> str:
    return f"{count:,.0f}" if count < math.inf else "not known"
