"""Likelihoods, and the conversion of names, losses and functions given by users.

>>> import torch
>>> from curvops.network.likelihoods import Categorical
>>> f, y = torch.zeros(1, 2), torch.tensor([0])
>>> Categorical().residual(f, y)
tensor([[-0.5000,  0.5000]])
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvops.network.likelihoods.bernoulli import Bernoulli
from curvops.network.likelihoods.bradley_terry import BradleyTerry, RewardPairs
from curvops.network.likelihoods.categorical import Categorical
from curvops.network.likelihoods.from_distribution import FromDistribution
from curvops.network.likelihoods.from_loss import FromLoss, required_names
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.heteroscedastic import HeteroscedasticGaussian
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.poisson import Poisson
from curvops.network.likelihoods.sequences import Sequences
from curvops.network.likelihoods.torch_losses import interpretation_of

__all__ = [
    "Bernoulli",
    "BradleyTerry",
    "Categorical",
    "FromDistribution",
    "FromLoss",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "RewardPairs",
    "Sequences",
    "as_likelihood",
]

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
        raise TypeError(
            f"{getattr(spec, '__name__', spec)} averages over the points, and likelihoods are sums. {remedy}"
        )
    if callable(spec) and not isinstance(spec, nn.Module | type):
        names = required_names(spec)
        if names is None or not 1 <= len(names) <= 2:
            raise TypeError(
                f"the signature of {spec!r} shows neither one argument (outputs) nor two (outputs, targets). Use "
                "curvops.likelihoods.FromDistribution(function) or .FromLoss(function)."
            )
        return FromDistribution(spec) if len(names) == 1 else FromLoss(spec)
    remedy = next((text for kind, text in REMEDIES.items() if isinstance(spec, kind)), "")
    if isinstance(spec, type):
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
