"""The protocol of layer rules: products with the parameters of a layer that is linear in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

Local = dict[str, Tensor]


@runtime_checkable
class Rule(Protocol):
    """The products of a kind of layer with its own parameters, for one call on a batch of n points.

    `keep` turns the layer's input into what is stored. For K tangents of the weight and bias, (K, *shape) each, `push`
    gives the change of the layer's output, (n, K, *out); for K sensitivities of the output, (n, K, *out), `pull` gives
    the gradients, (K, *shape). `rows` is `pull` point by point: the layer's own Jacobian, (n, K, *shape).
    `multiply_adds` counts one forward pass of one point. A layer called with other than `operands` tensors has no rule.
    """

    @property
    def operands(self) -> int: ...
    @property
    def matrix_is_transposed(self) -> bool: ...
    def supports(self, layer: Any) -> bool: ...
    def keep(self, layer: Any, *inputs: Any) -> Tensor: ...
    def push(self, layer: Any, kept: Tensor, tangents: Mapping[str, Tensor]) -> Tensor: ...
    def pull(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local: ...
    def rows(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Local: ...
    def multiply_adds(self, layer: Any, output: Tensor) -> int: ...

    def left(self, layer: Any, kept: Tensor, s: Tensor, names: tuple[str, ...]) -> Tensor | None:
        """The rows as sums of outer products over the positions t that share the weight, or None: their left side.

        Left (n, R, g, t, p) from the sensitivities (n, R, *out), `right` (n, g, t, q) from the input: of point n,
        column R and group g, `weight.reshape(g, p, q)` has the gradient Σ_t left ⊗ right. `matrix_is_transposed` says
        that the matrix is the weight transposed, (1, p, q) for a weight (q, p). None where the names lack "weight", or
        where the layer has no such structure.
        """
        ...

    def right(self, layer: Any, kept: Tensor, names: tuple[str, ...]) -> Tensor:
        """The right side, where there is a left one.

        Where the names hold "bias" too it ends in a column of ones: q is one more, and column q − 1 the gradient of the
        bias, (g·p).
        """
        ...
