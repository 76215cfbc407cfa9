"""The routes by which a system A X = B is solved: one table, from facts to a choice, its cost and its reason.

`routes` and `determinants` are pure functions of a `System`, so that a rule is one line here for all uses: `solve` for
any operator, draws and covariances of a posterior, and its evidence. The first possible route is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from curvops.summary import Table, Tabular

DENSE_SIZE = 256
"""Up to this many rows, any matrix is formed for a solve, which costs no more than iterating and has every gradient,
and for an estimate without a budget, whose value is then exact."""
DENSE_BLOCK = 2048
"""Up to this many rows, a matrix is formed once if it is used for many later answers: a block next to others that have
closed forms, a posterior's curvature for many draws. A matrix that exists is factorised, in float64."""
MOST_FORMED = 8192
"""Up to this many rows, a posterior's curvature is formed once for its covariances: 2 GiB with factor and work."""
ALWAYS_FORMED = 1024
"""The largest matrix that is formed however few rows of J need it, since more may follow: this takes a few solves."""
MOST_DECOMPOSED = 1024
"""Up to this many rows, a curvature is decomposed for its determinants: probes take 300 to 500 products for one prior
precision, whereas the whole spectrum takes as many products as rows, serves all precisions, and is exact. A layer of
more parameters without Kronecker factors gets only the diagonal of its block in KFAC."""
MOST_MATVECS = 4000
"""The most products for an evidence: beyond them its error bar is accepted, and the estimate's reason says so. If
probes fail within them, a matrix of up to this many rows is decomposed."""
MOST_SOLVES = 200
"""The number of solves for the effective dimension under a prior operator, one for each probe."""
PRODUCTS_A_SOLVE = 8
"""The least number of products per column of a block solve: from rows / 8 columns on, forming the matrix is cheaper."""
PRODUCTS_A_ROW = 64
"""The number of products that a solve for a row of J counts as, if there are twice as many outputs as weights: it goes
on to more digits, products take long, and what is formed serves all later rows, too."""
MOST_GRADIENTS = 200.0
"""The largest cost of J Jᵀ in gradients for determinants: for one prior precision (probes: 300–500), or on request."""
MOST_OUTPUTS = 6144
"""Up to this many outputs in total J Jᵀ is formed; its spectrum takes minutes, with five matrices of 300 MB."""
FEWER_OUTPUTS = 4
"""The ratio of weights to outputs from which function space is cheaper, including its tighter tolerance."""
KERNEL_COPIES = 5
"""The matrices (N·C, N·C) in float64 of a formed kernel: K, SᵀS, its eigenvectors and two for LAPACK; or K, these
vectors, a factor, and two in a step of Newton's method."""
FORMED_COPIES = 4
"""The matrices of n² numbers in float64 of a formed operator: itself, itself plus a shift, its factor, and work."""
SOLVE_VECTORS = 16
"""Vectors per column in a block solve: the right-hand side, the solution, and the solver's."""
MOST_COLUMNS = 128
"""The most right-hand sides of one CG block: beyond, the K × K work and the vectors grow faster than products fall."""
SKETCH_RANK = 1024
"""The largest rank of a sketch if neither a rank nor a memory budget is given."""
DETERMINANT_RANK = 400
"""The largest rank of a determinant's preconditioner, and the deepest basis for a lower bound that is estimated."""
SKETCH_SERVES = 4
"""A sketch is used for up to this many times the columns it was made for; more would justify a larger one."""
UNEVEN = 4.0
"""The largest ratio between the factors by which prior precisions differ from those that a sketch was made for."""
RESOLVED = 1000
"""The least prior precision, in units of the rounding of J Jᵀ, for which solutions are right to three digits."""
NEWTON_STEPS = 12
"""The number of factorisations that the mode of a linear model is expected to take in function space."""
EPOCHS = 100
"""The default number of passes over the data of stochastic descent."""

