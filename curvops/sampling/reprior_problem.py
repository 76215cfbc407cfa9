"""The inference problem of a network under a Gaussian prior, in the units in which this prior is N(0, I)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.checks import check_kind, checked_number, refuse
from curvops.network import Blocks, Model
from curvops.network.data.inputs import Inputs, copy
from curvops.network.likelihoods import Categorical, Likelihood
from curvops.network.model.model import unwrap
from curvops.operators import Linearization
from curvops.sampling.state import long_dot

FAN_IN_FIRST = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *FAN_IN_FIRST)


@dataclass(frozen=True, eq=False)
class RepriorProblem:
    """A network, all its data, their likelihood and the prior N(0, A⁻¹) of its weights θ = A^-½ v.

    `inputs` are kept batch by batch, `targets` and `weights` for all points together; `scale` is A^-½ by name. Blocks
    of v are called white, because their prior is N(0, I).
    """

    model: Model
    inputs: tuple[Inputs, ...]
    targets: Tensor
    weights: Float[Tensor, " N"] | None
    likelihood: Likelihood
    scale: Blocks

    @classmethod
    def of(cls, lin: Linearization, precision: Float[Tensor, "*D"]) -> RepriorProblem:
        """Build the problem from a linearisation's model, data and likelihood; the data are copied."""
        batches = list(lin.data)
        weighted = [batch.weights for batch in batches if batch.weights is not None]
        weights = torch.cat(weighted) if weighted else None
        if weights is not None and weights.ndim > 1:
            raise ValueError("reprior takes one sample weight for each point, not one for each target.")
        scale = lin.model.selection.unflatten(precision.detach().rsqrt().expand_as(lin.theta).clone())
        inputs = tuple(copy(batch.inputs) for batch in batches)
        return cls(lin.model, inputs, torch.cat([batch.targets for batch in batches]), weights, lin.likelihood, scale)

    @property
    def num_data(self) -> int:
        """The number N of points."""
        return len(self.targets)

    @property
    def root(self) -> Float[Tensor, "N 1"] | None:
        """The root √w of each point's weight, 0 for points that do not count; None if all have weight 1."""
        counted = self.likelihood.counted(self.targets, self.weights)
        if counted is None or (self.weights is None and bool(counted.all())):
            return None
        weights = counted.to(self.model.theta.dtype) if self.weights is None else self.weights * counted
        return weights.sqrt().unsqueeze(1)

    def regression_targets(self) -> Float[Tensor, "N C"]:
        """Return the targets of the Gaussian model that defines T: for classes, one-hot rows minus 1/C."""
        if not isinstance(self.likelihood, Categorical):
            return self.targets
        assert self.model.layout is not None
        C, targets = self.model.layout.num_outputs, self.targets
        if not targets.is_floating_point():
            counted = self.likelihood.counted(targets)
            assert counted is not None  # for classes
            targets = torch.nn.functional.one_hot(targets.long().masked_fill(~counted, 0), C)
        return targets.to(self.model.theta.dtype) - 1 / C

    @property
    def log_scale(self) -> Float[Tensor, ""]:
        """The log-determinant log det A^-½, in float64."""
        return torch.stack([scale.double().log().sum() for scale in self.scale.values()]).sum()

    def theta(self, white: Mapping[str, Tensor]) -> Blocks:
        """Return the weights θ of the model."""
        return {name: scale * white[name] for name, scale in self.scale.items()}

    def white(self, theta: Mapping[str, Tensor]) -> Blocks:
        """Return white weights v, the inverse of `theta`."""
        return {name: theta[name] / scale for name, scale in self.scale.items()}

    def outputs(self, white: Mapping[str, Tensor]) -> Float[Tensor, "N C"]:
        """Return f for all data, by one forward pass."""
        values = self.theta(white)
        return torch.cat([self.model(values, inputs) for inputs in self.inputs])

    def log_likelihood(self, outputs: Float[Tensor, "N C"]) -> Float[Tensor, ""]:
        """Return Σ_n log p(y_n | f_n) in nats, summed in float64."""
        return self.likelihood.log_prob(outputs, self.targets, self.weights).double().sum()


def log_normal(white: Mapping[str, Tensor]) -> Float[Tensor, ""]:
    """Return log N(v; 0, I), in float64."""
    squares = torch.stack([long_dot(block.flatten(), block.flatten()) for block in white.values()]).sum()
    return -0.5 * (squares + math.log(2 * math.pi) * sum(block.numel() for block in white.values()))


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
            precisions[_as_glob(name)] = inputs / sw**2
        elif id(parameter) in biases:
            precisions[_as_glob(name)] = 1 / sb**2
        else:
            others.append(name)
    refuse(others, f"the fan-in of {others} is unknown: pass prior_precision as a mapping {{glob: number}}.")
    return precisions


def _as_glob(name: str) -> str:
    """Return a pattern that matches this name alone."""
    return name if not set(name) & set("*?[") else "".join(f"[{c}]" if c in "*?[" else c for c in name)
