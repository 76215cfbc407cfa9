"""Likelihoods given by a function from outputs to a `torch.distributions.Distribution`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, distributions
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from curvops.checks import drawn_seed
from curvops.network.likelihoods.likelihood import ByAutograd, Outputs, TargetForm, vjp
from curvops.summary import summary

# The number of points and draws on which a Hessian is checked before it is used as the Fisher.
POINTS, DRAWS = 8, 64
CLASSES = distributions.Categorical, distributions.OneHotCategorical
MONTE_CARLO = "Use the Monte-Carlo Fisher, co.GGN(lin, mc_samples=...), which needs only samples and residuals"


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

    @property
    def identified_by(self) -> Any:
        """The facts by which a checkpoint tells this apart from others."""
        return self.function

    def __repr__(self) -> str:
        return f"FromDistribution({summary(self.function)})"

    def distribution(self, f: Outputs) -> Distribution:
        """Return p(. | f). Raises TypeError or ValueError unless it is a distribution with one row per point."""
        try:
            p = self.function(f)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise ValueError(
                f"{self!r} could not make a distribution from outputs {tuple(f.shape)}: {error}"
            ) from error
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
        try:
            # Left to torch, whose check torch.compile switches off in the whole process.
            if not base._validate_args and "_validate_args" not in vars(base):
                base._validate_sample(y)
            log_p = base.log_prob(y)
        except NotImplementedError:
            raise  # the distribution has no log_prob
        except (ValueError, RuntimeError, IndexError) as error:
            raise ValueError(f"{self!r} cannot score targets of {y.dtype}: {error}") from error
        return log_p.reshape(len(f), -1).to(f.dtype)

    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        p = _base(self.distribution(f))
        if p.has_enumerate_support:
            try:
                return self._enumerate(f, p.enumerate_support(expand=False))
            except NotImplementedError:  # for example a binomial with different total counts
                pass
        if not self._constant:
            self._constant = self._hessian_is_fisher(f.detach()[:POINTS], y[:POINTS])
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
        """Return whether the Hessian proved to be the Fisher; False if all draws are equal, which shows nothing.

        Raises ValueError if it depends on y, or if E[r r^T] exceeds it by 6 standard errors (a kink, or a support that
        depends on f, as for a Laplace distribution, whose Hessian is 0).
        """
        generator = torch.Generator(device=f.device).manual_seed(0)
        drawn = self.sample(f.repeat(DRAWS, 1), generator)
        targets = torch.cat([y.to(drawn.dtype), drawn])
        f = f.repeat(DRAWS + 1, 1)
        H = self._hessians(f, targets).detach().unflatten(0, (DRAWS + 1, -1))
        slack = torch.finfo(H.dtype).eps ** 0.5
        size = H.abs().amax((0, 2, 3))
        spread = (H - H[0]).abs().amax((0, 2, 3))
        squares = self._residual(f, targets).detach().square().sum(-1).unflatten(0, (DRAWS + 1, -1))[1:]
        excess = squares.mean(0) - H[0].diagonal(dim1=-2, dim2=-1).sum(-1)
        margin = 6 * squares.std(0) / DRAWS**0.5 + slack * size.clamp_min(slack)
        if bool((spread > slack * size).any()):
            raise ValueError(
                f"{self!r}: the Hessian of -log p depends on the target, so it is not the output Fisher (the outputs "
                f"are not natural parameters), and the support is not finite. {MONTE_CARLO}; or make the outputs "
                "natural parameters (a mean at a fixed variance, a log rate)."
            )
        if bool((excess > margin).any()):
            raise ValueError(
                f"{self!r}: the Hessian of -log p is not the output Fisher (log p has a kink). {MONTE_CARLO}."
            )
        return bool((targets.unflatten(0, (DRAWS + 1, -1)) != targets[: len(y)]).any())


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
