"""J of one batch on flat vectors, whichever engine multiplies, with derivatives of any order by its adjoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from curvops.network.engines.autodiff import Streamed
from curvops.network.engines.engine import Engine
from curvops.network.model.model import Model


class BatchMap:
    """J of one batch on flat vectors: push (D, K) -> (K, n, C) and pull (K, n, C) -> (D, K), both differentiable."""

    def __init__(self, engine: Engine, model: Model, points: slice) -> None:
        self._engine, self._selection, self._lock = engine, model.selection, model.lock
        self.points = points
        """The positions of the batch's points among all points of the walk."""

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """The outputs f(θ, inputs)."""
        with self._lock:
            return self._engine.outputs

    def pull_of(self, cotangent: Callable[[Tensor], Tensor]) -> Float[Tensor, "D 1"]:
        """Return Jᵀ u for a function u of the outputs, which one pass computes with their graph."""
        with self._lock:
            if isinstance(self._engine, Streamed):
                self._engine.record()
        return self.pull(cotangent(self.outputs)[None])

    def push(self, vectors: Float[Tensor, "D K"]) -> Float[Tensor, "K n C"]:
        """Return J V."""
        if torch.is_grad_enabled() and vectors.requires_grad:
            return linear(vectors, self.push, self.pull)
        with self._lock:
            return self._engine.push(self._selection.split(vectors.detach()))

    def pull(self, cotangents: Float[Tensor, "K n C"]) -> Float[Tensor, "D K"]:
        """Return Jᵀ U."""
        if torch.is_grad_enabled() and cotangents.requires_grad:
            return linear(cotangents, self.pull, self.push)
        with self._lock:
            return self._selection.join(self._engine.pull(cotangents.detach()))


class _Linear(Function):
    """A linear map with its adjoint, for autograd; both give their own derivatives while gradients are recorded."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
        ctx.adjoint = adjoint
        return apply(argument)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def linear(argument: Tensor, apply: Any, adjoint: Any) -> Tensor:
    """Return a linear map's value, with derivatives of any order by its adjoint, which is recorded in the same way."""
    return _Linear.apply(argument, apply, adjoint)  # type: ignore[no-untyped-call]
