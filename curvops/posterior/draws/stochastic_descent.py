"""Draws of a posterior by minibatch gradient descent on one of two losses that they minimise.

Antorán et al. 2023: L(z) = ½‖ε − Sᵀz‖² + ½‖z − θ⁰‖²_A has the noise of the data in each minibatch, L′(z) = ½‖Sᵀz‖² +
½‖z − θⁿ‖²_A with θⁿ = θ⁰ + A⁻¹Sε has it summed once before. They have one minimiser; at it the gradient noise of L′ is
below that of L where Σ tr(M_iΣM_i) < ½ Σ tr M_i, M_i the curvature of point i: with many weights to a point determined,
near interpolation, L is better.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checkpoint import Checkpoint, named_part
from curvops.checks import check_choice, checked_number, checked_whole
from curvops.linalg import Reason, Solution
from curvops.linalg.core.solve_routes import EPOCHS
from curvops.linalg.core.vectors import norm
from curvops.operators.curvatures.curvature_root import CurvatureRoot
from curvops.posterior.core.priors import Prior
from curvops.posterior.draws.noise import Noise
from curvops.progress import as_step, at_work, remark

Loss = Literal["low_variance", "standard"]
POWER_STEPS, POWER_BATCHES = 8, 3
GROWN = 100.0
"""Where the gradient exceeds the right-hand side by this factor, the descent has diverged."""
MOST_HALVINGS = 12
RANGES = {"step_size": "(0, inf)", "momentum": "[0, 1)", "final": "(0, 1]", "averaging": "(0, 1]", "clip": "(0, inf)"}
CHECK_EVERY = 5
"""Epochs between two looks at the true residual, which costs as much as an epoch."""


class Diverged(RuntimeError):
    """A descent or a sampler diverges with the step size that was asked for; the message names one to try."""


@dataclass(frozen=True)
class StochasticDescent:
    """Minibatch gradient descent with Nesterov's momentum, a step that decays linearly, clipping and averaging.

    Args:
        loss: "low_variance" is L′, "standard" L.
        batch_size: points in a step; those of a step come from one batch of the data.
        epochs: passes over the data.
        step_size: of the first steps, relative to the prior's precision (steps are A⁻¹ times the gradient); None is
            1/λ, λ the largest eigenvalue of A⁻¹P of a few minibatches by power iterations. A step of one's own that
            diverges is an error; the default is halved.
        momentum: in [0, 1).
        final: the last step as a share of the first.
        averaging: the weight of the newest iterate in the average that is the answer (Polyak & Juditsky 1992).
        clip: longest gradient of a draw, in lengths of its right-hand side.
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
        check_choice("loss", self.loss, get_args(Loss))
        for name in ("batch_size", "epochs"):
            checked_whole(name, getattr(self, name))
        for name, interval in RANGES.items():
            if name != "step_size" or self.step_size is not None:
                checked_number(name, getattr(self, name), interval)

    def solve(
        self,
        precision: Any,
        root: CurvatureRoot,
        prior: Prior,
        of_prior: Float[Tensor, "D k"],
        points: Float[Tensor, "NR k"],
        x0: Float[Tensor, "D k"] | None,
        rtol: float,
        noise: Noise,
    ) -> Solution:
        """Find the minimiser for each column: `of_prior` is Aθ⁰, `points` ε. A checkpoint is written after epochs."""
        kept = named_part("descent", of_prior.device)
        if kept.done:
            return kept.result(Solution)
        right = of_prior + root._matmul(points)
        generator = kept.source("generator", noise.generator("cpu"), torch.device("cpu"))
        assert generator is not None
        scale = prior.diagonal.detach() if prior.diagonal is not None else right.new_ones(())
        scale = scale if scale.ndim == 0 else scale.unsqueeze(-1)
        problem = _Problem(self, precision, root, prior, scale, of_prior, right, points, generator)
        known = None if kept.state is None else _AfterEpoch(**kept.state)
        if known is not None:
            problem.passes, longest, halvings = known.passes, known.longest, known.halvings
        else:
            longest, halvings = problem.step() if self.step_size is None else float(self.step_size), 0
        step = longest / 2**halvings
        with at_work("stochastic gradient descent", None, None, precision):
            while halvings < MOST_HALVINGS:
                start = known or _AfterEpoch.before(right, x0, longest, halvings)
                try:
                    found = problem.descend(start, rtol, kept)
                except Diverged:
                    if self.step_size is not None:
                        raise Diverged(
                            f"the gradient grew to {GROWN:g} times the right-hand side with step_size={step:g}; try "
                            f"step_size={min(problem.step(), step / 2):.2g}, or None."
                        ) from None
                    known, halvings, step = None, halvings + 1, step / 2
                else:
                    return kept.finish(found)
        raise Diverged(f"no step from {longest:.2g} down to {step:.2g} converges; use method='cg'.")


