"""The noise of a posterior's draws, kept as a seed for every method and prior precision, and the systems it defines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import draw
from curvops.linalg.core.memory import Memories, solve_width
from curvops.linalg.core.sharded import SEED
from curvops.linalg.core.symmetry import is_psd
from curvops.linalg.core.vectors import join
from curvops.network import PointNormals
from curvops.operators import Linearization
from curvops.operators.curvatures.curvature import CurvatureRoot, root_of
from curvops.posterior.core.terms import PrecisionTerms, Prior

DRAWN_TOGETHER = 8
"""How many draws of a matrix without a square root are made at once, whatever the memory."""
STREAMS = OF_CURVATURE, OF_PRIOR, FURTHER = range(3)
"""The number of independent streams per draw: the terms of a draw take their numbers from different streams."""


@dataclass(frozen=True)
class Noise:
    """Standard normal numbers for `count` draws of a posterior, stored as a seed and generated where they are used.

    Each draw has its own numbers: the first draws of two noises with the same seed are equal, whatever the batches and
    the memory budget.
    """

    seed: int
    count: int
    num_parameters: int
    num_data: int
    data: int
    """The fingerprint of the training data in their order."""

    @classmethod
    def draw(cls, lin: Linearization, count: int, generator: torch.Generator | None) -> Noise:
        """Make new noise for the posteriors of a linearisation."""
        seed = PointNormals.drawn(generator).seed
        if lin.ranks is not None:
            lin.ranks.require_equal({SEED: seed})
        return cls(seed, count, len(lin.theta), lin.num_data, lin.data.prints.order)

    def require_of(self, lin: Linearization, k: int) -> None:
        """Raise ValueError if the noise belongs to another problem, or to fewer draws."""
        own = (lin.num_parameters, lin.num_data, lin.data.prints.order)
        if (self.num_parameters, self.num_data, self.data) != own:
            raise ValueError(
                f"the noise belongs to {self.num_data} points and {self.num_parameters} weights, or to other data, but "
                f"this posterior has {lin.num_data} and {lin.num_parameters}; leave noise out to draw it anew."
            )
        if k > self.count:
            raise ValueError(f"k={k}, but the noise is for {self.count} draws; pass k={self.count} or fewer.")

    def of_data(self, per_point: int, columns: range, like: Tensor) -> Float[Tensor, "NR k"]:
        """Return standard normal columns for the square root of the curvature, the same number for each point."""
        numbers = PointNormals(self.seed).block(columns, slice(0, self.num_data), per_point, like)
        return numbers.flatten(1).mT

    def of_curvature(self, curvature: LinearOperator, columns: range) -> Float[Tensor, "D k"]:
        """Draw from N(0, G) for a curvature without a square root by points."""
        return self._drawn(OF_CURVATURE, curvature, columns)

    def of_prior(self, prior: Prior, columns: range, like: Tensor) -> Float[Tensor, "D k"]:
        """Draw ξ from N(0, A)."""
        if prior.diagonal is None:
            assert isinstance(prior.precision, LinearOperator)
            return self._drawn(OF_PRIOR, prior.precision, columns)
        scale = prior.diagonal.sqrt()
        rows = torch.empty(len(columns), self.num_parameters, dtype=like.dtype, device=like.device)
        for column, row in zip(columns, rows):
            row.normal_(generator=self._generator(column, OF_PRIOR, like.device))
        return rows.mT * (scale if scale.ndim == 0 else scale.unsqueeze(-1))

    def generator(self, device: Any) -> torch.Generator:
        """Return a generator of further numbers."""
        return self._generator(0, FURTHER, device)

    def _drawn(self, part: int, operator: LinearOperator, columns: range) -> Tensor:
        if not is_psd(operator):  # its parts have no root, but a shift makes the whole definite
            operator = operator.add_diagonal(0.0)
        blocks = []
        for start in range(columns.start - columns.start % DRAWN_TOGETHER, columns.stop, DRAWN_TOGETHER):
            drawn = draw(operator, DRAWN_TOGETHER, self._generator(start, part, operator.device))
            blocks.append(drawn[:, max(0, columns.start - start) : columns.stop - start])
        return join(*blocks)

    def _generator(self, column: int, part: int, device: Any) -> torch.Generator:
        return torch.Generator(device=device).manual_seed(self.seed + len(STREAMS) * column + part)


@dataclass(frozen=True, eq=False)
class Systems:
    """P = G + A with the right-hand sides of some draws; every method starts from these."""

    terms: PrecisionTerms
    noise: Noise
    columns: range
    """The positions of these draws in the noise."""
    route: str
    precision: Any

    @property
    def count(self) -> int:
        """k, the number of draws."""
        return len(self.columns)

    @property
    def memories(self) -> Memories:
        """The memory budgets that the draws count against; a structured P does not hold them."""
        return frozenset((self.terms.lin.memory,))

    @property
    def at_a_time(self) -> tuple[int, int]:
        """Return how many draws fit into memory at once, and the bytes to hold in addition to their solves."""
        return solve_width(self.precision, self.count, self.memories)

    @property
    def like(self) -> Tensor:
        """A tensor with the weights' dtype and device."""
        return self.terms.curvature.representation()[0]

    @property
    def root(self) -> CurvatureRoot | None:
        """The root S, if the curvature has such a root by points; otherwise None."""
        return root_of(self.terms.curvature)

    def of_prior(self) -> Float[Tensor, "D k"]:
        """Return Aθ⁰ ~ N(0, A)."""
        return self.noise.of_prior(self.terms.prior, self.columns, self.like)

    def of_points(self, root: CurvatureRoot) -> Float[Tensor, "NR k"]:
        """Return the white noise ε."""
        return self.noise.of_data(root.columns_a_point, self.columns, self.like)

    def right_sides(self) -> Float[Tensor, "D k"]:
        """Return Aθ⁰ + Sε ~ N(0, P).

        For an indefinite G, or if P is not exactly G + A, these are draws from N(0, P) itself.
        """
        curvature, root = self.terms.curvature, self.root
        if not is_psd(curvature) or self.terms.sum.error is not None:
            return self.noise.of_curvature(self.precision, self.columns)
        if root is None:
            return self.of_prior() + self.noise.of_curvature(curvature, self.columns)
        return self.of_prior() + root._matmul(self.of_points(root))
