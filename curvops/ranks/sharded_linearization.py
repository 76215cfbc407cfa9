"""A network that `fully_shard` has sharded, linearised without gathering its parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curvops.argument_types import Collate, Data, LikelihoodChoice, ParameterChoice
from curvops.checkpoint import identify
from curvops.checks import check_kind
from curvops.linalg.core.matrix_identity import Sources
from curvops.network.likelihoods.gaussian import estimated_noise
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import Empirical
from curvops.network.trained.first_points import FirstPoints, output_shape
from curvops.network.trained.network_on_data import NetworkOnData
from curvops.network.trained.trained_network import TrainedNetwork
from curvops.network.walks.budget import Budget
from curvops.ranks.process_group import Ranks
from curvops.ranks.shard import Shard
from curvops.ranks.sharded_model import ShardedModel
from curvops.ranks.sharded_vectors import RowLayout, Sharded, unwrapped, wrapped
from curvops.ranks.sharded_walk import ShardedLayers, ShardedWalk

KNOWN_OF_SHARDS = (
    "available are its gradient, log_likelihood, outputs, flatten, unflatten and theta, and the operators co.GGN, "
    "co.EmpiricalFisher and co.DiagonalGGN, with all of co.linalg on them"
)


class ShardedLinearization(NetworkOnData):
    """A network sharded by `fully_shard`, linearised at a snapshot θ* of its weights; see `co.linearize`.

    The model stays as it is, and each rank keeps a copy of its own slices of the parameters. Vectors (D,) and blocks
    (D, K) are DTensors on the model's mesh, sharded by rows, `[Shard(0)]`, with the parameters in the same order as on
    a single process; `flatten` and `unflatten` convert them from and to DTensors by name, laid out as the parameters
    are. Everything is a sum over the data of all ranks. All ranks make the same calls.

    Anything that needs all parameters on a rank at once, or an engine other than layer rules, raises an error that
    names it.

    Args:
        passes: the walk over the sharded model and its data.
        likelihood: the likelihood of the targets.
        shape: the shape of one point's outputs.
        memory: the memory budget.
        token: the fingerprint of data and weights.

    Examples:
        >>> lin = co.linearize(model, (x, y), "classification")
        >>> isinstance(lin, co.operators.Linearization)  # a ShardedLinearization, if fully_shard has sharded the model
        True
    """

    model: ShardedModel
    data: Shard
    passes: ShardedWalk  # type: ignore[assignment]  # the other walk, with the same verbs

    def __init__(
        self, passes: ShardedWalk, likelihood: Likelihood, shape: torch.Size, memory: Budget, token: str
    ) -> None:
        self.model, self.data, self.likelihood, self.output_shape = passes.model, passes.shard, likelihood, shape
        self.passes, self.memory, self.token = passes, memory, token
        self._results = None, {}

    @classmethod
    def read(
        cls,
        model: nn.Module,
        data: Data,
        likelihood: LikelihoodChoice,
        parameters: ParameterChoice | None,
        memory_budget: int | None,
        engine: str,
        weights: bool,
        collate: Collate | None,
        process_group: ProcessGroup | None,
    ) -> ShardedLinearization:
        """Read a sharded model, this rank's data and the likelihood, and check them against each other."""
        if process_group is None:
            raise ValueError("a model sharded by fully_shard needs process_group=mesh.get_group(), and shards.")
        if engine not in ("auto", "layerwise"):
            raise ValueError(f"engine={engine!r} would gather all parameters: use engine='auto' or 'layerwise'.")
        ranks = Ranks(process_group)
        network = ShardedModel(model, parameters, ranks)
        theta = network.theta
        memory = Budget.of(memory_budget, theta.device, ranks)
        first = FirstPoints.of(network, data, likelihood, weights, collate, ranks)
        layers = ShardedLayers(network, first.inputs)
        step = max(1, memory.budget // (8 * max(1, layers.bytes_a_point(layers.num_outputs))))
        shard = first.batches(network, step, weights, ranks)
        assert isinstance(shard, Shard)
        token = ranks.gather(os.urandom(16).hex())[0]
        walk = ShardedWalk(layers, shard, memory.budget)
        new = cls(walk, first.likelihood, output_shape(first.likelihood, first.layout), memory, token)
        if first.likelihood.needs_noise:
            new.likelihood = estimated_noise(first.likelihood, new.squared_residuals(), theta)
        facts = {
            "torch's version": torch.__version__,
            "the dtype": str(theta.dtype),
            "the parameters": [*network.selection.names, *map(tuple, network.selection.shapes)],
            "the layers": layers.groups,
            "the likelihood": identify(new.likelihood),
            "whether points have weights": weights,
        }
        ranks.require_equal(facts)
        return new

    @cached_property
    def layout(self) -> RowLayout:
        """The layout of vectors over the ranks."""
        return RowLayout.on(self.model.shards.mesh, self.num_parameters)

    @property
    def theta(self) -> Any:
        """The selected parameters as one vector, a DTensor (D,)."""
        return self.flatten(self.model.named_snapshot())

    @property
    def sources(self) -> Sources:
        """The data of operators made from this linearisation, counted once."""
        return Sources({self.source: 1.0})

    @torch.no_grad()
    def gradient(self) -> Any:
        """Return the gradient of the negative log-likelihood as a DTensor (D,). Costs one gradient."""
        rows = Empirical(self.likelihood)  # by the rows of all points: J itself would take C backward passes

        def term(batch: Any, G: Any) -> Tensor:
            return G.pull(rows.weigh(G.outputs.new_ones(1, len(G.outputs), 1), batch))

        return wrapped(Sharded(self.passes.total(term, 1, rows).squeeze(1), self.layout))

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
        return wrapped(Sharded(self.model.shards.from_named(tensors, self.model.theta), self.layout))

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
            raise AttributeError(f"lin.{name} is not available for models sharded over ranks: {KNOWN_OF_SHARDS}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return self._printed(self.model.theta.dtype, f"on {self.data.ranks.names}")
