"""Variational inference: fitting the member of a family of normal distributions that is nearest to the posterior.

A member of a family is a zero-mean normal distribution of the vector of all weights, described by a few tensors; the
mean is kept separately. The table `FAMILIES` names them: a new family is one class and one row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.argument_types import Density, GivenBatch, OptimizerChoice, StepSizes
from curvops.checks import check_choice, checked_whole
from curvops.errors import UnsettledWarning, warn
from curvops.linalg import Dense, Diagonal, DirectSum, Kronecker, LowRank, Operator
from curvops.operators import Linearization
from curvops.posterior.gaussians.gaussian_posterior import GaussianPosterior
from curvops.sampling.log_density import order_at_mean
from curvops.sampling.state import Info, NoiseSource, State, Structure, identity
from curvops.sampling.torch_optimizer import Optimizer, OptimizerState, descent
from curvops.sampling.transition import checked_rank, common_arguments

Tensors = Mapping[str, Tensor]
DrawnNumbers = Float[Tensor, "k m"]
"""The standard normal numbers of k draws, or derivatives in them."""
LOG_2PI = math.log(2 * math.pi)


class GaussianFamily(ABC):
    """A family of covariances Σ on vectors (d,) with a given structure."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in vars(self).items())})"

    @abstractmethod
    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        """Return the tensors of N(0, scale² I), or of a nearby member of the family."""

    def noise(self, structure: Structure, k: int, like: Tensor, source: NoiseSource) -> DrawnNumbers:
        """Draw the standard normal numbers for k draws, by default one for each weight."""
        return source.normal(like.new_empty(k * len(like))).view(k, -1)

    @abstractmethod
    def transform(self, tensors: Tensors, structure: Structure, noise: DrawnNumbers) -> Float[Tensor, "k d"]:
        """Transform standard normal numbers to draws z of N(0, Σ), differentiably in the tensors."""

    @abstractmethod
    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        """Return log N(z; 0, Σ) in nats."""

    @abstractmethod
    def misfits(self, structure: Structure, residual: DrawnNumbers, noise: DrawnNumbers) -> dict[str, Tensor]:
        """Estimate the relative error of the precision, restricted to the parts that the family can make zero.

        With the residual u = Tᵀ∇ log(q/p) of draws z = T ε, the mean of u εᵀ is TᵀHT − I for the mean Hessian H of
        −log p (Stein 1981), which is the relative error of q's precision. The squares of an error add up over all
        dimensions but the first.
        """

    @abstractmethod
    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        """Return Σ, and Σ⁻¹ if it has a separate form, with entry i at position order[i] of the vector."""


class DiagonalFamily(GaussianFamily):
    """The family Σ = diag(e^{2 s})."""

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        return {"log_scale": torch.full_like(like, math.log(scale))}

    def transform(self, tensors: Tensors, structure: Structure, noise: DrawnNumbers) -> Float[Tensor, "k d"]:
        return noise * tensors["log_scale"].exp()

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        s = tensors["log_scale"]
        return _standard(z / s.exp(), s.sum())

    def misfits(self, structure: Structure, residual: DrawnNumbers, noise: DrawnNumbers) -> dict[str, Tensor]:
        return {"log_scale": (residual * noise).mean(0)}

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        variances = (2 * tensors["log_scale"][order]).exp()
        return Diagonal(variances), Diagonal(1 / variances)


