"""The fast engine if rows are few: J of one batch from each layer's input a and output sensitivity δ.

One forward pass records a; one backward pass per output records δ. Row (n, c) of J restricted to a layer is
Σ_t δ[n,c,t] ⊗ a[n,t], so that a product is a few matrix products per layer and the Jacobian is never formed. If the
layer's own rows are fewer numbers than a and δ (early convolutions, norms), they are kept instead. For the layer whose
output is the model's, δ is the identity: only a is kept, without a backward pass. For a layer that only an elementwise
function separates from the last layer, with weight W, δ[n,c] = W[c] ∘ m[n]: the slopes m are kept, one number per unit.

The engine also multiplies by any R rows Lᵀ J per point instead of the C rows of J: the cotangents are then the
columns of L, not unit vectors. For a Fisher from residuals, R is one per sample, whatever C.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from curvops.ambient import CACHE_BYTES
from curvops.network.data.inputs import move_tensor
from curvops.network.engines.autodiff import Recorded, Streamed
from curvops.network.engines.layer_calls import (
    Call,
    Layer,
    Recording,
    bytes_of_one,
    sensitivities,
)
from curvops.network.engines.rules import Local
from curvops.network.likelihoods.output_fisher import IDENTITY, Root, RootJacobian
from curvops.network.model.model import Model
from curvops.network.model.parameters import PIECE_BYTES, Blocks, FlatLayout


@dataclass(frozen=True, eq=False)
class Part(ABC):
    """One call of a layer as an engine keeps it: the rows of J for its parameters, which multiply blocks of vectors."""

    layer: Layer

    @abstractmethod
    def push(self, tangents: Local) -> Float[Tensor, "K n R"]:
        """Return the rows times K tangents by the layer's own names."""

    @abstractmethod
    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Local:
        """Return the adjoint's images, by the same names."""

    def times(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n R"]:
        """Return the rows times K tangents by parameter name."""
        return self.push({local: tangents[name] for local, name in self.layer.names.items()})

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes that are kept."""

    @cached_property
    def work(self) -> int:
        """The numbers that a product makes for each vector."""
        return self.layer.output.numel()


def at_once(column_bytes: int, is_cuda: bool) -> int:
    """Return how many columns are computed at a time, on a CPU such that what is made of them takes `PIECE_BYTES`."""
    return sys.maxsize if is_cuda else max(1, PIECE_BYTES // max(1, column_bytes))


def push_some(push: Callable[[Local], Tensor], block: Local, width: int) -> Tensor:
    """Return the images of a block of tangents, `width` of them at a time."""
    pieces = zip(*(tangents.split(width) for tangents in block.values()))
    return torch.cat([push(dict(zip(block, piece))) for piece in pieces])


@dataclass(frozen=True, eq=False)
class Factors(Part):
    """One call of a layer, kept as its input a and sensitivity δ (n, R, *out): the rows of J are sums of products.

    With a `weight` W (C, out), that of the last layer, `delta` is the slopes m (n, out) between the two: δ = W ∘ m.
    `inside` (n, T) says which entries of a table of ragged rows are rows, and `positions` (n, T) which position of the
    outputs depends on each of them (negative if none does, or several); without `positions` this is not known.
    """

    layer_input: Tensor
    delta: Tensor
    weight: Float[Tensor, "C out"] | None = None
    inside: Bool[Tensor, "n T"] | None = None
    positions: Int[Tensor, "n T"] | None = None

    def push(self, tangents: Local) -> Float[Tensor, "K n R"]:
        z = self.layer.rule.push(self.layer.module, self.layer_input, tangents)
        if self.weight is None:
            return torch.bmm(self.delta.flatten(2), z.flatten(2).mT).permute(2, 0, 1)
        through = (z * self.delta.unsqueeze(1)).flatten(0, 1)
        return (through @ self.weight.mT).unflatten(0, z.shape[:2]).transpose(0, 1)

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Local:
        u = cotangents.transpose(0, 1)
        if self.weight is None:
            s = torch.bmm(u, self.delta.flatten(2)).unflatten(2, self.delta.shape[2:])
        else:
            s = (u.flatten(0, 1) @ self.weight).unflatten(0, u.shape[:2]).mul_(self.delta.unsqueeze(1))
        return self.layer.rule.pull(self.layer.module, self.layer_input, s, tuple(self.layer.names))

    def of_rows(self, values: Shaped[Tensor, "n *s"]) -> Shaped[Tensor, "n *t"]:
        """Return a mask or weights of points or positions for ragged rows; in doubt, the largest of their point."""
        if self.inside is None or values.ndim == 1:
            return values
        of_points = values.amax(1, keepdim=True)
        if self.positions is None:
            return of_points.expand(self.inside.shape)
        return values.gather(1, self.positions.clamp_min(0)).where(self.positions >= 0, of_points)

    def left(self) -> Tensor | None:
        """See `Rule.left`."""
        return self.layer.rule.left(self.layer.module, self.layer_input, self.delta, tuple(self.layer.names))

    def right(self) -> Tensor:
        """See `Rule.right`."""
        return self.layer.rule.right(self.layer.module, self.layer_input, tuple(self.layer.names))

    def rows(self, points: slice) -> Blocks:
        """Return the rows of some points by parameter name, (n, R, *shape)."""
        layer = self.layer
        rows = layer.rule.rows(layer.module, self.layer_input[points], self.delta[points], tuple(layer.names))
        return {layer.names[local]: row for local, row in rows.items()}

    def at(self, points: slice) -> Factors:
        """Return the rows of some points."""
        inside = None if self.inside is None else self.inside[points]
        positions = None if self.positions is None else self.positions[points]
        return replace(
            self, layer_input=self.layer_input[points], delta=self.delta[points], inside=inside, positions=positions
        )

    def to(self, dtype: torch.dtype) -> Factors:
        """Return the rows from a and δ in another dtype."""
        inputs = move_tensor(self.layer_input, None, dtype)
        weight = None if self.weight is None else self.weight.to(dtype)
        return replace(self, layer_input=inputs, delta=self.delta.to(dtype), weight=weight)

    def widened(self, positions: int) -> Factors:
        """Return a table of ragged rows with this number of positions a point."""
        if self.inside is None or positions == self.inside.shape[1]:
            return self
        more = positions - self.inside.shape[1]
        inputs = F.pad(self.layer_input, (0, 0) * (self.layer_input.ndim - 2) + (0, more))
        delta = F.pad(self.delta, (0, 0) * (self.delta.ndim - 3) + (0, more))
        return replace(self, layer_input=inputs, delta=delta, inside=F.pad(self.inside, (0, more)), positions=None)

    @property
    def nbytes(self) -> int:
        return self.delta.nbytes + self.layer_input.nbytes

    @cached_property
    def work(self) -> int:
        # Through a weight nothing is read again for some of the vectors, so that fewer of them stay in a cache.
        return self.layer.output.numel() * (1 if self.weight is None else 8)


@dataclass(frozen=True, eq=False)
class Rows(Part):
    """A layer kept as its own rows, (n, R, p), with its p parameters side by side."""

    jacobian: Tensor

    def push(self, tangents: Local) -> Float[Tensor, "K n R"]:
        v = torch.cat([tangents[local].flatten(1) for local in self.layer.names], 1)
        return (v @ self.jacobian.flatten(0, 1).mT).unflatten(1, self.jacobian.shape[:2])

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Local:
        return self._layout.named(cotangents.flatten(1) @ self.jacobian.flatten(0, 1))

    def named_rows(self) -> Blocks:
        """Return the rows by parameter name, (n, R, *shape)."""
        return {self.layer.names[local]: rows for local, rows in self._layout.named(self.jacobian).items()}

    @property
    def _layout(self) -> FlatLayout:
        return FlatLayout(tuple(self.layer.names), tuple(map(self.layer.shape_of, self.layer.names)))

    @property
    def nbytes(self) -> int:
        return self.jacobian.nbytes

    @cached_property
    def work(self) -> int:
        return 0


@dataclass(frozen=True, eq=False)
class Features(Part):
    """The layer whose outputs are the model's, kept as its input a; its δ is the identity, for any C."""

    layer_input: Tensor

    @property
    def outputs(self) -> int:
        """The number of outputs per point."""
        return self.layer.output[1:].numel()

    def inputs(self) -> Float[Tensor, "m q"] | None:
        """Return the layer's inputs at all positions, with a one appended for its bias; None for a bias alone."""
        if "weight" not in self.layer.names:
            return None
        a = self.layer_input.flatten(0, -2)
        return self.layer.rule.right(self.layer.module, a, tuple(self.layer.names))[:, 0, 0]

    @property
    def outputs_each(self) -> int:
        """The number C of outputs per position."""
        return self.layer.output[-1]

    def push(self, tangents: Local) -> Float[Tensor, "K n R"]:
        return self.layer.rule.push(self.layer.module, self.layer_input, tangents).flatten(2).transpose(0, 1)

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Local:
        s = cotangents.transpose(0, 1).unflatten(2, self.layer.output[1:])
        return self.layer.rule.pull(self.layer.module, self.layer_input, s, tuple(self.layer.names))

    def at(self, points: slice) -> Features:
        """Return the rows of some points."""
        return replace(self, layer_input=self.layer_input[points])

    @property
    def nbytes(self) -> int:
        return self.layer_input.nbytes


class Layerwise:
    """J of one batch, or Lᵀ J for a root L, as layer parts; an autodiff part covers the parameters in `rest`."""

    kind = "layerwise"

    def __init__(
        self,
        model: Model,
        recording: Recording,
        rest: Recorded | Streamed | None,
        chunk_bytes: int,
        root: Root = IDENTITY,
    ) -> None:
        self.model = model
        self.rest = rest if rest is None or root is IDENTITY else RootJacobian(rest, root)
        outputs, calls, misfits = recording
        assert not misfits  # they have no rule
        self.outputs = outputs.detach()
        self.num_columns = root.num_columns(outputs.shape[1])
        self.parts = _layer_jacobians(model, outputs, calls, chunk_bytes, root)
        self.nbytes = sum(part.nbytes for part in self.parts) + (rest.nbytes if rest is not None else 0)
        self._zero = {name: value for name, value in model.values.items() if rest is None or name not in rest.names}

    @property
    def features(self) -> Features | None:
        """The only part, if it is the last layer's input."""
        features = self.parts[0] if len(self.parts) == 1 and self.rest is None else None
        return features if isinstance(features, Features) else None

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n R"]:
        """Return Lᵀ J V for K tangents by name, (K, *shape) each."""
        with torch.no_grad():
            total = None if self.rest is None else self.rest.push(tangents)
            for part in self.parts:
                block = {local: tangents[name] for local, name in part.layer.names.items()}
                first = next(iter(block.values()))
                width = at_once(part.work * first.element_size(), first.is_cuda)
                pushed = part.push(block) if len(first) <= width else push_some(part.push, block, width)
                total = pushed if total is None else total + pushed
        if total is None:
            columns = next(iter(tangents.values())).shape[0]
            return self.outputs.new_zeros(columns, len(self.outputs), self.num_columns)
        return total

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Blocks:
        """Return Jᵀ L U for K cotangents, by name, (K, *shape) each."""
        with torch.no_grad():
            total = Blocks() if self.rest is None else self.rest.pull(cotangents)
            for part in self.parts:
                width = at_once(part.work * cotangents.element_size(), cotangents.is_cuda)
                if len(cotangents) <= width:
                    pulled = part.pull(cotangents)
                else:
                    pieces = [part.pull(some) for some in cotangents.split(width)]
                    pulled = {local: torch.cat([piece[local] for piece in pieces]) for local in part.layer.names}
                for local, gradient in pulled.items():
                    name = part.layer.names[local]
                    total[name] = total[name] + gradient if name in total else gradient
            for name, value in self._zero.items():
                if name not in total:  # a layer whose branch does not reach the outputs
                    total[name] = value.new_zeros(cotangents.shape[0], *value.shape)
        return total


def _layer_jacobians(model: Model, outputs: Tensor, calls: list[Call], chunk_bytes: int, root: Root) -> list[Part]:
    """Return the Jacobian of each call, with the columns' backward passes in chunks of at most `chunk_bytes` of δ."""
    n, columns = len(outputs), root.num_columns(outputs.shape[1])
    last = [call for call in calls if call.layer.is_last and root is IDENTITY]
    before = [call for call in calls if call.layer.feeds_last and root is IDENTITY]
    calls = [call for call in calls if call not in last and call not in before]
    as_rows = [call.layer.as_rows(columns) for call in calls]
    sizes = [(call.layer.size,) if rows else call.layer.output[1:] for call, rows in zip(calls, as_rows)]
    stores = [outputs.new_empty(n, columns, *size) for size in sizes]
    reached = [False] * len(calls)
    if not outputs.is_cuda:
        chunk_bytes = min(chunk_bytes, CACHE_BYTES)  # batched passes copy, and gain nothing beyond a cache
    step = max(1, chunk_bytes // max(1, bytes_of_one(calls, outputs.element_size())))
    for start in range(0, columns if calls else 0, step):
        some = slice(start, min(start + step, columns))
        with torch.no_grad():
            cotangents = root.columns(outputs.detach(), some.start, some.stop)
        deltas = sensitivities(model, outputs, calls, cotangents)
        with torch.no_grad():
            for i, delta in enumerate(deltas):
                reached[i] |= delta is not None  # a custom function may return nothing for zeros
                rows = delta if delta is None or not as_rows[i] else _rows(calls[i], delta)
                stores[i][:, some] = 0 if rows is None else rows
        del deltas, delta, rows  # before the next pass
    parts = [
        Rows(call.layer, store) if rows else Factors(call.layer, call.layer_input, store)
        for call, store, rows, is_reached in zip(calls, stores, as_rows, reached)
        if is_reached
    ]
    feeding = [_slopes(model, call, last[0]) for call in before]
    return [*parts, *feeding, *(Features(call.layer, call.layer_input) for call in last)]


def _slopes(model: Model, call: Call, last: Call) -> Factors:
    """Return the part of a call that feeds the last layer, by one backward pass between the two."""
    h, layer = last.a, last.layer
    with model.holding(model.leaves()):
        (slopes,) = torch.autograd.grad(h, call.edge, torch.ones_like(h), retain_graph=True)
    weight = model.values[layer.names["weight"]]
    weight = weight.mT if layer.rule.matrix_is_transposed else weight
    return Factors(call.layer, call.layer_input, slopes.detach(), weight)


def _rows(call: Call, delta: Tensor) -> Tensor:
    layer = call.layer
    rows = layer.rule.rows(layer.module, call.layer_input, delta, tuple(layer.names))
    return torch.cat([rows[local].flatten(2) for local in layer.names], 2)
