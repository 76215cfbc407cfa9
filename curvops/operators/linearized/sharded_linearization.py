"""A network that `fully_shard` has sharded, linearised without gathering its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from curvops.checks import check_kind
from curvops.linalg.core.sharded import RowLayout, Sharded, unwrapped, wrapped
from curvops.network import ShardedNetwork, TrainedNetwork

KNOWN_OF_SHARDS = (
    "available are its gradient, log_likelihood, outputs, flatten, unflatten and theta, and the operators co.GGN, "
    "co.EmpiricalFisher and co.DiagonalGGN, with all of co.linalg on them"
)


class ShardedLinearization(ShardedNetwork):
    """A network sharded by `fully_shard`, linearised at a snapshot θ* of its weights; see `co.linearize`.

    The model stays as it is, and each rank keeps a copy of its own slices of the parameters. Vectors (D,) and blocks
    (D, K) are DTensors on the model's mesh, sharded by rows, `[Shard(0)]`, with the parameters in the same order as on
    a single process; `flatten` and `unflatten` convert them from and to DTensors by name, laid out as the parameters
    are. Everything is a sum over the data of all ranks. All ranks make the same calls.

    Anything that needs all parameters on a rank at once, or an engine other than layer rules, raises an error that
    names it.

    Args:
        passes: the passes over the sharded model and its data.
        likelihood: the likelihood of the targets.
        shape: the shape of one point's outputs.
        memory: the memory budget.
        token: the fingerprint of data and weights.

    Examples:
        >>> lin = co.linearize(model, (x, y), "classification")
        >>> isinstance(lin, co.operators.Linearization)  # a ShardedLinearization, if fully_shard has sharded the model
        True
    """

    @cached_property
    def layout(self) -> RowLayout:
        """The layout of vectors over the ranks."""
        return RowLayout.on(self.model.shards.mesh, self.num_parameters)

    @property
    def theta(self) -> Any:
        """The selected parameters as one vector, a DTensor (D,)."""
        return self.flatten(self.model.named_snapshot())

    def gradient(self) -> Any:
        """Return the gradient of the negative log-likelihood as a DTensor (D,). Costs one gradient."""
        return wrapped(Sharded(self.passes.gradient(self.likelihood), self.layout))

    def flatten(self, tensors: Mapping[str, Any]) -> Any:
        """Return named tensors, (*shape) or (K, *shape) each, as a DTensor (D,) or (D, K).

        These are DTensors laid out as the parameters (for K vectors, sharded along the next dimension), or whole
        tensors that all ranks have.

        Args:
            tensors: the tensors by parameter name.

        Returns:
            The DTensor, sharded by rows.

        Raises:
            TypeError, ValueError: names, shapes, dtypes or placements are not those of the parameters.
        """
        check_kind("tensors", tensors, Mapping, "a mapping of tensors by name")
        return wrapped(Sharded(self.model.shards.from_named(tensors, self.local_theta), self.layout))

    def unflatten(self, vectors: Any) -> dict[str, Any]:
        """Return a DTensor (D,) or (D, K) as DTensors by name, (*shape) or (K, *shape), laid out as the parameters.

        Args:
            vectors: the DTensor.

        Returns:
            The DTensors by parameter name.

        Raises:
            ValueError: the argument is not sharded by rows on the model's mesh.
        """
        return self.model.shards.to_dtensors(self.rows_of(vectors))

    def rows_of(self, vectors: Any) -> Tensor:
        """Return this rank's rows of a DTensor; raise ValueError or TypeError for another kind of vector."""
        from torch.distributed.tensor import DTensor

        check_kind(
            "vectors", vectors, DTensor, "DTensors, sharded by rows on the model's mesh: see lin.flatten(mapping)"
        )
        block = unwrapped(vectors)
        if block.shape[0] != self.num_parameters:
            raise ValueError(f"expected {self.num_parameters} rows, got {tuple(block.shape)}.")
        block.rows.require(self.layout)
        return block.local

    def __getattr__(self, name: str) -> Any:
        if name in ("jacobian", "push", "gradients") or (not name.startswith("_") and hasattr(TrainedNetwork, name)):
            raise AttributeError(
                f"lin.{name} is not available for a model whose parameters are sharded over ranks: {KNOWN_OF_SHARDS}."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
