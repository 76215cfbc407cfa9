"""The exact diagonal of the GGN, and of the Monte-Carlo and empirical Fishers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg import Diagonal
from curvops.network.likelihoods.output_fisher import OutputFisher
from curvops.network.model.model import Model
from curvops.network.model.parameters import Blocks
from curvops.network.walks.layer_roots import Group
from curvops.operators.fisher import output_fisher
from curvops.operators.jacobian import Jacobian
from curvops.operators.layer_matrix import as_tensors, width_of
from curvops.operators.linearization import Linearization
from curvops.operators.moments import second_moments
from curvops.operators.reading import OfLinearization, Stored, made_of


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


@torch.no_grad()
def curvature_diagonal(lin: Linearization, fisher: OutputFisher) -> Float[Tensor, " D"]:
    """Σ_n Σ_r g[n, r]², elementwise."""
    return _summed(lin.model, lin.root_rows(fisher), lin.passes.chunk_bytes)


@torch.no_grad()
def squared_columns(jacobian: Jacobian) -> Float[Tensor, " D"]:
    """Σ_n Σ_c J[n·C + c, d]² for each weight d: the diagonal of JᵀJ."""
    passes = jacobian.passes
    groups = (group for _, groups in passes.jacobian_rows() for group in groups)
    return _summed(passes.model, groups, passes.chunk_bytes)


def _summed(model: Model, groups: Iterable[Group], chunk_bytes: int) -> Float[Tensor, " D"]:
    total = {name: torch.zeros_like(value) for name, value in model.values.items()}
    for group in groups:
        for name, squares in _squares(group, chunk_bytes).items():
            total[name] += squares
    return model.selection.flatten(total)


def _squares(group: Group, chunk_bytes: int) -> Blocks:
    matrices = group.matrices()
    if matrices is not None:
        assert group.layer is not None
        return as_tensors(group.layer, second_moments(matrices, width_of(group.layer), chunk_bytes))
    total: Blocks = {}
    for rows in group.pieces(chunk_bytes):
        for name, row in rows.items():
            squares = row.flatten(0, 1).square().sum(0)
            total[name] = total[name] + squares if name in total else squares
    return total