CLOSED_FORM, SKETCHED = "closed form", "cg with a sketch"
NO_GRADIENT = "a gradient is recorded, which it does not have"
METHODS = {
    CLOSED_FORM: (CLOSED_FORM, "formed matrix"),
    "cg": (CLOSED_FORM, "dense", "formed matrix", SKETCHED, "cg"),
    "dual": ("formed kernel", "dual"),
    "sgd": ("sgd",),
}
"""The routes that each method of a posterior's draws allows."""
METHOD_OF = {route: method for method in reversed(METHODS) for route in METHODS[method]}
"""The first method that allows each route."""


@dataclass(frozen=True)
class PosteriorFacts:
    """The facts that a posterior adds to those of its precision P = G + A."""

    name: str = "the curvature"
    psd: bool = True
    scalar: bool = True
    """Whether the prior precision A is a single number."""
    diagonal: bool = True
    """Whether it is a number or a vector."""
    root_columns: int = 0
    """The number N·R of columns of the curvature's root by points; 0 if it has none."""
    outputs: int = 0
    """The number N·C of outputs."""
    gram_cost: float | int = math.inf
    """The gradients that forming J Jᵀ takes; ∞ unless the curvature is the exact GGN of these data alone."""
    fewer_outputs: int = FEWER_OUTPUTS
    """The least ratio of weights to outputs for J Jᵀ."""
    resolved: bool = True
    """False if the prior precision is known to be below the rounding of J Jᵀ."""
    budget: float | int = math.inf
    """The linearisation's whole memory budget."""
    formed: bool = False
    """Whether earlier systems have formed the curvature as a matrix."""
    decomposed: bool = False
    """Whether all eigenvalues of G are known."""
    prepared: bool = False
    """Whether a quadrature that covers this prior precision is known."""


@dataclass(frozen=True)
class System:
    """The facts about A X = B that decide how it is solved: sizes, structure, memory in bytes, the requested method."""

    rows: int
    columns: int = 1
    square: bool = True
    longest: int = 0
    """The length of the longest vector in a product, if it exceeds rows."""
    itemsize: int = 8
    closed_form: bool = False
    at_hand: bool = False
    """Whether the matrix exists already."""
    symmetric: bool = True
    definite: bool = True
    """Whether A is to be solved by CG, for which negative curvature is an error."""
    rows_of_J: bool = False
    """Whether the columns are rows of J, for covariances: more follow, for which what is formed once is kept."""
    moved: bool = False
    """Whether these rows have a gradient in their points."""
    sketch: bool = True
    """Whether a sketch is tried as preconditioner."""
    recorded: bool = False
    """Whether a gradient is recorded through A."""
    room: float | int = math.inf
    """The bytes left for vectors and formed matrices."""
    requested: str | None = None
    """The requested method for draws of a posterior."""
    posterior: PosteriorFacts | None = None

    @property
    def small(self) -> bool:
        """Whether the matrix is formed, or exists, and is factorised by every solve."""
        return self.rows <= (DENSE_BLOCK if self.at_hand else DENSE_SIZE)

    def vectors(self, length: int = 0) -> int:
        """Return the bytes of a block solve with vectors of this length, by default the longest."""
        return SOLVE_VECTORS * self.columns * (length or max(self.rows, self.longest)) * self.itemsize


@dataclass(frozen=True)
class Route:
    """A way to solve: its least number of products (for J Jᵀ, gradients), its bytes, and why it is not possible."""

    name: str
    products: float | int
    nbytes: float | int
    why_not: str = ""

    @property
    def possible(self) -> bool:
        """Whether there is no obstacle."""
        return not self.why_not


def _route(name: str, products: float | int, nbytes: float | int, *obstacles: tuple[bool, str]) -> Route:
    """Return a route, with the first obstacle that applies."""
    for there, why in obstacles:
        if there:
            return Route(name, products, nbytes, why)
    return Route(name, products, nbytes)


