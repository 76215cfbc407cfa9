"""torch losses as likelihoods, and the check that loss and likelihood have equal gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from curvops.network.data.layout import Layout
from curvops.network.likelihoods.bernoulli import Bernoulli
from curvops.network.likelihoods.categorical import Categorical
from curvops.network.likelihoods.from_loss import FromLoss
from curvops.network.likelihoods.gaussian import Gaussian
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.poisson import Poisson


@dataclass(frozen=True)
class Interpretation:
    """The interpretation of a class of losses.

    likelihood: a function of a loss and the shape of a point's outputs, if that is known. class_dim: the dimension of
    (N, ...) that holds the classes. indices: whether targets may be class indices, so that outputs are never (N,).
    """

    likelihood: Callable[[nn.Module, torch.Size | None], Likelihood]
    class_dim: int = -1
    indices: bool = False


def _cross_entropy(loss: nn.Module, shape: torch.Size | None) -> Likelihood:
    assert isinstance(loss, nn.CrossEntropyLoss)
    return Categorical(loss.weight, loss.ignore_index, loss.label_smoothing)


def _binary_cross_entropy(loss: nn.Module, shape: torch.Size | None) -> Likelihood:
    assert isinstance(loss, nn.BCEWithLogitsLoss)
    return Bernoulli(_over(loss.weight, "weight", shape), _over(loss.pos_weight, "pos_weight", shape))


def _poisson(loss: nn.Module, shape: torch.Size | None) -> Likelihood:
    assert isinstance(loss, nn.PoissonNLLLoss)
    return Poisson() if loss.log_input else FromLoss(loss)


def _squares(loss: nn.Module, shape: torch.Size | None) -> Likelihood:
    return Gaussian(noise=0.5)


def _gaussian(loss: nn.Module, shape: torch.Size | None) -> Likelihood:
    assert isinstance(loss, nn.GaussianNLLLoss)
    return FromLoss(MeansAndVariances(loss))


class MeansAndVariances(nn.Module):
    """The loss nn.GaussianNLLLoss as a function of outputs (n, 2m): m means, then m variances."""

    remedy = " For a GGN, let the model return log variances: curvops.likelihoods.HeteroscedasticGaussian()."

    def __init__(self, loss: nn.GaussianNLLLoss) -> None:
        super().__init__()
        self.loss, self.full, self.eps = copy.deepcopy(loss), loss.full, loss.eps
        self.loss.__dict__["reduction"] = "none"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.shape[1] != 2 * targets.shape[-1]:
            raise ValueError(f"the outputs must be {targets.shape[-1]} means, then as many variances.")
        mean, variance = outputs.chunk(2, -1)
        found: Tensor = self.loss(mean, targets, variance)
        return found


NOT_LOSSES = (nn.NLLLoss, nn.BCELoss)
"""Losses of probabilities; the activation that computes these in the model belongs in the likelihood instead."""

INTERPRETATIONS: dict[type[nn.Module], Interpretation] = {
    nn.CrossEntropyLoss: Interpretation(_cross_entropy, class_dim=1, indices=True),
    nn.BCEWithLogitsLoss: Interpretation(_binary_cross_entropy),
    nn.PoissonNLLLoss: Interpretation(_poisson),
    nn.MSELoss: Interpretation(_squares),
    nn.GaussianNLLLoss: Interpretation(_gaussian),
}


def interpretation_of(spec: object) -> Interpretation | None:
    """Return the interpretation of a torch loss or of a user's own module; None for anything else."""
    found = next((interpretation for kind, interpretation in INTERPRETATIONS.items() if isinstance(spec, kind)), None)
    if found is None and isinstance(spec, nn.Module) and not isinstance(spec, NOT_LOSSES):
        return Interpretation(lambda loss, shape: FromLoss(loss))
    return found


def require_same_loss(
    loss: nn.Module, likelihood: Likelihood, layout: Layout, outputs: Tensor, targets: Tensor, f: Tensor
) -> None:
    """Raise ValueError unless the sum of a torch loss has the likelihood's residual as its gradient.

    `outputs` (n, *shape) and `targets` have the form that the model and the data give them; `f` are these outputs as
    rows. Gradients are compared at random outputs, which also detects a subclass that computes something else, and at
    these, where a good fit's gradient may be a rounding error next to what it is at random ones.
    """
    interpretation = interpretation_of(loss)
    assert interpretation is not None
    summed = copy.deepcopy(loss).to(device=outputs.device, dtype=f.dtype)
    summed.__dict__["reduction"] = "sum"
    integers = not targets.is_floating_point()
    y = targets.long() if integers and interpretation.indices else targets.to(f.dtype)
    generator = torch.Generator(device=f.device).manual_seed(0)
    random = torch.randn(outputs.shape, dtype=f.dtype, device=f.device, generator=generator)
    largest = f.new_zeros(())
    for g in (random, outputs.detach().to(f.dtype)):
        with torch.inference_mode(False), torch.enable_grad():
            g = g.clone().requires_grad_()
            try:
                (gradient,) = torch.autograd.grad(summed(g, y.clone()).sum(), g)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"{loss} itself cannot score outputs of shape {tuple(outputs.shape)} and targets of shape "
                    f"{tuple(targets.shape)} ({targets.dtype}): {error}"
                ) from error
        expected = likelihood.residual(layout.rows(g.detach()), layout.targets(targets))
        difference, size = (layout.rows(gradient) - expected).norm(), expected.norm()
        largest = largest.maximum(size)
        if not bool(difference <= 10 * torch.finfo(f.dtype).eps ** 0.5 * largest):
            raise ValueError(
                f"the gradient of {loss} is not that of {likelihood} (they differ by {float(difference):.2g}, the "
                f"likelihood's has size {float(size):.2g}), so it is not a plain {_plain(loss)}. Pass a likelihood "
                "of curvops.likelihoods, or this loss as curvops.likelihoods.FromLoss(loss)."
            )


def _plain(loss: nn.Module) -> str:
    return next(f"torch.nn.{kind.__name__}" for kind in INTERPRETATIONS if isinstance(loss, kind))


def _over(weight: Tensor | None, name: str, shape: torch.Size | None) -> Tensor | None:
    """Return a weight that torch broadcasts over (N, *shape) as (C,), or as (T, C) if it differs by position."""
    if weight is None or shape is None or weight.numel() == 1:
        return weight if weight is None or weight.numel() > 1 else weight.reshape(())
    if weight.ndim == 1 + len(shape) and len(weight) == 1:
        weight = weight.squeeze(0)
    try:
        full = weight.expand(shape)
    except RuntimeError as error:
        raise ValueError(
            f"BCEWithLogitsLoss: {name} of shape {tuple(weight.shape)} does not broadcast over the outputs of a point, "
            f"{tuple(shape)}. Pass weights of points with the data: (inputs, targets, weights) and weights=True."
        ) from error
    if full.ndim < 2:
        return full
    rows = full.flatten(0, -2)
    return rows[0] if bool((rows == rows[0]).all()) else rows
