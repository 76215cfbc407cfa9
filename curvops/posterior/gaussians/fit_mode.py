"""Training of a network to a mode of its log posterior, in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.ambient import Progress, Steps, progress_bar
from curvops.argument_types import Collate, Data, LikelihoodChoice, Network, ParameterChoice, PriorMean, PriorPrecision
from curvops.checks import check_options
from curvops.errors import ConvergenceError, ModeWarning, warn
from curvops.linalg import Reason
from curvops.network import tensors_of
from curvops.operators import GGN, Linearization, linearize
from curvops.posterior.gaussians.laplace import Laplace, make_laplace
from curvops.posterior.gaussians.updating import checked_posterior
from curvops.posterior.linear_mode import TOLERATED, LinearMode, in_words, nats_below_mode, nats_of_prior
from curvops.posterior.terms import CurvatureCache, PrecisionTerms, Prior
from curvops.ranks.process_group import holds_shards
from curvops.summary import Summarised

CHUNK = 50
"""The number of L-BFGS steps between looks at the gradient; the model has the weights reached after each."""
REMEDIES = {
    Reason.ITERATION_LIMIT: "maxiter was reached: call fit_mode again, which goes on from here, or raise maxiter.",
    Reason.STAGNATION: (
        "the loss no longer falls although its gradient is not zero, as at the kinks of a ReLU, or for want of digits "
        "(model.double() has more; a smooth activation such as Tanh or SiLU has no kinks)."
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class ModeFit(Summarised):
    """The course of `co.fit_mode`, and the reason why it ended.

    ``remaining`` bounds what the log posterior would still gain up to a mode, in nats: ½ gᵀP⁻¹g, for the gradient g at
    the final weights and P = GGN + A. The log evidence at these weights is too low by this much at most. (For a
    distribution without an exact GGN, such as Student's t, P has the Fisher of 16 targets drawn for each point.)
    ``losses`` are minus the log posterior without the prior's constant, in nats, at the start and after every 50 steps;
    ``gradients`` counts gradients over all data (for a last layer, products with its curvature).

    Examples:
        >>> fit = co.fit_mode(nn.Linear(2, 2), (x, y), "classification", prior_precision=1.0)
        >>> fit.converged, fit.remaining < 0.01
        (True, True)
    """

    reason: Reason
    remaining: float
    gradients: int
    losses: Float[Tensor, " steps"]

    @property
    def converged(self) -> bool:
        """Whether the weights are a mode to the tolerance."""
        return self.reason is Reason.CONVERGED


@torch.inference_mode(False)
@torch.no_grad()
def fit_mode(
    model: Network,
    data: Data,
    likelihood: LikelihoodChoice,
    prior_precision: PriorPrecision,
    prior_mean: PriorMean = 0.0,
    *,
    parameters: ParameterChoice | None = None,
    weights: bool = False,
    atol: float = 0.01,
    maxiter: int = 3000,
    memory_budget: int | None = None,
    progress: Progress = None,
    collate: Collate | None = None,
) -> ModeFit:
    """Train a network, in place, to a mode of its log posterior, the weights around which `co.laplace` expands.

    The loss is −Σ log p(y | x, θ) + ½ (θ − m)ᵀA(θ − m), over all data. L-BFGS with a line search minimises it from the
    present weights, best those of ordinary training. For the last layer alone, whose loss is convex, Newton's method
    reaches the mode with one pass through the rest of the network.

        >>> import torch, curvops as co
        >>> x = torch.linspace(-2, 2, 40).unsqueeze(1)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> fit = co.fit_mode(model, (x, x.sin()), co.likelihoods.Gaussian(0.1), prior_precision=1.0)
        >>> fit.reason.name
        'CONVERGED'

    Args:
        model: as in `co.linearize`, in evaluation mode if it has dropout or batch normalisation. Its selected
            parameters are changed in place, after every 50 steps. So an interruption (Ctrl-C) leaves them where the
            last 50 steps ended, and unchanged before that, or if a last layer's mode is sought by Newton's method.
        data: as in `co.linearize`.
        likelihood: as in `co.linearize`.
        prior_precision: A, as in `co.laplace`: a number, a vector, a mapping by glob, an operator or a posterior.
        prior_mean: m, as in `co.laplace`.
        parameters: as in `co.linearize`; all others keep their values. "last_layer" always reaches its mode.
        weights: as in `co.linearize`.
        atol: the nats that the log posterior may remain below that of the mode.
        maxiter: the maximum number of L-BFGS steps, at little more than a gradient each.
        memory_budget: bytes, as in `co.linearize`.
        progress: as in `co.linearize`; it counts gradients.
        collate: as in `co.linearize`.

    Returns:
        A `ModeFit`, whose `reason` is CONVERGED, ITERATION_LIMIT, or STAGNATION (kinks, or rounding).

    Raises:
        TypeError, ValueError: as `co.linearize` and `co.laplace`; the loss is not finite at the given weights; the
            model is sharded; or a number is out of range.

    Warns with `ModeWarning` if it ends more than a nat from a mode. A network with kinks (ReLU) may not come closer.

    Cost: a few hundred gradients over all data, thousands for stiff problems (a small noise), and a solve at the end.

    Source: Nocedal & Wright 2006, algorithms 3.5 and 7.5, in `torch.optim.LBFGS`.
    """
    check_options(atol=atol, maxiter=maxiter, progress=progress)
    if holds_shards(model):
        raise ValueError("fit_mode trains on one process, and this model is sharded by fully_shard: pass a whole copy.")
    lin = linearize(
        model, data, likelihood, parameters, memory_budget, weights=weights, progress=False, collate=collate
    )
    post = checked_posterior(make_laplace(lin, GGN, prior_precision, prior_mean), check_mode=False)
    objective, tensors = _Objective(lin, post.prior), tensors_of(model)
    loss, _ = objective(lin.theta)
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at the given weights: start from trained weights, or scale the inputs.")

    @torch.no_grad()
    def keep(theta: Tensor) -> None:
        for name, value in lin.model.unflatten(theta).items():
            tensors[name].copy_(value)

    with progress_bar("fit_mode", None, progress, " gradients") as bar:
        of_head = lin.plan.is_last_layer or (isinstance(parameters, str) and parameters == "last_layer")
        mode = _mode_of_head(post, atol) if of_head else None
        if mode is None:
            theta, reason, losses = _minimise(objective, loss, atol, maxiter, keep, bar)
        else:
            theta, reason, losses = mode.theta, mode.reason, [loss, objective(mode.theta)[0]]
            keep(theta)
            bar.advance(mode.matvecs)
    remaining = _nats_at(theta, post, atol)
    if reason is not Reason.ITERATION_LIMIT or remaining <= atol:
        reason = Reason.CONVERGED if remaining <= atol else Reason.STAGNATION
    if not remaining <= TOLERATED:
        warn(
            f"fit_mode ended about {in_words(remaining)} nats from a mode of the posterior: {REMEDIES[reason]} "
            'Evidences there are as much too low. Two ways are always open: parameters="last_layer", which is convex, '
            "in fit_mode and in co.linearize; and the mode of the linearised network, post.linear_mode() and "
            'mode="linear" in co.evidence.',
            ModeWarning,
        )
    return ModeFit(reason, remaining, bar.done, torch.tensor(losses, dtype=torch.float64))


def _nats_at(theta: Float[Tensor, " D"], post: Laplace, atol: float) -> float:
    """Return the nats by which the log posterior at these weights is below that of a mode."""
    there = post.lin.with_weights(theta)

    def nats(curvature: GGN) -> float:
        return nats_below_mode(PrecisionTerms(CurvatureCache(there, curvature), post.prior), atol)[1]

    try:
        return nats(GGN(there))
    except ValueError:  # as for Student's t: the Hessian of −log p depends on the target, and is not the output Fisher
        return nats(GGN(there, 16, torch.Generator(theta.device).manual_seed(0)))


def _mode_of_head(post: Laplace, atol: float) -> LinearMode | None:
    """Return the mode of a last layer, in which the network is linear; None if rounding stops Newton's method.

    Also None without an exact Fisher, or if it proves to be no mode of the network, whose outputs need not be linear in
    a weight that is tied or normalised.
    """
    try:
        mode = post.linear_mode()
    except (ConvergenceError, ValueError):
        return None
    return mode if post.lin.plan.is_last_layer or _nats_at(mode.theta, post, atol) <= atol else None


class _Objective:
    """The function −Σ log p(y | x, θ) + ½ (θ − m)ᵀA(θ − m) with its gradient."""

    def __init__(self, lin: Linearization, prior: Prior) -> None:
        self.lin, self.prior = lin, prior

    def __call__(self, theta: Float[Tensor, " D"]) -> tuple[float, Float[Tensor, " D"]]:
        lin, leaf = self.lin, theta.detach().requires_grad_()
        loss, gradient = 0.5 * float(self.prior.quadratic(theta.detach())), self.prior.gradient(theta.detach())
        for batch in lin.data:
            with torch.enable_grad():
                outputs = lin.model(lin.model.unflatten(leaf), batch.inputs)
                # In double precision, since the line search compares sums that differ by little.
                fit = lin.likelihood.log_prob(outputs, batch.targets, batch.weights).sum(dtype=torch.float64)
                gradient = gradient - torch.autograd.grad(fit, leaf)[0]
            loss -= float(fit.detach())
        return loss, gradient


def _minimise(
    objective: _Objective, loss: float, atol: float, most: int, keep: Callable[[Tensor], None], bar: Steps
) -> tuple[Tensor, Reason, list[float]]:
    """Minimise by L-BFGS until the nats to the mode are bounded by atol or the loss stands still.

    The loss stands still if a chunk of steps gains less than half of atol. At most 100 earlier steps are kept, two
    vectors each, within half of the memory budget.
    """
    theta = objective.lin.theta.detach().clone().requires_grad_()
    pairs = max(5, min(100, objective.lin.memory_budget // (4 * theta.nbytes)))

    def start(steps: int) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            [theta],
            max_iter=steps,
            history_size=pairs,
            tolerance_grad=0.0,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

    def evaluate() -> float:
        value, theta.grad = objective(theta)
        bar.advance(1, f"loss {value:.6g}")
        return value

    optimizer, fresh, losses, done = start(min(CHUNK, most)), True, [loss], 0
    while done < most:
        before = theta.detach().clone()
        optimizer.step(evaluate)
        done += CHUNK
        gained = losses[-1] - (loss := evaluate())
        if gained > 0:
            losses.append(loss)
            keep(theta.detach())
        else:  # the line search met rounding, or an overflow
            theta.data.copy_(before)
        assert theta.grad is not None
        if gained >= 0 and nats_of_prior(objective.prior, theta.grad) <= atol:
            return theta.detach(), Reason.CONVERGED, losses
        stands = not gained > 0.5 * atol
        if stands and fresh:
            return theta.detach(), Reason.STAGNATION, losses
        # Steepest descent may go on where the directions of earlier steps do not.
        optimizer, fresh = (start(CHUNK), True) if stands else (optimizer, False)
    return theta.detach(), Reason.ITERATION_LIMIT, losses
