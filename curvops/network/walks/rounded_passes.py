"""Products of curvatures from recorded tensors in a lower precision, and the error that this causes."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import torch

from curvops.errors import LowerPrecisionWarning
from curvops.network.data.inputs import num_points, take
from curvops.network.engines.engine import Engine
from curvops.network.engines.plan import EngineChoice, EngineKind, Plan
from curvops.network.likelihoods.output_fisher import IDENTITY, OutputFisher, Root, RootJacobian
from curvops.network.walks.passes import Passes

MEASURED_POINTS = 64
"""The largest number of points of the first batch on which the error is measured."""
MEASURED_VECTORS = 8
"""The number of random vectors whose products are compared."""
MARGIN = 2.0
"""The reported error in units of the largest one measured: other vectors and points may have a larger one."""


class RoundedPasses(Passes):
    """A walk that multiplies by the J of another walk, rounded once: a, δ and layers' rows are kept in `dtype`.

    Vectors, sums and the output Fishers keep the weights' dtype, in which a product is computed a few points at a time.
    So every product is one with the same matrix Σ_n J̃ᵀ H J̃, which is symmetric and positive semi-definite up to
    rounding in the weights' dtype. For this, layer rules are used on every batch; a batch whose recorded tensors do not
    fit into the budget is recorded again in each product. The relative error is measured with the Fisher `measured`.
    """

    def __init__(self, walk: Passes, dtype: torch.dtype, measured: OutputFisher) -> None:
        self.dtype, self._measured = dtype, measured
        self._found: float | None = None
        super().__init__(
            walk.model, walk._source, "layerwise", walk.memory, None, walk._points, walk.progress, None, walk.shard
        )
        self._whole, self._fisher = walk, walk._fisher

    def with_root(self, fisher: OutputFisher) -> RoundedPasses:
        assert self._whole is not None
        return RoundedPasses(self._whole.with_root(fisher), self.dtype, fisher)

    @property
    def product_error(self) -> float:  # type: ignore[override]
        """Twice the largest ‖G̃v − Gv‖ / ‖Gv‖ of a few random v over the first points, measured once."""
        if self._found is None:
            with self.guarded():
                found = self._measure()
            self._found = found if self.shard is None else max(self.shard.ranks.gather(found))
        return self._found

    def warn(self) -> None:
        """Warn of the error."""
        warnings.warn(
            f"products with curvatures use tensors kept in {self.dtype}: their relative error on the first points is "
            f"{self.product_error:.1e}. Results computed from them inherit this error, solutions of systems multiplied "
            "by the condition number. Gradients, log-likelihoods, diagonals and Kronecker factors are not affected.",
            LowerPrecisionWarning,
            stacklevel=4,
        )

    @torch.no_grad()
    def _measure(self) -> float:
        inputs, label = next(self.batches())
        few = slice(0, min(MEASURED_POINTS, num_points(inputs)))
        inputs = take(inputs, few)
        root = Root(self._measured, label.labels(few))
        exact = self.engines.build("streamed", inputs, 0, root)
        if self._fisher is None:
            rounded: Any = RootJacobian(self._build("layerwise", inputs, 0, IDENTITY), root)
        else:
            rounded = self._build("layerwise", inputs, 0, root)
        theta, selection, largest = self.model.theta, self.model.selection, 0.0
        generator = torch.Generator(theta.device).manual_seed(0)
        for _ in range(MEASURED_VECTORS):
            v = torch.randn(len(theta), 1, dtype=theta.dtype, device=theta.device, generator=generator)
            Gv, near = (selection.join(J.pull(J.push(selection.split(v)))) for J in (exact, rounded))
            size = float(Gv.norm())
            largest = max(largest, float((near - Gv).norm()) / size if size else 0.0)
        return MARGIN * largest

    @property
    def wanted_bytes(self) -> int:
        return 0 if self._whole is None else self._points * self._rule.layerwise_bytes

    @property
    def plan(self) -> Plan:
        return dataclasses.replace(super().plan, product_error=self.product_error)

    @property
    def _rule(self) -> Plan:
        return dataclasses.replace(super()._rule, engine="layerwise", compute_dtype=self.dtype)

    def _choose(self, built: EngineKind, asked: Counter[int], columns: int, points: int, room: int) -> EngineKind:
        return "layerwise"

    def _build(self, kind: EngineKind, inputs: Any, room: int, root: Root) -> Engine:
        engine = self.engines.build(kind, inputs, room, root, self.dtype)
        if engine.kind != "layerwise":
            raise RuntimeError(
                f"compute_dtype={self.dtype}, but layers ran differently in this batch than on the first points, so "
                "their recorded tensors do not give J: linearise without compute_dtype."
            )
        return engine


def check_compute_dtype(given: Any, dtype: torch.dtype, engine: EngineChoice, plan: Plan) -> None:
    """Raise TypeError or ValueError for a compute_dtype that the weights' dtype, the engine or the model exclude."""
    if not isinstance(given, torch.dtype):
        raise TypeError(f"compute_dtype must be a torch.dtype such as torch.bfloat16, or None, got {given!r}.")
    if given not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"compute_dtype must be torch.bfloat16 or torch.float32, got {given} (float16 overflows beyond 65504, and "
            "loses sensitivities below 6e-8)."
        )
    if torch.finfo(given).eps <= torch.finfo(dtype).eps:
        raise ValueError(f"compute_dtype={given} is not of lower precision than the weights' {dtype}: leave it out.")
    if engine not in ("auto", "layerwise"):
        raise ValueError(
            f"compute_dtype={given} rounds the tensors that the layerwise engine keeps, and engine={engine!r} excludes "
            "that engine: leave one of them out."
        )
    if not plan.layers:
        why = "; ".join(f"{name}: {reason}" for name, reason in plan.others.items())
        raise ValueError(
            f"compute_dtype={given} rounds the tensors that layer rules keep, and no selected parameter has a rule "
            f"({why}): leave it out."
        )


def require_room(points: int, plan: Plan, dtype: torch.dtype, memory_budget: int) -> None:
    """Raise ValueError unless the tensors that layers keep of the largest batch fit into the budget."""
    needed = points * dataclasses.replace(plan, compute_dtype=dtype).layerwise_bytes
    if needed > memory_budget:
        raise ValueError(
            f"compute_dtype={dtype} keeps {needed:,} bytes of a batch of {points:,} points, more than "
            f"memory_budget={memory_budget:,}: pass smaller batches or a larger memory_budget, or leave it out."
        )
