"""Lᵀ J of one batch from J itself, for engines that multiply with J alone."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from curvops.network.autodiff import Recorded, Streamed
from curvops.network.output_fisher import Root
from curvops.network.parameters import Blocks


class Reduced:
    """Lᵀ J: a push of J followed by Lᵀ, and L followed by a pull. Costs what J costs, however few its rows."""

    def __init__(self, whole: Recorded | Streamed, root: Root) -> None:
        self.whole, self.root = whole, root
        self.kind, self.nbytes = whole.kind, whole.nbytes

    @property
    def outputs(self) -> Float[Tensor, "n C"]:
        """f(θ, inputs)."""
        return self.whole.outputs

    def push(self, tangents: Mapping[str, Tensor]) -> Float[Tensor, "K n R"]:
        """Lᵀ J V."""
        pushed = self.whole.push(tangents)  # first: a streamed push finds the outputs on its way
        return self.root.transpose_product(self.outputs, pushed)

    def pull(self, cotangents: Float[Tensor, "K n R"]) -> Blocks:
        """Jᵀ L U, by name, (K, *shape) each."""
        return self.whole.pull(self.root.product(self.outputs, cotangents))
