"""Dense principal blocks of an operator: subnetworks, and block-diagonal approximations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import BlockDiagonal as Blocks
from curvops.linalg import Dense
from curvops.network.output_fisher import Exact
from curvops.operators.curvature import Curvature
from curvops.operators.linearization import Linearization

COLUMNS = 64
"""Unit vectors that are multiplied at a time."""


class Subnetwork(Dense):
    """The principal block A[S, S] of an operator for a set S of weights, as a dense matrix (S, S).

    `co.Subnetwork(op, indices)`; plus a prior it is solved by Cholesky (Daxberger et al. 2021). For a GGN or Fisher it
    costs one push of J for each index, Σ_n (J_n E_S)ᵀ H_n (J_n E_S), and never a row of J; for other operators a product
    for each index. Memory: S² and S·N·C of a batch at a time. `parameters=indices` in `co.linearize` is the same block as
    an operator that is never formed. Raises ValueError for indices that are out of range, repeated, or none.
    """

    def __init__(self, source: LinearOperator | Tensor, indices: Any = None, psd: bool = False) -> None:
        if isinstance(source, LinearOperator):
            indices = checked_indices(indices, source.shape[-1]).to(source.device)
            psd = bool(getattr(source, "psd", False))
            source = principal_block(source, indices)
        super().__init__(source)
        self._kwargs = {"indices": indices, "psd": psd}

    @property
    def indices(self) -> Int[Tensor, " S"]:
        """Positions of the subnetwork's weights in the vector of all."""
        return self._kwargs["indices"]

    @property
    def psd(self) -> bool:
        return self._kwargs["psd"]
