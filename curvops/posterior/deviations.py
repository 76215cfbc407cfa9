"""Draws of N(0, T P⁻¹) by perturbing and solving: P z = Aθ⁰ + Sε, in weight space, function space, or by minibatches.

Papandreou & Yuille 2010; for linearised networks Antorán et al. 2023. G = S Sᵀ is the curvature with its square root,
a block of columns per point; ε is standard normal and θ⁰ ~ N(0, A⁻¹). A given noise, kept as a seed, has one solution,
whatever the method and the prior precision.

Stochastic descent minimises one of two losses. In L(z) = ½‖ε − Sᵀz‖² + ½‖z − θ⁰‖²_A each minibatch contains the noise
of its data; in L′(z) = ½‖Sᵀz‖² + ½‖z − θⁿ‖²_A with θⁿ = θ⁰ + A⁻¹Sε this noise is summed once, beforehand. Both have the
same minimiser. There, the gradient noise of L′ is below that of L if Σ tr(M_iΣM_i) < ½ Σ tr M_i, with M_i the curvature
of point i; L is better if points determine many weights each, near interpolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.ambient import Memories, as_step, hold, remark, running
from curvops.checkpoint import Checkpoint, current
from curvops.checks import carries_graph, check_choice, check_options, checked_number, drawn_seed, refuse
from curvops.errors import DivergenceError, NotSolvedError
from curvops.linalg import Diagonal, Estimate, Reason, Solution, cg, draw
from curvops.linalg.core.algorithm import PRODUCT_VECTORS, solve_width
from curvops.linalg.core.results import Reasoned
from curvops.linalg.core.solve_routes import CLOSED_FORM, EPOCHS, METHOD_OF, METHODS, SKETCHED, directions_pay
from curvops.linalg.core.vectors import inner, is_psd, join, norm
from curvops.linalg.estimators.trace import sample_mean
from curvops.linalg.operators.damped import Damped
from curvops.linalg.solvers.solve import solve
from curvops.linalg.solvers.systems import ANSWERED, join_solutions
from curvops.network import PointNormals
from curvops.operators import Linearization
from curvops.operators.curvatures.ggn import CurvatureRoot, root_of
from curvops.operators.curvatures.subnetwork import Formed
from curvops.posterior.precision import REMEDIES, kernel_of, preconditioner, route_of
from curvops.posterior.terms import PrecisionTerms, Prior
from curvops.ranks.sharded_vectors import SEED
from curvops.summary import Summarised

DRAWN_TOGETHER = 8
"""How many draws of a matrix without a square root are made at once, whatever the memory."""
STREAMS = OF_CURVATURE, OF_PRIOR, FURTHER = range(3)
"""The number of independent streams per draw: the terms of a draw take their numbers from different streams."""


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers for `count` draws of a posterior, stored as a seed and generated where they are used.

    Each draw has its own numbers: the first draws of two noises with the same seed are equal, whatever the batches and
    the memory budget.
    """

    seed: int
    count: int
    num_parameters: int
    num_data: int
    data: int
    """The fingerprint of the training data in their order."""

    @classmethod
    def draw(cls, lin: Linearization, count: int, generator: torch.Generator | None) -> Noise:
        """Make new noise for the posteriors of a linearisation."""
        seed = drawn_seed(generator)
        lin.passes.agree({SEED: seed})
        return cls(seed, count, len(lin.theta), lin.data.num_data, lin.data.prints.order)

    def require_of(self, lin: Linearization, k: int) -> None:
        """Raise ValueError if the noise belongs to another problem, or to fewer draws."""
        refuse(k > self.count, f"k={k}, but the noise is for {self.count} draws; pass k={self.count} or fewer.")
        sizes = (lin.num_parameters, lin.num_data, lin.data.prints.order)
        if (self.num_parameters, self.num_data, self.data) != sizes:
            raise ValueError(
                f"the noise belongs to {self.num_data} points and {self.num_parameters} weights, or to other data, but "
                f"this posterior has {lin.num_data} and {lin.num_parameters}; leave noise out to draw it anew."
            )

    def of_data(self, per_point: int, columns: range, like: Tensor) -> Float[Tensor, "NR k"]:
        """Return standard normal columns for the square root of the curvature, the same number for each point."""
        numbers = PointNormals(self.seed).block(columns, slice(0, self.num_data), per_point, like)
        return numbers.flatten(1).mT

    def of_prior(self, prior: Prior, columns: range, like: Tensor) -> Float[Tensor, "D k"]:
        """Draw ξ from N(0, A)."""
        if prior.diagonal is None:
            assert isinstance(prior.precision, LinearOperator)
            return self.of_operator(OF_PRIOR, prior.precision, columns)
        scale = prior.diagonal.sqrt()
        rows = torch.empty(len(columns), self.num_parameters, dtype=like.dtype, device=like.device)
        for column, row in zip(columns, rows):
            row.normal_(generator=self.generator(like.device, OF_PRIOR, column))
        return rows.mT * (scale if scale.ndim == 0 else scale.unsqueeze(-1))

    def of_operator(self, stream: int, operator: LinearOperator, columns: range) -> Float[Tensor, "D k"]:
        """Draw from N(0, M) for an operator M without a square root by points, from the numbers of a stream."""
        if not is_psd(operator):  # its parts have no root, but a shift makes the whole definite
            operator = operator.add_diagonal(0.0)
        blocks = []
        for start in range(columns.start - columns.start % DRAWN_TOGETHER, columns.stop, DRAWN_TOGETHER):
            drawn = draw(operator, DRAWN_TOGETHER, self.generator(operator.device, stream, start))
            blocks.append(drawn[:, max(0, columns.start - start) : columns.stop - start])
        return join(*blocks)

    def generator(self, device: Any, stream: int = FURTHER, column: int = 0) -> torch.Generator:
        """Return a generator of the numbers of one stream of a draw."""
        return torch.Generator(device=device).manual_seed(self.seed + len(STREAMS) * column + stream)


