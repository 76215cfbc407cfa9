"""The likelihood exp(−loss) for a loss that belongs to no distribution; its posterior is a Gibbs posterior."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.errors import MissingLabelsError
from curvops.network.likelihoods.likelihood import ROUNDINGS, ByAutograd, Outputs
from curvops.summary import summary

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
        TypeError: `function` does not take two arguments, or its first argument is named like targets.

    Examples:
        >>> likelihood = co.likelihoods.FromLoss(lambda f, y: (f - y).square().sum(-1) / 2)
        >>> lin = co.linearize(nn.Linear(2, 1), (x, torch.zeros(8, 1)), likelihood)
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        names = required_names(function)
        if names is not None and len(names) != 2:
            raise TypeError(f"a loss is a function of (outputs, targets); this one takes ({', '.join(names)}).")
        if names and names[0] in TARGET_NAMES and names[1] not in TARGET_NAMES:
            raise TypeError(f"a loss takes the outputs first; this one takes ({', '.join(names)}): swap them.")
        if isinstance(function, nn.Module):
            function = copy.deepcopy(function).requires_grad_(False)
            if hasattr(function, "reduction"):
                function.__dict__["reduction"] = "none"
        self.function = function
        self._target_shape: torch.Size | None = None

    @property
    def identified_by(self) -> Any:
        """The facts by which a checkpoint tells this apart from others."""
        return self.function

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
                    f"{self!r}: the loss of a point depends on the other points of its batch. Do the targets "
                    f"{tuple(y.shape)} broadcast against the outputs {tuple(f.shape)}? For one output use "
                    "y.unsqueeze(-1); do not average over points."
                )
        random = torch.randn(f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(0)).to(f.device)
        try:
            sloped = any(bool(self.residual(at, y.clone()).any()) for at in (f, random))
        except RuntimeError as error:
            hint = "" if y.is_floating_point() else " Pass floating-point targets, y.float(), unless they are classes."
            raise ValueError(f"{self!r} cannot be differentiated in the outputs: {error}.{hint}") from error
        if not sloped:
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
        try:
            losses = self.function(f, y)
        except Exception as error:
            raise ValueError(
                f"{self!r} cannot score outputs of shape {tuple(f.shape)} and targets of shape {tuple(y.shape)} "
                f"({y.dtype}): {error} It is called as loss(outputs, targets)."
            ) from error
        if not isinstance(losses, Tensor):
            raise TypeError(f"{self!r} returns {type(losses).__name__}, expected a tensor of losses ({len(f)},).")
        if losses.shape not in {f.shape[:1], f.shape, y.shape, (len(f), 1)}:
            hint = " Is it reduced? Return a loss per point, reduction='none'." if losses.ndim == 0 else ""
            raise ValueError(
                f"{self!r} made outputs {tuple(f.shape)} and targets {tuple(y.shape)} into {tuple(losses.shape)}; "
                f"expected a loss per point, ({len(f)},), or the shape of outputs or targets.{hint}"
            )
        return -losses.reshape(len(f), -1).to(f.dtype)

    def _fisher(self, f: Tensor, y: Tensor) -> Tensor:
        try:
            H = self._hessians(f, y)
        except RuntimeError as error:
            raise ValueError(f"{self!r} has no second derivatives: {error}. Use co.EmpiricalFisher(lin).") from error
        lowest = (torch.linalg.eigvalsh(H.detach())[:, 0] if len(H) else H.new_zeros(1)).min()
        if not bool(lowest >= -_slack(H)) and not bool(lowest >= -self._rounding(f, y)):
            raise ValueError(
                f"{self!r} is not convex in the outputs: its Hessian has an eigenvalue of {float(lowest):.3g} at "
                "a training point, so there is no GGN. Use co.Hessian(lin), with a prior above its lowest "
                f"eigenvalue, or co.EmpiricalFisher(lin).{getattr(self.function, 'remedy', '')}"
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
    if not callable(function) or isinstance(function, type):
        raise TypeError(f"a loss or a distribution is given as a function, not {function!r}.")
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
