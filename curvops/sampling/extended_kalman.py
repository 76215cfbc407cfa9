"""The extended Kalman filter of the weights: each batch, linearised at the current mean, adds to the precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import StepSizes
from curvops.checks import check_choice, check_kind, refuse
from curvops.linalg import Dense, Diagonal, LowRank
from curvops.network import Empirical, Exact, own_randomness, score_and_diagonal
from curvops.operators import GGN, EmpiricalFisher, Linearization
from curvops.operators.curvatures.ggn import root_of
from curvops.posterior.gaussians.gaussian_posterior import GaussianPosterior, compress_precision
from curvops.sampling.log_density import LogPosterior, order_at_mean
from curvops.sampling.state import Info, NoiseSource, State, identity
from curvops.sampling.transition import Transition, checked_rank, common_arguments

FORMS = ("diagonal", "dense", "low_rank_diagonal")
FISHERS = ("ggn", "empirical")
PrecisionTensors = dict[str, Tensor]
Moved = tuple[PrecisionTensors, Tensor]
"""The precision after a batch, and P⁻¹ times the gradient."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class KalmanState(State):
    """The state of a Kalman filter: the mean as `theta`, and the tensors of its precision.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.ekf(density).init(density.params, torch.Generator().manual_seed(0))
        >>> list(state.precision)
        ['diagonal']
    """

    precision: PrecisionTensors


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ExtendedKalmanFilter(Transition):
    """An extended Kalman filter of the weights: P ← P + ε Σ JᵀHJ, θ ← θ − ε P⁻¹ ∇(−log-likelihood), batch by batch.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> method = co.sampling.ekf(density)
        >>> state, info = method.update(method.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> state.theta.shape
        torch.Size([17])
    """

    form: str
    fisher: str
    transition_noise: float
    rank: int
    state_type: ClassVar[type[State]] = KalmanState
    alone: ClassVar[str] = "a Kalman filter is deterministic: use ekf(...) itself, not chains of it."

    def step_length(self, step: int) -> tuple[str, float]:
        """Return "lr" and its value, the fraction by which a batch counts."""
        return "lr", self.step_size(step)

    @property
    def _target(self) -> LogPosterior:
        return cast(LogPosterior, self.log_posterior)

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        A, theta = self._target.prior.precision, state.theta
        if self.form == "dense":
            matrix = torch.diag(A.detach().expand_as(theta)) if isinstance(A, Tensor) else A.to_dense()
            return {"precision": {"matrix": matrix.clone()}}
        if not isinstance(A, Tensor):
            raise ValueError("this form needs a prior precision that is a number or a vector: use form='dense'.")
        held = {"diagonal": A.detach().expand_as(theta).clone()}
        if self.form == "low_rank_diagonal":
            held["root"] = theta.new_zeros(len(theta), 0)
        return {"precision": held}

    def _step(self, state: Any, batch: Any, noise: NoiseSource) -> Info:
        rate, _ = self._now(state)
        with own_randomness(state.theta.device):  # drawn once for all passes of the step
            n, score, slope, curvature = self._terms(state.theta, batch)
        if not all(map(math.isfinite, torch.stack([score.to(slope), *slope.aminmax()]).tolist())):
            raise self._not_finite(score, int(state.step))
        precision, move = getattr(self, f"_{self.form}")(state.precision, curvature, rate, slope, noise)
        state.precision.clear()
        state.precision.update(precision)
        state.theta.sub_(move, alpha=rate)
        return Info((score / n).to(state.theta))

    def _terms(self, theta: Float[Tensor, " d"], batch: Any) -> tuple[int, Tensor, Tensor, Any]:
        """Return the number of points, their log-likelihood, its negative gradient, and the source of the curvature."""
        target, engines = self._target, None
        if self.form == "diagonal":
            engines, likelihood, points = target.record(theta, batch)
            fisher = Empirical(likelihood) if self.fisher == "empirical" else Exact(likelihood)
            score_terms = score_and_diagonal(engines, likelihood, points, fisher)
            if score_terms is not None:
                return points.num_points, *score_terms
        lin = target.linearize(theta, batch, engines)
        curvature = lin.curvature_diagonal(fisher) if self.form == "diagonal" else lin
        return lin.num_data, lin.log_likelihood(), lin.gradient(), curvature

    # For each form, return the precision after the transition and this batch, and P⁻¹ times the gradient.

    def _diagonal(
        self, held: PrecisionTensors, entries: Tensor, rate: float, slope: Tensor, noise: NoiseSource
    ) -> Moved:
        before = held["diagonal"]
        if self.transition_noise:
            before = before / (1 + self.transition_noise * before)
        diagonal = before.add(entries, alpha=rate)
        return {"diagonal": diagonal}, slope / diagonal

    def _dense(
        self, held: PrecisionTensors, lin: Linearization, rate: float, slope: Tensor, noise: NoiseSource
    ) -> Moved:
        before = held["matrix"]
        if self.transition_noise:  # (P⁻¹ + q I)⁻¹ = (I + q P)⁻¹ P
            widened = torch.linalg.solve(self.transition_noise * before + identity(len(before), before), before)
            before = (widened + widened.mT) / 2
        matrix = before + rate * self._curvature(lin).to_dense()
        factor = torch.linalg.cholesky(matrix)
        return {"matrix": matrix}, torch.cholesky_solve(slope.unsqueeze(1), factor).squeeze(1)

    def _low_rank_diagonal(
        self, held: PrecisionTensors, lin: Linearization, rate: float, slope: Tensor, noise: NoiseSource
    ) -> Moved:
        diagonal, W = held["diagonal"], held["root"]
        if self.transition_noise:
            # (P⁻¹ + q I)⁻¹ of P = D + W Wᵀ is D/E + E⁻¹W (I + q WᵀE⁻¹W)⁻¹ WᵀE⁻¹ for E = I + q D: of the same form.
            q, E = self.transition_noise, 1 + self.transition_noise * diagonal
            scaled = W / E.unsqueeze(1)
            inner = q * W.mT @ scaled
            factor = torch.linalg.cholesky(inner + identity(len(inner), inner))
            diagonal, W = diagonal / E, torch.linalg.solve_triangular(factor, scaled.mT, upper=False).mT
        root = root_of(self._curvature(lin))
        assert root is not None
        W = torch.cat([W, math.sqrt(rate) * root.to_dense()], 1)
        precision = _low_rank_plus(W, diagonal)
        move = precision.solve(slope.unsqueeze(1)).squeeze(1)  # uses the whole batch: only the stored root is truncated
        if W.shape[1] <= self.rank:
            return {"diagonal": diagonal, "root": W}, move
        seed = int(noise.per_chain(lambda g: torch.randint(2**62, (), generator=g, device=g.device)))
        generator = torch.Generator(W.device).manual_seed(seed)
        rank = min(self.rank, len(diagonal))
        compressed: Any = compress_precision("low_rank_diagonal", precision, rank, generator)[0]
        return {"diagonal": compressed.shift, "root": compressed.base.root}, move

    def _curvature(self, lin: Linearization) -> GGN | EmpiricalFisher:
        return EmpiricalFisher(lin) if self.fisher == "empirical" else GGN(lin)

    def posterior(self, state: KalmanState, lin: Linearization) -> GaussianPosterior:
        """Return N(mean, P⁻¹) as a posterior, with the same methods as a Laplace posterior.

        Args:
            state: the result of `init` or `update` of this filter.
            lin: the network linearised at the mean: `model.load_state_dict(state.params, strict=False)` (for a
                subnetwork, of `lin.unflatten_weights(state.theta)`), then `co.linearize(model, data, likelihood)`.

        Returns:
            The posterior.

        Raises:
            TypeError, ValueError: the state is of another kind, or the linearisation has other parameters or weights.
        """
        order, held = order_at_mean(lin, state), state.precision
        if self.form == "diagonal":
            entries = held["diagonal"][order]
            return GaussianPosterior.of(lin, Diagonal(1 / entries), Diagonal(entries))
        if self.form == "dense":
            matrix = held["matrix"][order][:, order]
            return GaussianPosterior.of(lin, precision=Dense(matrix, psd=True).add_diagonal(0.0))
        return GaussianPosterior.of(lin, precision=_low_rank_plus(held["root"][order], held["diagonal"][order]))