@dataclass(frozen=True, eq=False)
class Systems:
    """P = G + A with the right-hand sides of some draws; every method starts from these."""

    terms: PrecisionTerms
    noise: Noise
    columns: range
    """The positions of these draws in the noise."""
    route: str
    precision: Any

    @property
    def count(self) -> int:
        """k, the number of draws."""
        return len(self.columns)

    @property
    def memories(self) -> Memories:
        """The memory budgets that the draws count against; a structured P does not hold them."""
        return frozenset((self.terms.lin.memory,))

    @property
    def like(self) -> Tensor:
        """A tensor with the weights' dtype and device."""
        return self.terms.curvature.representation()[0]

    @property
    def root(self) -> CurvatureRoot | None:
        """The root S, if the curvature has such a root by points; otherwise None."""
        return root_of(self.terms.curvature)

    def of_prior(self) -> Float[Tensor, "D k"]:
        """Return Aθ⁰ ~ N(0, A)."""
        return self.noise.of_prior(self.terms.prior, self.columns, self.like)

    def of_points(self, root: CurvatureRoot) -> Float[Tensor, "NR k"]:
        """Return the white noise ε."""
        return self.noise.of_data(root.columns_a_point, self.columns, self.like)

    def right_sides(self) -> Float[Tensor, "D k"]:
        """Return Aθ⁰ + Sε ~ N(0, P).

        For an indefinite G, or if P is not exactly G + A, these are draws from N(0, P) itself.
        """
        curvature, root = self.terms.curvature, self.root
        if not is_psd(curvature) or self.terms.sum.error is not None:
            return self.noise.of_operator(OF_CURVATURE, self.precision, self.columns)
        if root is None:
            return self.of_prior() + self.noise.of_operator(OF_CURVATURE, curvature, self.columns)
        return self.of_prior() + root._matmul(self.of_points(root))


LOSSES = ("low_variance", "standard")
GROWN = 100.0
"""The factor by which the gradient exceeds the right-hand side once a descent has diverged."""
RANGES = {"momentum": "[0, 1)", "final": "(0, 1]", "averaging": "(0, 1]", "clip": "(0, inf)"}


