"""A trained network, linearised at its weights: the one object that every network operator is built from.

`curvops.operators.linearized.linearize` makes it, and checks what it is made of.
"""

from __future__ import annotations

from typing import Any

from curvops.checks import check_flag
from curvops.linalg.core.sources import Sources
from curvops.network import TrainedNetwork
from curvops.operators.linearized.gradients import Gradients
from curvops.operators.linearized.jacobian import Jacobian


class Linearization(TrainedNetwork):
    """f(x, θ) ≈ f(x, θ*) + J(x)(θ − θ*) around a snapshot θ* of the network, made by `co.linearize`.

    Training the network further changes nothing here. Sums run over the data, never means. `output_shape` is that of
    a point's outputs: (C,), or (T, C) for sequences, whose outputs are rows (n, T·C) everywhere, position by position.
    """

    @property
    def sources(self) -> Sources:
        """The data of operators made of this linearisation, counted once."""
        return Sources({self.source: 1.0})

    def jacobian(self, x: Any = None, differentiable: bool = False) -> Jacobian:
        """J as an operator (n·C, D), rows point by point (n·C + c); at the training inputs where x is None.

        With `differentiable` its products, and what posteriors make of them, have gradients in those of the inputs that
        require one (never in θ): first derivatives, by differentiating backward passes.

        Raises as `linearize` does for inputs that are not finite or of another form, and ValueError for inputs
        that require a gradient which is not asked for or which J does not have (a custom `autograd.Function`, an
        operation without a second derivative).
        """
        check_flag("differentiable", differentiable)
        if x is None:
            if differentiable:
                raise ValueError("differentiable=True is for inputs that are given: pass x.")
            return Jacobian(self.theta, passes=self.passes, rows=self.num_data * self.num_outputs)
        # A copy of x: the operator is lazy, and a later change must not change half of a predictive.
        walk, points, graph = self.walk_at(x, differentiable)
        rows = points * self.num_outputs
        if graph is None:
            return Jacobian(self.theta, passes=walk, rows=rows)
        return Jacobian(self.theta, *graph.tensors, passes=walk, rows=rows, graph=graph.detached())

    def gradients(self, per_token: bool = False) -> Gradients:
        """The gradient of each point's negative log-likelihood as the rows of an operator (N, D); see `Gradients`.

        With `per_token` those of the tokens of sequences, (N·T, D). Raises TypeError for anything but True or False.
        """
        check_flag("per_token", per_token, "For points other than the training points linearise there.")
        return Gradients(self.theta, *self.likelihood.hyperparameters, lin=self, per_token=per_token)
