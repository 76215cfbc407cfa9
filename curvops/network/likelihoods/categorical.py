"""The categorical likelihood of class labels, one logit per class, and the Bradley–Terry likelihood of preferences."""

from __future__ import annotations

import sys

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from curvops.checks import checked_number, checked_whole
from curvops.errors import MissingLabelsError
from curvops.network.data.inputs import within
from curvops.network.likelihoods.likelihood import (
    HessianParts,
    Likelihood,
    OutputBlock,
    Outputs,
    RootBlock,
    Weights,
    check_rows,
    weight_of,
)


class Categorical(Likelihood):
    """The categorical likelihood, a softmax over C classes: p = softmax(f), H = diag(p) - p p^T.

    H has the root L = diag(sqrt p) - p sqrt(p)^T. Targets are class indices (n,) of an integer dtype, or class
    probabilities t, floating-point rows (n, C) that sum to 1; an index y stands for t = e_y. The options have the
    meaning of those of `torch.nn.CrossEntropyLoss` with ``reduction="sum"``. A point then has the target mass
    q = weight ((1 - s) t + s / C), the log-likelihood q . log p, the residual |q| p - q and the curvature |q| H,
    where s is the label smoothing and |q| the sum of q. Without options q is t and |q| is 1.

    Args:
        weight: (C,) non-negative weights of the classes, a tensor or an array.
        ignore_index: points with this index as target are left out; an index of 0 or more is rejected if targets are
            class probabilities.
        label_smoothing: s in [0, 1). With s > 0, weights or class probabilities, exp(log-likelihood) is not normalised
            over y.

    Raises:
        TypeError: an option is of another kind.
        ValueError: an option is out of range.

    Examples:
        >>> likelihood = co.likelihoods.Categorical(label_smoothing=0.1)
        >>> lin = co.linearize(model, (x, y), likelihood)
    """

    form = "classes"

    def __init__(
        self,
        weight: Tensor | np.ndarray | None = None,
        ignore_index: int = -100,
        label_smoothing: float | int = 0.0,
    ) -> None:
        weight = weight_of("weight", weight)
        if weight is not None and not (weight.ndim == 1 and weight.is_floating_point() and within(weight, 0.0)):
            raise ValueError(f"Class weights must be floating-point, (C,), finite and at least 0; given {weight}.")
        self.weight = weight
        self.ignore_index = checked_whole("ignore_index", ignore_index, -sys.maxsize - 1)
        self.label_smoothing = checked_number("label_smoothing", label_smoothing, "[0, 1)")

    def __repr__(self) -> str:
        weight = "None" if self.weight is None else f"<{len(self.weight)} classes>"
        return (
            f"Categorical(weight={weight}, ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing:g})"
        )

    def log_prob(self, f: Outputs, y: Tensor, w: Weights = None) -> Float[Tensor, " n"]:
        return (self._target_mass(f, y, w) * f.log_softmax(-1)).sum(-1)

    def residual(self, f: Outputs, y: Tensor, w: Weights = None) -> Outputs:
        q = self._target_mass(f, y, w)
        largest = q.argmax(-1, keepdim=True) if y.is_floating_point() else self._class_index(y)
        return _zero_sum(q.sum(-1, keepdim=True) * f.softmax(-1) - q, largest)

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        p = f.softmax(-1)
        return self._curvature_weight(f, y, w) * p * _centre(u, p)

    def hessian_parts(self, f: Outputs, y: Tensor, w: Weights = None) -> HessianParts:
        p, weight = f.softmax(-1), self._curvature_weight(f, y, w)
        top = p.argmax(-1, keepdim=True)
        rest = (1 - p).scatter(-1, top, p.scatter(-1, top, 0.0).sum(-1, keepdim=True))
        return HessianParts(weight * p * rest, weight.sqrt() * p)

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        log_p = f.log_softmax(-1)
        v = (0.5 * log_p).exp() * z
        product = _zero_sum(v - log_p.exp() * v.sum(-1, keepdim=True), f.argmax(-1, keepdim=True))
        return self._curvature_weight(f, y, w).sqrt() * product

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        log_p = f.log_softmax(-1)
        return self._curvature_weight(f, y, w).sqrt() * (0.5 * log_p).exp() * _centre(u, log_p.exp())

    def narrow_columns(self, num_outputs: int) -> int:
        return num_outputs - 1

    def narrow_root(self, f: Outputs, y: Tensor, w: Weights, start: int, stop: int) -> Float[Tensor, "M n C"]:
        """Return columns of the Cholesky factor of diag(p) - p p^T, whose last one is zero (Tanabe & Sagae 1992).

        With q_j = p_j + ... + p_C, column j is √(p_j / (q_j q_{j+1})) times q_{j+1} at j, and times -p_i at i > j. It
        is computed from logarithms: no entry is a difference, and none underflows before it is zero itself.
        """
        log_p = f.log_softmax(-1)
        tails = log_p.flip(-1).logcumsumexp(-1).flip(-1).clamp_min(torch.finfo(f.dtype).min / 8)
        scale = 0.5 * (log_p[:, :-1] - tails[:, :-1] - tails[:, 1:])[:, start:stop].mT.unsqueeze(-1)
        root = -(scale + log_p).exp().movedim(0, 1).triu(start + 1).movedim(1, 0)
        root.diagonal(start, 0, 2).copy_((scale.squeeze(-1) + tails[:, 1:][:, start:stop].mT).exp().mT)
        return self._curvature_weight(f, y, w).sqrt() * root

    def sample(self, f: Outputs, generator: torch.Generator | None = None) -> Tensor:
        return torch.multinomial(f.detach().softmax(-1), 1, generator=generator).squeeze(-1)

    def mc_residual(
        self,
        f: Outputs,
        y: Tensor,
        w: Weights = None,
        generator: torch.Generator | None = None,
    ) -> Outputs:
        drawn = self.sample(f, generator).unsqueeze(-1)
        unscaled = _zero_sum(f.softmax(-1).scatter_add(-1, drawn, -torch.ones_like(f[:, :1])), drawn)
        return self._curvature_weight(f, y, w).sqrt() * unscaled

    def mean(self, f: Outputs) -> Outputs:
        return f.softmax(-1)

    def log_probabilities(self, f: Outputs) -> Float[Tensor, "n C"]:
        return f.log_softmax(-1)

    def check_targets(self, y: Tensor, num_outputs: int | None = None) -> None:
        if num_outputs is not None:
            self._check_classes(num_outputs)
        if y.is_floating_point() and y.ndim == 2:
            if self.ignore_index >= 0:
                raise ValueError("ignore_index has no meaning for class probabilities: use sample weights of zero.")
            _check_probabilities(y, num_outputs)
            return
        if y.is_floating_point() or y.dtype == torch.bool:
            raise TypeError(
                f"targets are class indices, or probabilities (n, C), not {y.dtype}: pass y.long(), one-hot y.float()."
            )
        if y.ndim != 1:
            hint = "Use y.squeeze(-1)." if y.ndim == 2 and y.shape[1] == 1 else "One-hot rows become y.argmax(-1)."
            raise ValueError(f"Categorical targets have shape (n,); given {tuple(y.shape)}. {hint}")
        labels = y[y != self.ignore_index].long()
        if labels.numel() == 0:
            return
        low, high = torch.stack(labels.aminmax()).tolist()
        last = high if num_outputs is None else num_outputs - 1
        if low < 0 or high > last:
            raise ValueError(
                f"Categorical targets must lie in 0 .. {last} or equal ignore_index = {self.ignore_index}; given "
                f"values from {low} to {high}. Renumber the classes from 0, or give the model more outputs."
            )

    def any_targets(self, f: Outputs) -> Tensor:
        if self.weight is not None:
            raise MissingLabelsError(f"the weight of a point under {self!r}")
        if self.ignore_index != -100:  # not the default, so some labels are ignored
            remedy = "(Leave these points or positions out by weights of zero, (inputs, None, weights).) "
            raise MissingLabelsError(f"which points are ignored under {self!r}", remedy)
        return torch.zeros(len(f), dtype=torch.long, device=f.device)

    def counted(self, y: Tensor, w: Weights = None) -> Bool[Tensor, " n"]:
        f = y if y.is_floating_point() else torch.zeros((), device=y.device)
        return (self._curvature_weight(f, y, w) != 0).squeeze(-1)

    def weights_of_points(self, y: Tensor, w: Weights) -> Float[Tensor, " n"] | None:
        return None if w is None else self._point_weight(y, w, w.dtype).squeeze(-1)

    def _check_classes(self, num_outputs: int) -> None:
        if num_outputs < 2:
            raise ValueError(
                f"Categorical needs 2 outputs or more, not {num_outputs}: for one logit, Bernoulli() with y (n, 1)."
            )
        if self.weight is not None and len(self.weight) != num_outputs:
            raise ValueError(f"{len(self.weight)} class weights were given, but the model has {num_outputs} outputs.")

    def _class_index(self, y: Tensor) -> Tensor:
        """Return labels (n, 1), with class 0 in place of ignored labels so that they can be gathered."""
        return y.long().masked_fill(y == self.ignore_index, 0).unsqueeze(-1)

    def _target_mass(self, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        """Return the mass q (n, C) of the class docstring, times sample weights, and zero if the label is ignored."""
        smoothing = self.label_smoothing
        if y.is_floating_point():
            q = torch.lerp(y, y.new_tensor(1 / y.shape[-1]), smoothing) if smoothing else y
            q = q if self.weight is None else self.weight * q
        else:
            class_weight = f.new_ones(f.shape[-1]) if self.weight is None else self.weight
            labels = self._class_index(y)
            on = (1.0 - smoothing) * class_weight[labels]
            q = (smoothing / f.shape[-1] * class_weight).expand_as(f).scatter_add(-1, labels, on)
        return q * self._point_weight(y, w, f.dtype)

    def _curvature_weight(self, f: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        """Return the factor |q| (n, 1) of H."""
        if y.is_floating_point():
            return self._target_mass(f, y, w).sum(-1, keepdim=True)
        point = self._point_weight(y, w, f.dtype)
        if self.weight is None:
            return point
        label_weight = self.weight[self._class_index(y)]
        return point * torch.lerp(label_weight, self.weight.mean(), self.label_smoothing)

    def _point_weight(self, y: Tensor, w: Tensor | None, dtype: torch.dtype) -> Tensor:
        if y.is_floating_point():
            return y.new_ones(1, 1) if w is None else w.unsqueeze(-1)
        counted = (y != self.ignore_index).to(dtype)
        return (counted if w is None else counted * w).unsqueeze(-1)


def _centre(u: Tensor, p: Tensor) -> Tensor:
    """Return u - p.u, with u first measured from its entry at the likeliest class, so that p near 1 loses no digits."""
    top = p.argmax(-1, keepdim=True).expand(*u.shape[:-1], 1)
    u = u - u.gather(-1, top)
    return u - (p * u).sum(-1, keepdim=True)


def _zero_sum(x: Tensor, index: Tensor) -> Tensor:
    """Set the entry at ``index`` (n, 1) of x, whose rows sum to 0 in exact arithmetic, to minus the sum of the others.

    That entry is a difference like p - 1, of which rounding would leave no digits.
    """
    return x.scatter_add(-1, index.expand(*x.shape[:-1], 1), -x.sum(-1, keepdim=True))


def _check_probabilities(y: Tensor, num_outputs: int | None) -> None:
    check_rows(y, num_outputs, "Categorical")
    slack = max(1e-4, 8 * torch.finfo(y.dtype).eps)
    if y.numel() and not bool((y >= 0).all() & ((y.sum(-1) - 1).abs() <= slack).all()):
        raise ValueError(
            "float targets are class probabilities, whose rows sum to 1: labels become y.long(), logits y.softmax(-1)."
        )


class BradleyTerry(Categorical):
    """The Bradley–Terry likelihood of preferences in pairs with rewards f (n, 2): p(second preferred) = σ(f₂ − f₁).

    It is the softmax of `Categorical` over the pair, so H is that of two classes. Targets are the index of the
    preferred item, 0 or 1, of an integer dtype, or the probabilities of both, floating-point rows (n, 2). Adding one
    number to all rewards changes nothing: a predicted preference depends only on the difference of the rewards, whose
    variance is v₁ + v₂ − 2 c₁₂, from their covariance.

    Args:
        label_smoothing: s in [0, 1), as in `Categorical`.

    Raises:
        ValueError: label_smoothing is out of range.

    Source: Bradley & Terry 1952; for reward models Stiennon et al. 2020, section 3.3.

    Examples:
        >>> pairs, preferred = torch.stack([x, x.flip(0)], 1), torch.zeros(8, dtype=torch.long)
        >>> rewards = co.likelihoods.RewardPairs(nn.Linear(2, 1))
        >>> lin = co.linearize(rewards, (pairs, preferred), co.likelihoods.BradleyTerry())
        >>> lin.output_shape
        torch.Size([2])
    """

    def __init__(self, label_smoothing: float | int = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing)

    def __repr__(self) -> str:
        return f"BradleyTerry(label_smoothing={self.label_smoothing:g})"

    def _check_classes(self, num_outputs: int) -> None:
        if num_outputs != 2:
            raise ValueError("BradleyTerry compares two rewards: wrap the model as co.likelihoods.RewardPairs(model).")


class RewardPairs(nn.Module):
    """A model of one output per item, such as a reward model, applied to both items of each pair.

    Inputs are pairs: each tensor (n, 2, ...), alone, in a tuple or in a mapping, has the two items at dimension 1.
    Outputs are (n, 2), so that predictions include the covariance of the two. The parameters are the model's own, with
    names that begin with "model.".

    Args:
        model: a module that returns (n, 1) or (n,) for n items, or an object with such `logits`. It is called twice
            per pass.

    A call raises ValueError for inputs without this dimension.

    Examples:
        >>> pairs = torch.stack([x, x.flip(0)], 1)
        >>> rewards = co.likelihoods.RewardPairs(nn.Linear(2, 1))
        >>> rewards(pairs).shape
        torch.Size([8, 2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor, **named: Tensor) -> Float[Tensor, "n 2"]:
        for tensor in (*inputs, *named.values()):
            if tensor.ndim < 2 or tensor.shape[1] != 2:
                raise ValueError("RewardPairs takes inputs (n, 2, ...), as by torch.stack([a, b], 1).")
        pairs = [self.model(*(x[:, i] for x in inputs), **{name: x[:, i] for name, x in named.items()}) for i in (0, 1)]
        rewards = (getattr(outputs, "logits", outputs) for outputs in pairs)
        return torch.stack([reward.reshape(len(reward)) for reward in rewards], 1)