class LowRankDiagonalFamily(GaussianFamily):
    """The family Σ = U Uᵀ + diag(e^{2 s}), U (d, r) (Ong, Nott & Smith 2018)."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        small = 0.1 * scale / self.rank**0.5  # at U = 0 the mean of its gradient is zero
        vectors = small * source.normal(like.new_empty(len(like) * self.rank)).view(-1, self.rank)
        return {"log_scale": torch.full_like(like, math.log(scale)), "vectors": vectors}

    def noise(self, structure: Structure, k: int, like: Tensor, source: NoiseSource) -> DrawnNumbers:
        return source.normal(like.new_empty(k * (len(like) + self.rank))).view(k, -1)

    def transform(self, tensors: Tensors, structure: Structure, noise: DrawnNumbers) -> Float[Tensor, "k d"]:
        s, U = tensors["log_scale"], tensors["vectors"]
        return noise[:, : len(s)] * s.exp() + noise[:, len(s) :] @ U.mT

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        s, U = tensors["log_scale"], tensors["vectors"]
        W, white = U / s.exp().unsqueeze(1), z / s.exp()
        inner, _ = torch.linalg.cholesky_ex(identity(self.rank, W) + W.mT @ W)  # its eigenvalues are at least 1
        projected = torch.linalg.solve_triangular(inner, (white @ W).mT, upper=False)
        return _standard(white, s.sum() + inner.diagonal().log().sum()) + 0.5 * projected.square().sum(0)

    def misfits(self, structure: Structure, residual: DrawnNumbers, noise: DrawnNumbers) -> dict[str, Tensor]:
        d = noise.shape[1] - self.rank
        u = residual[:, :d]
        return {"log_scale": (u * noise[:, :d]).mean(0), "vectors": u.mT @ noise[:, d:] / len(noise)}

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        U = tensors["vectors"][order]
        return LowRank(U, U.new_ones(self.rank)).add_diagonal((2 * tensors["log_scale"][order]).exp()), None


class KroneckerFamily(GaussianFamily):
    """The family Σ = (L Lᵀ) ⊗ (R Rᵀ) for each tensor, on its first dimension and the others; L Lᵀ for a vector.

    It is the matrix normal distribution of Louizos & Welling 2016. Tensors are independent of each other.
    """

    def factors(self, structure: Structure) -> Iterator[tuple[list[str], int, int, slice]]:
        """Yield the names of each tensor's factors, its shape (p, q) as a matrix, and its part of the vector.

        A vector (q = 1) has no right factor, which would be 1 × 1, a second scale in addition to the left one.
        """
        start = 0
        for i, shape in enumerate(structure.shapes):
            p, q = shape[0] if shape else 1, shape[1:].numel()
            yield [f"left.{i}", *([f"right.{i}"] if q > 1 else [])], p, q, slice(start, start + p * q)
            start += p * q

    def start(self, structure: Structure, scale: float, like: Tensor, source: NoiseSource) -> dict[str, Tensor]:
        tensors = {}
        for names, *sizes, _ in self.factors(structure):
            for name, n in zip(names, sizes):
                tensors[name] = torch.diag(like.new_full((n,), math.log(scale) / len(names)))
        return tensors

    def transform(self, tensors: Tensors, structure: Structure, noise: DrawnNumbers) -> Float[Tensor, "k d"]:
        return self._scaled(tensors, structure, noise, lambda factor, block: triangle(factor) @ block)

    def log_density(self, tensors: Tensors, structure: Structure, z: Float[Tensor, "k d"]) -> Float[Tensor, " k"]:
        def whiten(factor: Tensor, block: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(triangle(factor), block, upper=False)

        white = self._scaled(tensors, structure, z, whiten)
        log_root = z.new_zeros(())
        for names, p, q, _ in self.factors(structure):
            for name, copies in zip(names, (q, p)):
                log_root = log_root + copies * tensors[name].diagonal().sum()
        return _standard(white, log_root)

    def misfits(self, structure: Structure, residual: DrawnNumbers, noise: DrawnNumbers) -> dict[str, Tensor]:
        errors = {}
        for (left, *right), p, q, entries in self.factors(structure):
            u, Z = (rows[:, entries].unflatten(1, (p, q)) for rows in (residual, noise))
            errors[left] = torch.einsum("kpq,krq->pr", u, Z) / (len(u) * q)
            errors.update((name, torch.einsum("kpq,kpr->qr", u, Z) / (len(u) * p)) for name in right)
        return errors

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)  # the new position of each entry of the vector
        blocks, inverses, positions = [], [], []
        for names, *_, entries in self.factors(structure):
            left, *others = (triangle(tensors[name]).unsqueeze(0) for name in names)
            right = others[0] if others else left.new_ones(1, 1, 1)
            blocks.append(Kronecker(left @ left.mT, right @ right.mT))
            inverses.append(Kronecker(torch.cholesky_inverse(left), torch.cholesky_inverse(right)))
            positions.append(place[entries])
        return DirectSum(*blocks, positions=positions), DirectSum(*inverses, positions=positions)

    def _scaled(
        self, tensors: Tensors, structure: Structure, rows: Tensor, apply: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "k d"]:
        """Apply L from the left and R from the right, tensor by tensor."""
        blocks = []
        for (left, *right), p, q, entries in self.factors(structure):
            block = apply(tensors[left], rows[:, entries].unflatten(1, (p, q)))
            for name in right:
                block = apply(tensors[name], block.mT).mT
            blocks.append(block.flatten(1))
        return torch.cat(blocks, 1)


class DenseFamily(KroneckerFamily):
    """The family Σ = L Lᵀ, L lower triangular with a positive diagonal e^s: a single factor, of the whole vector."""

    def factors(self, structure: Structure) -> Iterator[tuple[list[str], int, int, slice]]:
        yield ["factor"], structure.size, 1, slice(None)

    def covariance(self, tensors: Tensors, structure: Structure, order: Tensor) -> tuple[Operator, Operator | None]:
        rows = triangle(tensors["factor"])[order]
        return Dense(rows @ rows.mT, psd=True), None


FAMILIES: dict[str, type[GaussianFamily]] = {
    "diagonal": DiagonalFamily,
    "dense": DenseFamily,
    "low_rank_diagonal": LowRankDiagonalFamily,
    "kronecker": KroneckerFamily,
}


def family_of(name: str, rank: object) -> GaussianFamily:
    """Return the family of this name, of this rank if it has one."""
    kind, checked = FAMILIES[name], checked_rank(rank, name)
    return LowRankDiagonalFamily(checked) if kind is LowRankDiagonalFamily else kind()


def triangle(factor: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return the lower triangle with the exponential of its diagonal."""
    return factor.tril(-1) + torch.diag(factor.diagonal().exp())


