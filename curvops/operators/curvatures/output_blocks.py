"""The GGN of a last layer whose outputs do not interact: a block for each output, which Cholesky solves.

With H diagonal, G = Σ_n H_n ⊗ a_n a_nᵀ is block-diagonal by output, with blocks G_c = Σ_n h_nc a_n a_nᵀ of the layer's
weights of output c and its bias.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg import Dense
from curvops.linalg.core.memory import keep
from curvops.linalg.core.solve_routes import DENSE_BLOCK, DENSE_SIZE, FORMED_COPIES
from curvops.linalg.operators.dense import round_with_rest
from curvops.linalg.operators.direct_sum import DirectSum, DirectSumForm
from curvops.network import Exact, OutputFisher
from curvops.operators.curvatures.curvature import Curvature
from curvops.operators.linearized.linearization import Linearization


class OutputBlocksForm(DirectSumForm):
    """The closed form of such a GGN plus a diagonal, if it has more rows than each solve forms anyway."""

    def __init__(self, curvature: Any, shift: Tensor) -> None:
        self.curvature, self.shift = curvature, shift

    @cached_property
    def base(self) -> DirectSum:
        """The blocks, which priors share."""
        G = self.curvature
        found: DirectSum = G.cache.get_or_compute("by output", G.representation(), self._blocks, G.representation()[1:])
        return found

    def nearby_shift(self) -> Tensor:
        return self.shift  # whether this form holds does not depend on it

    def _blocks(self) -> DirectSum:
        found = output_blocks(self.curvature.lin, self.curvature.output)
        keep(self.curvature, found, self._nbytes)
        return found

    @property
    def _nbytes(self) -> int:
        """The bytes of all blocks, of these plus a prior, of their factors, and of work."""
        layer = self.curvature.lin.passes.engines.plan.layers[0]
        return FORMED_COPIES * 8 * int(layer.height * layer.width**2)

    @property
    def holds(self) -> bool:
        G, lin = self.curvature, self.curvature.lin
        plan, model = lin.passes.engines.plan, lin.model
        exact = type(G)._product is Curvature._product and isinstance(G.output, Exact)
        if not (
            exact
            and G.output.is_diagonal
            and plan.is_last_layer
            and model.selection.index is None
            and self.shift.ndim < 2
        ):
            return False
        if carries_graph(G.representation()) or "weight" not in plan.layers[0].names:
            return False
        large = len(lin.theta) > DENSE_SIZE and plan.layers[0].width <= DENSE_BLOCK
        return large and self._nbytes <= lin.memory_budget


@torch.no_grad()
def output_blocks(lin: Linearization, output: OutputFisher) -> DirectSum:
    """Return the GGN of a last layer with a diagonal H as the direct sum of its blocks. One forward pass."""
    layer = lin.passes.engines.plan.layers[0]
    total = lin.theta.new_zeros(layer.height, layer.width, layer.width, dtype=torch.float64)
    for _, groups in lin.root_pieces(output, lin.passes.chunk_bytes, apart=True):
        for group in groups:
            assert group.hessian is not None  # its layer is the last one, alone, and H is diagonal
            right = group.parts[0].right().flatten(0, 2).double()
            for own, weights in zip(total, group.hessian.diagonal.unbind(1)):
                own.addmm_((weights.unsqueeze(1) * right).mT, right)
    total = lin.passes.add_up(total)
    positions = layer.to_matrix(lin.model.selection.positions())[0].to(lin.theta.device)
    parts = (round_with_rest(block, lin.theta.dtype) for block in total)
    dense = (Dense(block, psd=True, rest=rest) for block, rest in parts)
    return DirectSum(*dense, positions=list(positions), **lin.origin)
