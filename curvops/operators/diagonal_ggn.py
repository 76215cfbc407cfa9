"""The exact diagonal of the GGN, and of the Monte-Carlo and empirical Fishers."""

from __future__ import annotations

import torch

from curvops.linalg import Diagonal
from curvops.operators.fisher import output_fisher
from curvops.operators.linearization import Linearization
from curvops.operators.reading import OfLinearization, Stored, made_of
from curvops.operators.row_squares import curvature_diagonal


class DiagonalGGN(OfLinearization, Diagonal):
    """diag(G) as an operator (D, D): the squares of all rows of LᵀJ, added up (Dangel, Kunstner & Hennig 2020).

    `co.DiagonalGGN(lin, fisher="exact" | "mc" | "empirical", mc_samples=1, generator=None)`. Every operation on it,
    and on it plus a prior, is elementwise: a product is D multiplications. It ignores correlations: choose it for
    ranking weights and as the cheapest posterior, not where weights act together.

    Cost to build, here and once, without a gradient graph: a forward pass and a backward pass for each of C columns
    (mc: `mc_samples`, empirical: one), and one more matrix product a layer for each; where a layer is applied at one
    position that product is shared by all columns. Memory: a chunk of sensitivities within the budget, never a
    Jacobian. Parameters without a layer rule take a backward pass for each point and column. Raises ValueError for
    another `fisher`.
    """

    STORED = "space"

    @classmethod
    def _read(
        cls,
        lin: Linearization,
        fisher: str = "exact",
        mc_samples: int = 1,
        generator: torch.Generator | None = None,
    ) -> Stored:
        entries = curvature_diagonal(lin, output_fisher(lin, fisher, mc_samples, generator))
        return (entries,), made_of(lin)
