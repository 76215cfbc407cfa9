"""A walk over the data has three verbs: a sum over batches, rows over points, and each batch.

Data that ranks share enter here alone: every sum over the data ends in `add_up`, every concatenation in `line_up`, what
all ranks have enters a sum through `replicated`, for the sake of its gradient, and what must not differ is in `agree`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.network.data.randomness import PointNormals
from curvops.network.likelihoods.output_fisher import OutputFisher
from curvops.network.model.model import Model
from curvops.ranks.shard import Shard


class Walk(ABC):
    """A sum over batches (`total`), rows over their points (`rows`), or each batch in turn (`each`).

    A term is a function of (label, J of a batch). If the data are a `shard`, sums and rows are those of all ranks.
    """

    model: Model
    shard: Shard | None

    @abstractmethod
    def each(self, columns: int, root: OutputFisher | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield (label, J of the batch) for every batch, for a product with `columns` vectors (0: for outputs only).

        With a `root` it is Lᵀ J, with H = L Lᵀ.
        """

    def total(
        self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None, own_part: bool = False
    ) -> Tensor:
        """Return Σ over batches of `term(label, J of the batch)`, for `columns` vectors; with a root Lᵀ J.

        With `own_part` the result is this rank's part.
        """
        return self.add_up(self.own_sum(term, columns, root), own_part)

    def own_sum(self, term: Callable[[Any, Any], Tensor], columns: int, root: OutputFisher | None = None) -> Tensor:
        """Return the sum of the terms over this process's batches."""
        total: Tensor | None = None
        for label, J in self.each(columns, root):  # a loop: a generator would hold one vector more
            total = accumulate(total, term(label, J))
        assert total is not None  # linearize rejects empty data
        return total

    def rows(
        self, term: Callable[[Any, Any], Float[Tensor, "K n R"]], columns: int, root: OutputFisher | None = None
    ) -> Float[Tensor, "NR K"]:
        """Return the terms of all points, with those of each point together."""
        terms = [term(label, J).flatten(1) for label, J in self.each(columns, root)]
        return self.line_up([self.model.theta.new_zeros(max(1, columns), 0), *terms], 1).mT

    def pull(
        self,
        block: Float[Tensor, "NR K"],
        rows: int,
        term: Callable[[Any, Any, Tensor], Tensor] = lambda label, J, z: J.pull(z),
        root: OutputFisher | None = None,
    ) -> Float[Tensor, "D K"]:
        """Return Σ over batches of `term(label, J, z)`, Jᵀ z, of a block with R rows a point; z (K, n, R) per batch."""
        block = self.replicated(block)
        z = block.mT.unflatten(1, (-1, rows))
        return self.total(lambda label, J: term(label, J, z[:, J.points]), block.shape[1], root)

    def draw(self, draws: range, columns: int, seed: int, root: OutputFisher | None = None) -> Float[Tensor, "D k"]:
        """Draw samples of Σ over batches of Jᵀ z, z standard normal with `columns` per point; with a root Jᵀ L z."""
        like, normals = self.model.theta, PointNormals(seed)
        return self.total(lambda _, J: J.pull(normals.block(draws, J.points, columns, like)), len(draws), root)

    def add_up(self, total: Tensor, own_part: bool = False) -> Tensor:
        """Return the sum of a tensor over all ranks, or with `own_part` this rank's part of it."""
        if self.shard is None:
            return total
        return self.shard.own_part(total) if own_part else self.shard.add_up(total)

    def line_up(self, tensors: list[Tensor], dim: int = 0) -> Tensor:
        """Concatenate the parts of all batches in the order of the points."""
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
        return whole if self.shard is None else self.shard.line_up(whole, dim)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the data, each with its own."""
        return self.shard is not None

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raise RanksDifferError, on all ranks that share the data, if a fact differs between them."""
        if self.shard is not None:
            self.shard.ranks.require_equal(facts)

    def replicated(self, tensor: Tensor) -> Tensor:
        """Return a tensor that all ranks have; its gradient is the sum of the gradients from each rank."""
        return tensor if self.shard is None else self.shard.ranks.replicate(tensor)


def accumulate(total: Tensor | None, term: Tensor) -> Tensor:
    """Return total + term, in place if no gradient is recorded; a total of None means that there is none yet."""
    if total is None:
        return term
    if total.requires_grad or term.requires_grad:
        return total + term
    return total.add_(term)