@dataclass(eq=False)
class _AfterEpoch:
    """The state of a descent after an epoch."""

    longest: float
    """The first step size, before halvings."""
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
        """The first epoch."""
        z = torch.zeros_like(right) if x0 is None else x0.clone()
        return cls(longest, halvings, z, torch.zeros_like(z), z.clone(), [])


@dataclass(eq=False)
class _Problem:
    """The systems of one run, with the passes that it has taken."""

    options: StochasticDescent
    precision: Any
    root: CurvatureRoot
    prior: Prior
    scale: Tensor
    of_prior: Float[Tensor, "D k"]
    right: Float[Tensor, "D k"]
    points: Float[Tensor, "NR k"]
    generator: torch.Generator
    passes: float = 0.0

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
        """Return 1/λ_max of A⁻¹(N/n S_b S_bᵀ + A), λ_max being the largest over a few minibatches."""
        largest = 0.0
        for index, (chosen, piece) in enumerate(self.root.minibatches(self.options.batch_size, self.generator)):
            if index == POWER_BATCHES:
                break
            factor = self.root.lin.num_data / len(chosen)
            v = self.right[:, :1] / _length(self.right[:, :1])
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
        return norm(self.right - self.precision._matmul(z)) / norm(self.right)

    def descend(self, at: _AfterEpoch, rtol: float, kept: Checkpoint) -> Solution:
        """Run the epochs that are left, or as many as reach rtol."""
        options, step = self.options, at.longest / 2**at.halvings
        z, velocity, average, history, count = at.z, at.velocity, at.average, at.history, at.count
        size = _length(self.right / self.scale)
        batches = sum(math.ceil(n / options.batch_size) for n in self.root.lin.data.sizes)
        total = options.epochs * batches
        for epoch in range(at.epoch + 1, options.epochs + 1):
            for chosen, piece in self.root.minibatches(options.batch_size, self.generator):
                ahead = z + options.momentum * velocity
                gradient = self.gradient(ahead, chosen, piece) / self.scale
                lengths = _length(gradient) / size
                if not float(lengths.max()) < GROWN * max(1.0, math.sqrt(self.root.lin.num_data / len(chosen))):
                    raise Diverged
                gradient = gradient / (lengths / options.clip).clamp_min(1.0)
                rate = step * (1 - (1 - options.final) * count / total)
                velocity = options.momentum * velocity - rate * gradient
                z = z + velocity
                count += 1
                average += max(options.averaging, 1 / count) * (z - average)
            self.passes += 1
            as_step(self.right.shape[1], lambda: None)
            if epoch % CHECK_EVERY == 0 or epoch == options.epochs:
                residuals = self.residuals(average)
                history.append(residuals.double().cpu())
                worst = float(residuals.max())
                remark(lambda worst=worst: f"residual {worst:.1e}")  # type: ignore[misc]
                if worst <= rtol:
                    break
            reached = _AfterEpoch(at.longest, at.halvings, z, velocity, average, history, epoch, count, self.passes)
            kept.save(partial(vars, reached))
        return self._solution(average, history, rtol, count)

    def _solution(self, z: Tensor, history: list[Tensor], rtol: float, steps: int) -> Solution:
        final = history[-1]
        reasons = tuple(Reason.CONVERGED if r <= rtol else Reason.ITERATION_LIMIT for r in final.tolist())
        return Solution(
            z,
            reasons,
            final <= rtol,
            final,
            torch.full_like(final, math.nan),
            steps,
            round(self.passes * z.shape[1]),
            torch.stack(history),
        )


def _length(V: Float[Tensor, "D k"]) -> Float[Tensor, " k"]:
    """Return norms of columns, in their own dtype."""
    return norm(V).to(V.dtype)
