"""Likelihoods from names, torch losses and functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvops.network.likelihoods.by_autograd import FromDistribution, FromLoss, required_names
from curvops.network.likelihoods.categorical import Categorical
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.independent import Bernoulli, Poisson
from curvops.network.likelihoods.likelihood import Likelihood


@dataclass(frozen=True)
class Interpretation:
    """The interpretation of a class of losses.

    likelihood: a function of a loss and the shape of a point's outputs, if that is known. class_dim: the dimension of
    (N, ...) that holds the classes. indices: whether targets may be class indices, so that outputs are never (N,).
    """

    likelihood: Callable[[Any, torch.Size | None], Likelihood]
    class_dim: int = -1
    indices: bool = False


class MeansAndVariances(nn.Module):
    """The loss nn.GaussianNLLLoss as a function of outputs (n, 2m): m means, then m variances."""

    remedy = " For a GGN, let the model return log variances: curvops.likelihoods.HeteroscedasticGaussian()."

    def __init__(self, loss: nn.GaussianNLLLoss) -> None:
        super().__init__()
        self.loss, self.full, self.eps = copy.deepcopy(loss), loss.full, loss.eps
        self.loss.__dict__["reduction"] = "none"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.ndim == 1:
            raise ValueError("targets need a column for each mean, (N, m): pass y.unsqueeze(1).")
        if outputs.shape[1] != 2 * targets.shape[-1]:
            raise ValueError(f"the outputs must be {targets.shape[-1]} means, then as many variances.")
        mean, variance = outputs.chunk(2, -1)
        losses: Tensor = self.loss(mean, targets, variance)
        return losses


NOT_LOSSES = (nn.NLLLoss, nn.BCELoss)
"""Losses of probabilities; the activation that computes these in the model belongs in the likelihood instead."""

INTERPRETATIONS: dict[type[nn.Module], Interpretation] = {
    nn.CrossEntropyLoss: Interpretation(
        lambda loss, _: Categorical(loss.weight, loss.ignore_index, loss.label_smoothing), class_dim=1, indices=True
    ),
    nn.BCEWithLogitsLoss: Interpretation(
        lambda loss, shape: Bernoulli(_over(loss.weight, shape), _over(loss.pos_weight, shape))
    ),
    nn.PoissonNLLLoss: Interpretation(lambda loss, _: Poisson() if loss.log_input else FromLoss(loss)),
    nn.MSELoss: Interpretation(lambda loss, _: Gaussian(noise=0.5)),
    nn.GaussianNLLLoss: Interpretation(lambda loss, _: FromLoss(MeansAndVariances(loss))),
}


def interpretation_of(spec: object) -> Interpretation | None:
    """Return the interpretation of a torch loss or of a user's own module; None for anything else.

    A subclass with a `forward` of its own computes something else, and is a loss like any other.
    """
    for kind, interpretation in INTERPRETATIONS.items():
        if isinstance(spec, kind):
            own = type(spec).forward is not kind.forward
            return replace(interpretation, likelihood=lambda loss, _: FromLoss(loss)) if own else interpretation
    if isinstance(spec, nn.Module) and not isinstance(spec, NOT_LOSSES):
        return Interpretation(lambda loss, _: FromLoss(loss))
    return None


def _over(weight: Tensor | None, shape: torch.Size | None) -> Tensor | None:
    """Return a weight that torch broadcasts over (N, *shape) as (C,), or as (T, C) if it differs by position."""
    if weight is None or shape is None or weight.numel() == 1:
        return weight if weight is None or weight.numel() > 1 else weight.reshape(())
    if weight.ndim == 1 + len(shape) and len(weight) == 1:
        weight = weight.squeeze(0)
    full = weight.expand(shape)
    if full.ndim < 2:
        return full
    rows = full.flatten(0, -2)
    return rows[0] if bool((rows == rows[0]).all()) else rows


REMEDIES: dict[type[nn.Module], str] = {
    nn.NLLLoss: "It takes log-probabilities: use nn.CrossEntropyLoss(), which gives the same on them as on logits.",
    nn.BCELoss: "It takes probabilities: drop the model's last sigmoid and use nn.BCEWithLogitsLoss().",
}


FUNCTIONS: dict[Callable[..., Tensor], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.mse_loss: nn.MSELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.l1_loss: nn.L1Loss,
}
"""Functions that average over the points, with the modules that have the same options; their reduction is not used."""


NAMES = {
    "classification": '"classification"',
    "regression": '"regression"',
    "categorical": '"classification"',
    "gaussian": "co.likelihoods.Gaussian(noise=variance)",
    "bernoulli": "co.likelihoods.Bernoulli()",
    "binary": "co.likelihoods.Bernoulli()",
    "poisson": "co.likelihoods.Poisson()",
}
"""Words that a user may write, and what they probably mean."""


def as_likelihood(spec: object, shape: torch.Size | None = None) -> Likelihood:
    """Return the likelihood for a name, a torch loss or a function.

    ``"classification"`` is ``Categorical()``, ``"regression"`` is ``Gaussian()``, whose noise `co.linearize` estimates.
    ``nn.CrossEntropyLoss`` keeps its weight, ignore_index and label smoothing, ``nn.BCEWithLogitsLoss`` its weight and
    pos_weight (a weight per point is a sample weight, passed with the data); ``nn.PoissonNLLLoss(log_input=True)`` is
    ``Poisson()``, whether ``full`` or not. ``nn.MSELoss`` is ``Gaussian(noise=0.5)``, whose negative log-likelihood is
    the sum of squared errors up to a constant: a loss is taken as it is given, so that its GGN is that of this sum. A
    function from outputs to a ``torch.distributions.Distribution`` is a ``FromDistribution``. Any other loss of
    (outputs, targets), a function or a module (``nn.HuberLoss``, ``nn.SmoothL1Loss``), is a ``FromLoss``; for
    ``nn.GaussianNLLLoss`` the outputs are m means, then m variances. A loss's ``reduction`` is not used: the
    log-likelihood is always the sum over points.

    Args:
        spec: a `Likelihood`, or any of the above.
        shape: the shape of a point's outputs, if it is known; weights of ``nn.BCEWithLogitsLoss`` broadcast over it
            as in torch.

    Returns:
        The Likelihood.

    Raises:
        TypeError: `spec` is anything else, or a function whose signature does not show how many arguments it takes.
        ValueError: an option has no counterpart.

    Examples:
        >>> co.likelihoods.as_likelihood("classification"), co.likelihoods.as_likelihood(nn.MSELoss())
        (Categorical(weight=None, ignore_index=-100, label_smoothing=0), Gaussian(noise=0.5))
    """
    if isinstance(spec, Likelihood):
        return spec
    interpretation = interpretation_of(spec)
    if interpretation is not None and isinstance(spec, nn.Module):
        return interpretation.likelihood(spec, shape)
    if spec == "classification":
        return Categorical()
    if spec == "regression":
        return Gaussian()
    module = next((module for function, module in FUNCTIONS.items() if function is spec), None)
    if module is not None:
        remedy = REMEDIES.get(module, f"Pass nn.{module.__name__}(), whose reduction is not used.")
        raise TypeError(f"{getattr(spec, '__name__', spec)} averages over the points, and likelihoods sum. {remedy}")
    if callable(spec) and not isinstance(spec, nn.Module | type):
        names = required_names(spec)
        if names is None or not 1 <= len(names) <= 2:
            raise TypeError(f"{spec!r} takes neither (outputs) nor (outputs, targets).")
        return FromDistribution(spec) if len(names) == 1 else FromLoss(spec)
    remedy = next((text for kind, text in REMEDIES.items() if isinstance(spec, kind)), "")
    if isinstance(spec, Mapping):
        remedy = "Likelihoods of several outputs, by name, are for co.linearize; here one is needed."
    elif isinstance(spec, type):
        remedy = f"A class is not enough: pass an instance, {spec.__name__}()."
    elif isinstance(spec, str):
        remedy = "".join(f"Did you mean {NAMES[near]}?" for near in get_close_matches(spec.lower(), NAMES, 1))
    raise TypeError(
        f"No likelihood for {spec!r}. {remedy} Accepted: curvops.likelihoods.Categorical(...), "
        ".Gaussian(noise=variance), .Bernoulli(...), .Poisson() and .HeteroscedasticGaussian(); instances of "
        "torch.nn.CrossEntropyLoss, BCEWithLogitsLoss, PoissonNLLLoss and MSELoss; any other loss of (outputs, "
        "targets), a module or a function, unreduced; a function from outputs to a torch.distributions.Distribution; "
        '"classification" and "regression".'
    )
