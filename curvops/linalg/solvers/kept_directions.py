"""Search directions of conjugate gradients that are kept with their images, for the later steps of a solve.

With directions W, WᵀPW = I, and their images PW, a later direction z becomes z − W (PW)ᵀz, which is P-conjugate to all
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.core.memory import memories_of, room_for, vector_bytes
from curvops.linalg.core.solve_routes import kept_directions
from curvops.linalg.core.vectors import (
    Matrix,
    Vectors,
    as_block,
    axpy,
    column_bytes,
    combine,
    describe_square,
    empty_block,
    gram,
    part,
    put,
)

VECTORS = 12
"""Working vectors per right-hand side, temporaries included."""
TOGETHER = 64
"""How many directions are stored side by side."""


@dataclass(eq=False)
class Panel:
    """Some directions side by side, with room for more: Q and PQ, of which the first ``filled`` columns are in use."""

    Q: Float[Vectors, "n j"]
    PQ: Float[Vectors, "n j"]
    filled: int = 0

    @property
    def pair(self) -> tuple[Vectors, Vectors]:
        """The directions and their images."""
        return part(self.Q, 0, self.filled), part(self.PQ, 0, self.filled)

    @property
    def nbytes(self) -> int:
        """The bytes of both blocks."""
        return 2 * self.Q.shape[1] * column_bytes(self.Q)


@dataclass(eq=False)
class KeptDirections:
    """The first directions of a solve, scaled so that QᵀPQ = I.

    Conjugation to them changes nothing without rounding, so that any number of them may be kept: the first ones span
    the large eigenvalues, along which conjugacy is lost.

    ``most`` limits their number. ``hold(panel, nbytes)`` counts the bytes of each panel as used while it exists.
    """

    most: int = 0
    hold: Callable[[object, int], None] | None = None
    panels: list[Panel] = field(default_factory=list, init=False)
    ended: bool = field(default=False, init=False)
    """Whether no directions are kept any more."""

    @property
    def count(self) -> int:
        """The number of directions."""
        return sum(panel.filled for panel in self.panels)

    def add(self, Q: Vectors, PQ: Vectors, curvature: Float[Tensor, "r *r"]) -> None:
        """Keep directions that are conjugate to the others, if there is room for all of them."""
        r = Q.shape[1]
        if not r or self.ended or self.count + r > self.most:
            return
        L, _ = torch.linalg.cholesky_ex(curvature)
        scale = torch.linalg.solve_triangular(L, torch.eye(r, dtype=L.dtype, device=L.device), upper=False).mT
        self._append(combine(Q, scale), combine(PQ, scale))

    def _append(self, Q: Vectors, PQ: Vectors) -> None:
        r = Q.shape[1]
        if not self.panels or self.panels[-1].filled + r > self.panels[-1].Q.shape[1]:
            self._begin_panel(Q, min(max(TOGETHER, r), self.most - self.count))
        panel = self.panels[-1]
        put(panel.Q, panel.filled, Q)
        put(panel.PQ, panel.filled, PQ)
        panel.filled += r

    def _begin_panel(self, like: Vectors, width: int) -> None:
        panel = Panel(empty_block(like, width), empty_block(like, width))
        self.panels.append(panel)
        if self.hold is not None:
            self.hold(panel, panel.nbytes)

    def conjugate(self, Z: Vectors) -> Vectors:
        """Return Z made conjugate to the directions."""
        Z = as_block(Z) if self.panels else Z
        for Q, PQ in self._pairs():
            axpy(Z, Q, -gram(PQ, Z))
        return Z

    def project(self, x: Vectors, r: Vectors) -> None:
        """Minimise the energy along the directions for the residual r: x ← x + Q Qᵀr, r ← r − PQ Qᵀr."""
        for Q, PQ in self._pairs():
            alpha = gram(Q, r)
            axpy(x, Q, alpha)
            axpy(r, PQ, -alpha)

    def _pairs(self) -> Iterator[tuple[Vectors, Vectors]]:
        return (panel.pair for panel in self.panels)

    def end(self) -> None:
        """Forget the directions, and keep no more: the matrix is too close to singular for them."""
        self.most, self.panels, self.ended = 0, [], True

    def state(self) -> dict[str, Any]:
        """Return the directions, as a state from which a run continues."""
        return {"most": self.most, "pairs": list(self._pairs())}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        self.most = state["most"]
        for Q, PQ in state["pairs"]:
            self._append(Q, PQ)


def most_directions(A: Matrix, columns: int, memory_budget: int | None) -> int:
    """Return how many directions fit beside the working vectors, for an operator of a network."""
    facts, room = describe_square(A), room_for(A, memory_budget, 0) if memories_of(A) else None
    size = vector_bytes(facts)
    fitting = 0 if room is None else kept_directions(room - VECTORS * size * columns, size)
    return min(facts.rows // 2, fitting)  # what is left of a small space is rounding
