"""Lᵀ J of one batch from J itself, for engines that multiply with J alone."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from curvops.network.likelihoods.output_fisher import Root


class Reduced:
    """Lᵀ J: a push of J followed by Lᵀ, and L followed by a pull. Costs what J costs, however few its rows.

    Made of an engine it is one; of a differentiable map it carries gradients to the likelihood's hyperparameters too.
    """

    def __init__(self, whole: Any, root: Root) -> None:
        self.whole, self.root = whole, root
        self.kind, self.nbytes = getattr(whole, "kind", None), getattr(whole, "nbytes", 0)
        self.points: slice = getattr(whole, "points", slice(None))

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """f(θ, inputs)."""
        outputs: Tensor = self.whole.outputs
        return outputs

    def push(self, tangents: Any) -> Float[Tensor, "K n R"]:
        """Lᵀ J V."""
        pushed = self.whole.push(tangents)  # first: a streamed push finds the outputs on its way
        return self.root.transpose_product(self.outputs, pushed)

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Any:
        """Jᵀ L U, in the form of J's pull."""
        return self.whole.pull(self.root.product(self.outputs, cotangents))
