"""Likelihoods of a user's function, a loss or a distribution, with derivatives by autograd."""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, distributions, nn
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from curvops.checks import drawn_seed
from curvops.errors import MissingLabelsError
from curvops.network.data.inputs import require_finite
from curvops.network.likelihoods.likelihood import (
    ROUNDINGS,
    Likelihood,
    OutputBlock,
    Outputs,
    RootBlock,
    TargetForm,
    Weights,
    vjp,
    weigh,
    with_autograd,
)
from curvops.summary import summary


class ByAutograd(Likelihood):
    """A likelihood whose H, C x C per point, is computed in each product; its root costs O(C^3) per point."""

    function: Callable[..., Any]

    @property
    def identified_by(self) -> Any:
        """The facts by which a checkpoint tells this apart from others."""
        return self.function

    @property
    def kind(self) -> str:
        return repr(self)

    @abstractmethod
    def _log_factors(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the terms (n, F) of each point's log-likelihood."""

    @abstractmethod
    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        """Return H (n, C, C) without weights."""

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        return weigh(self._log_factors(f, y), w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        return weigh(with_autograd(self._residual, f, y), w)

    def fisher(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, "n C C"]:
        """Return H of each point, weights included."""
        H = with_autograd(self._fisher, f, y)
        H = H if f.requires_grad else H.detach()  # tensors inside the function have no gradient from an operator
        return H if w is None else H * w[:, None, None]

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        return torch.einsum("ncd,...nd->...nc", self.fisher(f, y, w), u)

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        values, vectors = torch.linalg.eigh(self.fisher(f, y, w))
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2) @ vectors.mT
        return torch.einsum("ncd,...nd->...nc", root, z)

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        return self.root_product(f, u, y, w)

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        """Check that targets are finite; shapes and values are checked when targets are scored."""
        require_finite("targets", y)

    def _residual(self, f: Tensor, y: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda g: -self._log_factors(g, y).sum())(f)
        return gradient

    def _hessians(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the Hessians (n, C, C) of -log p."""
        _, pull = vjp(lambda g: self._residual(g, y), f)
        units = torch.eye(f.shape[1], dtype=f.dtype, device=f.device)
        H = torch.stack([pull(unit.expand_as(f))[0] for unit in units], -1)
        return (H + H.mT) / 2


TARGET_NAMES = ("target", "targets", "label", "labels", "y", "y_true", "truth")


class FromLoss(ByAutograd):
    """A likelihood given by a loss: −loss(outputs, targets) for each point, up to an unknown normalising constant.

    The function takes outputs (n, C) and the targets of the data, and returns a loss per point, unreduced: (n,), or in
    the shape of the outputs or the targets, whose entries are summed. A torch loss is called with ``reduction="none"``;
    its other options are respected. H is the Hessian of the loss in the outputs, by C gradients per product. A negative
    eigenvalue, with which there is no GGN, raises ValueError (the check waits for the device once per batch). If H
    vanishes, as in the tails of a Huber loss, a point adds nothing.

    A posterior under it is the Gaussian approximation of exp(−loss) times the prior, a Gibbs or generalised posterior
    (Bissiri, Holmes & Walker 2016): its spread follows the scale of the loss, and `temperature` changes it. Evidences
    lack the loss's normalising constant: they compare priors under one loss, not losses or their options. Targets
    cannot be drawn, so Monte-Carlo Fishers raise TypeError. Tensors inside a function must be on the outputs' device.

    Args:
        function: the loss, a torch module or any function of (outputs, targets).

    Raises:
        TypeError: the first argument of `function` is named like targets.

    Examples:
        >>> likelihood = co.likelihoods.FromLoss(lambda f, y: (f - y).square().sum(-1) / 2)
        >>> lin = co.linearize(nn.Linear(2, 1), (x, torch.zeros(8, 1)), likelihood)
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        names = required_names(function)
        if names and names[0] in TARGET_NAMES and names[-1] not in TARGET_NAMES:
            raise TypeError(f"a loss takes the outputs first; this one takes ({', '.join(names)}): swap them.")
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function).requires_grad_(False)
            if hasattr(function, "reduction"):
                function.__dict__["reduction"] = "none"
        self.function = function
        self._target_shape: torch.Size | None = None

    def __repr__(self) -> str:
        return f"FromLoss({_describe(self.function)})"

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        """Check that all targets have the shape of the first ones, since a loss would silently broadcast others."""
        super().check_targets(y, num_outputs)
        if self._target_shape not in (None, y.shape[1:]):
            raise ValueError(f"{self!r} had targets {('n', *self._target_shape)} before, and now {tuple(y.shape)}.")
        self._target_shape = y.shape[1:]

    def check_scores(self, f: Outputs, y: Tensor) -> None:
        """Raise ValueError unless each point's loss is finite, depends on that point alone, and on its outputs."""
        losses = -self._log_factors(f, y.clone())
        if not bool(losses.isfinite().all()):
            raise ValueError(f"{self!r} is NaN or infinite at the first points, at outputs {f[0].tolist()}.")
        slack = losses.new_zeros(())
        for g in (shrunk(f), f):  # a good fit's losses may be rounding errors of larger numbers
            losses, alone = (-self._log_factors(g[:n], y[:n].clone()) for n in (len(g), 1))
            slack = slack.maximum(_slack(losses))
            if alone.shape[1] != losses.shape[1] or not bool((alone[0] - losses[0]).abs().max() <= slack):
                raise ValueError(
                    f"{self!r}: the loss of a point depends on the other points of its batch (targets "
                    f"{tuple(y.shape)}, outputs {tuple(f.shape)}). For one output use y.unsqueeze(-1); do not average."
                )
        random = torch.randn(f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(0)).to(f.device)
        if not any(bool(self.residual(at, y.clone()).any()) for at in (f, random)):
            raise ValueError(f"{self!r} has no gradient in the outputs: does it contain a detach() or an argmax?")

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        raise TypeError(f"{self!r} is a loss, not a distribution: there is nothing to draw. Use fisher='exact'.")

    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        return self.sample(f)

    def any_targets(self, f: Outputs) -> Tensor:
        raise MissingLabelsError(f"the curvature of {self!r}", "(A likelihood of co.likelihoods may not need them.) ")

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> FromLoss:
        new = copy.copy(self)
        if isinstance(self.function, nn.Module):
            new.function = copy.deepcopy(self.function).to(device=device, dtype=dtype)
        return new

    def _log_factors(self, f: Tensor, y: Tensor) -> Tensor:
        losses = self.function(f, y)
        if losses.shape not in {f.shape[:1], f.shape, y.shape, (len(f), 1)}:
            hint = " Is it reduced? Return a loss per point, reduction='none'." if losses.ndim == 0 else ""
            raise ValueError(
                f"{self!r} made outputs {tuple(f.shape)} and targets {tuple(y.shape)} into {tuple(losses.shape)}; "
                f"expected a loss per point, ({len(f)},), or the shape of outputs or targets.{hint}"
            )
        return -losses.reshape(len(f), -1).to(f.dtype)

    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        H = self._hessians(f, y)
        lowest = (torch.linalg.eigvalsh(H.detach())[:, 0] if len(H) else H.new_zeros(1)).min()
        if not bool(lowest >= -_slack(H)) and not bool(lowest >= -self._rounding(f, y)):
            raise ValueError(
                f"{self!r} is not convex in the outputs (its Hessian has an eigenvalue of {float(lowest):.3g}): there "
                "is no GGN. Use co.Hessian(lin), with a prior above its lowest eigenvalue, or co.EmpiricalFisher(lin)."
                f"{getattr(self.function, 'remedy', '')}"
            )
        return H

    def _rounding(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the size of rounding errors in H, whose entries may be differences of far larger numbers.

        For a confident classifier all of H is such a difference, so the scale is that of H at small outputs.
        """
        H = self._hessians(shrunk(f.detach()), y).detach()
        return ROUNDINGS * f.shape[1] * torch.finfo(H.dtype).eps * H.abs().max()


def shrunk(f: Tensor) -> Tensor:
    """Return these outputs times a number, such that all are below 1: no classifier is confident there."""
    return f / (1 + f.abs().max())


def required_names(function: Any) -> list[str] | None:
    """Return the names of a function's required positional arguments; None if its signature does not show them."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def _slack(x: Tensor) -> Tensor:
    """Return the size that rounding may give to a zero next to the largest entry."""
    return torch.finfo(x.dtype).eps ** 0.5 * x.detach().abs().max()


def _describe(function: Any) -> str:
    if not isinstance(function, nn.Module):
        return summary(function)
    options = {name: value for name, value in vars(function).items() if isinstance(value, bool | int | float)}
    said = ", ".join(f"{name}={value}" for name, value in options.items() if name[0] != "_" and name != "training")
    return f"{type(function).__name__}({said})"


CLASSES = distributions.Categorical, distributions.OneHotCategorical
MONTE_CARLO = 'Use the Monte-Carlo Fisher, co.GGN(lin, mc_samples=...) or co.KFAC(lin, fisher="mc")'


class FromDistribution(ByAutograd):
    """A likelihood p(y | f) = function(f), any distribution with batch shape (n, ...) and independent batch entries.

    Targets (n, ...) have the distribution's batch and event shape. H, C x C per point, is:

    - with a finite support, E[r r^T] by enumeration, at a gradient per value and batch entry;
    - otherwise the Hessian of -log p, at C gradients. It is the Fisher if it does not depend on y (natural parameters:
      a normal mean, a log rate). This is checked on the first points, and raises ValueError if it does not hold.

    Predictions of targets average over draws of the outputs. A `Categorical` has classes and a `Bernoulli` labels, with
    `probabilities` (link "mc" or "network") and entropies in `uncertainty`; others have variances there, and with
    `noise=True` in `predict` if their entries are real and independent, whatever the noise depends on. Angles
    (`VonMises`) have neither, only scores.

    H is computed in each product; its symmetric root, for root products, costs O(C^3) per point. Tensors inside
    `function` get no gradients from an operator, and must be on the outputs' device. Pickling needs a `function` that
    can be pickled, not a lambda.

    Args:
        function: a function from outputs (n, ...) to a distribution of the targets.

    Raises:
        TypeError, ValueError: its methods raise them for any other distribution.

    Examples:
        >>> from torch.distributions import Poisson
        >>> likelihood = co.likelihoods.FromDistribution(lambda f: Poisson(f.exp()))
        >>> likelihood.log_prob(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([-1.])
    """

    def __init__(self, function: Callable[[Tensor], Distribution]) -> None:
        self.function = function
        self._constant = False

    def __repr__(self) -> str:
        return f"FromDistribution({summary(self.function)})"

    def distribution(self, f: Outputs) -> Distribution:
        """Return p(. | f). Raises TypeError or ValueError unless it is a distribution with one row per point."""
        p = self.function(f)
        if not isinstance(p, Distribution):
            raise TypeError(f"{self!r} returns {type(p).__name__}, expected a torch.distributions.Distribution.")
        if p.batch_shape[:1] != f.shape[:1]:
            raise ValueError(
                f"{self!r} made a batch of shape {tuple(p.batch_shape)}; expected one row per point, {len(f)} for "
                f"outputs {tuple(f.shape)} (each position of a sequence or an image is one)."
            )
        self.form = _form_of(p)
        return p

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        p = self.distribution(f.detach())
        if generator is None:
            return p.sample().detach()
        # Distributions draw only from torch's default generators, which are seeded here and restored.
        seed = drawn_seed(generator)
        accelerator = [] if f.device.type == "cpu" else [f.device]
        with torch.random.fork_rng(accelerator, device_type=f.device.type if accelerator else "cuda"):
            torch.default_generator.manual_seed(seed)
            if accelerator:
                module = torch.get_device_module(f.device)
                with module.device(f.device):
                    module.manual_seed(seed)
            return p.sample().detach()

    def any_targets(self, f: Outputs) -> Tensor:
        return self.sample(f, torch.Generator().manual_seed(0))

    def mean(self, f: Outputs) -> Float[Tensor, "n *m"]:
        p = self.distribution(f)
        base = _base(p)
        if isinstance(base, distributions.Categorical):
            return base.probs
        return self._moment(p, "mean").reshape(len(f), -1)

    def log_probabilities(self, f: Outputs) -> Float[Tensor, "n *L c"]:
        p = _base(self.distribution(f))
        if isinstance(p, CLASSES):
            return p.logits
        if not isinstance(p, distributions.Bernoulli):
            return super().log_probabilities(f)
        logits = p.logits.reshape(len(f), -1)
        return logsigmoid(torch.stack([logits, -logits], -1))

    def variance(self, f: Outputs) -> Float[Tensor, "n m"]:
        return self._moment(self.distribution(f), "variance").reshape(len(f), -1)

    def _moment(self, p: Distribution, name: str) -> Tensor:
        if _is_circular(p):
            raise ValueError(
                f"{self!r} makes a {type(_base(p)).__name__} of angles, which have no {name} as numbers do: use "
                "log_likelihood, or draws of the outputs, post.functions(x, k)."
            )
        try:
            moment: Tensor = getattr(p, name)
        except NotImplementedError as error:
            raise ValueError(f"{self!r} makes a {type(p).__name__}, whose {name} torch does not know.") from error
        if moment.numel() and bool(moment.isnan().all()):
            raise ValueError(f"{self!r} makes a {type(p).__name__}, which has no {name}: use log_likelihood.")
        return moment

    def _log_factors(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the log-probabilities (n, F) of the F independent factors of each point."""
        p = self.distribution(f)
        if y.shape != p.batch_shape + p.event_shape:
            raise ValueError(f"{self!r} gives targets {tuple(p.batch_shape + p.event_shape)}; given {tuple(y.shape)}.")
        return self._score(p, f, y)

    def _score_at(self, y: Tensor, f: Tensor) -> Tensor:
        return self._score(self.distribution(f), f, y)

    def _score(self, p: Distribution, f: Tensor, y: Tensor) -> Tensor:
        base = _base(p)
        # Left to torch, whose check torch.compile switches off in the whole process.
        if not base._validate_args and "_validate_args" not in vars(base):
            base._validate_sample(y)
        return base.log_prob(y).reshape(len(f), -1).to(f.dtype)

    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        p = _base(self.distribution(f))
        if p.has_enumerate_support:
            try:
                return self._enumerate(f, p.enumerate_support(expand=False))
            except NotImplementedError:  # for example a binomial with different total counts
                pass
        if not self._constant:
            self._constant = self._hessian_is_fisher(f.detach()[:8], y[:8])
        return self._hessians(f, y)

    def _enumerate(self, f: Tensor, support: Tensor) -> Tensor:
        """Return the sum of p r r^T over values and factors, (n, C, C)."""
        H = torch.zeros_like(f.unsqueeze(2) * f.unsqueeze(1))
        for value in support:
            log_p, pull = vjp(partial(self._score_at, value), f)
            for j in range(log_p.shape[1]):
                (r,) = pull(torch.zeros_like(log_p).index_fill(1, torch.tensor([j], device=f.device), 1.0))
                H = H + log_p[:, j, None, None].exp() * r.unsqueeze(2) * r.unsqueeze(1)
        return H

    def _hessian_is_fisher(self, f: Tensor, y: Tensor) -> bool:
        """Return whether the Hessian proved to be the Fisher at draws; False if all are equal, which shows nothing.

        Raises ValueError if it depends on y, or if E[r r^T] exceeds it by 6 standard errors (a kink, or a support that
        depends on f, as for a Laplace distribution, whose Hessian is 0).
        """
        draws, generator = 64, torch.Generator(device=f.device).manual_seed(0)
        drawn = self.sample(f.repeat(draws, 1), generator)
        targets = torch.cat([y.to(drawn.dtype), drawn])
        f = f.repeat(draws + 1, 1)
        H = self._hessians(f, targets).detach().unflatten(0, (draws + 1, -1))
        slack = torch.finfo(H.dtype).eps ** 0.5
        size = H.abs().amax((0, 2, 3))
        spread = (H - H[0]).abs().amax((0, 2, 3))
        squares = self._residual(f, targets).detach().square().sum(-1).unflatten(0, (draws + 1, -1))[1:]
        excess = squares.mean(0) - H[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        margin = 6 * squares.std(0) / draws**0.5 + slack * size.clamp_min(slack)
        if bool((spread > slack * size).any()):
            raise ValueError(
                f"{self!r}: the Hessian of -log p depends on the target, so is not the output Fisher. {MONTE_CARLO}; "
                "or make the outputs natural parameters (a mean at a fixed variance, a log rate)."
            )
        if bool((excess > margin).any()):
            raise ValueError(f"{self!r}: log p has a kink, so its Hessian is not the output Fisher. {MONTE_CARLO}.")
        return bool((targets.unflatten(0, (draws + 1, -1)) != targets[: len(y)]).any())


def _form_of(p: Distribution) -> TargetForm:
    """Return the form of a distribution's targets."""
    base = _base(p)
    if isinstance(base, CLASSES):
        return "classes"
    if isinstance(base, distributions.Bernoulli):
        return "labels"
    if base.event_shape:
        return "vectors"
    try:
        return "counts" if getattr(base.support, "is_discrete", False) else "numbers"
    except NotImplementedError:
        return "numbers"


def _is_circular(p: Distribution) -> bool:
    base = _base(p)
    base = _base(base.component_distribution) if isinstance(base, distributions.MixtureSameFamily) else base
    return isinstance(base, distributions.VonMises)


def _base(p: Distribution) -> Distribution:
    """Return the distribution whose batch entries are the independent factors."""
    while isinstance(p, distributions.Independent):
        p = p.base_dist
    return p