def _standard(white: Float[Tensor, "k d"], log_root: Tensor) -> Float[Tensor, " k"]:
    """Return the log density of z = Σ^½ w in nats, from w and log det Σ^½."""
    return -0.5 * (white.square() + LOG_2PI).sum(1) - log_root


class FitEnding(Enum):
    """The outcome of variational inference: whether it reached its optimum; the value is the remedy in plain words."""

    SETTLED = (
        "Settled: the gradient, averaged over the last steps, leaves the mean less than 0.1 standard deviations and "
        "the precisions less than 10 % from the family's optimum. Nothing needs to be done."
    )
    DRIFTING = (
        "The steps ran out before the fit stopped moving: the gradient, averaged over the last steps, exceeds its "
        "noise. Continue from this state, with a larger lr if the gradient keeps its sign."
    )
    SCATTERED = (
        "The gradient, averaged over the last steps, is zero within its noise, but the single steps scatter around "
        "the optimum by more than a tenth of a standard deviation. Continue from this state with an lr that falls "
        "to zero, lr=co.sampling.Cosine(lr, steps)."
    )
    NOISY = (
        "The gradient's noise hides whether the fit has stopped moving. More steps, more draws= or larger batches help."
    )


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class VariationalState(OptimizerState):
    """The state of a variational fit: the mean as `theta`, and the tensors of the covariance as `spread`.

    average and square: averages over steps of the misfits of mean and covariance (zero at the optimum) and of their
    squares; centre: averages of the tensors themselves. All averages give the last steps the largest weight.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> state = co.sampling.vi(density).init(density.params, torch.Generator().manual_seed(0))
        >>> state.theta.shape, list(state.spread)
        (torch.Size([17]), ['log_scale'])
    """

    spread: dict[str, Tensor]
    average: dict[str, Tensor] = field(repr=False)
    square: dict[str, Tensor] = field(repr=False)
    centre: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class VariationalInfo(Info):
    """Means over a step's draws of log_posterior and of ``nelbo``, 𝒯 log q − log_posterior, in nats per point.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> method = co.sampling.vi(density)
        >>> state, info = method.update(method.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> bool(info.nelbo.isfinite())
        True
    """

    nelbo: Float[Tensor, ""] | None = None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Variational(Optimizer):
    """Variational inference as an optimiser of the mean and the covariance of a normal distribution.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> method = co.sampling.vi(density, lr=1e-2)
        >>> state, info = method.update(method.init(density.params, torch.Generator().manual_seed(0)), (x, y))
        >>> info.nelbo.shape
        torch.Size([])
    """

    family: GaussianFamily
    draws: int
    stick_the_landing: bool
    initial_scale: float
    state_type: ClassVar[type[State]] = VariationalState
    cold: ClassVar[str] = "temperature must be positive, got 0: the optimum is then a point; use co.sampling.optimizer."
    alone: ClassVar[str] = "variational inference makes one fit, not chains: pass draws= for several draws per step."

    def _initial_tensors(self, state: State, noise: NoiseSource) -> dict[str, Any]:
        spread = self.family.start(state.structure, self.initial_scale, state.theta, noise)
        tensors: dict[str, Any] = {"spread": spread, "average": {}, "square": {}, "centre": {}}
        return super()._initial_tensors(state, noise) | tensors

    def _step(self, state: Any, batch: Any, noise: NoiseSource) -> VariationalInfo:
        numbers = self.family.noise(state.structure, self.draws, state.theta, noise)
        info, of_mean, of_spread, residual = self.gradients(state, batch, numbers)
        if not bool(info.log_posterior.isfinite()):
            raise self._not_finite(info.log_posterior, int(state.step))
        tensors = [*state.structure.parts(state.theta), *state.spread.values()]
        slopes = [*state.structure.parts(of_mean), *of_spread.values()]
        self._descend(tensors, slopes, state.slots.setdefault("0", {}), int(state.step))
        misfits = {"mean": residual.mean(0), **self.family.misfits(state.structure, residual, numbers)}
        share = 4 / (int(state.step) + 4)  # averages weight step t by t³, so that early steps lose their influence
        for name, misfit in misfits.items():
            state.average.setdefault(name, misfit.clone()).lerp_(misfit, share)
            state.square.setdefault(name, misfit.square()).lerp_(misfit.square(), share)
        for name, tensor in {"theta": state.theta, **state.spread}.items():
            state.centre.setdefault(name, tensor.detach().clone()).lerp_(tensor.detach(), share)
        return info

    def ending(self, state: VariationalState) -> FitEnding:
        """Decide whether the fit is at its optimum, as far as the noise of its gradients allows.

        At the optimum of the family the expected gradient is zero. In units of the fit itself (standard deviations for
        the mean, relative errors for the precisions) it measures the distance from the optimum. It is averaged over the
        steps, with the largest weight on the last ones, and compared with its standard error, as a root mean square
        over the weights and entry by entry. Since this holds for the average over these steps, the state must also be
        near that average.

        Args:
            state: the result of `update` of this method.

        Returns:
            The ending, whose value says what to do.
        """
        settled = 0.1  # the largest error of the mean in standard deviations, and of the precision as a relative error
        steps = int(state.step) * 7 / 16  # the steps of an average with equal weights that has the same variance
        if steps <= 1:
            return FitEnding.NOISY
        hidden = False
        for name, average in state.average.items():
            variance = (state.square[name] - average.square()).clamp_min(0) / (steps - 1)
            off = float((average.square() - variance).sum()) / len(average)
            error = 2 * (2 * float(variance.square().sum())) ** 0.5 / len(average)
            alone = float((average.abs() - 5 * variance.sqrt()).max())
            if not (off - error <= settled**2 and alone <= settled):
                return FitEnding.DRIFTING
            hidden |= max(off, 0.0) + error > settled**2
        if hidden:
            return FitEnding.NOISY
        order = torch.arange(len(state.theta), device=state.theta.device)
        spreads = (state.spread, {name: state.centre[name] for name in state.spread})
        now, mean = (self.family.covariance(tensors, state.structure, order)[0].diagonal() for tensors in spreads)
        from_centre = (state.theta - state.centre["theta"]).square() / mean, (now / mean).log().square() / 4
        near = all(float(tensors.mean()) <= settled**2 for tensors in from_centre)
        return FitEnding.SETTLED if near else FitEnding.SCATTERED

    def gradients(
        self, state: VariationalState, batch: GivenBatch, numbers: DrawnNumbers
    ) -> tuple[VariationalInfo, Float[Tensor, " d"], dict[str, Tensor], DrawnNumbers]:
        """Return the NELBO for these standard normal numbers, its gradients in mean and spread, and residuals.

        The residual of a draw is the gradient of log(q/p) in its standard normal numbers.
        """
        _, temperature = self._now(state)
        family, structure = self.family, state.structure
        spread = {name: tensor.detach().clone().requires_grad_() for name, tensor in state.spread.items()}
        mean = state.theta.detach().clone().requires_grad_()
        numbers = numbers.clone().requires_grad_()
        with torch.enable_grad():
            theta = mean + family.transform(spread, structure, numbers)
            points = theta.detach() if len(theta) > 1 else theta.detach().squeeze(0)
            values, slopes = self.density.gradient(points, structure, batch)
            fixed = {name: tensor.detach() for name, tensor in spread.items()} if self.stick_the_landing else spread
            centre = mean.detach() if self.stick_the_landing else mean
            log_q = temperature * family.log_density(fixed, structure, theta - centre)
            surrogate = (log_q - (slopes * theta).sum(1)).mean()
        of_mean, of_numbers, *of_spread = torch.autograd.grad(
            surrogate, [mean, numbers, *spread.values()], allow_unused=True
        )
        info = VariationalInfo(values.mean(), nelbo=(log_q.detach() - values).mean())
        return info, of_mean, dict(zip(spread, of_spread)), of_numbers * (len(numbers) / temperature)

    def posterior(self, state: VariationalState, lin: Linearization) -> GaussianPosterior:
        """Return N(mean, Σ) as a posterior, with the same methods as a Laplace posterior.

        Args:
            state: the result of `init` or `update` of this method.
            lin: the network linearised at the mean: `model.load_state_dict(state.params, strict=False)` (for a
                subnetwork, of `lin.unflatten_weights(state.theta)`), then `co.linearize(model, data, likelihood)`.

        Returns:
            The posterior.

        Raises:
            TypeError, ValueError: the state is of another kind, or the linearisation has other parameters or weights.

        Warns with `UnsettledWarning` if the fit may not be at its optimum; see `ending`.
        """
        ending = self.ending(state)
        covariance, precision = self.family.covariance(state.spread, state.structure, order_at_mean(lin, state))
        if ending is not FitEnding.SETTLED:
            warn(f"after {int(state.step)} steps: {ending.value}", UnsettledWarning)
        return GaussianPosterior.of(lin, covariance, precision)


