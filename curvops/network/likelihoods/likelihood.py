"""The base class of likelihoods.

A likelihood turns outputs ``f`` of shape (n, C) and targets ``y`` into log-probabilities, residuals
``r = -d log p / d f`` and products with the output Fisher ``H`` (C x C per point), which is never formed.
Every method takes ``(outputs[, block], targets, weights)``. Weights (n,) are one non-negative factor per point of the
log-likelihood, or None for ones; they enter residuals and curvature alike. Where targets are independent given the
outputs, weights may have the targets' shape, one factor per target. All likelihoods are sums over points.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from curvops.checks import check_tensor
from curvops.errors import MissingLabelsError
from curvops.fingerprints import fingerprint, in_single
from curvops.network.data.inputs import MISSING, copy_unless_recorded, move_tensor, require_finite, tensor_of

Outputs = Float[Tensor, "n C"]
OutputBlock = Float[Tensor, "*K n C"]
RootBlock = Float[Tensor, "*K n R"]
Weights = Float[Tensor, " n"] | Float[Tensor, "n m"] | None
TargetForm = Literal["classes", "labels", "numbers", "counts", "vectors"]
"""The form of a target: one of several classes, yes or no for each label, real numbers that are independent given the
outputs, other numbers that are independent, or vectors of dependent ones."""
ROUNDINGS = 64.0
"""Numbers that differ by at most this many eps of their size count as equal."""


class HessianParts(NamedTuple):
    """H of each point by its diagonal h (n, C), and u (n, C) with -u u^T beside the diagonal; without u it is diagonal.

    The diagonal is given, not h - u^2, so that no entry is a difference.
    """

    diagonal: Tensor
    column: Tensor | None = None


class Likelihood(ABC):
    """A distribution p(y | f) of a target given the network's C outputs; immutable, and copies share their tensors.

    Examples:
        >>> lin = co.linearize(model, (x, y), "classification")
        >>> isinstance(lin.likelihood, co.likelihoods.Likelihood), lin.likelihood
        (True, Categorical(weight=None, ignore_index=-100, label_smoothing=0))
    """

    positions: int | None = None
    """The number of positions that a point must have; None for any number."""
    missing: str | None = None
    """What happens to targets that are NaN: "ignore" leaves them out, None refuses them."""
    estimated: str | None = None
    """How `co.linearize` estimates the noise, as "one" number or "per_output"; None if it does not."""
    form: TargetForm | None = None
    """The form of a target, by which predictions of targets are made; None if there are none."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        of_H = ("hessian_parts", "narrow_columns", "narrow_root", "any_targets")
        for method, names in (("hessian_product", of_H), ("curvature", of_H[-1:])):
            if method in vars(cls):  # another H: what the class above it knows of its own does not hold
                for name in names:
                    if name not in vars(cls):
                        setattr(cls, name, getattr(Likelihood, name))

    @property
    def kind(self) -> str:
        """The name of the distribution."""
        return type(self).__name__

    @property
    def described(self) -> str:
        """The distribution with its noise, if that is a hyperparameter."""
        return self.kind

    @property
    def of_position(self) -> Likelihood:
        """The likelihood of one position's target."""
        return self

    @property
    def members(self) -> tuple[Likelihood, ...]:
        """The likelihoods of several outputs, or this one alone."""
        return (self,)

    @property
    def needs_noise(self) -> bool:
        """Whether the noise of this likelihood, or of one of several, is to be estimated."""
        return any(member.of_position.estimated is not None for member in self.members)

    def split(self, f: Outputs, y: Tensor, w: Weights = None) -> list[tuple[Likelihood, Tensor, Tensor, Weights]]:
        """Return each of the `members` with its outputs, targets and weights."""
        return [(self, f, y, w)]

    @property
    def single_noise(self) -> Tensor | None:
        """The noise of a Gaussian likelihood, of points or of positions, if it is a single number."""
        return None

    @abstractmethod
    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        """Return each point's log-likelihood in nats, with its normalising constant, times the point's weight."""

    @abstractmethod
    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        """Return the gradient of each point's negative log-likelihood with respect to its outputs."""

    @abstractmethod
    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        """Return H u, where H is the output Fisher of each point times its weight. Costs O(C) per point and vector."""

    @abstractmethod
    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        """Return L z, where H = L L^T and L is C x R with R = ``root_columns(C)``."""

    @abstractmethod
    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        """Return L^T u, the adjoint of ``root_product``."""

    def root_columns(self, num_outputs: int) -> int:
        """Return the number R of columns of the square root L for C = ``num_outputs``."""
        return num_outputs

    def narrow_columns(self, num_outputs: int) -> int:
        """Return the number M <= R of columns of ``narrow_root``."""
        return self.root_columns(num_outputs)

    def narrow_root(
        self, f: Outputs, y: Tensor, w: Weights, start: int, stop: int
    ) -> Float[Tensor, "{stop}-{start} n C"]:
        """Return some columns of a square root of H that has no more of them than H has rank, if one is known."""
        return self.root_product(f, unit_vectors(f, self.root_columns(f.shape[-1]), start, stop), y, w)

    def hessian_parts(self, f: Outputs, y: Tensor, w: Weights = None) -> HessianParts | None:
        """Return H by its parts, for sequences a row per position, or None; sums over H then need no root of it."""
        return None

    @abstractmethod
    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        """Draw one target per point from p(. | f), in the form that ``log_prob`` takes."""

    def mc_residual(
        self,
        f: Outputs,
        y: Tensor,
        w: Weights = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        """Return the residual at one sampled target, scaled so that E[r r^T] = H, weights included.

        The true targets enter only through their effect on H (class weights, ignored points); a likelihood that uses
        them in another way overrides this.
        """
        return self.residual(f, self.sample(f, generator), None if w is None else w.sqrt())

    @abstractmethod
    def mean(self, f: Outputs) -> Float[Tensor, "n m"]:
        """Return the mean of the target given the outputs: class probabilities for a categorical.

        m is C unless targets have another number of entries than the outputs.
        """

    def log_probabilities(self, f: Outputs) -> Float[Tensor, "n *L c"]:
        """Return the log-probabilities of the values of a target: of its classes, or of yes and no for each label."""
        raise ValueError(f"{self!r} has no class probabilities.")

    def variance(self, f: Outputs) -> Float[Tensor, "n m"]:
        """Return the variance of each number of the target given the outputs."""
        raise ValueError(f"{self!r} has no variance.")

    @abstractmethod
    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        """Raise an error for targets that this likelihood cannot score.

        Without ``num_outputs`` (C is known only after a forward pass) nothing that depends on C is checked.
        Waits for the device once. Raises TypeError for a wrong dtype and ValueError for a wrong shape or value.
        """

    def any_targets(self, f: Outputs) -> Tensor:
        """Return targets with which H is that of every target, for points without labels.

        Raises MissingLabelsError if H depends on them; a likelihood for which nothing is known does.
        """
        raise MissingLabelsError(
            f"the curvature of {self!r}",
            "(If that of your own class does not, let its any_targets(f) return some targets of the right shape.) ",
        )

    def counted(self, y: Tensor, w: Weights = None) -> Bool[Tensor, "n *T"] | None:
        """Return a mask of the points (for sequences: positions) that count; None if all do.

        A point counts if its weight is not zero and its target is not ignored.
        """
        w = self.weights_of_points(y, w)
        return None if w is None else w != 0

    def weights_of_points(self, y: Tensor, w: Weights) -> Float[Tensor, "n *T"] | None:
        """Return one weight per point (for sequences: or per position), the largest of those of its targets.

        That of a target that is left out is zero.
        """
        return w if w is None or w.ndim == 1 else w.amax(1)

    @property
    def hyperparameters(self) -> tuple[Tensor, ...]:
        """Tensors that may require a gradient; every method is differentiable with respect to them."""
        return ()

    def with_hyperparameters(self, tensors: Sequence[Tensor]) -> Likelihood:
        """Return a copy with other ``hyperparameters``, unchecked: for rebuilding an operator from its tensors."""
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Likelihood:
        """Return a copy on another device or in another floating-point dtype; gradients flow through.

        Its tensors are copied, too, unaffected by later changes, except those with gradients.
        """
        new = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Likelihood):
                setattr(new, name, value.to(device, dtype))
            elif isinstance(value, Tensor):
                moved = move_tensor(value, device, dtype)
                is_parameter = any(value is tensor for tensor in self.hyperparameters)
                what = f"{name} of {type(self).__name__}"
                copied = copy_unless_recorded(value, moved, what) if is_parameter else moved.detach().clone()
                setattr(new, name, copied)
        return new

    def snapshot(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Likelihood:
        """Return the result of `to`, which later changes do not affect, except those of tensors with gradients."""
        return self.to(device, dtype)


class Independent(Likelihood):
    """A likelihood of targets that are independent given the outputs, with H = diag(h) and L = diag(sqrt h).

    Subclasses define the terms of single targets. Each target may have a weight of its own and, with
    ``missing="ignore"``, may be NaN: it then has the weight zero.
    """

    def __init__(self, missing: str | None = None) -> None:
        self.missing = checked_missing(missing)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'' if self.missing is None else f'missing={self.missing!r}'})"

    @abstractmethod
    def log_factors(self, f: Outputs, y: Tensor) -> Float[Tensor, "n m"]:
        """Return the log-likelihood of each target."""

    @abstractmethod
    def slope(self, f: Outputs, y: Tensor) -> Outputs:
        """Return the residual without weights."""

    def drawn_slope(self, f: Outputs, y: Tensor, generator: torch.Generator | None) -> Outputs:
        """Return the residual at sampled targets, without weights and such that E[r r^T] = diag(h)."""
        return self.slope(f, self.sample(f, generator))

    @abstractmethod
    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        """Return h of each point without sample weights, broadcastable to (n, C)."""

    @abstractmethod
    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        """Return the square root of h, computed so that it does not underflow when h does."""

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        y, w = self.observed(y, w)
        return weigh(self.log_factors(f, y), w).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        y, w = self.observed(y, w)
        return weigh(self.slope(f, y), w)

    def mc_residual(
        self, f: Outputs, y: Tensor, w: Weights = None, generator: torch.Generator | None = None
    ) -> Outputs:
        y, w = self.observed(y, w)
        return weigh(self.drawn_slope(f, y, generator), None if w is None else w.sqrt())

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        y, w = self.observed(y, w)
        return weigh(self.curvature(f, y) * u, w)

    def hessian_parts(self, f: Outputs, y: Tensor, w: Weights = None) -> HessianParts:
        y, w = self.observed(y, w)
        return HessianParts(weigh(self.curvature(f, y).expand_as(f), w))

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        y, w = self.observed(y, w)
        return weigh(self.curvature_root(f, y) * z, None if w is None else w.sqrt())

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        return self.root_product(f, u, y, w)

    def weights_of_points(self, y: Tensor, w: Weights) -> Float[Tensor, " n"] | None:
        return super().weights_of_points(*self.observed(y, w))

    def observed(self, y: Tensor, w: Weights) -> tuple[Tensor, Weights]:
        """Return the targets with numbers in place of NaN, and the weights with zeros there, if some may be missing."""
        if self.missing is None or not y.is_floating_point():
            return y, w
        present = ~y.isnan()
        ones = present.to(y.dtype)
        return y.where(present, 0), ones if w is None else weigh(ones, w)