@dataclass(frozen=True)
class StochasticDescent:
    """Minibatch gradient descent with Nesterov momentum, a linearly decaying step, clipping and averaging.

    Args:
        loss: "low_variance" for L′, "standard" for L.
        batch_size: the number of points per step; the points of a step come from one batch of the data.
        epochs: the number of passes over the data.
        step_size: the first step, relative to the prior's precision (steps are A⁻¹ times the gradient). None is 1/λ,
            with λ the largest eigenvalue of A⁻¹P on a few minibatches by power iterations. If a given step size
            diverges, that is an error; the default one is halved instead.
        momentum: the momentum, in [0, 1).
        final: the last step as a fraction of the first.
        averaging: the weight of the newest iterate in the average that is returned (Polyak & Juditsky 1992).
        clip: the largest allowed gradient of a draw, as a multiple of the length of its right-hand side.

    Examples:
        >>> method = co.posterior.StochasticDescent(epochs=50, batch_size=4)
        >>> method.momentum
        0.9
    """

    loss: str = "low_variance"
    batch_size: int = 256
    epochs: int = EPOCHS
    step_size: float | None = None
    momentum: float = 0.9
    final: float = 1 / 330
    averaging: float = 0.01
    clip: float = 10.0

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, LOSSES)
        check_options(batch_size=self.batch_size, epochs=self.epochs, step_size=self.step_size)
        for name, interval in RANGES.items():
            checked_number(name, getattr(self, name), interval)

    def solve(self, systems: Systems, x0: Float[Tensor, "D k"] | None, rtol: float) -> Solution:
        """Find the minimiser for each column; a checkpoint is written after an epoch."""
        saved = current().step("descent", systems.like.device)
        if saved.done:
            return saved.result(Solution)
        generator = saved.source("generator", systems.noise.generator("cpu"), torch.device("cpu"))
        assert generator is not None
        problem = _Problem(self, systems, generator)
        if saved.state is not None:
            at = _AfterEpoch(**saved.state)
            problem.passes = at.passes
        else:
            step = problem.step() if self.step_size is None else float(self.step_size)
            at = _AfterEpoch.before(problem.right, x0, step)
        with running("stochastic gradient descent", systems.precision):
            for _ in range(12):
                try:
                    return saved.finish(problem.descend(at, rtol, saved))
                except DivergenceError:
                    if self.step_size is not None:
                        raise DivergenceError(
                            f"the gradient grew to {GROWN:g} times the right-hand side with step_size={at.step:g}; try "
                            f"step_size={min(problem.step(), at.step / 2):.2g}, or None."
                        ) from None
                    at = _AfterEpoch.before(problem.right, x0, at.step / 2)
        raise DivergenceError(f"no step size down to {at.step:.2g} converges; use method='cg'.")


@dataclass(eq=False)
class _AfterEpoch:
    """The state of a descent after an epoch; the next epoch changes it in place."""

    step: float
    """The first step size, halved after each divergence."""
    z: Float[Tensor, "D k"]
    velocity: Float[Tensor, "D k"]
    average: Float[Tensor, "D k"]
    history: list[Float[Tensor, " k"]]
    epoch: int = 0
    count: int = 0
    passes: float = 0.0

    @classmethod
    def before(cls, right: Tensor, x0: Tensor | None, step: float) -> _AfterEpoch:
        """Return the state before the first epoch."""
        z = torch.zeros_like(right) if x0 is None else x0.clone()
        return cls(step, z, torch.zeros_like(z), z.clone(), [])


