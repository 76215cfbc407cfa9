"""The layers of a model that is sharded over ranks: the check of their rules, and a pass over some points.

No other engine can be used for a parameter here, since it would gather all parameters on a rank at once. So a
parameter that has no rule, or a wrong one, is rejected by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvops.network.data.inputs import take
from curvops.network.engines.engine import LEAST_CHUNK
from curvops.network.engines.layerwise import Layerwise, Recording, never_ran, owners_of, record
from curvops.network.engines.self_check import mismatches, path_of
from curvops.network.likelihoods.output_fisher import IDENTITY, Root
from curvops.network.model.parameters import Blocks
from curvops.network.model.sharded_model import ShardedModel
from curvops.network.walks.layer_roots import group_calls, unlike

KNOWN = "Linear, convolution, embedding and normalisation layers of torch, without hooks, each called by itself"


class ShardedLayers:
    """The layers that hold the selected parameters; they are proven to multiply by J at the first points.

    `groups` are the parameters of each layer, or of layers that share some, in the same order on all ranks.

    Raises ValueError, with the parameters' names, if a selected parameter has no layer rule or a wrong one.
    """

    def __init__(self, model: ShardedModel, few: Any) -> None:
        self.model, self._owners = model, owners_of(model)
        served = {name for names in self._owners.values() for name in names.values()}
        _refuse_if(set(model.selection.names) - served, "have no layer rule")
        self._paths = {self._prove(few)}
        self._paths.add(self._prove(take(few, slice(0, 1))))

    def _prove(self, few: Any) -> int:
        """Check the rules against autograd's gradients, some layers at a time; return the path of the pass."""
        edges: dict[str, GradientEdge] = {}

        def note(module: nn.Module, _: Any) -> None:  # while the module's parameters are whole
            edges.update((name, get_gradient_edge(getattr(module, k))) for k, name in self._owners[module].items())

        handles = [module.register_forward_pre_hook(note) for module in self._owners]
        try:
            with self.model.at_snapshot():
                recording = record(self.model, few, self._owners)
                outputs, calls, misfits = recording
                silent = never_ran(calls, self._owners)
                _refuse_if(silent, "belong to layers that do not run")
                _refuse_if(misfits, "belong to layers that run differently from their rules")
                engine = Layerwise(self.model, recording, None, LEAST_CHUNK)
                reached = {name for part in engine.parts for name in part.layer.names.values()}
                _refuse_if(set(self.model.selection.names) - reached, "have no effect on the outputs")
                self.groups = tuple(group_calls(calls))
                self.num_outputs = outputs.shape[1]
                self._sizes = [(call.kept[:1].nbytes, call.layer.output[1:].numel()) for call in calls]
                bad: set[str] = set()
                for names in self._together():
                    some = copy(engine)
                    some.parts = [part for part in engine.parts if names & set(part.layer.names.values())]
                    reference = _Leaves(self.model, outputs, {name: edges[name] for name in names})
                    bad |= mismatches(some, reference.pull).wrong
        finally:
            for handle in handles:
                handle.remove()
        _refuse_if(bad, "have gradients that differ from those of their layers' rules")
        path = path_of(self.model, recording)
        if path is None:
            raise ValueError(
                "the model moves points of a batch, which cannot be checked if its parameters are sharded."
            )
        return path

    def _together(self) -> Iterator[set[str]]:
        """Yield the parameters of some layers at a time, together no larger than the largest group."""
        sizes = dict(zip(self.model.selection.names, (shape.numel() for shape in self.model.selection.shapes)))
        most = max(sum(sizes[name] for name in names) for names in self.groups)
        some: set[str] = set()
        for names in self.groups:
            if some and sum(sizes[name] for name in some | set(names)) > most:
                yield some
                some = set()
            some = some | set(names)
        yield some

    def bytes_a_point(self, columns: int) -> int:
        """Return the most bytes that an engine keeps for a point with this number of rows."""
        itemsize = self.model.theta.element_size()
        return sum(kept + columns * output * itemsize for kept, output in self._sizes)

    def build(self, inputs: Any, chunk_bytes: int, root: Root = IDENTITY) -> Layerwise:
        """Return J of some points, or Lᵀ J. All ranks call it together; a rank whose layers run differently raises."""
        with self.model.at_snapshot():
            recording: Recording = record(self.model, inputs, self._owners)
            if recording[2] or path_of(self.model, recording) not in self._paths:
                raise RuntimeError(unlike(recording[2] or self.model.selection.names))
            return Layerwise(self.model, recording, None, chunk_bytes, root)


class _Leaves:
    """Jᵀ of a recorded pass by autograd, for a few parameters: the gradients of this rank's points alone."""

    def __init__(self, model: ShardedModel, outputs: Tensor, edges: Mapping[str, GradientEdge]) -> None:
        self._model, self._outputs, self._edges = model, outputs, edges

    def pull(self, cotangents: Tensor) -> Blocks:
        """Return Jᵀ u for one u, (1, n, C), by name."""
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        with self._model.differentiating(), self._model.holding({}):
            found = torch.autograd.grad(self._outputs, [*self._edges.values()], cotangents[0], **options)
        shapes = dict(zip(self._model.selection.names, self._model.selection.shapes))
        zero = self._outputs.new_zeros(())
        return {
            name: (zero.expand(shapes[name]) if gradient is None else gradient.detach()).unsqueeze(0)
            for name, gradient in zip(self._edges, found)
        }


def _refuse_if(names: Collection[str], why: str) -> None:
    if names:
        raise ValueError(
            f"the parameters {sorted(names)} {why}. If parameters are sharded over ranks, only layer rules can be "
            f"used ({KNOWN}): leave these parameters out of parameters=, or linearise an unsharded copy of the model."
        )
