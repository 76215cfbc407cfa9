"""A network whose parameters are sharded over ranks, with each rank's data and its likelihood."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curvops.checkpoint import identify
from curvops.checks import check_generator, checked_whole
from curvops.network.data.batches import Reading, as_source
from curvops.network.data.shard import Shard
from curvops.network.likelihoods.gaussian import estimated_noise, needs_noise, sums_of_squares
from curvops.network.likelihoods.likelihood import Likelihood, likelihood_state
from curvops.network.likelihoods.output_fisher import OutputFisher, Sampled
from curvops.network.model.sharded_model import ShardedModel
from curvops.network.trained.drawn_fisher import drawn_residuals, output_fisher
from curvops.network.trained.first_points import check_scores, first_points, likelihood_at, output_shape, reading_for
from curvops.network.trained.trained_network import NetworkOnData, Source
from curvops.network.walks.budget import Budget, default_budget
from curvops.network.walks.sharded_layers import ShardedLayers
from curvops.network.walks.sharded_passes import ShardedPasses
from curvops.process_group import Ranks

N = TypeVar("N", bound="ShardedNetwork")


class ShardedNetwork(NetworkOnData):
    """A network sharded by `fully_shard`, at a snapshot of its weights, with the data of all ranks.

    Everything is a sum over the data of all ranks. Vectors are this rank's rows; see `ShardedParameters`.
    """

    model: ShardedModel
    data: Shard

    def __init__(
        self, passes: ShardedPasses, likelihood: Likelihood, shape: torch.Size, memory: Budget, token: str
    ) -> None:
        self.passes, self.likelihood, self.output_shape = passes, likelihood, shape
        self.memory, self.model, self.data, self._token = memory, passes.model, passes.shard, token

    @classmethod
    def read(
        cls: type[N],
        process_group: ProcessGroup | None,
        model: nn.Module,
        data: Any,
        likelihood: Any,
        parameters: Any,
        memory_budget: int | None,
        engine: str,
        weights: bool,
    ) -> N:
        """Read a sharded model, this rank's data and the likelihood, and check them against each other."""
        if process_group is None:
            raise ValueError(
                "a model sharded by fully_shard needs process_group=mesh.get_group(), and a shard on each rank."
            )
        if engine not in ("auto", "layerwise"):
            raise ValueError(f"engine={engine!r} would gather all parameters: use engine='auto' or 'layerwise'.")
        ranks = Ranks(process_group)
        network = ShardedModel(model, parameters, ranks)
        theta = network.theta
        nbytes = default_budget(theta.device) if memory_budget is None else memory_budget
        memory = Budget(min(ranks.gather(nbytes)), theta.device, ranks)
        few, first_targets, network.calls.mapping_type = first_points(data, theta, weights, ranks)
        given, layout, outputs = likelihood_at(network, few, likelihood)
        probability = given.snapshot(theta.device, theta.dtype)
        layers = ShardedLayers(network, few)
        step = max(1, memory.budget // (8 * max(1, layers.bytes_a_point(layers.num_outputs))))
        reading: Reading = reading_for(network, probability, layout, weights, outputs)
        shard = Shard(as_source(data, step, weights), reading, ranks)
        shard.require_apart()
        check_scores(network, probability, outputs, first_targets, likelihood)
        token = ranks.gather(os.urandom(16).hex())[0]
        passes = ShardedPasses(layers, shard, memory.budget)
        new = cls(passes, probability, output_shape(probability, layout), memory, token)
        if needs_noise(probability):
            sums = sums_of_squares(probability, *passes.outputs_and_labels())
            new.likelihood = estimated_noise(probability, sums, theta)
        ranks.require_equal(new.facts() | {"whether points have weights": weights})
        return new

    @property
    def source(self) -> Source:
        """The data of all ranks and the likelihood, by fingerprints."""
        return Source(self.num_data, self.data.prints.contents, likelihood_state(self.likelihood, self._token))

    @property
    def local_theta(self) -> Tensor:
        """This rank's slices of the selected parameters, flattened."""
        return self.model.theta

    def log_likelihood(self) -> Tensor:
        """Return Σ_n log p(y_n | f(x_n, θ*)) over the data of all ranks, in nats. One forward pass."""
        return self.passes.log_likelihood(self.likelihood)

    def outputs(self) -> Tensor:
        """Return f(θ*) at the training inputs of all ranks, each position as a point, (N·T, C). One forward pass."""
        return self.passes.outputs_and_labels()[0].reshape(-1, self.output_shape[-1])

    def draw_residuals(self, mc_samples: int, generator: torch.Generator | None) -> Tensor:
        """Return residuals (M, N, C) at M targets per point drawn from the model, divided by √M. One forward pass."""
        checked_whole("mc_samples", mc_samples, kind="a whole number of targets per point")
        check_generator(generator)
        f, y, w = self.passes.outputs_and_labels()
        return drawn_residuals(self.likelihood, f, y, w, mc_samples, generator)

    def output_fisher(self, kind: str, mc_samples: int, generator: torch.Generator | None) -> OutputFisher:
        """Return the H named by `fisher=`; see `drawn_fisher.output_fisher`."""

        def drawn() -> OutputFisher:
            return Sampled(self.likelihood, self.draw_residuals(mc_samples, generator))

        return output_fisher(kind, self.likelihood, mc_samples, drawn)

    def facts(self) -> dict[str, Any]:
        selection = self.model.selection
        return {
            "torch's version": torch.__version__,
            "the dtype": str(self.local_theta.dtype),
            "the parameters": [*selection.names, *map(tuple, selection.shapes)],
            "the layers": self.passes.layers.groups,
            "the likelihood": identify(self.likelihood),
        }

    def __repr__(self) -> str:
        return self._printed(self.local_theta.dtype, f"on {self.data.ranks.names}")