def ekf(
    log_posterior: LogPosterior,
    form: str = "diagonal",
    *,
    fisher: str = "ggn",
    transition_noise: float = 0.0,
    lr: StepSizes = 1.0,
    rank: int | None = None,
) -> ExtendedKalmanFilter:
    """Build the extended Kalman filter of the weights: an online natural gradient (Ollivier 2018).

    For each batch, linearised at the current mean θ with the output Fisher H (the observation noise's inverse):

        P ← (P⁻¹ + q I)⁻¹ + ε Σ_n J_nᵀH_nJ_n,    θ ← θ + ε P⁻¹ Σ_n ∇ log p(y_n | x_n, θ)

    Sums run over the batch. With ε = 1 and one pass this is Bayes' rule, which for a linear model under a Gaussian
    likelihood is exact with form="dense", in any order of the batches (recursive least squares).

    Args:
        log_posterior: the result of `co.sampling.log_posterior`: the network, its likelihood and the prior precision,
            with which the first state starts. The prior mean is the params passed to `init`: for Bayes' rule, pass the
            prior's mean.
        form: the form of P: "diagonal"; "dense"; or "low_rank_diagonal", W Wᵀ plus a diagonal, which keeps the exact
            diagonal of what exceeds its rank (Chang et al. 2023), as `post.update(form="low_rank_diagonal")` does.
        fisher: "ggn", or "empirical" for Σ g_n g_nᵀ of the gradients instead of the curvature (Duffield et al. 2024).
            The latter does not estimate the curvature, and linear models then do not reach their posterior.
        transition_noise: q ≥ 0, the variance of the expected change of each weight between two batches.
        lr: ε > 0, a number or a schedule; the fraction by which a batch counts.
        rank: the rank of W, by default 10.

    Returns:
        An `ExtendedKalmanFilter` with `init(params)`, `update(state, batch)` and `posterior(state, lin)`, which
        `co.sampling.run` accepts.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range, or the form cannot represent the prior.

    Cost of a step, after a first one that also checks the derivatives: for the diagonal form a forward pass over the
    batch and C + 1 backward passes (empirical: one); for the other forms a gradient and the N·C rows of J in the batch;
    for the dense form also D³/3 operations.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> chain = co.sampling.run(co.sampling.ekf(density), density.params, [(x, y)], steps=1)
        >>> chain.state.theta.shape
        torch.Size([17])
    """
    check_choice("form", form, FORMS)
    check_choice("fisher", fisher, FISHERS)
    check_kind("log_posterior", log_posterior, LogPosterior, "co.sampling.log_posterior(model, likelihood, ...)")
    shared = log_posterior.ranks is not None
    refuse(shared, "ekf is not for a log posterior over a process group: filter all data in each process.")
    arguments = common_arguments(log_posterior, lr, 1.0, None, None, transition_noise=transition_noise)
    return ExtendedKalmanFilter(**arguments, form=form, fisher=fisher, rank=checked_rank(rank, form))


def _low_rank_plus(root: Float[Tensor, "d r"], diagonal: Float[Tensor, " d"]) -> Any:
    """Return W Wᵀ plus a diagonal, for a root W."""
    return LowRank(root, root.new_ones(root.shape[1])).add_diagonal(diagonal)