def vi(
    log_posterior: Density,
    family: str = "diagonal",
    *,
    optimizer: OptimizerChoice = torch.optim.Adam,
    draws: int = 1,
    rank: int | None = None,
    stick_the_landing: bool = True,
    initial_scale: float = 0.05,
    temperature: StepSizes = 1.0,
    data_size: int | None = None,
    **options: Any,
) -> Variational:
    """Build variational inference with normal distributions (Graves 2011; Blundell et al. 2015).

    Each step descends NELBO(q) = E_q[𝒯 log q − log_posterior], 𝒯 = τ/N, whose minimum over all distributions is the
    posterior to the power 1/τ. For a linear model under a Gaussian likelihood the dense family converges to
    N(θ̄, τP⁻¹), the diagonal one to the variances τ/P_dd.

    Args:
        log_posterior: a function (params, batch) -> mean log-likelihood of the batch + log prior / N, such as
            `co.sampling.log_posterior` returns.
        family: "diagonal"; "dense", by a Cholesky factor; "low_rank_diagonal", U Uᵀ plus a diagonal; "kronecker", the
            Kronecker product of two covariances for each tensor, one covariance for a vector.
        optimizer: a class of torch.optim, which gets the gradients of the mean and of the family's parameters. Weight
            decay would shrink the covariance, too: AdamW needs weight_decay=0.
        draws: the number of draws of the weights per step, together if `torch.vmap` can run the model; the gradient's
            variance falls with it.
        rank: the rank of U, by default 10.
        stick_the_landing: leave the score of q out of the gradient (Roeder, Wu & Duvenaud 2017). The gradient stays
            unbiased, and has no noise if q is the posterior; False differentiates log q in all of its parameters.
        initial_scale: the initial standard deviation of each weight.
        temperature: τ > 0, a number or a schedule.
        data_size: N, required unless log_posterior carries it.
        options: options of the optimiser; `lr` may be a schedule.

    Returns:
        A `Variational` with `init(params)`, `update(state, batch)` and `posterior(state, lin)`, which `co.sampling.run`
        accepts. `state.params` are the mean; `ending(state)` says whether the fit is at its optimum.

    Raises:
        TypeError, ValueError: an argument is of another kind or out of range, and everything that `optimizer` rejects.

    Cost of a step: a gradient for each draw. Memory: the family's tensors (diagonal D, low rank (r + 1) D, Kronecker
    p² + q² per tensor, dense D²) and three times as much for `ending`, the optimiser's state, and three vectors per
    draw.

    Examples:
        >>> density = co.sampling.log_posterior(model, "classification", data_size=8)
        >>> method = co.sampling.vi(density, "diagonal", lr=1e-2)
        >>> co.sampling.run(method, density.params, [(x, y)], steps=20).state.step
        tensor(20)
    """
    check_choice("family", family, FAMILIES)
    shared = common_arguments(log_posterior, 1.0, temperature, data_size, None, initial_scale=initial_scale)
    return Variational(
        **shared | descent(optimizer, options),
        family=family_of(family, rank),
        draws=checked_whole("draws", draws, 1),
        stick_the_landing=stick_the_landing,
    )
