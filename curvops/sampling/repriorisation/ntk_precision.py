"""The prior of the tangent-kernel limit of wide networks: each layer's variance over its fan-in."""

from __future__ import annotations

from typing import Any

from torch import nn

from curvops.checks import checked_number
from curvops.network.model.model import unwrapped

FAN_IN_FIRST = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *FAN_IN_FIRST)


def ntk_precision(model: nn.Module, weight_std: float = 2**0.5, bias_std: float = 1.0) -> dict[str, float]:
    """Return prior precisions fan_in/σ_w² for weights and 1/σ_b² for biases, by name: a `prior_precision=`.

    Under them θ = σ_w v/√fan_in (and σ_b v) with v ~ N(0, I): the tangent-kernel scaling (Jacot et al. 2018) for the
    weights as the model stores them.

    Args:
        model: a network of linear and convolutional layers, which are identified by their class. Frozen parameters are
            left out.
        weight_std: σ_w; √2 keeps the size of activations through rectified layers.
        bias_std: σ_b.

    Raises:
        TypeError: the model is not a module, or a standard deviation not a number.
        ValueError: a parameter of another layer (a normalisation, an embedding): add {glob: number} for it to a mapping
            of your own; a standard deviation that is not positive and finite.

    >>> import curvops as co
    >>> co.sampling.ntk_precision(nn.Linear(8, 2), weight_std=2.0, bias_std=0.1)
    {'weight': 2.0, 'bias': 99.99999999999999}
    """
    found: dict[str, float] = {}
    module: Any = unwrapped(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}; for a function give a mapping.")
    sw, sb = checked_number("weight_std", weight_std), checked_number("bias_std", bias_std)
    known = {id(layer.weight): layer for layer in module.modules() if isinstance(layer, LAYERS)}
    biases = {id(layer.bias) for layer in known.values() if layer.bias is not None}
    others = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if (layer := known.get(id(parameter))) is not None:
            outputs = layer.out_channels if isinstance(layer, FAN_IN_FIRST) else parameter.shape[0]
            inputs = parameter.numel() // outputs
            found[_as_glob(name)] = inputs / sw**2
        elif id(parameter) in biases:
            found[_as_glob(name)] = 1 / sb**2
        else:
            others.append(name)
    if others:
        raise ValueError(
            f"{others} belong to no linear or convolutional layer, so that their fan-in is not known: give "
            "prior_precision a mapping {glob: number} that names each parameter, these too."
        )
    return found


def _as_glob(name: str) -> str:
    """Return a pattern that matches this name alone."""
    return name if not set(name) & set("*?[") else "".join(f"[{c}]" if c in "*?[" else c for c in name)
