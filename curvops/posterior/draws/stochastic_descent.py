"""Draws of a posterior by minibatch gradient descent on one of two losses with the same minimiser.

Antorán et al. 2023. In L(z) = ½‖ε − Sᵀz‖² + ½‖z − θ⁰‖²_A each minibatch contains the noise of its data; in
L′(z) = ½‖Sᵀz‖² + ½‖z − θⁿ‖²_A with θⁿ = θ⁰ + A⁻¹Sε this noise is summed once, beforehand. Both have the same
minimiser. There, the gradient noise of L′ is below that of L if Σ tr(M_iΣM_i) < ½ Σ tr M_i, with M_i the curvature of
point i; L is better if points determine many weights each, near interpolation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import Checkpoint, named_part
from curvops.checks import check_choice, checked_number, checked_whole
from curvops.errors import DivergenceError
from curvops.linalg import Reason, Solution
from curvops.linalg.core.solve_routes import EPOCHS
from curvops.linalg.core.vectors import norm
from curvops.operators.curvatures.curvature import CurvatureRoot
from curvops.posterior.draws.noise import Systems
from curvops.progress import as_step, at_work, remark

LOSSES = ("low_variance", "standard")
POWER_STEPS, POWER_BATCHES = 8, 3
GROWN = 100.0
"""The factor by which the gradient exceeds the right-hand side once a descent has diverged."""
MOST_HALVINGS = 12
RANGES = {"step_size": "(0, inf)", "momentum": "[0, 1)", "final": "(0, 1]", "averaging": "(0, 1]", "clip": "(0, inf)"}
CHECK_EVERY = 5
"""The number of epochs between two checks of the true residual, each of which costs as much as an epoch."""


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
        for name in ("batch_size", "epochs"):
            checked_whole(name, getattr(self, name))
        for name, interval in RANGES.items():
            if name != "step_size" or self.step_size is not None:
                checked_number(name, getattr(self, name), interval)

    def solve(self, systems: Systems, x0: Float[Tensor, "D k"] | None, rtol: float) -> Solution:
        """Find the minimiser for each column; a checkpoint is written after an epoch."""
        kept = named_part("descent", systems.like.device)
        if kept.done:
            return kept.result(Solution)
        generator = kept.source("generator", systems.noise.generator("cpu"), torch.device("cpu"))
        assert generator is not None
        problem = _Problem(self, systems, generator)
        known = None if kept.state is None else _AfterEpoch(**kept.state)
        if known is not None:
            problem.passes, longest, halvings = known.passes, known.longest, known.halvings
        else:
            longest, halvings = problem.step() if self.step_size is None else float(self.step_size), 0
        step = longest / 2**halvings
        with at_work("stochastic gradient descent", None, None, systems.precision):
            while halvings < MOST_HALVINGS:
                start = known or _AfterEpoch.before(problem.right, x0, longest, halvings)
                try:
                    found = problem.descend(start, rtol, kept)
                except DivergenceError:
                    if self.step_size is not None:
                        raise DivergenceError(
                            f"the gradient grew with step_size={step:g}: try {min(problem.step(), step / 2):.2g}."
                        ) from None
                    known, halvings, step = None, halvings + 1, step / 2
                else:
                    return kept.finish(found)
        raise DivergenceError(f"no step size from {longest:.2g} down to {step:.2g} converges; use method='cg'.")


@dataclass(eq=False)
class _AfterEpoch:
    """The state of a descent after an epoch; the next epoch changes it in place."""

    longest: float
    """The first step size, before any halving."""
    halvings: int
    z: Float[Tensor, "D k"]
    velocity: Float[Tensor, "D k"]
    average: Float[Tensor, "D k"]
    history: list[Float[Tensor, " k"]]
    epoch: int = 0
    count: int = 0
    passes: float = 0.0

    @classmethod
    def before(cls, right: Tensor, x0: Tensor | None, longest: float, halvings: int) -> _AfterEpoch:
        """Return the state before the first epoch."""
        z = torch.zeros_like(right) if x0 is None else x0.clone()
        return cls(longest, halvings, z, torch.zeros_like(z), z.clone(), [])


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
        """Return 1/λ_max of A⁻¹(N/n S_b S_bᵀ + A), with λ_max the largest over a few minibatches."""
        largest, first = 0.0, self.right[:, :1]
        first = first if bool(first.any()) else torch.ones_like(first)
        for index, (chosen, piece) in enumerate(self.root.minibatches(self.options.batch_size, self.generator)):
            if index == POWER_BATCHES:
                break
            factor = self.root.lin.num_data / len(chosen)
            v = first / _length(first)
            for _ in range(POWER_STEPS):
                image = (factor * piece._matmul(piece._t_matmul(v)) + self._of_prior(v)) / self.scale
                size = _length(image)
                largest = max(largest, float(size))
                v = image / size
            self.passes += POWER_STEPS * len(chosen) / self.root.lin.num_data / self.right.shape[1]
        return 1 / largest

    def residuals(self, z: Tensor) -> Tensor:
        """Return the true relative residuals."""
        self.passes += 1
        return norm(self.right - self.precision._matmul(z)) / _nonzero(norm(self.right))

    def descend(self, at: _AfterEpoch, rtol: float, kept: Checkpoint) -> Solution:
        """Run the remaining epochs, or as many as are needed to reach rtol."""
        options, step = self.options, at.longest / 2**at.halvings
        size = _nonzero(_length(self.right / self.scale))
        total = options.epochs * sum(math.ceil(n / options.batch_size) for n in self.root.lin.data.sizes)
        while at.epoch < options.epochs:
            for chosen, piece in self.root.minibatches(options.batch_size, self.generator):
                gradient = self.gradient(at.z + options.momentum * at.velocity, chosen, piece) / self.scale
                lengths = _length(gradient) / size
                if not float(lengths.max()) < GROWN * max(1.0, math.sqrt(self.root.lin.num_data / len(chosen))):
                    raise DivergenceError
                gradient = gradient / (lengths / options.clip).clamp_min(1.0)
                rate = step * (1 - (1 - options.final) * at.count / total)
                at.velocity = options.momentum * at.velocity - rate * gradient
                at.z = at.z + at.velocity
                at.count += 1
                at.average += max(options.averaging, 1 / at.count) * (at.z - at.average)
            at.epoch += 1
            self.passes += 1
            as_step(self.right.shape[1], lambda: None)
            if at.epoch % CHECK_EVERY == 0 or at.epoch == options.epochs:
                residuals = self.residuals(at.average)
                at.history.append(residuals.double().cpu())
                worst = float(residuals.max())
                remark(lambda worst=worst: f"residual {worst:.1e}")  # type: ignore[misc]
                if worst <= rtol:
                    break
            at.passes = self.passes
            kept.save(partial(vars, at))
        return self._solution(at, rtol)

    def _solution(self, at: _AfterEpoch, rtol: float) -> Solution:
        final = at.history[-1]
        reasons = tuple(Reason.CONVERGED if r <= rtol else Reason.ITERATION_LIMIT for r in final.tolist())
        return Solution(
            at.average,
            reasons,
            final <= rtol,
            final,
            torch.full_like(final, math.nan),
            at.count,
            round(self.passes * len(final)),
            torch.stack(at.history),
        )


def _nonzero(sizes: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Return the norms to divide by: 1 for a right-hand side of zeros, whose solution is 0."""
    return sizes.where(sizes > 0, 1.0)


def _length(V: Float[Tensor, "D k"]) -> Float[Tensor, " k"]:
    """Return the norms of columns, in their own dtype."""
    return norm(V).to(V.dtype)
