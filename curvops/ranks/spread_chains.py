"""Chains of a sampler that are spread over the ranks of a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Shaped
from torch import Tensor

from curvops.ranks.process_group import Ranks


@dataclass(frozen=True, eq=False)
class Spread:
    """The chains of one rank among all: rank r of n has the chains r, r + n, r + 2n, … of `chains`."""

    ranks: Ranks
    chains: int
    gather: bool

    def __post_init__(self) -> None:
        self.ranks.require_equal({"the number of chains, and gather": (self.chains, self.gather)})
        if self.chains < self.ranks.size:
            raise ValueError(f"{self.chains} chains are fewer than the {self.ranks.size} ranks: each rank needs one.")

    @property
    def indices(self) -> slice:
        """The positions of this rank's chains among all chains."""
        return slice(self.ranks.rank, None, self.ranks.size)

    @property
    def count(self) -> int:
        """The number of this rank's chains."""
        return len(range(self.chains)[self.indices])

    def line_up(self, rows: Shaped[Tensor, "own *n"]) -> Shaped[Tensor, "k *n"]:
        """Return the rows of the chains of all ranks, in the order of the chains."""
        by_rank = self.ranks.line_up(rows)
        order = torch.cat([torch.arange(self.chains)[r :: self.ranks.size] for r in range(self.ranks.size)])
        return by_rank[order.argsort().to(by_rank.device)]

    def mean(self, values: Float[Tensor, " own"]) -> float:
        """Return the mean of one number per chain, over the chains of all ranks."""
        return float(self.ranks.add_up(values.sum())) / self.chains

    def require_apart(self, other: Ranks) -> None:
        """Raise ValueError if the ranks that share the data are those that share the chains."""
        both = set(dist.get_process_group_ranks(self.ranks.group)) & set(dist.get_process_group_ranks(other.group))
        if len(both) > 1:
            raise ValueError("the ranks of process_group share the data of log_posterior: leave process_group out.")
