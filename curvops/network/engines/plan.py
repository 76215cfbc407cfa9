"""The rule by which an engine is chosen for a product: expected costs in gradients. No other module decides this.

Unit: one loss gradient of the batch, 3 F multiply-adds if a forward pass takes F. By count:

- streamed: a JVP and a VJP, each with its own forward pass, 2 gradients per vector; nothing to build;
- recorded: the same without the forward passes, 4/3 (5/3 if J v comes from a double backward pass). To build: a forward
  pass, one with tangents, and a product that checks it;
- layerwise: two products per layer, 2/3 in all, and the stored numbers are read once in each direction. To build: a
  forward pass and C backward passes, each of which visits the layers anew where δ exceeds a CPU's cache. Layers without
  a rule add a recorded product;
- formed: the rows of J, if parameters have no layer rule: a product reads C·D numbers a point in each direction. To
  build: a forward pass and C backward passes for each point alone. It pays if outputs are few.

For a Fisher from residuals the layerwise engine stores one row per sample and point instead of C (`for_rows`): building
it takes 2/3 of a gradient for any C, and it pays from the first product.

To these counts the device's `Rates` add the time of reading stored numbers, which all vectors of a block share, and of
visiting a layer, whatever its size: once per vector by autodiff, once per block by the layerwise engine. Visits are
most of the cost of small networks, and on a GPU of all but large ones.

The rule takes the engine that costs least for `MANY` vectors in blocks of `WIDTH`, since a second product means a
solver, and that engine stays. A single product streams instead, unless it pays for the engine itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from curvops.ambient import CACHE_BYTES, SMALL_BYTES
from curvops.network.engines.autodiff import Pushes
from curvops.network.engines.layer_calls import Layer
from curvops.summary import Table, Tabular

EngineKind = Literal["streamed", "recorded", "layerwise", "formed"]
EngineChoice = Literal["auto", "streamed", "autodiff", "layerwise"]
MANY, WIDTH = 50, 4
"""The number of vectors that an engine is built for, and how many of them it multiplies at a time."""
STREAMED, STREAMED_TWICE, REPLAYED, DOUBLE_BACKWARD, RECORDING = 2.0, 3.0, 4 / 3, 5 / 3, 7 / 3
VISITS: dict[EngineKind, tuple[float, float]] = {
    "streamed": (3.0, 0.0),
    "recorded": (1.0, 8.0),
    "layerwise": (0.75, 6.0),
    "formed": (0.25, 0.0),
}
"""How often a product visits the layers, and building the engine (for formed rows besides the passes of each point), as
measured, in units of a product by the recorded engine."""


@dataclass(frozen=True)
class Rates:
    """The rates of a device, in multiply-adds of a large matrix product in the same time."""

    read: float
    """Reading one number from memory."""
    visit: float
    """Visiting a layer, besides its arithmetic: Python, and the launches of its operations."""


CPU = Rates(read=12.0, visit=2e7)
"""As measured on two cores of AMD EPYC and Intel Xeon."""
GPU = Rates(read=40.0, visit=1.7e9)
"""As predicted from the data sheet of an H100, not measured: 33.5e12 multiply-adds and 3.35e12 bytes a second in single
precision (half as many of both numbers in double precision), and ten operations a visit that Python issues in 5 µs
each."""


@dataclass(frozen=True, eq=False)
class Routes:
    """How J v is computed for some parameters, and what a recorded pass keeps. Bytes are per point.

    `replayed` says whether a stored linearisation replays forward mode, `recordable` whether it may be stored at all
    (rows are computed anew at each product). Until recording has been `tried`, both are assumed, with the bytes of the
    graph alone. `made_bytes` are those of the results of all operations of a pass, `multiply_adds` (per point) those of
    its matrix products and convolutions. `why` is the reason why only rows remain, without forward mode and double
    backward.
    """

    pushes: Pushes
    replayed: bool
    recordable: bool
    saved_bytes: int
    recorded_bytes: int
    made_bytes: int
    multiply_adds: int
    why: str = ""
    tried: bool = True


@dataclass(frozen=True)
class KeptLayer:
    """The numbers per point that the layerwise engine keeps of a layer, and the multiply-adds of a product each way.

    A product reads `read` numbers besides the `inputs` a: δ, slopes or the layer's Jacobian; none for the last layer.
    """

    what: str
    read: int
    inputs: int
    multiply_adds: int


def kept_layer(layer: Layer, columns: int) -> KeptLayer:
    """Return what is kept of a layer, for this number of rows per point."""
    out, work = layer.output[1:].numel(), layer.multiply_adds
    if layer.is_last:
        return KeptLayer("a", 0, layer.inputs, work)
    if layer.feeds_last:  # products go through the last layer's weight
        return KeptLayer("a and slopes", out, layer.inputs, columns * out + work)
    if layer.as_rows(columns):
        return KeptLayer("Jacobian rows", columns * layer.size, 0, columns * layer.size)
    return KeptLayer("a and δ", columns * out, layer.inputs, columns * out + work)


@dataclass(frozen=True, eq=False)
class Plan(Tabular):
    """The choice of engines for products with J, and its reasons; `print(lin.plan)` shows a table.

    `layers` have rules: with every engine, their rows and Kronecker factors come from the rules, and the layerwise
    engine can multiply by them. `others` maps the parameters without a rule to the reason. Bytes are per data point;
    `in_use` counts the batches for which an engine is kept.
    """

    engine: EngineChoice
    layers: tuple[Layer, ...]
    others: dict[str, str]
    num_outputs: int
    itemsize: int
    size: int  # the numbers of all selected parameters
    routes: Routes  # of all selected parameters
    rest: Routes | None  # of `others`
    memory_budget: int
    rates: Rates
    single: bool = True  # the model can be run on any point alone
    half_base: bool = False  # frozen tensors round more coarsely than the selected parameters' dtype
    unlike: frozenset[str] = frozenset()  # parameters whose layers ran differently in a batch than in the first points
    in_use: dict[str, int] = field(default_factory=dict)

    @cached_property
    def forward(self) -> int:
        """The multiply-adds of one forward pass of one point, as far as they are known."""
        of_layers = sum(layer.multiply_adds for layer in self.layers)
        return max(of_layers, self.routes.multiply_adds) if self.others else of_layers

    @cached_property
    def kept_layers(self) -> tuple[KeptLayer, ...]:
        """The numbers that the layerwise engine keeps of each layer."""
        return tuple(kept_layer(layer, self.num_outputs) for layer in self.layers)

    @cached_property
    def layerwise_bytes(self) -> int:
        """The bytes per point that the layerwise engine keeps."""
        numbers = sum(layer.read + layer.inputs for layer in self.kept_layers)
        return numbers * self.itemsize + (self.rest.recorded_bytes if self.rest and self.rest.recordable else 0)

    @cached_property
    def sensitivity_bytes(self) -> int:
        """The bytes per point of δ, the sensitivities of all layers, for one column."""
        return sum(layer.output[1:].numel() for layer in self.layers) * self.itemsize

    def for_rows(self, rows: int) -> Plan:
        """Return the plan of Lᵀ J, with this number of rows per point instead of the outputs; L is the last δ."""
        layers = tuple(dataclasses.replace(layer, is_last=False, feeds_last=False) for layer in self.layers)
        return dataclasses.replace(self, num_outputs=rows, layers=layers)

    def bytes_needed(self, kind: EngineKind) -> int:
        """Return the bytes per point that an engine keeps."""
        if kind == "formed":
            return self.num_outputs * self.size * self.itemsize
        return {"streamed": 0, "recorded": self.routes.recorded_bytes, "layerwise": self.layerwise_bytes}[kind]

    @cached_property
    def most_bytes(self) -> int:
        """The largest number of bytes per point that an engine keeps, among the candidates for any number of points."""
        return max(self.bytes_needed(kind) for kind in self.candidates() if kind != "formed")

    @property
    def together(self) -> int:
        """The number of backward passes of a point alone that go together."""
        return SMALL_BYTES // max(1, self.routes.saved_bytes)

    def records(self, kind: EngineKind) -> bool:
        """Return whether an engine keeps a recorded pass, for all parameters or for those without a layer rule."""
        return kind == "recorded" or (kind == "layerwise" and self.rest is not None and self.rest.recordable)

    @property
    def is_last_layer(self) -> bool:
        """Whether the only selected layer is the one whose outputs are the model's: J then takes one forward pass."""
        return bool(self.layers) and not self.others and len(self.layers) == 1 and self.layers[0].is_last

    def candidates(self) -> tuple[EngineKind, ...]:
        """Return the engines that may be used, before memory is considered."""
        recorded: tuple[EngineKind, ...] = ("recorded",) if self.routes.recordable else ()
        if self.engine == "streamed":
            return ("streamed",)
        formed: tuple[EngineKind, ...] = ("formed",) if self.engine == "auto" and self.others and self.single else ()
        if self.engine == "autodiff" or self.unlike or not self.layers:
            return ("streamed", *recorded, *formed)
        return ("streamed", "layerwise") if self.prefers_layerwise else ("streamed", *recorded, "layerwise", *formed)

    @property
    def prefers_layerwise(self) -> bool:
        """Whether the layerwise engine is used if its bytes fit: the user chose it, or it is the only accurate one.

        On a base in half precision every pass rounds anew, J and Jᵀ are not adjoint, and solvers stagnate; the
        layerwise engine rounds J once. It also needs only first derivatives: if there are no others, building it costs
        less than one product by rows. For a last layer J is the features, which the first pass computes anyway.
        """
        alone = self.half_base or self.routes.pushes == "rows" or self.is_last_layer
        wants_layerwise = self.engine == "layerwise" or (self.engine == "auto" and alone and not self.others)
        return wants_layerwise and not self.unlike

    def per_vector(self, kind: EngineKind, columns: int = 1) -> float:
        """Return the expected gradients per product with one vector, in a block of `columns`."""
        if kind == "formed":
            return 2 * self.num_outputs * self.size * (1 + self.rates.read / columns) / (3 * max(1, self.forward))
        if kind != "layerwise":
            return self._autodiff(self.routes, columns, is_recorded=kind == "recorded")
        work = sum(layer.multiply_adds + self.rates.read * layer.read / columns for layer in self.kept_layers)
        rest = 0.0 if self.rest is None else self._autodiff(self.rest, columns, is_recorded=self.rest.recordable)
        return 2 * work / (3 * max(1, self.forward)) + rest

    def _autodiff(self, routes: Routes, columns: int, is_recorded: bool) -> float:
        if is_recorded:
            return REPLAYED if routes.replayed else DOUBLE_BACKWARD
        if routes.pushes == "rows":  # 1 forward, C backward passes a block, a dot product per vector, the pull
            return (1 + 2 * self.num_outputs) / (3 * columns) + self.num_outputs / 3 + 1
        return STREAMED if routes.pushes == "forward mode" else STREAMED_TWICE

    def build(self, kind: EngineKind) -> float:
        """Return the expected gradients for building an engine for a batch."""
        if kind == "formed":
            return (1 + 2 * self.num_outputs) / 3
        if kind != "layerwise":
            return 0.0 if kind == "streamed" else RECORDING
        return (1 + self.backward) / 3 + (RECORDING if self.records(kind) else 0.0)

    @property
    def backward(self) -> int:
        """The number of backward passes that build the layerwise engine."""
        return 0 if all(layer.is_last or layer.feeds_last for layer in self.layers) else self.num_outputs

    def choose(self, points: int, free: int, single: int | None = None) -> EngineKind:
        """Return the engine for a batch of `points` with the least cost for many vectors, if `free` bytes are left.

        For a `single` product, with a block of so many vectors, an engine that costs more than streaming is not built.
        """
        fitting = [kind for kind in self.candidates() if points * self.bytes_needed(kind) <= max(0, free)]
        if self.prefers_layerwise and "layerwise" in fitting:
            return "layerwise"
        best = min(fitting, key=lambda kind: self.cost(kind, points, MANY, WIDTH))
        if single is None or self.cost(best, points, single, single) < self.cost("streamed", points, single, single):
            return best
        return "streamed"

    def cost(self, kind: EngineKind, points: int, vectors: int, width: int) -> float:
        """Return the gradients of a batch for building an engine and multiplying `vectors` in blocks of `width`."""
        visits = VISITS[kind][0]
        if kind == "layerwise":
            visits = visits / max(1, width) + (0.0 if self.rest is None else VISITS["recorded"][0])
        products = vectors * (self.per_vector(kind, max(1, width)) + self.overhead(visits, points))
        return round(self.cost_to_build(kind, points) + products, 9)  # rounded: ties go to the kind that keeps least

    def cost_to_build(self, kind: EngineKind, points: int) -> float:
        """Return `build` with the visits of layers: for rows, the passes of each point visit them anew.

        There a point's backward passes go together, which makes each an eighth of a visit, as measured. Those of the
        layerwise engine share their visits as far as their δ fit a CPU's cache together.
        """
        alone = points * (1 + self.num_outputs / 8) if kind == "formed" else 0.0
        if kind == "layerwise" and self.rates is CPU:
            alone = self.backward / 2 * min(1.0, points * self.sensitivity_bytes / CACHE_BYTES)
        return self.build(kind) + self.overhead(VISITS[kind][1] + alone, points)

    def overhead(self, visits: float, points: int) -> float:
        """Return the cost of that many visits of all layers, in gradients of a batch, whatever the layers' sizes."""
        layers = len(self.layers) + len({name.rpartition(".")[0] for name in self.others})
        return visits * self.rates.visit * layers / (3 * max(1, self.forward * points))

    __repr__ = Tabular.as_text

    def _tables(self) -> list[Table]:
        rows: list[tuple[str, ...]] = []
        instead = "a layer ran differently in a batch" if self.unlike else "by the engine option"
        layerwise = "layerwise" in self.candidates()
        for layer, counts in zip(self.layers, self.kept_layers):
            what, size, cost = f"autodiff: {instead}", "", ""
            if layerwise:
                work = counts.multiply_adds + self.rates.read * counts.read
                what = f"{counts.what}, ragged rows" if layer.is_ragged else counts.what
                cost = f"{2 * work / (3 * max(1, self.forward)):.2f}"
                size = f"{(counts.read + counts.inputs) * self.itemsize:,}"
            rows.append((layer.path or "(model)", f"{layer.size:,}", what, size, cost))
        rows += [(name, "", f"autodiff: {why}", "", "") for name, why in self.others.items()]
        head = ("layer", "parameters", "kept as", "bytes per point", "gradients per product")
        return [Table(head, rows, self._remarks())]

    def _remarks(self) -> list[str]:
        lines = [
            f"{kind}: {self.per_vector(kind):.2f} gradients per product, {self.build(kind):.1f} to build, "
            f"{self.bytes_needed(kind):,} bytes per point"
            for kind in self.candidates()
        ]
        if self.routes.why:
            serves = "the layerwise engine, from first derivatives only" if self.prefers_layerwise else "rows of J"
            lines.append(f"{self.routes.why}: products with J by {serves}.")
        served = ", ".join(f"{count} batches {kind}" for kind, count in sorted(self.in_use.items()) if count)
        now = f"engine={self.engine!r}, memory budget {self.memory_budget:,} bytes; now: {served or 'nothing'}"
        return [*lines, now]
