"""A network at a snapshot of its weights, with its data and its likelihood: outputs, sums over the data, vectors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy as copy_object
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from curvops.ambient import Progress
from curvops.argument_types import Collate
from curvops.checkpoint import identify
from curvops.checks import check_shape, check_tensor
from curvops.network.data.batches import AbsentBatches, Batch, Batches, LabelledSource
from curvops.network.data.inputs import (
    Inputs,
    as_inputs,
    copy,
    cut,
    first_of,
    in_pieces,
    map_inputs,
    names_with_gradient,
    num_points,
)
from curvops.network.data.layouts import Name, NamedLayout, PositionsLayout
from curvops.network.data.objects import Objects, WholeBatch
from curvops.network.engines.autodiff import hessian_product
from curvops.network.engines.engine import Engines
from curvops.network.engines.plan import EngineChoice, Plan
from curvops.network.engines.self_check import require_symmetric
from curvops.network.likelihoods.composite import Multitask, Sequences
from curvops.network.likelihoods.gaussian import estimated_noise
from curvops.network.likelihoods.likelihood import Likelihood
from curvops.network.likelihoods.output_fisher import Empirical, OutputFisher
from curvops.network.model.calls import explain
from curvops.network.model.last_layer import last_layer
from curvops.network.model.model import Model, tensors_of
from curvops.network.model.parameters import TangentSpace
from curvops.network.trained.first_points import FirstPoints, output_shape, try_objects
from curvops.network.trained.network_on_data import NetworkOnData, Source
from curvops.network.walks.budget import Budget, linear
from curvops.network.walks.input_graphs import InputGraph, outputs_at
from curvops.network.walks.layer_roots import Group
from curvops.network.walks.row_squares import sum_squares
from curvops.network.walks.walk import Passes, accumulate
from curvops.ranks.process_group import Ranks, warn_without_group
from curvops.ranks.shard import Shard
from curvops.storage import WRITTEN_BY

N = TypeVar("N", bound="TrainedNetwork")
SHOWN = (
    *("model", "data", "likelihood", "num_parameters", "num_data", "num_outputs", "output_shape"),
    *("theta", "predict", "outputs", "log_likelihood", "gradient", "gradients", "hessian_product", "jacobian"),
    *("flatten", "unflatten", "unflatten_weights", "unflatten_tangent", "with_likelihood", "restrict", "cast"),
    *("plan", "memory", "memory_budget"),
)
"""The names of a linearisation that `dir` shows."""


class TrainedNetwork(NetworkOnData):
    """A network at a snapshot θ* of its weights, with its data and its likelihood.

    Training the network further changes nothing here. Everything is a sum over the data, never a mean. `output_shape`
    is the shape of one point's outputs: (C,), or (T, C) for sequences. The outputs of sequences are rows (n, T·C)
    everywhere, position by position.
    """

    def __dir__(self) -> list[str]:
        """List what a user calls; the other methods serve operators and posteriors."""
        return list(SHOWN)

    IDENTITIES: ClassVar[tuple[type, ...]] = (Source, TangentSpace)
    """Dataclasses that identify data and weights; operators and records store them in place of both."""

    def __init__(
        self,
        model: Model,
        data: Batches | AbsentBatches,
        likelihood: Likelihood,
        output_shape: torch.Size,
        engine: EngineChoice,
        memory_budget: int | Budget,
        progress: Progress = None,
        token: str | None = None,
        engines: Engines | None = None,
    ) -> None:
        self.model, self.data, self.likelihood = model, data, likelihood
        self.output_shape, self.engine = output_shape, engine
        few, points = (None, sum(data.sizes)) if data.is_present else (data.few, 0)
        shard = data if isinstance(data, Shard) else None
        self.passes = Passes(model, LabelledSource(data), engine, memory_budget, engines, points, progress, few, shard)
        self.memory = self.passes.memory
        """The memory budget, with its present use by engines and by vectors of running algorithms."""
        self.theta: Float[Tensor, " D"] = model.theta
        """The selected parameters as one vector."""
        self.token = os.urandom(16).hex() if token is None else token  # for a likelihood that cannot be fingerprinted
        self._gradient_rows: dict[bool, tuple[list[Tensor], Passes]] = {}
        self._results: tuple[list[Tensor] | None, dict[str, Any]] = None, {}  # results at these hyperparameters
        self._views: dict[Any, Any] = {}

    @classmethod
    def read(
        cls: type[N],
        model: Any,
        data: Any,
        likelihood: Any,
        parameters: Any,
        memory_budget: int | None,
        engine: EngineChoice,
        weights: bool,
        collate: Collate | None,
        progress: Progress,
        process_group: ProcessGroup | None,
    ) -> N:
        """Read a model, its data and its likelihood, as `co.linearize` does, and check them against each other.

        Costs one pass over the data, some over two points, and a forward pass if the noise is to be estimated. With a
        process group the data are this rank's shard.
        """
        ranks = None if process_group is None else Ranks(process_group)
        if ranks is None:
            warn_without_group()
        else:
            kinds = sorted({tensor.device.type for tensor in tensors_of(model).values()})
            options = {"memory_budget": memory_budget, "the engine": engine, "whether points have weights": weights}
            versions = {"torch's version": torch.__version__, "the version": WRITTEN_BY}
            ranks.require_equal(versions | options | {"the kind of device": kinds})
        by_running = isinstance(parameters, str) and parameters == "last_layer"
        network = Model(model, None if by_running else parameters)
        network.refuse_modes()
        first = FirstPoints.of(network, data, likelihood, weights, collate, ranks)
        if by_running:
            network = network.selecting(last_layer(network, first.inputs))
        memory = Budget.of(memory_budget, network.theta.device, ranks)
        engines = Engines(network, first.inputs, engine, memory.budget)  # this call's probe, not the first product's
        step = max(1, memory.budget // (8 * max(1, engines.plan.routes.saved_bytes)))
        batches, token = first.batches(network, step, weights, ranks), None
        if ranks is not None:
            engines.agree(next(iter(batches)).inputs, ranks.gather)
            token = ranks.gather(os.urandom(16).hex())[0]
        shape = output_shape(first.likelihood, first.layout)
        new = cls(network, batches, first.likelihood, shape, engine, memory, progress, token, engines)
        if first.likelihood.needs_noise:
            new = new.with_likelihood(estimated_noise(first.likelihood, new.squared_residuals(), network.theta))
        if ranks is not None:
            ranks.require_equal(new.identified_by)
        return new

    @property
    def ranks(self) -> Ranks | None:
        """The process group whose ranks share the data."""
        return None if self.passes.shard is None else self.passes.shard.ranks

    def name_of(self, value: Any) -> str | None:
        """Return "source" or "space" for a value that equals the network's own; records refer to it by this name."""
        if isinstance(value, Source):
            return "source" if value == self.source else None
        return "space" if isinstance(value, TangentSpace) and value.is_at(self.tangent_space) else None

    @property
    def memory_budget(self) -> int:
        """The bytes for the engines kept between products and the vectors of algorithms, together."""
        return self.memory.budget

    @property
    def plan(self) -> Plan:
        """The plan of engines and its reasons: engine per layer, bytes, expected gradients per product."""
        return self.passes.plan

    def walk_at(self, x: Any, differentiable: bool = False) -> tuple[Passes, int, InputGraph | None]:
        """Return a walk over a copy of these inputs, their number, and their graph if they require a gradient.

        Raises as `admit`, and ValueError if J has no gradient in the inputs that is certain to be right.
        """
        inputs, engines = copy(self.admit(x, differentiable)), self.passes.engines
        batches = [(map_inputs(Tensor.detach, subset), None) for _, subset in cut(inputs, self.data.largest)]
        walk = Passes(self.model, batches, self.engine, self.memory, engines, progress=self.passes.progress)
        points = num_points(inputs)
        names = names_with_gradient(inputs) if points else ()
        return walk, points, InputGraph(engines, inputs, names) if names else None

    def predict(self, x: Any, weights: Float[Tensor, " D"] | None = None) -> Float[Tensor, "n *shape"] | Any:
        """Return f(x, θ*), the network's outputs at its snapshot, in the shape in which the model returns them.

        (One number per point, (n,), is (n, 1).) Several outputs are a mapping of such tensors by name. Costs one
        forward pass.

        With `weights`, such as a draw from a posterior, it evaluates the network itself at these weights; weights
        outside a subnetwork keep their values. Inputs that require a gradient get one. Raises as `jacobian` does, and
        ValueError unless the weights are one vector (D,).
        """
        if isinstance(self.likelihood, Multitask):
            return {name: self.output(name).predict(x, weights) for name in self.likelihood.likelihoods}
        return self.by_point(self.output_rows(x, weights))

    def output_rows(self, x: Any, weights: Float[Tensor, " D"] | None = None) -> Float[Tensor, "n C"]:
        """Return f(x, θ*), or the outputs at other weights, with a row for each position of a point."""
        inputs = self.admit(x, differentiable=True)
        values = self.model.values if weights is None else self.unflatten_weights(weights)
        if num_points(inputs) and names_with_gradient(inputs):
            constants = {name: value.detach() for name, value in values.items()}
            return outputs_at(self.model, copy(inputs), constants).reshape(-1, self.output_shape[-1])
        with torch.no_grad():
            subsets = in_pieces(inputs, self._points_at_once())
            outputs = [self.model(values, subset) for subset in subsets if num_points(subset)]
        return torch.cat([self.theta.new_zeros(0, self.num_outputs), *outputs]).reshape(-1, self.output_shape[-1])

    def admit(self, x: Any, differentiable: bool = False) -> Inputs:
        """Return inputs on the weights' device, after trying the model on them; raise as `jacobian` does."""
        self.model.refuse_modes()
        inputs = self.inputs_of(x)
        if isinstance(inputs, Objects):
            for name in names_with_gradient(inputs):
                raise ValueError(f"{name} requires a gradient, which points joined by collate= do not get: detach it.")
            try_objects(self.model, inputs, self._points_at_once())
            return inputs
        for name in () if differentiable else names_with_gradient(inputs):
            raise ValueError(f"{name} requires a gradient: use lin.jacobian(x, differentiable=True), or x.detach().")
        self.model.admit(inputs)
        return inputs

    def _points_at_once(self) -> int:
        return min(self.data.largest, self.passes.engines.forward_points or self.data.largest)

    def inputs_of(self, x: Any) -> Inputs:
        """Return inputs on the weights' device; a batch that only the model can read takes a pass to count its points.

        Raises as `as_inputs` does, and ValueError or TypeError if the model cannot be run on such a batch.
        """
        inputs, place = self.model.calls.read(x), (self.theta.device, self.theta.dtype)
        if isinstance(inputs, WholeBatch) and inputs.size is None:
            with torch.no_grad(), explain(inputs):
                outputs = self.model.raw(self.model.values, inputs.move(*place))
            inputs = inputs.of_size(len(outputs))
        return as_inputs(inputs, *place)

    def gradient(self) -> Float[Tensor, " D"]:
        """Return the gradient of the negative log-likelihood (a sum over the data), Jᵀr. Costs one gradient."""
        exact = self._exact
        return self.passes.total(lambda batch, J: J.pull_of(lambda f: exact.residual(f, batch)), 1).squeeze(1)

    def hessian_product(self, block: Float[Tensor, "D K"]) -> Float[Tensor, "D K"]:
        """Return the Hessian of the negative log-likelihood times a block of vectors; see `hessian_product`."""
        if torch.is_grad_enabled() and block.requires_grad:
            return linear(block, self.hessian_product, self.hessian_product)
        total: Tensor | None = None
        for inputs, batch in self.passes.source:
            total = accumulate(total, hessian_product(self.model, self.likelihood, block.detach(), inputs, batch))
        assert total is not None  # linearize rejects empty data
        return self.passes.add_up(total)

    def require_symmetric_hessian(self) -> None:
        """Raise RuntimeError unless uᵀHv equals vᵀHu at the first two points, and if there are no labels."""
        self.require_labels("the Hessian")
        inputs, _ = next(iter(self.passes.source))
        require_symmetric(self.model, first_of(inputs))

    @torch.no_grad()
    def curvature_diagonal(self, fisher: OutputFisher) -> Float[Tensor, " D"]:
        """Return Σ_n Σ_r g[n, r]², elementwise, for rows g[n, r] of LᵀJ with H = L Lᵀ."""
        chunk = self.passes.chunk_bytes
        pieces = self.root_pieces(fisher.narrow, chunk, apart=self.passes.engines.plan.is_last_layer)
        groups = (group for _, groups in pieces for group in groups)
        return sum_squares(self.passes, groups, chunk)

    def gradient_rows(self, likelihood: Likelihood, per_token: bool = False) -> Passes | None:
        """Return the walk over the points' own gradients J_nᵀ r_n, or those of their tokens; all callers share it.

        r is kept as a constant. The result is None if a gradient for the likelihood's hyperparameters is recorded.
        """
        tensors = likelihood.hyperparameters
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        present = [tensor.detach() for tensor in tensors]
        with self.model.lock:
            held = self._gradient_rows.get(per_token)
            if held is None or not all(map(torch.equal, held[0], present)):  # they may change in place, as in training
                values = [tensor.clone() for tensor in present]
                fisher = Empirical(likelihood.with_hyperparameters(values), self.positions_apart(per_token))
                held = self._gradient_rows[per_token] = values, self.passes.with_root(fisher)
            return held[1]

    def root_pieces(
        self, fisher: OutputFisher, chunk: int, apart: bool = False, first: int = 0
    ) -> Iterator[tuple[slice, Iterator[Group]]]:
        """Yield the root pieces of `passes`; the first walk over all data also computes the log-likelihood."""
        results, count = self.results_now(), 0
        unscored = self.data.labelled and "log likelihood" not in results
        total: Tensor | None = None

        def score(f: Tensor, batch: Batch) -> None:
            nonlocal total, count
            with torch.no_grad():
                total = accumulate(total, self.likelihood.log_prob(f, batch.targets, batch.weights).sum())
            count += batch.num_points

        yield from self.passes.root_pieces(fisher, chunk, apart, first, score if unscored else None)
        if total is not None and count == sum(self.data.sizes):
            results["log likelihood"] = self.passes.add_up(total)

    def flatten(self, tensors: Mapping[str, Tensor] | nn.Module) -> Float[Tensor, " D"]:
        """Return named tensors, or the parameters of a module, as one vector, in the order of the selection."""
        return self.model.selection.flatten(tensors_of(tensors) if isinstance(tensors, nn.Module) else tensors)

    def unflatten(self, vector: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """Return one vector as named tensors, the inverse of `flatten`, if whole tensors are selected.

        Raises ValueError for a subnetwork, whose vector lacks the entries outside it; use `unflatten_weights` or
        `unflatten_tangent` instead.
        """
        if self.model.selection.index is not None:
            raise ValueError("a subnetwork's vector lacks entries: use unflatten_weights or unflatten_tangent.")
        return self.unflatten_tangent(vector)

    def unflatten_weights(self, weights: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """Return weights, such as a draw, as named tensors; entries outside a subnetwork are those of the snapshot.

        `model.load_state_dict(lin.unflatten_weights(draw), strict=False)` loads a draw into the model. Raises
        ValueError unless it is one vector (D,).
        """
        return self.model.unflatten(self._one_vector(weights))

    def unflatten_tangent(self, vector: Float[Tensor, " D"]) -> dict[str, Tensor]:
        """Return a step, gradient or product as named tensors; entries outside a subnetwork are zero.

        Raises ValueError unless it is one vector (D,).
        """
        return self.model.selection.unflatten(self._one_vector(vector))

    def _one_vector(self, vector: Tensor) -> Tensor:
        if isinstance(vector, Mapping):
            raise TypeError("expected one vector, got a mapping: join its tensors by lin.flatten(mapping).")
        check_tensor("vector", vector)
        check_shape("vector", vector, (self.num_parameters,))
        return vector

    def with_likelihood(self: N, likelihood: Likelihood) -> N:
        """Return a copy with another likelihood of the same targets, unchecked, which shares the engines for J."""
        if not isinstance(likelihood, Likelihood):
            wanted = "with_likelihood takes one of co.likelihoods (names, losses and mappings are for co.linearize)"
            raise TypeError(f"{wanted}; given {likelihood!r}.")
        new = copy_object(self)
        new.likelihood, new._gradient_rows, new._views = likelihood.to(), {}, {}
        new._results = None, {}
        return new

    def output(self: N, name: Name) -> N:
        """Return the network with one of several outputs, for predictions of it: its data have all targets."""
        if name not in self._views:
            assert isinstance(self.likelihood, Multitask) and isinstance(self.model.layout, NamedLayout)
            layout = next(member for member in self.model.layout.members if member.name == name)
            member, model = self.likelihood.likelihoods[name], self.model.with_layout(layout)
            shape = output_shape(member, layout)
            self._views[name] = self._with(self.data, self.token, model=model, likelihood=member, output_shape=shape)
        view: N = self._views[name]
        return view

    def at_positions(self: N, chosen: Sequence[int]) -> N:
        """Return the network with the outputs at some positions, for predictions of them: its data have all targets."""
        layout, likelihood = self.model.layout, self.likelihood
        assert layout is not None and isinstance(likelihood, Sequences)
        part = PositionsLayout(layout.shape, layout.class_dim, name=layout.name, whole=layout, chosen=tuple(chosen))
        of_part = Sequences(likelihood.of_position, len(chosen), likelihood.num_outputs)
        others = {"likelihood": of_part, "output_shape": of_part.output_shape}
        return self._with(self.data, self.token, model=self.model.with_layout(part), **others)

    def with_weights(self: N, theta: Float[Tensor, " D"]) -> N:
        """Return the network at other values of its selected parameters, with the same data."""
        return self._with(self.data, self.token, model=self.model.at(theta))

    def restrict(self: N, chosen: Int[Tensor, " m"], factor: float) -> N:
        """Return the network with some of its points, in ascending order, and their weights multiplied by a factor."""
        return self._with(self.data.restrict(chosen, factor, self.theta), None)

    def of_whole_network(self: N) -> N:
        """Return the network with all parameters that require a gradient, whatever selection this one has."""
        selection, trainable = self.model.selection, self.model.trainable
        if selection.index is None and set(selection.names) >= set(trainable):
            return self
        return self._with(self.data, self.token, model=self.model.selecting(trainable))

    def write_once(self, write: Callable[[], None]) -> None:
        """Write files; over a process group the first rank writes, while the others wait."""
        if self.ranks is None:
            write()
        else:
            self.ranks.from_first(write)

    def gathered(self: N) -> N:
        """Return the network with the data of all ranks on this one alone; itself if it has no process group.

        This is for function space and for code that reads all data at once: the data of all ranks must fit on each.
        """
        shard = self.passes.shard
        return self if shard is None else self._with(shard.whole(self.theta), self.token)

    def cast(self: N, dtype: torch.dtype | None = None, device: torch.device | None = None) -> N:
        """Return a copy with parameters, buffers and data converted. Costs two passes over the data."""
        likelihood = self.likelihood.to(device=device, dtype=dtype)
        data, model = self.data.to(device=device, dtype=dtype), self.model.cast(dtype, device)
        others = {"model": model, "likelihood": likelihood}
        return self._with(data, self.token, memory_budget=self.memory.on(device), **others)

    def _with(self: N, data: Batches | AbsentBatches, token: str | None, **others: Any) -> N:
        """Return a network of other data; its further parts are this one's, except those given."""
        arguments: dict[str, Any] = {"model": self.model, "likelihood": self.likelihood, "memory_budget": self.memory}
        arguments |= {"engine": self.engine, "progress": self.passes.progress, "output_shape": self.output_shape}
        return type(self)(data=data, token=token, **arguments | others)

    @torch.no_grad()
    def problem(self) -> dict[str, Any]:
        """Return by name the facts that a checkpoint compares, including the log-likelihood. Costs one forward pass."""
        return self.identified_by | ({"its log-likelihood": self.log_likelihood()} if self.data.labelled else {})

    @property
    def order(self) -> dict[str, Any]:
        """The further facts that a checkpoint compares if a run draws noise for each point."""
        return {"the order of the data": self.data.prints.order}

    @property
    def identified_by(self) -> dict[str, Any]:
        """By name the facts that distinguish a linearisation from others: network, data, likelihood, engine."""
        return {
            **self.model.identified_by,
            "the data": str(self.source),
            "the likelihood": identify(self.likelihood),
            "the engine": self.engine,
        }

    def __repr__(self) -> str:
        return self._printed(self.theta.dtype, self.theta.device)