class _Problem:
    """The systems of one run, with a count of the passes over the data."""

    def __init__(self, options: StochasticDescent, systems: Systems, generator: torch.Generator) -> None:
        root, A = systems.root, systems.terms.A
        assert root is not None
        self.options, self.generator, self.passes = options, generator, 0.0
        self.root, self.prior, self.precision = root, systems.terms.prior, systems.precision
        self.of_prior, self.points = systems.of_prior(), systems.of_points(root)
        self.right = self.of_prior + root._matmul(self.points)
        self.scale = torch.ones_like(self.right[:1, :1]) if A is None else torch.atleast_1d(A.detach()).unsqueeze(-1)

    def gradient(self, z: Tensor, chosen: Tensor, piece: CurvatureRoot) -> Tensor:
        """Return an unbiased gradient of the loss at z from some points."""
        lin, per_point = self.root.lin, self.root.columns_a_point
        factor = lin.num_data / len(chosen)
        pushed = piece._t_matmul(z)
        if self.options.loss == "standard":
            pushed = pushed - self.points.unflatten(0, (-1, per_point))[chosen].flatten(0, 1)
            offset = self.of_prior
        else:
            offset = self.right
        return factor * piece._matmul(pushed) + self._of_prior(z) - offset

    def _of_prior(self, z: Tensor) -> Tensor:
        precision = self.prior.precision
        return self.scale * z if isinstance(precision, Tensor) else precision._matmul(z)

    def step(self) -> float:
        """Return 1/λ_max of A⁻¹(N/n S_b S_bᵀ + A), λ_max the largest of a few minibatches, by power iteration."""
        batches, steps, largest, first = 3, 8, 0.0, self.right[:, :1]
        for index, (chosen, piece) in enumerate(self.root.minibatches(self.options.batch_size, self.generator)):
            if index == batches:
                break
            factor = self.root.lin.num_data / len(chosen)
            v = first / _length(first)
            for _ in range(steps):
                image = (factor * piece._matmul(piece._t_matmul(v)) + self._of_prior(v)) / self.scale
                size = _length(image)
                largest = max(largest, float(size))
                v = image / size
            self.passes += steps * len(chosen) / self.root.lin.num_data / self.right.shape[1]
        return 1 / largest

    def residuals(self, z: Tensor) -> Tensor:
        """Return the true relative residuals."""
        self.passes += 1
        return norm(self.right - self.precision._matmul(z)) / norm(self.right)

    def descend(self, at: _AfterEpoch, rtol: float, saved: Checkpoint) -> Solution:
        """Run the remaining epochs, or as many as are needed to reach rtol."""
        options = self.options
        size = _length(self.right / self.scale)
        total = options.epochs * sum(math.ceil(n / options.batch_size) for n in self.root.lin.data.sizes)
        while at.epoch < options.epochs:
            for chosen, piece in self.root.minibatches(options.batch_size, self.generator):
                gradient = self.gradient(at.z + options.momentum * at.velocity, chosen, piece) / self.scale
                lengths = _length(gradient) / size
                if not float(lengths.max()) < GROWN * max(1.0, math.sqrt(self.root.lin.num_data / len(chosen))):
                    raise DivergenceError
                gradient = gradient / (lengths / options.clip).clamp_min(1.0)
                rate = at.step * (1 - (1 - options.final) * at.count / total)
                at.velocity = options.momentum * at.velocity - rate * gradient
                at.z = at.z + at.velocity
                at.count += 1
                at.average += max(options.averaging, 1 / at.count) * (at.z - at.average)
            at.epoch += 1
            self.passes += 1
            as_step(self.right.shape[1], lambda: None)
            if at.epoch % 5 == 0 or at.epoch == options.epochs:  # true residuals cost as much as an epoch
                residuals = self.residuals(at.average)
                at.history.append(residuals.double().cpu())
                worst = float(residuals.max())
                remark(lambda worst=worst: f"residual {worst:.1e}")  # type: ignore[misc]
                if worst <= rtol:
                    break
            at.passes = self.passes
            saved.save(partial(vars, at))
        return self._solution(at, rtol)

    def _solution(self, at: _AfterEpoch, rtol: float) -> Solution:
        final = at.history[-1]
        reasons = tuple(Reason.CONVERGED if r <= rtol else Reason.ITERATION_LIMIT for r in final.tolist())
        return Solution(
            at.average,
            reasons,
            final,
            torch.full_like(final, math.nan),
            at.count,
            round(self.passes * len(final)),
            torch.stack(at.history),
        )


