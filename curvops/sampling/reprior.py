"""Repriorisation: coordinates of the weights in which a wide network's posterior is nearly its prior N(0, I)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from curvops.argument_types import Collate, Data, LikelihoodChoice, Network, PriorPrecision
from curvops.checks import (
    check_choice,
    check_kind,
    check_like,
    check_options,
    check_shape,
    checked_number,
    checked_whole,
    refuse,
)
from curvops.errors import FewDrawsWarning, warn
from curvops.linalg import Estimate
from curvops.linalg.core.results import Reason
from curvops.network import Blocks, read_precision
from curvops.network.likelihoods import Categorical, Gaussian
from curvops.network.model.model import unwrap
from curvops.operators import Linearization, linearize
from curvops.posterior.terms import Prior
from curvops.sampling.changes_of_weights import (
    Change,
    DataSpaceMap,
    FeatureSpaceMap,
    ReadoutMap,
    RepriorProblem,
    TangentMap,
    find_readout,
    log_normal,
)
from curvops.summary import Summarised


@dataclass(frozen=True, eq=False, repr=False)
class GradientGap(Summarised):
    """The gradient gap E ‖∇ log p̃(φ) + φ‖² under p̃, which is 0 if p̃ is N(0, I): in total and for the readout.

    `total` is over all weights, `readout` over those of the readout; `readout` is None for a form without one.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
        >>> rep = co.sampling.reprior(net, (x, torch.zeros(8, 1)), noise=3.0)
        >>> float(rep.gradient_gap(samples=100, generator=torch.Generator().manual_seed(0)).total) > 0
        True
    """

    total: Estimate
    readout: Estimate | None


def effective_draws(ratios: Float[Tensor, " S"]) -> float:
    """Return the effective number of draws, (Σ e^h)²/Σ e^2h."""
    return float((2 * ratios.logsumexp(0) - (2 * ratios).logsumexp(0)).exp())


def divergence(ratios: Float[Tensor, " S"]) -> Estimate:
    """Estimate log E e^h − E h from draws h, with a delta-method standard error; warn if few draws dominate."""
    S = len(ratios)
    value = ratios.logsumexp(0) - math.log(S) - ratios.mean()
    warn_of_few(ratios, "the estimate of KL(prior ‖ p̃) is too low, a lower bound")
    terms = (ratios - ratios.logsumexp(0) + math.log(S)).exp() - ratios
    return Estimate(value, terms.std() / math.sqrt(S), S, 0, reason=Reason.BUDGET_SPENT)


def weighted_mean(values: Float[Tensor, " S"], ratios: Float[Tensor, " S"]) -> Estimate:
    """Estimate Σ w g / Σ w with w = e^h, and the standard error of this ratio."""
    w = ratios.softmax(0)
    mean = w @ values
    stderr = (w * (values - mean)).square().sum().sqrt()
    return Estimate(mean, stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def plain_mean(values: Float[Tensor, " S"]) -> Estimate:
    """Estimate a mean from independent draws."""
    stderr = values.std() / math.sqrt(len(values))
    return Estimate(values.mean(), stderr, len(values), 0, reason=Reason.BUDGET_SPENT)


def warn_of_few(ratios: Float[Tensor, " S"], what: str) -> None:
    """Warn if fewer than 20 effective draws carry the weights e^h, so that the largest ones dominate."""
    effective = effective_draws(ratios)
    if effective < 20:
        warn(
            f"{what}, since {effective:.1f} of {len(ratios)} draws of the prior carry the weights e^h (standard "
            f"deviation of h {float(ratios.std()):.1f} nats). Use more samples, a wider network, or draws of p̃ from "
            "a sampler.",
            FewDrawsWarning,
        )


Form = Literal["feature", "data", "ntk"]


@dataclass(frozen=True, eq=False, repr=False)
class Reprior:
    """A change of variables θ = T(φ) of a network's weights, with the log posterior of φ; `reprior` makes it.

    φ and θ are mappings by parameter name, like the parameters. φ is also free of the prior's scale: the posterior of φ
    is N(0, I) if the network is linear, and tends to it as the network becomes wider. Every sampler accepts this object
    as its `log_posterior`, with `batch=None`, and a chain may start at `params`. Everything is differentiable and can
    be mapped over chains by `torch.vmap`.

    form: "feature", "data" or "ntk". reg: λ. noise: σ², None for classes. readout: names of the readout's parameters.
    data_size: N.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> rep = co.sampling.reprior(net, (x, torch.zeros(8, 1)), noise=0.5)
        >>> rep.readout
        ('2.weight', '2.bias')
    """

    form: Form
    reg: float
    noise: float | None
    readout: tuple[str, ...]
    data_size: int
    _problem: RepriorProblem
    _change: Change

    @property
    def params(self) -> Blocks:
        """The φ of the network's weights, a start for a sampler."""
        return self.inverse(self._problem.model.values)

    @property
    def prior(self) -> Prior:
        """The prior N(0, I) of φ, from which `pcn` proposes."""
        one = torch.ones_like(self._problem.model.theta[0])
        return Prior(one, torch.zeros_like(one))

    def __call__(self, phi: Mapping[str, Tensor], batch: Any = None) -> Float[Tensor, ""]:
        """Return log p̃(φ)/N in nats, as samplers need it; raise ValueError for a batch, since T depends on all data."""
        refuse(batch is not None, "a step of a Reprior takes all of its data: leave batches out.")
        return -self.energy(phi) / self.data_size

    def map(self, phi: Mapping[str, Tensor]) -> Blocks:
        """Return θ = T(φ), the weights of the network, by one forward pass over all data."""
        return self._problem.theta(self._change.map(self._checked(phi)))

    def inverse(self, theta: Mapping[str, Tensor]) -> Blocks:
        """Return φ with T(φ) = θ; the tangent-kernel form uses Newton's method and raises ValueError if it fails."""
        return self._change.inverse(self._problem.white(self._checked(theta, "theta")))

    def logdet(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return log|det ∂θ/∂φ|, in float64."""
        return self._change.forward(self._checked(phi)).logdet + self._problem.log_scale

    def estimated_logdet(
        self,
        phi: Mapping[str, Tensor],
        *,
        rtol: float = 0.01,
        max_matvecs: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Estimate:
        """Estimate `logdet` of the tangent-kernel form, with an error bar, for use if a (D, D) matrix is too large.

        Only log|det(I + H_α)| is estimated, by stochastic Lanczos quadrature (of the square if I + H_α is indefinite).
        J (N·C, D) is formed, and `minres` solves with I + H_α once for each output of each point.

        Args:
            phi: φ by parameter name.
            rtol: the relative accuracy to reach.
            max_matvecs: a limit on products; None is none.
            generator: the source of the probes.

        Returns:
            An Estimate in nats.

        Raises:
            ValueError: the form is another one, whose exact log-determinant is free.
            ConvergenceError: a solve failed.
        """
        if not isinstance(self._change, TangentMap):
            raise ValueError(f"form={self.form!r} has its log-determinant in closed form: use logdet(phi).")
        estimate = self._change.estimated_logdet(self._checked(phi), rtol, max_matvecs, generator)
        return estimate + float(self._problem.log_scale)

    def energy(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return −log p̃(φ) = −log p(y | T(φ)) − log p(T(φ)) − log|det ∂T/∂φ| in nats, with all constants, in float64.

        The integral of e^−energy over φ is the evidence p(y), whatever the form and λ.

        Args:
            phi: φ by parameter name.

        Returns:
            The energy, a number in float64.
        """
        mapped = self._change.forward(self._checked(phi))
        return -(self._problem.log_likelihood(mapped.outputs) + log_normal(mapped.white) + mapped.logdet)

    def normal(self, k: int, generator: torch.Generator | None = None) -> Blocks:
        """Draw k times φ ~ N(0, I), {name: (k, *shape)}."""
        check_options(k=k, generator=generator)
        theta = self._problem.model.theta
        options: dict[str, Any] = {"dtype": theta.dtype, "device": theta.device, "generator": generator}
        return {name: torch.randn(k, *scale.shape, **options) for name, scale in self._problem.scale.items()}

    @torch.no_grad()
    def sample(self, k: int, generator: torch.Generator | None = None) -> Blocks:
        """Return T(φ) of k draws φ ~ N(0, I), {name: (k, *shape)}: nearly posterior draws for a wide network.

        They are exact for a linear model; otherwise `divergence` measures how far they are from the posterior, and
        e^h (`log_ratio`) are their importance weights. Costs k forward passes.

        Args:
            k: the number of draws.
            generator: the source of the draws.

        Returns:
            T(φ) by parameter name, {name: (k, *shape)}.
        """
        weights: Blocks = self._over(self.map, self.normal(k, generator))
        return weights

    @torch.no_grad()
    def log_ratio(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """Return h(φ) = log p̃(φ) − log N(φ; 0, I), a constant if the posterior of φ is its prior; E e^h = p(y)."""
        return self._ratio(phi)

    def divergence(self, samples: int = 1000, generator: torch.Generator | None = None) -> Estimate:
        """Estimate KL(N(0, I) ‖ p̃) = log E e^h − E h ≥ 0 in nats from draws of N(0, I) (Hron et al. 2022, theorem 2.1).

        If the standard deviation of h is many nats, few draws determine E e^h and the estimate is too low; this warns
        with `FewDrawsWarning`. Costs one forward pass per draw.

        Args:
            samples: the number of draws.
            generator: the source of the draws.

        Returns:
            An Estimate in nats.
        """
        drawn = self.normal(checked_whole("samples", samples, 2), generator)
        return divergence(self._over(self.log_ratio, drawn))

    def gradient_gap(
        self,
        draws: Mapping[str, Tensor] | None = None,
        *,
        samples: int = 1000,
        generator: torch.Generator | None = None,
    ) -> GradientGap:
        """Estimate E ‖∇log p̃(φ) + φ‖² under p̃ (Hron et al. 2022, proposition 3.1), which is 0 if p̃ is N(0, I).

        Costs a gradient per draw.

        Args:
            draws: φ from a sampler, {name: (k, *shape)}, nearly independent (as the standard error assumes). None uses
                draws of N(0, I) with weights e^h, and warns if few draws carry them (`FewDrawsWarning`). At λ = σ²
                the readout's part is 0 up to rounding.
            samples: the number of draws of N(0, I), if `draws` is None.
            generator: the source of these draws.

        Returns:
            The GradientGap, two Estimates.
        """
        weighted = draws is None
        if draws is None:
            draws = self.normal(checked_whole("samples", samples, 2), generator)
        self._checked({name: block[0] for name, block in draws.items()}, "draws (one of them)")
        refuse(min(map(len, draws.values())) < 2, "draws must be at least 2 of each parameter.")

        def gaps(phi: Blocks) -> tuple[Tensor, Blocks]:
            slopes, h = grad_and_value(self._ratio)(phi)
            return h, {name: slope.double().square().sum() for name, slope in slopes.items()}

        h, squares = self._over(gaps, draws)
        if weighted:
            warn_of_few(h, "the gradient gap is not a reliable mean under p̃")

        def mean(names: Sequence[str]) -> Estimate:
            total = torch.stack([squares[name] for name in names]).sum(0)
            return weighted_mean(total, h) if weighted else plain_mean(total)

        return GradientGap(mean(list(squares)), mean(self.readout) if self.readout else None)

    def _ratio(self, phi: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        return -self.energy(phi) - log_normal(phi)

    def _checked(self, blocks: Any, what: str = "phi") -> Mapping[str, Tensor]:
        """Check names, shapes and dtype of parameter blocks; raise TypeError or ValueError if they differ."""
        scale = self._problem.scale
        check_kind(what, blocks, Mapping, "a mapping of parameter names to tensors, as reprior(...).params is")
        refuse(blocks.keys() != scale.keys(), f"{what} must have the names {list(scale)}, got {list(blocks)}.")
        for name, block in blocks.items():
            check_shape(f"{what}[{name!r}]", block, scale[name].shape, "Pass several draws by torch.vmap.")
            check_like(f"{what}[{name!r}]", block, scale[name], "the network")
        return blocks

    def _over(self, function: Callable[[Any], Any], draws: Mapping[str, Tensor]) -> Any:
        """Evaluate a function at each of several draws and stack the results.

        It evaluates many at a time by `torch.vmap`, or one by one if the model has an operation that cannot be mapped.
        """
        D = self._problem.model.theta.numel()
        numbers = self.data_size * D**0.5 + D  # about how many a draw takes in memory
        try:
            return torch.vmap(function, chunk_size=max(1, int(4e6 / numbers)))(dict(draws))
        except RuntimeError:
            values = [function(dict(zip(draws, blocks))) for blocks in zip(*draws.values())]
            return pytree.tree_map(lambda *leaves: torch.stack(leaves), *values)

    def __repr__(self) -> str:
        noise = "classes" if self.noise is None else f"noise={self.noise:g}"
        return f"Reprior(form={self.form!r}, reg={self.reg:g}, {noise}, readout={self.readout}, N={self.data_size})"


def reprior(
    model: Network,
    data: Data,
    noise: float | None = None,
    reg: float | None = None,
    form: Form | None = None,
    last: str | None = None,
    prior_precision: PriorPrecision = 1.0,
    *,
    likelihood: LikelihoodChoice | None = None,
    weights: bool = False,
    collate: Collate | None = None,
) -> Reprior:
    """Build weights φ in which the posterior of a wide network is nearly its prior N(0, I) (Hron et al. 2022).

    In θ = T(φ), the readout is a draw from the posterior of a linear regression on the last features, mean plus root
    times φ; the weights before it are unchanged. Markov chains in φ mix faster as the network becomes wider.

        T(φ) = μ + Σ^½φ,   Σ = λ(λI + ΨᵀΨ)⁻¹,   μ = ΣΨᵀy/λ,
        Ψ = features and a column for the bias, times A^-½

    Args:
        model: an `nn.Module` that ends with a linear layer, with any number of outputs C, with or without a bias.
            All parameters that require a gradient are inferred, the others stay fixed.
        data: as in `co.linearize`. All of it is used at once, with (N, width) features in memory.
        noise: σ², the *variance* of real targets. For classes it is the variance of the regression onto one-hot targets
            minus 1/C that defines T, and only sets the default of reg=.
        reg: λ > 0; None is σ², for which T is the exact conditional posterior of the readout. The posterior of θ = T(φ)
            is the same for every λ; towards `math.inf` T becomes the prior's scale alone, θ = A^-½φ.
        form: "feature" factorises a matrix (width, width), "data" one (N, N); None uses the smaller one. "ntk" changes
            all weights of any model, by the tangent kernel at φ: T(φ) = φ + Jᵀ(JJᵀ + λI)⁻¹(y − f(φ)). Its
            log-determinant is exact and needs a (D, D) matrix of second derivatives, for networks of some hundred
            weights (`estimated_logdet` for more). A linear model gets N(μ, Σ²) instead of N(μ, Σ). For small λ, T may
            fold, so that two φ have the same image and a chain counts it twice: check that inverse(map(φ)) is φ, or
            raise reg.
        last: the name of the readout's module; None finds it by running the model; form="ntk" has none.
        prior_precision: A as in `co.laplace`: a number, a vector (D,) or a mapping {glob: number}, with one value for
            all outputs of the readout; `co.sampling.ntk_precision(model)` is the prior of the theory.
        likelihood: None for a Gaussian of variance `noise`; "classification", `nn.CrossEntropyLoss(...)` or
            `co.likelihoods.Categorical(...)` for classes.
        weights: True if the third item of a batch holds the weights of its points.
        collate: as in `co.linearize`.

    Returns:
        A Reprior: a `log_posterior` of φ for every sampler, with `map` and `inverse`.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: everything that `co.linearize` rejects (no points, targets of another shape, noise not positive, …);
            λ is not positive; the model has no linear readout, or another layer shares it; features are not finite; in
            float32, the regression cannot be solved in this dtype.

    Cost of an evaluation: a forward pass over all data, and O(min(N, width)²·max(N, width)) operations; memory
    O(min(N, width)² + N·width).

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> rep = co.sampling.reprior(net, (x, torch.zeros(8, 1)), noise=0.5)
        >>> rep.noise
        0.5
    """
    if form is not None:
        check_choice("form", form, get_args(Form))
    refuse(last is not None and form == "ntk", "last= names a readout, but form='ntk' has none: leave out one of them.")
    stated = None if noise is None else checked_number("noise", noise)
    level = None if reg is None else checked_number("reg", reg, "(0, inf)" if form == "ntk" else "(0, inf]")
    chosen_likelihood = _likelihood(likelihood, stated)
    lin = linearize(model, data, chosen_likelihood, weights=weights, collate=collate)
    twice = stated is not None and chosen_likelihood is likelihood and isinstance(lin.likelihood, Gaussian)
    refuse(twice, "likelihood and noise both give a variance: leave out one of them.")
    variance = _variance(lin, stated)
    level = (variance if stated is None else stated) if level is None else level
    if level is None:
        raise ValueError("classes need reg=λ, or noise= of the regression onto one-hot targets, such as 0.1.")
    precision = read_precision("prior_precision", prior_precision, lin.model.selection, lin.theta)
    problem = RepriorProblem.of(lin, precision)
    if form == "ntk":
        return Reprior("ntk", level, variance, (), lin.num_data, problem, TangentMap(problem, level))
    readout = find_readout(lin.model, problem.inputs[0], last)
    for name in readout.names:
        if bool((problem.scale[name] != problem.scale[name][:1]).any()):
            raise ValueError(f"prior_precision differs between the rows of the readout's {name!r}: use form='ntk'.")
    width = problem.scale[readout.names[0]].shape[1] + len(readout.names) - 1
    chosen: Form = form if form is not None else "feature" if width <= lin.num_data else "data"
    change = (FeatureSpaceMap if chosen == "feature" else DataSpaceMap)(problem, level, readout)
    _require_precise(change)
    return Reprior(chosen, level, variance, readout.names, lin.num_data, problem, change)


def _likelihood(likelihood: Any, noise: float | None) -> Any:
    """Return the likelihood to pass to `linearize`."""
    unknown = isinstance(likelihood, Gaussian) and likelihood.needs_noise
    if not (likelihood is None or likelihood == "regression" or unknown):
        return likelihood
    if noise is None:
        raise ValueError("noise is missing: pass the variance of the targets, or likelihood='classification'.")
    return Gaussian(noise)


def _variance(lin: Linearization, noise: float | None) -> float | None:
    """Return σ² for real targets, None for classes."""
    likelihood: Any = lin.likelihood
    if isinstance(likelihood, Categorical):
        return None
    check_kind("likelihood", likelihood, Gaussian, "Gaussian with one noise variance, or 'classification'")
    refuse(likelihood.missing is not None, "reprior takes no missing targets: leave these points out.")
    if len(set(likelihood.noise.flatten().tolist())) > 1:
        raise ValueError(f"reprior needs one noise variance for all outputs, got {likelihood.noise.tolist()}.")
    return float(likelihood.noise.detach().flatten()[0]) if noise is None else noise


@torch.no_grad()
def _require_precise(change: ReadoutMap) -> None:
    """Raise ValueError if features are not finite or the matrix is too ill-conditioned for the dtype."""
    problem, dtype = change.problem, change.problem.model.theta.dtype
    kappa, eps = change.condition(problem.white(problem.model.values)), torch.finfo(dtype).eps
    if not kappa * eps <= 0.05:  # above it fewer than two digits would be left; refuses NaN
        wider = "Compute in float64 (model.double())" if dtype != torch.float64 else "Scale the inputs down"
        raise ValueError(
            f"the regression on the features has condition number {kappa:.1e} at reg={change.level:g}, beyond "
            f"{dtype} (rounding {eps:.1g}). {wider}, or raise reg: the target of the sampler stays the same."
        )


FAN_IN_FIRST = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *FAN_IN_FIRST)


def ntk_precision(model: nn.Module, weight_std: float = 2**0.5, bias_std: float = 1.0) -> dict[str, float]:
    """Return prior precisions fan_in/σ_w² for weights and 1/σ_b² for biases, by name, to pass as `prior_precision`.

    Under them θ = σ_w v/√fan_in (and σ_b v) with v ~ N(0, I): the tangent-kernel scaling (Jacot et al. 2018) for the
    weights as the model stores them.

    Args:
        model: a network of linear and convolutional layers, recognised by their class. Frozen parameters are left out.
        weight_std: σ_w; √2 keeps the size of activations through rectified layers.
        bias_std: σ_b.

    Returns:
        The precision of each parameter by its name.

    Raises:
        TypeError: the model is not a module, or a standard deviation is not a number.
        ValueError: a parameter belongs to another layer (a normalisation, an embedding): add {glob: number} for it to a
            mapping of your own; or a standard deviation is not positive and finite.

    Examples:
        >>> import curvops as co
        >>> co.sampling.ntk_precision(nn.Linear(8, 2), weight_std=2.0, bias_std=0.5)
        {'weight': 2.0, 'bias': 4.0}
    """
    precisions: dict[str, float] = {}
    module: Any = unwrap(model)
    check_kind("model", module, nn.Module, "an nn.Module; for a function pass a mapping as prior_precision")
    sw, sb = checked_number("weight_std", weight_std), checked_number("bias_std", bias_std)
    layers = {id(layer.weight): layer for layer in module.modules() if isinstance(layer, LAYERS)}
    biases = {id(layer.bias) for layer in layers.values() if layer.bias is not None}
    others = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if (layer := layers.get(id(parameter))) is not None:
            outputs = layer.out_channels if isinstance(layer, FAN_IN_FIRST) else parameter.shape[0]
            inputs = parameter.numel() // outputs
            precisions[name] = inputs / sw**2
        elif id(parameter) in biases:
            precisions[name] = 1 / sb**2
        else:
            others.append(name)
    refuse(others, f"the fan-in of {others} is unknown: pass prior_precision as a mapping {{glob: number}}.")
    return precisions
