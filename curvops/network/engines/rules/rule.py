"""The base of layer rules: products with the parameters of a layer that is linear in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Local = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class SingleRows:
    """A call of a layer as m rows, each of which has one position: their inputs (m, *a), and their own rule.

    `split` turns sensitivities (R, *out) of the call's output into those of the rows, (R, m, *b). The rule takes rows
    in a table of points, (n, T, *a) and (n, R, T, *b), with T positions a point; rows of zeros fill it up.
    """

    rule: Rule
    kept: Tensor
    split: Callable[[Tensor], Tensor]


class Rule(ABC):
    """The products of a kind of layer with its own parameters, for one call with one tensor of n points.

    `inputs` is what `keep` makes of this tensor.
    """

    matrix_is_transposed = False

    def supports(self, layer: Any) -> bool:
        """Return whether a layer of this class is configured so that the rule holds."""
        return True

    def keep(self, layer: Any, a: Tensor) -> Tensor:
        """Turn the layer's input into the tensor that is stored, the `inputs` of the products."""
        return a

    def single_rows(self, layer: Any, *args: Tensor) -> SingleRows | None:
        """Return a call with these tensors row by row, whatever the number of rows; None if its rows have no rule."""
        return None

    @abstractmethod
    def push(self, layer: Any, inputs: Tensor, tangents: Mapping[str, Tensor]) -> Tensor:
        """Return the change of the output (n, K, *out) for K tangents of weight and bias, (K, *shape) each."""

    @abstractmethod
    def pull(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        """Return the gradients (K, *shape) for K sensitivities of the output, (n, K, *out)."""

    @abstractmethod
    def rows(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Local:
        """Return `pull` point by point, (n, K, *shape): the layer's own Jacobian."""

    def multiply_adds(self, layer: Any, output: Tensor) -> int:
        """Count the multiply-adds of one forward pass of one point."""
        return output.shape[1:].numel()

    def left(self, layer: Any, inputs: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        """Return the left side of the rows as sums of outer products over positions t that share the weight, or None.

        Left (n, R, g, t, p) comes from the sensitivities (n, R, *out), `right` (n, g, t, q) from the input: for point
        n, column R and group g, the gradient of `weight.reshape(g, p, q)` is Σ_t left ⊗ right. With
        `matrix_is_transposed` the matrix is the transposed weight, (1, p, q) for a weight (q, p). The result is None if
        the names lack "weight", or if the layer has no such structure.
        """
        return None

    def right(self, layer: Any, inputs: Tensor, names: tuple[str, ...]) -> Tensor:
        """Return the right side, if a left side exists.

        If the names contain "bias", it ends in a column of ones: q is larger by one, and column q − 1 is the gradient
        of the bias, (g·p).
        """
        raise NotImplementedError  # there is no left side