def _length(V: Float[Tensor, "D k"]) -> Float[Tensor, " k"]:
    """Return the norms of columns, in their own dtype."""
    return norm(V).to(V.dtype)


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

    Raises NotSolvedError if a draw failed, and ValueError or TypeError for a method that does not fit or exist.
    """
    root = math.sqrt(temperature)
    requested = "sgd" if isinstance(method, StochasticDescent) else method
    if requested is not None:
        check_choice("method", requested, METHODS)
    route = route_of(terms, k, requested)
    P = terms.formed if route.name == "formed matrix" else terms.precision
    named = requested or METHOD_OF[route.name]
    refuse(current() and carries_graph(P.representation()), "a checkpoint saves no gradient: detach what requires one.")
    refuse(named == CLOSED_FORM and x0 is not None, "a closed form has no iteration to start: leave x0 out.")
    if named == CLOSED_FORM:  # its own root of P⁻¹ loses fewer digits than a perturbation and a solve
        draws = draw(P.inverse(rtol), k, noise.generator(P.device), frozenset((terms.lin.memory,))).mT
        none = torch.zeros(k, dtype=torch.float64)
        drawn = Deviations(draws, noise, named, (Reason.CONVERGED,) * k, none, 0, none.new_zeros(0, k))
    else:
        chosen = method if isinstance(method, StochasticDescent) else StochasticDescent() if named == "sgd" else named
        start = x0 if x0 is None or root == 1 else x0 / root
        solution = _solve(Systems(terms, noise, range(k), route.name, P), chosen, start, rtol)
        residuals, history = solution.relative_residuals, solution.history
        drawn = Deviations(solution.x.mT, noise, named, solution.reasons, residuals, solution.matvecs, history)
        if not solution.accepted:
            raise NotSolvedError(drawn, rtol, REMEDIES)
    return drawn if root == 1 else replace(drawn, draws=drawn.draws * root)


def _solve(systems: Systems, chosen: Any, x0: Tensor | None, rtol: float) -> Solution:
    """Solve for draws at temperature 1, as many at once as fit into memory; failures are returned as reasons."""
    carried = carries_graph(systems.precision.representation())
    width, beside = solve_width(systems.precision, systems.count, systems.memories)
    if current() or width >= systems.count or carried:
        return _solve_together(systems, chosen, x0, rtol)
    draws, solutions = systems.like.new_empty(systems.count, systems.precision.shape[-1]), []
    for start in range(0, systems.count, width):
        columns = slice(start, start + width)
        with hold(systems.memories, beside):
            guess = None if x0 is None else x0[:, columns]
            solution = _solve_together(replace(systems, columns=systems.columns[columns]), chosen, guess, rtol)
        solutions.append(replace(solution, x=draws[columns].copy_(solution.x.mT).mT))
        del solution  # the solution's own buffers
    return join_solutions(solutions, draws.mT)


def _solve_together(systems: Systems, chosen: Any, x0: Tensor | None, rtol: float) -> Solution:
    if chosen == "cg":
        return _in_weight_space(systems, x0, rtol)
    if chosen != "dual":
        with torch.no_grad():
            return chosen.solve(systems, x0, rtol)
    block = systems.count * systems.precision.shape[-1] * systems.like.element_size()
    # The vectors of the dual solve are short, so what the products before and after it take is counted here.
    with torch.no_grad(), hold(systems.memories, PRODUCT_VECTORS * block):
        return _by_kernel(systems, rtol) if systems.route == "formed kernel" else _in_function_space(systems, x0, rtol)


def _in_weight_space(systems: Systems, x0: Tensor | None, rtol: float) -> Solution:
    P, right = systems.precision, systems.right_sides()
    if systems.route in (SKETCHED, "cg") and not carries_graph(P.representation()):
        M, spent = preconditioner(systems.terms, systems.count)
        most = None if directions_pay(getattr(M, "condition", math.inf), rtol) else 0
        solution = cg(P, right, preconditioner=M, rtol=rtol, x0=x0, keep_directions=most)
        return replace(solution, matvecs=solution.matvecs + spent)
    formed = systems.route == "dense" and isinstance(P, Damped) and is_psd(P.base)
    if formed and not carries_graph(P.base.representation()):
        P = Formed(P.base).add_diagonal(P.shift)  # in single precision, sums hide small prior precisions
    z = solve(P, right, rtol=rtol)  # exact if P is small or has a closed form; carries its gradient
    with torch.no_grad():
        residuals = _relative(right - P._matmul(z), right)
    reasons = tuple(Reason.CONVERGED if r <= rtol else Reason.PRECISION_LIMIT for r in residuals.tolist())
    none = residuals.new_full(residuals.shape, math.nan)
    matvecs = len(z) + systems.count
    return Solution(z, reasons, residuals, none, 1, matvecs, residuals.unsqueeze(0))


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
    M = dual.preconditioner(systems.count, systems.terms.cache.generator)
    spent += 0 if M is None else M.matvecs
    while True:
        solution = cg(dual, wanted, preconditioner=M, rtol=goal, x0=guess)
        z = start + inverse.unsqueeze(-1) * S._matmul(solution.x)
        residuals = _relative(right - systems.precision._matmul(z), right)
        spent += solution.matvecs + 2 * systems.count
        if not solution.accepted or bool((residuals <= rtol).all()) or goal <= 4 * torch.finfo(z.dtype).eps:
            break
        goal, guess = max(goal * min(0.1, float(rtol / residuals.max())), 2 * torch.finfo(z.dtype).eps), solution.x
    reasons = tuple(
        Reason.CONVERGED if residual <= rtol else Reason.PRECISION_LIMIT if reason is Reason.CONVERGED else reason
        for reason, residual in zip(solution.reasons, residuals.tolist())
    )
    return Solution(z, reasons, residuals, solution.backward_errors, solution.iterations, spent, solution.history)


def _by_kernel(systems: Systems, rtol: float) -> Solution:
    """Solve for z = θ⁰ + A⁻¹Sα with (I + SᵀA⁻¹S) α = ε − Sᵀθ⁰ by the factor of that matrix in float64, refined.

    With d = ε − Sᵀz − α the residual of P z is S d, and z differs from the exact draw by at most ‖d‖ in the norm of P,
    in which draws have a standard deviation of one in each direction. So ‖d‖/‖ε‖ tells a solution from none even if the
    residual is all rounding of products with P: it bounds the mean error, in standard deviations.
    """
    S, prior = systems.root, systems.terms.A
    assert S is not None and prior is not None
    prior, solve_dual = prior.detach(), kernel_of(systems.terms).inverse(float(prior))
    z, points = systems.of_prior(), systems.of_points(S)
    right = z + S._matmul(points)
    z, dual, history = z / prior, torch.zeros_like(points), []
    gap, error, shrinks = points - S._t_matmul(z), math.inf, True
    while shrinks:
        step = solve_dual(gap)
        z, dual = z + S._matmul(step) / prior, dual + step
        gap, before = points - S._t_matmul(z) - dual, error
        history.append(_relative(S._matmul(gap), right))
        errors = _relative(gap, points)
        error = float(errors.max())
        shrinks = error < 0.5 * before and not bool((history[-1] <= rtol).all())
    failure = Reason.SINGULAR if math.isfinite(error) else Reason.NON_FINITE
    reasons = tuple(
        Reason.CONVERGED if residual <= rtol else Reason.PRECISION_LIMIT if error <= ANSWERED else failure
        for residual, error in zip(history[-1].tolist(), errors.tolist())
    )
    none, spent = torch.full_like(errors, math.nan), (1 + 2 * len(history)) * systems.count
    return Solution(z, reasons, history[-1], none, len(history), spent, torch.stack(history))


def _relative(residual: Float[Tensor, "D k"], right: Float[Tensor, "D k"]) -> Float[Tensor, " k"]:
    """Return relative norms of columns, on the CPU."""
    return (norm(residual) / norm(right)).double().cpu()


def trace(M: LinearOperator, draws: Float[Tensor, "k D"]) -> Estimate:
    """Estimate tr(T P⁻¹ M) as the mean of zᵀM z over draws, with its standard error."""
    vectors = draws.mT
    samples = inner(vectors, M._matmul(vectors))
    refuse(len(samples) < 2, "one draw gives no standard error: use two or more.")
    return sample_mean(samples, len(samples))