def checked_missing(missing: str | None) -> str | None:
    """Return the choice for missing targets; raise ValueError for another one."""
    if missing not in (None, "ignore"):
        raise ValueError(f"missing={missing!r}; expected None, or 'ignore' to leave out targets that are NaN.")
    return missing


def weigh(x: Tensor, w: Tensor | None) -> Tensor:
    """Multiply x (..., n, C) by one factor per point (n,) or per target (n, m), if any; C is a multiple of m."""
    if w is None:
        return x
    if w.ndim == 1:
        return x * w.unsqueeze(-1)
    return x * (w if w.shape[1] == x.shape[-1] else w.repeat(1, x.shape[-1] // w.shape[1]))


def require_known(y: Tensor, missing: str | None) -> None:
    """Raise ValueError if targets hold NaN, unless these are missing and left out, or Inf. Waits for the device."""
    require_finite("targets", y if missing is None else y.where(~y.isnan(), 0), MISSING)


def weight_of(name: str, array: Tensor | np.ndarray | None) -> Tensor | None:
    """Return a likelihood's weight as a tensor, from an array, too; raise TypeError for another kind."""
    weight: Tensor | None = tensor_of(array)
    if weight is not None:
        check_tensor(name, weight)
    return weight


def normal_like(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers in the shape, dtype and device of f."""
    return torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)


def check_rows(y: Tensor, columns: int | None, name: str) -> None:
    """Raise ValueError unless targets are (n, C) with C = `columns`, if that is known."""
    if y.ndim != 2:
        hint = "Use y.unsqueeze(-1)." if y.ndim == 1 else "Flatten each target to C numbers."
        raise ValueError(f"{name} targets have the outputs' shape (n, C); given {tuple(y.shape)}. {hint}")
    if columns is not None and y.shape[1] != columns:
        raise ValueError(f"The model has {columns} outputs, but the targets have shape {tuple(y.shape)}.")


def unit_vectors(f: Outputs, columns: int, start: int, stop: int) -> Float[Tensor, "{stop}-{start} n {columns}"]:
    """Return some of the unit vectors of the columns of a root, for each point."""
    units = f.new_zeros(stop - start, len(f), columns)
    units.diagonal(start, 0, 2).fill_(1.0)
    return units


def vjp(function: Callable[[Tensor], Tensor], f: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor]]]:
    """Return function(f), and the function that pulls cotangents back."""
    result: Any = torch.func.vjp(function, f)
    return result[0], result[1]


def with_autograd(compute: Callable[[Tensor, Tensor], Tensor], f: Tensor, y: Tensor) -> Tensor:
    """Return compute(f, y) with autograd, even if the caller records no gradients or is in inference mode."""
    keep = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.inference_mode(False), torch.enable_grad():
        f, y = (t.clone() if t.is_inference() else t for t in (f, y))
        result = compute(f if keep or not f.requires_grad else f.detach(), y)
    return result if keep or not result.requires_grad else result.detach()


def likelihood_state(likelihood: Likelihood, token: str = "") -> str:
    """Return a string that is the same for equal likelihoods with the same hyperparameters."""
    return repr(_state(likelihood, token))


def _state(likelihood: Likelihood, token: str) -> Hashable:
    """Return a key that distinguishes likelihoods, at the current values of their tensors."""
    # An estimated noise is told by its value.
    attributes = sorted(item for item in vars(likelihood).items() if item[0] not in ("estimated", "found"))
    if all(_is_plain(value) for _, value in attributes):
        kind = f"{type(likelihood).__module__}.{type(likelihood).__qualname__}"
        return kind, tuple((name, _identity(value, token)) for name, value in attributes)
    return token, tuple(_identity(tensor, token) for tensor in likelihood.hyperparameters)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict | tuple):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | Tensor | Likelihood)


def _identity(value: Any, token: str) -> Hashable:
    if isinstance(value, Likelihood):
        return _state(value, token)
    if isinstance(value, Tensor):
        return tuple(value.shape), int(fingerprint([in_single(value.detach())])) if value.numel() else 0
    if isinstance(value, dict):
        return tuple((name, _identity(entry, token)) for name, entry in value.items())
    hashable: Hashable = value
    return hashable