def directions_pay(condition: float, rtol: float) -> bool:
    """Return whether CG keeps its directions, given the condition number that a sketch leaves.

    Up to 25 iterations they save at most a tenth of the products, and take as much time and half of the memory.
    """
    return math.sqrt(condition) * math.log(2 / rtol) / 2 > 25


def chosen(table: Iterable[Route]) -> Route | None:
    """Return the first possible route, or None."""
    for route in table:
        if not route.why_not:
            return route
    return None


def routes(system: System) -> tuple[Route, ...]:
    """Return all routes in order of preference; for a posterior with a given method, only those of that method."""
    s, p, least, block = system, system.posterior, PRODUCTS_A_SOLVE * system.columns, system.vectors()
    not_square = (not s.square, "least squares need lsmr")
    indefinite = (not s.definite, "not known to be positive semidefinite")
    closed_form = _route(
        CLOSED_FORM,
        0,
        0,
        (not s.closed_form, "no closed form is known"),
        (s.recorded and s.small and p is None, "its dense matrix carries more gradients"),
    )
    dense = _route(
        "dense",
        0 if s.at_hand else s.rows,
        2 * s.itemsize * s.rows**2,
        not_square,
        (not s.small, f"more than {DENSE_BLOCK if s.at_hand else DENSE_SIZE:,} rows"),
    )
    no_shift = (not s.sketch, "there is no positive diagonal to add")
    cg = (
        _route(SKETCHED, least, block, not_square, indefinite, no_shift),
        _route("cg", least, block, not_square, indefinite),
    )
    if p is None:
        minres = _route("minres", least, block, not_square, (not s.symmetric, "not symmetric"))
        return closed_form, dense, *cg, minres, Route("lsmr", 2 * least, block)
    narrow = bool(p.root_columns) and FEWER_OUTPUTS * p.root_columns <= s.rows and p.diagonal
    short = narrow and block > s.room and s.columns > 1
    often = s.requested == "dual" or short or s.rows_of_J
    most = MOST_GRADIENTS if often else 2.0 * PRODUCTS_A_SOLVE * s.columns
    unresolved = (not p.resolved, "the prior precision is below the rounding of J Jᵀ")
    stochastic = (
        (not p.root_columns, f"needs the curvature's square root by points, which {p.name} does not have"),
        (s.recorded, "gives no gradient for the prior precision or the noise"),
    )
    operator_prior = (not p.diagonal, "needs a prior precision that is a number or a vector")
    dual = _route("dual", least, s.vectors(p.root_columns), *stochastic, operator_prior)
    matrix, kernel = _formed_matrix(s, p), _formed_kernel(s, p, most, unresolved)
    if s.rows_of_J:  # by solves to more digits than draws; under J Jᵀ a row's gradient takes such a solve
        return closed_form, *((matrix, kernel) if s.moved else (kernel, matrix)), dense, *cg
    descent = _route("sgd", EPOCHS * s.columns, block, *stochastic)
    every = closed_form, matrix, dense, kernel, *((dual, *cg) if short else (*cg, dual)), descent
    return tuple(route for route in every if s.requested is None or route.name in METHODS[s.requested])


def _formed_matrix(s: System, p: PosteriorFacts) -> Route:
    nbytes, once = FORMED_COPIES * 8 * s.rows**2, s.rows_of_J  # for all later rows, too
    most, serves = MOST_FORMED if once else DENSE_BLOCK, once and (p.formed or s.rows <= ALWAYS_FORMED)
    least = PRODUCTS_A_ROW if once and p.outputs >= 2 * s.rows else PRODUCTS_A_SOLVE
    few = least * s.columns < s.rows and not serves
    return _route(
        "formed matrix",
        0 if p.formed else s.rows,
        nbytes,
        (s.closed_form, "the closed form takes no products"),
        (s.rows > most, f"more than {most:,} rows"),
        (not once and s.rows <= DENSE_SIZE, f"up to {DENSE_SIZE:,} rows each solve forms its own"),
        (s.recorded, NO_GRADIENT),
        (not p.psd, "the curvature is not known to be positive semidefinite"),
        (few, f"fewer than rows / {least} columns"),
        (nbytes > s.room and not p.formed, "memory has no room for it"),
    )


