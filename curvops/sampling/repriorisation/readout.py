"""The last linear layer of a network: how probes find and verify it, and which features it receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from curvops.network import Blocks, Model
from curvops.network.data.inputs import Inputs
from curvops.network.model.last_layer import layer_of_outputs

REMEDY = "make the network end with an nn.Linear whose output it returns, or change all weights alike with form='ntk'"


@dataclass(frozen=True, eq=False)
class Readout:
    """A linear readout f = s_w h Wᵀ + s_b b: inputs h of a layer, its weight W (C, d), bias b (C,) or none, factors s.

    An `nn.Linear` has s = 1; a custom layer may scale its parameters.
    """

    path: str
    layer: nn.Module
    weight: str
    bias: str | None
    factors: tuple[float, float]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the weight and the bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def features(
        self, model: Model, values: Mapping[str, Tensor], inputs: Inputs, scale: Mapping[str, Tensor]
    ) -> Float[Tensor, "n p"]:
        """Return Ψ = [s_w h a_w^-½, s_b a_b^-½], whose product with the white weights is f; the bias is last."""
        h = inputs_of(self.layer, model, values, inputs)[0][0]
        columns = self.factors[0] * h * scale[self.weight][0]
        if self.bias is None:
            return columns
        return torch.cat([columns, (self.factors[1] * scale[self.bias][:1]).expand(len(h), 1)], 1)

    def matrix(self, white: Mapping[str, Tensor]) -> Float[Tensor, "p C"]:
        """Join the readout's blocks into one matrix."""
        W = white[self.weight].mT
        return W if self.bias is None else torch.cat([W, white[self.bias].unsqueeze(0)])

    def blocks(self, matrix: Float[Tensor, "p C"]) -> Blocks:
        """Split a matrix into the readout's blocks, the inverse of `matrix`."""
        if self.bias is None:
            return {self.weight: matrix.mT}
        return {self.weight: matrix[:-1].mT, self.bias: matrix[-1]}


def inputs_of(
    layer: nn.Module, model: Model, values: Mapping[str, Tensor], inputs: Inputs
) -> tuple[list[Tensor], Tensor]:
    """Return the arguments of each call of the layer, as rows (n, d), and the model's outputs."""
    found: list[Any] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.extend([*args, *kwargs.values()])

    with model.lock:
        handle = layer.register_forward_pre_hook(note, with_kwargs=True)
        try:
            outputs = model(values, inputs)
        finally:
            handle.remove()
    return [each.flatten(1) if isinstance(each, Tensor) and each.ndim > 1 else each for each in found], outputs


def find_readout(model: Model, inputs: Inputs, last: str | None) -> Readout:
    """Find the layer named `last`, or the one whose output the model returns; check that it is a linear readout.

    Raises TypeError if the model is not a module or `last` is not a name, and ValueError for a layer that is not a
    linear readout of the model: shared, called several times, partly frozen, or followed by another operation.
    """
    if model.module is None:
        raise TypeError("reprior finds the readout of an nn.Module; for a pair (function, params) use form='ntk'.")
    path, layer = _layer_by_name(model, last) if last is not None else _layer_of_outputs(model, inputs)
    where = f"the readout {path or 'of the model itself'!r} ({type(layer).__name__})"
    own = dict(layer.named_parameters(recurse=False))
    at = {name: f"{path}.{name}" if path else name for name in own}
    matrices = [name for name in own if own[name].ndim == 2]
    vectors = [name for name in own if own[name].ndim == 1]
    if len(matrices) != 1 or len(vectors) > 1 or len(own) != len(matrices) + len(vectors):
        shapes = ", ".join(f"{name} {tuple(parameter.shape)}" for name, parameter in own.items()) or "no parameters"
        raise ValueError(f"{where} has {shapes}; expected a weight (C, d) and at most a bias (C,): {REMEDY}.")
    frozen = [at[name] for name in own if at[name] not in model.selection.names]
    if frozen:
        raise ValueError(f"{where}: {frozen} are to be sampled but require no gradient; call requires_grad_().")
    readout = Readout(path, layer, at[matrices[0]], at[vectors[0]] if vectors else None, (1.0, 1.0))
    return _with_factors(readout, model, inputs, where)


def _layer_by_name(model: Model, last: Any) -> tuple[str, nn.Module]:
    assert model.module is not None
    parts = dict(model.module.named_modules())
    if last not in parts:
        linear = [name for name, part in parts.items() if isinstance(part, nn.Linear)]
        raise ValueError(f"last={last!r} names no module of the model; its linear layers are {linear}.")
    return last, parts[last]


def _layer_of_outputs(model: Model, inputs: Inputs) -> tuple[str, nn.Module]:
    assert model.module is not None
    layer = layer_of_outputs(model, inputs)
    if layer is None:
        raise ValueError(f"the model has no linear readout: no single layer's output is the model's output; {REMEDY}.")
    return next(name for name, part in model.module.named_modules() if part is layer), layer


@torch.no_grad()
def _with_factors(readout: Readout, model: Model, inputs: Inputs, where: str) -> Readout:
    """Return the readout with its factors, measured at random weights and checked; two forward passes per parameter."""
    values = model.values
    drawn = torch.Generator(model.theta.device).manual_seed(0)
    probes = {
        name: torch.randn(values[name].shape, generator=drawn, dtype=model.theta.dtype, device=model.theta.device)
        for name in readout.names
    }
    zeros = {name: torch.zeros_like(probe) for name, probe in probes.items()}

    def outputs(**changed: Tensor) -> tuple[Tensor, Tensor]:
        given, f = inputs_of(readout.layer, model, {**values, **zeros, **changed}, inputs)
        tensors = [each for each in given if isinstance(each, Tensor)]
        if len(given) != 1 or not tensors:
            raise ValueError(f"{where} is called several times, or with several arguments, in one pass: {REMEDY}.")
        return tensors[0], f

    h, offset = outputs()
    W = probes[readout.weight]
    if h.shape != (len(offset), W.shape[1]) or offset.shape[1] != W.shape[0]:
        raise ValueError(f"{where} does not return the model's output, {tuple(offset.shape)}: {REMEDY}.")
    expected = {readout.weight: h @ W.mT}
    if readout.bias is not None:
        expected[readout.bias] = probes[readout.bias].expand_as(offset)
    factors, total = [], torch.zeros_like(offset)
    for name, product in expected.items():
        found = outputs(**{name: probes[name]})[1].double()
        factor = float((found * product).sum() / product.double().square().sum())
        factors.append(1.0 if abs(factor - 1) < 8 * model.eps else factor)  # rounding only
        total = total + factors[-1] * product
    together = outputs(**probes)[1]
    slack = model.eps**0.5 * (together.abs().max() + h.abs().max())
    linear = ((together - total).abs() <= slack).all() & (offset.abs() <= slack).all()  # False for NaN
    if not bool(linear) or 0.0 in factors:
        raise ValueError(
            f"{where} is not linear in its parameters, or another operation follows it, or its inputs are zero or not "
            f"finite: the outputs are not its inputs times its weight plus its bias; {REMEDY}."
        )
    return Readout(readout.path, readout.layer, readout.weight, readout.bias, (factors[0], (*factors, 1.0)[1]))
