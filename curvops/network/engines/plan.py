"""The cost rule: which engine serves a product, in gradients, decided here and nowhere else.

Unit: one loss gradient of the batch, 3 F multiply-adds where a forward pass takes F. By count:

- streamed: a JVP and a VJP, each with its own forward pass, 2 gradients a vector, nothing built;
- recorded: the same without the forward passes, 4/3 (a double backward push makes it 5/3), after a forward pass, one
  with tangents and a product that proves it; 4 F less two input gradients of the first layer, and no less for an exact
  GGN by these passes (docs/engines.md);
- layerwise: two products a layer, 2/3 in all, plus reading what is kept once each way, after a forward pass, C backward
  passes and the layer Jacobians to build. Layers without a rule add a recorded product.

Of a Fisher from residuals the layerwise engine keeps one row a sample and point in place of C (`for_rows`): it is built
for 2/3 of a gradient whatever C, and pays from the first product.

Numbers that are only read (δ, layer Jacobians) cost `READ` multiply-adds each, however many vectors share the reading.
What a layer costs whatever its size is `OVERHEAD` multiply-adds each time that it is gone through: once a vector by
autodiff, once a block by the layerwise engine. Small networks cost little else.

As many vectors are expected to follow, in blocks as wide, as were asked for since one engine last took another's place
(the ski-rental bound: never twice the best cost; a solver whose block narrows does not make two engines take turns).
After the first product they are `SOLVER` at least: who asks twice solves, and an engine is built while it still pays.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from curvops.network.engines.layerwise import Layer
from curvops.network.engines.routes import Routes

EngineKind = Literal["streamed", "recorded", "layerwise"]
EngineChoice = Literal["auto", "streamed", "autodiff", "layerwise"]
READ = 8
SOLVER = 8
STREAMED, STREAMED_TWICE, REPLAYED, DOUBLE_BACKWARD = 2.0, 3.0, 4 / 3, 5 / 3
RECORDING = 7 / 3
OVERHEAD = 2e7
THROUGH: dict[EngineKind, float] = {"streamed": 3.0, "recorded": 1.0, "layerwise": 0.75}
"""How often a product goes through the layers, as measured beside the recorded engine: passes set the model up anew."""
THROUGH_TO_BUILD: dict[EngineKind, float] = {"streamed": 0.0, "recorded": 8.0, "layerwise": 6.0}


@dataclass(frozen=True, eq=False)
class Plan:
    """The choice of engines for products with J, and its reasons; `print(lin.plan)` shows a table.

    `layers` are those with rules, which rows and Kronecker factors are made by whatever engine multiplies with J, and
    which the layerwise engine can serve; `others` names the parameters without, with the reason.
    Bytes are per data point; `in_use` counts the batches that an engine is kept for.
    """

    engine: EngineChoice
    layers: tuple[Layer, ...]
    others: dict[str, str]
    num_outputs: int
    itemsize: int
    routes: Routes  # of all selected parameters
    rest: Routes | None  # of `others`
    memory_budget: int
    half_base: bool = False  # frozen tensors round more than the selected parameters' dtype does
    unlike: frozenset[str] = frozenset()  # those whose layers ran otherwise in a batch than in the first points
    in_use: dict[str, int] = field(default_factory=dict)

    @cached_property
    def forward(self) -> int:
        """Multiply-adds of one forward pass of one point, as far as they are known."""
        return sum(layer.multiply_adds for layer in self.layers)

    @cached_property
    def layerwise_bytes(self) -> int:
        """Bytes a point that the layerwise engine keeps."""
        kept = sum(self._numbers(layer) for layer in self.layers) * self.itemsize
        return kept + (self.rest.recorded_bytes if self.rest is not None and self.rest.recordable else 0)

    @cached_property
    def sensitivity_bytes(self) -> int:
        """Bytes a point of δ, the sensitivities of all layers, for one column."""
        return sum(layer.output[1:].numel() for layer in self.layers) * self.itemsize

    @property
    def recorded_bytes(self) -> int:
        """Bytes a point that the recorded autodiff engine keeps."""
        return self.routes.recorded_bytes

    def for_rows(self, rows: int) -> Plan:
        """Return the plan of Lᵀ J, with that many rows a point in place of the outputs: δ of the last layer is L."""
        layers = tuple(dataclasses.replace(layer, is_last=False) for layer in self.layers)
        return dataclasses.replace(self, num_outputs=rows, layers=layers)

    def bytes_needed(self, kind: EngineKind) -> int:
        """Return bytes a point that an engine keeps."""
        return {"streamed": 0, "recorded": self.recorded_bytes, "layerwise": self.layerwise_bytes}[kind]

    def records(self, kind: EngineKind) -> bool:
        """Return whether an engine keeps a recorded pass, for all parameters or for those without a layer rule."""
        return kind == "recorded" or (kind == "layerwise" and self.rest is not None and self.rest.recordable)

    @property
    def is_last_layer(self) -> bool:
        """Whether all that is selected is the layer whose outputs are the model's: one forward pass gives J."""
        return bool(self.layers) and not self.others and len(self.layers) == 1 and self.layers[0].is_last

    def candidates(self) -> tuple[EngineKind, ...]:
        """Return the engines that may serve, before memory is looked at."""
        recorded: tuple[EngineKind, ...] = ("recorded",) if self.routes.recordable else ()
        if self.engine == "streamed":
            return ("streamed",)
        if self.engine == "autodiff" or self.unlike or not self.layers:
            return ("streamed", *recorded)
        return ("streamed", "layerwise") if self.prefers_layerwise else ("streamed", *recorded, "layerwise")

    @property
    def prefers_layerwise(self) -> bool:
        """Whether the layerwise engine serves wherever its bytes fit: asked for, or alone in being accurate.

        On a base in half precision every pass rounds anew, and J and Jᵀ are no adjoints: solvers stagnate. The
        layerwise engine rounds J once. And it takes first derivatives alone: where there are no others, its build costs
        less than one product by rows. Of a last layer it is the features, which the first pass finds on its way.
        """
        alone = self.half_base or self.routes.pushes == "rows" or self.is_last_layer
        asked = self.engine == "layerwise" or (self.engine == "auto" and alone and not self.others)
        return asked and not self.unlike

    def per_vector(self, kind: EngineKind, columns: int = 1) -> float:
        """Expected gradients per product with one vector, in a block of `columns`."""
        if kind != "layerwise":
            return self._autodiff(self.routes, columns, kept=kind == "recorded")
        work = sum(self._product(layer) + READ * self._read(layer) / columns for layer in self.layers)
        rest = 0.0 if self.rest is None else self._autodiff(self.rest, columns, kept=self.rest.recordable)
        return 2 * work / (3 * max(1, self.forward)) + rest

    def _autodiff(self, routes: Routes, columns: int, kept: bool) -> float:
        if kept:
            return REPLAYED if routes.replayed else DOUBLE_BACKWARD
        if routes.pushes == "rows":  # forward and C backward passes for a block, a dot product a vector, and the pull
            return (1 + 2 * self.num_outputs) / (3 * columns) + self.num_outputs / 3 + 1
        return STREAMED if routes.pushes == "forward mode" else STREAMED_TWICE

    def build(self, kind: EngineKind) -> float:
        """Expected gradients to build an engine for a batch."""
        if kind != "layerwise":
            return 0.0 if kind == "streamed" else RECORDING
        rows = sum(layer.multiply_adds for layer in self.layers if self._as_rows(layer))
        backward = 0 if self.is_last_layer else self.num_outputs
        passes = (1 + backward) / 3 + self.num_outputs * rows / (3 * max(1, self.forward))
        return passes + (RECORDING if self.records(kind) else 0.0)

    def choose(self, built: EngineKind, asked: Mapping[int, int], columns: int, points: int, free: int) -> EngineKind:
        """Return the engine for a block of `columns` on a batch of `points`, with `free` bytes.

        `asked` says how many vectors were asked for since one was last replaced, by the width of their block.
        """
        allowed = [k for k in self.candidates() if k == built or points * self.bytes_needed(k) <= free]
        if self.prefers_layerwise and "layerwise" in allowed:
            return "layerwise"

        expected = Counter(asked)
        expected[columns] = max(expected[columns] + columns, SOLVER if expected.total() else 0)

        def cost(kind: EngineKind) -> float:
            total = 0.0 if kind == built else self.build(kind) + self._overhead(THROUGH_TO_BUILD[kind], points)
            for width, count in expected.items():
                shared = width if kind == "layerwise" else 1
                fixed = self._overhead(THROUGH[kind], points) / shared
                if kind == "layerwise" and self.rest is not None:
                    fixed += self._overhead(THROUGH["recorded"], points)
                total += count * (self.per_vector(kind, width) + fixed)
            return round(total, 9)  # a tie is one whatever the order of the sum: the first, which keeps least, has it

        return min(allowed, key=cost)

    def _overhead(self, through: float, points: int) -> float:
        """Return gradients of a batch that going through the layers so often costs whatever their size."""
        return through * OVERHEAD * len(self.layers) / (3 * max(1, self.forward * points))

    def _as_rows(self, layer: Layer) -> bool:
        return not layer.is_last and layer.as_rows(self.num_outputs)

    def _numbers(self, layer: Layer) -> int:
        return self._read(layer) + (0 if self._as_rows(layer) else layer.inputs)

    def _read(self, layer: Layer) -> int:
        """Numbers kept per point that a product reads: δ, or the layer's own Jacobian; of the last layer none."""
        if layer.is_last:
            return 0
        return self.num_outputs * (layer.size if self._as_rows(layer) else layer.output[1:].numel())

    def _product(self, layer: Layer) -> int:
        return self._read(layer) + (0 if self._as_rows(layer) else layer.multiply_adds)

    def __str__(self) -> str:
        rows = [("layer", "parameters", "kept as", "bytes a point", "gradients a product")]
        layerwise = "layerwise" in self.candidates()
        for layer in self.layers:
            if not layerwise:
                why = "a layer ran otherwise in a batch" if self.unlike else "asked for"
                rows.append((layer.path or "(model)", f"{layer.size:,}", f"autodiff: {why}", "", ""))
                continue
            cost = 2 * (self._product(layer) + READ * self._read(layer)) / (3 * max(1, self.forward))
            kept = "a" if layer.is_last else "Jacobian rows" if self._as_rows(layer) else "a and δ"
            size = self._numbers(layer) * self.itemsize
            rows.append((layer.path or "(model)", f"{layer.size:,}", kept, f"{size:,}", f"{cost:.2f}"))
        rows += [(name, "", f"autodiff: {why}", "", "") for name, why in self.others.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
        return f"{table}\n{self._summary()}"

    def _summary(self) -> str:
        lines = [
            f"{kind}: {self.per_vector(kind):.2f} gradients a product, {self.build(kind):.1f} to build, "
            f"{self.bytes_needed(kind):,} bytes a point"
            for kind in self.candidates()
        ]
        if self.routes.why:
            serves = "the layerwise engine, by first derivatives alone" if self.prefers_layerwise else "rows of J"
            lines.append(f"{self.routes.why}: products with J by {serves}.")
        served = ", ".join(f"{count} batches {kind}" for kind, count in sorted(self.in_use.items()) if count)
        return "\n".join(
            [*lines, f"engine={self.engine!r}, memory budget {self.memory_budget:,} bytes; now: {served or 'nothing'}"]
        )