def _formed_kernel(s: System, p: PosteriorFacts, most_gradients: float | int, *obstacles: tuple[bool, str]) -> Route:
    """Return the route by J Jᵀ of all training points, decomposed once for every prior precision that is a number."""
    nbytes = KERNEL_COPIES * 8 * p.outputs**2
    return _route(
        "formed kernel",
        p.gram_cost,
        nbytes,
        (not p.scalar, "the prior precision is not a single number"),
        (p.gram_cost == math.inf, "it needs the exact GGN of these data only"),
        (s.recorded, NO_GRADIENT),
        (p.outputs > MOST_OUTPUTS, f"more than {MOST_OUTPUTS:,} outputs in total"),
        (p.fewer_outputs * p.outputs > s.rows, f"fewer than {p.fewer_outputs} weights per output"),
        (nbytes > p.budget // 2, "half of the memory budget has no room for it"),
        (p.gram_cost > most_gradients, f"J Jᵀ takes more than {most_gradients:.0f} gradients"),
        *obstacles,
    )


def determinants(system: System) -> tuple[Route, ...]:
    """Return the routes to log det P − log det A and tr P⁻¹G under a prior precision A, a number or a vector."""
    s, p = system, system.posterior or PosteriorFacts()
    nbytes = 2 * 8 * s.rows**2
    too_large = (s.rows > MOST_DECOMPOSED or nbytes > p.budget) and not (p.decomposed and p.scalar)
    return (
        _route(CLOSED_FORM, 0, 0, (not s.closed_form, "no closed form is known")),
        _route(
            "spectrum",
            0 if p.decomposed else s.rows,
            nbytes,
            (too_large, f"more than {MOST_DECOMPOSED:,} rows, or than memory has room for"),
        ),
        _formed_kernel(s, p, MOST_GRADIENTS),
        _route(
            "quadrature", 0, 0, (s.recorded, NO_GRADIENT), (not p.prepared, "none was prepared for a range of priors")
        ),
        Route("probes", products_of_probes(s.rows), s.vectors()),
    )


def products_of_probes(rows: int) -> int:
    """Return how many products probes for a determinant may take; fewer than rows if all eigenvalues come next."""
    return MOST_MATVECS if rows > MOST_MATVECS else max(4, rows // 2)


def decomposes(system: System) -> bool:
    """Return whether the matrix is decomposed if probes do not reach the tolerance."""
    p = system.posterior or PosteriorFacts()
    return p.scalar and system.rows <= MOST_MATVECS and 2 * 8 * system.rows**2 <= p.budget


@dataclass(frozen=True)
class SolvePlan(Tabular):
    """The way in which each kind of question is answered, and why; printing it shows a table for each."""

    tables: Mapping[str, tuple[Route, ...]]
    """The routes in order of preference, by the name of the question; the first possible one is taken."""

    @property
    def chosen(self) -> dict[str, str]:
        """The route that is taken, by the name of the question."""
        routes_by_question = {question: chosen(table) for question, table in self.tables.items()}
        return {question: route.name for question, route in routes_by_question.items() if route is not None}

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        return [_table(question, table) for question, table in self.tables.items()]


def _table(question: str, table: tuple[Route, ...]) -> Table:
    chosen_route, rows = chosen(table), []
    for route in table:
        verdict = "taken" if route is chosen_route else route.why_not or "possible"
        rows.append((route.name, _number(route.products), _number(route.nbytes), verdict))
    return Table((question, "products", "bytes", ""), rows)


def _number(count: float | int) -> str:
    return f"{count:,.0f}" if count < math.inf else "unknown"
