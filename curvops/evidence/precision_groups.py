"""Which weights share a prior precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.operators import Linearization

OVER = ("scalar", "layers", "tensors", "weights")


@dataclass(frozen=True, eq=False)
class PrecisionGroups:
    """A = α[index] · base: one α for each group of weights."""

    names: tuple[str, ...]
    index: Int[Tensor, " D"]
    base: Float[Tensor, " D"]
    counts: Float[Tensor, " G"]

    def totals(self, each: Float[Tensor, " D"]) -> Float[Tensor, " G"]:
        """The sum over each group."""
        return torch.zeros_like(self.counts).index_add_(0, self.index, each.to(self.counts))

    def precision(self, alpha: Float[Tensor, " G"]) -> Tensor:
        """A as a posterior takes it: 0-d where it is one number."""
        if len(alpha) == 1 and bool((self.base == 1).all()):
            return alpha[0].to(self.base.dtype)
        return (alpha.to(self.base.dtype)[self.index]) * self.base

    def start(self, precision: Tensor) -> Float[Tensor, " G"]:
        """The α of a diagonal precision: in each group the geometric mean over its weights."""
        logs = (precision.detach().expand_as(self.base) / self.base).double().log()
        return (self.totals(logs) / self.counts).exp()


def precision_groups(lin: Linearization, over: str, base: Float[Tensor, " D"] | None = None) -> PrecisionGroups:
    """One group of all weights ("scalar"), one a layer ("layers": a module's own parameters), a tensor or a weight."""
    selection, size = lin.model.selection, lin.num_parameters
    names: tuple[str, ...]
    if over == "scalar":
        names, index = ("all",), torch.zeros(size, dtype=torch.long)
    elif over == "weights":
        names, index = ("weights",), torch.arange(size)
    else:
        owners = [(over == "layers" and name.rpartition(".")[0]) or name for name in selection.names]
        names = tuple(dict.fromkeys(owners))
        places = selection.positions()
        index = torch.empty(size, dtype=torch.long)
        for owner, name in zip(owners, selection.names):
            chosen = places[name].flatten()
            index[chosen[chosen >= 0].cpu()] = names.index(owner)
        used = index.unique()  # of a subnetwork some layers may have no weight
        names, index = tuple(names[i] for i in used.tolist()), torch.searchsorted(used, index)
    index = index.to(lin.theta.device)
    base = torch.ones_like(lin.theta) if base is None else base
    groups = int(index.max()) + 1
    return PrecisionGroups(names, index, base, index.bincount(minlength=groups).double())
