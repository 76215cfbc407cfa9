"""Kronecker factors and exact small blocks of a curvature, layer by layer: what KFAC and EKFAC are made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from curvops.linalg import Dense, Diagonal, EigenKronecker, Kronecker, Operator
from curvops.network.output_fisher import OutputFisher
from curvops.network.parameters import Blocks
from curvops.network.plan import ASKED_FOR
from curvops.network.roots import Group
from curvops.operators.layer_matrix import as_matrix
from curvops.operators.linearization import Linearization
from curvops.operators.moments import add_outer_sum, mirrored, second_moments

Sharing = Literal["expand", "reduce"]
MOST_DENSE = 1024
"""Parameters up to which a layer without Kronecker factors gets its exact block; larger ones get its diagonal."""


@dataclass(eq=False)
class Block:
    """One block as it is added up: sums of outer products of the layer's two sides, or of its whole gradients."""

    names: tuple[str, ...]
    positions: Int[Tensor, " p"]
    left: Tensor | None = None
    right: Tensor | None = None
    count: int = 0
    exact: Tensor | None = None

    def operator(self) -> Operator:
        """B ⊗ A / positions for a layer with factors, else the exact block or its diagonal.

        It ends the sums: call it once.
        """
        if self.exact is not None:
            return Diagonal(self.exact) if self.exact.ndim == 1 else Dense(self.exact, psd=True)
        assert self.left is not None and self.right is not None
        return Kronecker(mirrored(self.left), mirrored(self.right).div_(max(1, self.count)))


class NoFactors(UserWarning):
    """Parameters that have no Kronecker factors and are too many for an exact block: they got its diagonal."""


@torch.no_grad()
def kfac_blocks(lin: Linearization, fisher: OutputFisher, sharing: str) -> list[Block]:
    """The blocks of KFAC, one a layer (or set of layers that share weights), for one walk over the data."""
    blocks: dict[tuple[str, ...], Block] = {}
    positions = lin.model.selection.positions()
    for group in lin.root_rows(fisher):
        matrices = group.matrices()
        if group.names not in blocks:
            blocks[group.names] = Block(group.names, _positions(positions, group, matrices is not None))
        block = blocks[group.names]
        if matrices is None:
            _add_exact(block, group, positions, lin.passes.chunk_bytes)
        else:
            _add_factors(block, group, [shared(pair, sharing) for pair in matrices], sharing)
    _warn_of_diagonals(lin, blocks.values())
    return [*blocks.values(), *_silent(lin, positions, blocks)]


def _warn_of_diagonals(lin: Linearization, blocks: Iterable[Block]) -> None:
    for block in blocks:
        if block.exact is None or block.exact.ndim == 2:
            continue
        why = next((lin.plan.others[name] for name in block.names if name in lin.plan.others), "no outer products")
        remedy = "use co.GGN(lin) where that is too crude"
        if why == ASKED_FOR:
            why, remedy = f"engine={lin.engine!r} uses no layer rule", "linearise with engine='auto'"
        warnings.warn(
            f"{list(block.names)} have no Kronecker factors ({why}) and more than {MOST_DENSE:,} parameters "
            f"({len(block.positions):,}): they get the exact diagonal of their block alone; {remedy}.",
            NoFactors,
            stacklevel=5,
        )


def shared(pair: tuple[Tensor, Tensor], sharing: str) -> tuple[Tensor, Tensor]:
    """The two sides with positions as they are (expand), or δ summed and a averaged over them (reduce)."""
    left, right = pair
    if sharing == "expand" or not right.is_floating_point() or right.shape[2] == 1:
        return pair
    return left.sum(3, keepdim=True), right.mean(2, keepdim=True)


def _counted(group: Group, right: Tensor) -> Tensor:
    """The inputs (n, g, t, …) without points that do not count and, where t is the sequence, without such positions."""
    mask = group.positions
    if mask is None or mask.ndim == 1 or mask.shape[1] != right.shape[2]:
        return right[group.counted]
    return right.transpose(1, 2)[mask].unsqueeze(2)


def _add_factors(block: Block, group: Group, matrices: list[tuple[Tensor, Tensor]], sharing: str) -> None:
    assert group.layer is not None
    if sharing == "reduce" and len(matrices) > 1 and all(right.is_floating_point() for _, right in matrices):
        left = torch.stack([pair[0].sum(3, keepdim=True) for pair in matrices]).sum(0)
        right = torch.stack([pair[1].mean(2, keepdim=True) for pair in matrices]).mean(0)
        matrices = [(left, right)]
    for left, right in matrices:
        block.left = add_outer_sum(block.left, left)
        if group.first:
            kept = right if group.all_counted else _counted(group, right)
            if kept.is_floating_point():
                block.count += kept.shape[0] * kept.shape[2]
                block.right = add_outer_sum(block.right, kept)
            else:
                counts = _token_counts(kept, group.layer.module)
                block.count += int(counts.sum())
                block.right = _plus(block.right, counts.to(left.dtype).unsqueeze(0))


def _token_counts(tokens: Int[Tensor, "n 1 t"], table: Any) -> Int[Tensor, " V"]:
    """How often each row of the table is looked up; never the padding row, which has no gradient."""
    counts = torch.bincount(tokens.flatten(), minlength=table.num_embeddings)
    return counts if table.padding_idx is None else counts.index_fill(0, tokens.new_tensor([table.padding_idx]), 0)


def _add_exact(block: Block, group: Group, positions: Blocks, chunk_bytes: int) -> None:
    kept = kept_entries(positions, group.names)
    for rows in group.pieces(chunk_bytes):
        flat = torch.cat([rows[name].reshape(rows[name].shape[0] * rows[name].shape[1], -1) for name in group.names], 1)
        flat = flat[:, kept]
        if flat.shape[1] <= MOST_DENSE:
            block.exact = _plus(block.exact, flat.mT @ flat)
        else:
            block.exact = _plus(block.exact, flat.square().sum(0))


@torch.no_grad()
def eigenvalue_corrected(lin: Linearization, fisher: OutputFisher, blocks: Iterable[Block]) -> list[Operator]:
    """The blocks with exact second moments on the diagonal of each Kronecker eigenbasis: a second walk over data."""
    operators = {block.names: block.operator() for block in blocks}
    bases = {names: found.eigen() for names, found in operators.items() if isinstance(found, Kronecker)}
    values = {names: torch.zeros_like(base.values) for names, base in bases.items()}
    for group in lin.root_rows(fisher):
        if group.names in bases:
            values[group.names] += _second_moments(group, bases[group.names], lin.passes.chunk_bytes)
    corrected = {
        names: EigenKronecker(base.left_vectors, base.right_vectors, values[names]) for names, base in bases.items()
    }
    return [corrected.get(names, found) for names, found in operators.items()]


def _second_moments(group: Group, base: EigenKronecker, chunk_bytes: int) -> Float[Tensor, "g p q"]:
    """Σ_n Σ_r (U_lᵀ g U_r)² with g = Σ_t left ⊗ right over all calls."""
    matrices = group.matrices()
    assert matrices is not None
    rotated = [(rotate(left, base.left_vectors), rotate(right, base.right_vectors)) for left, right in matrices]
    return second_moments(rotated, base.values.shape[2], chunk_bytes)


def rotate(side: Tensor, vectors: Tensor) -> Tensor:
    """(*m, g, t, p) with its last dimension in the eigenbasis of its group; vectors (g, p) mean the unit basis."""
    if vectors.ndim == 2:
        return side
    by_group = side.movedim(-3, 0)
    return (by_group.flatten(1, -2) @ vectors).view(by_group.shape).movedim(0, -3)


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def check_sharing(sharing: str) -> None:
    """Raise ValueError for a word that names no weight-sharing setting."""
    if sharing not in get_args(Sharing):
        raise ValueError(f"sharing={sharing!r}; expected 'expand' or 'reduce'.")


def _positions(positions: Blocks, group: Group, kronecker: bool) -> Tensor:
    """Where a group's entries stand in the flat vector, in the order of its matrix or of its names."""
    if not kronecker:
        return torch.cat([positions[name].flatten() for name in group.names])[kept_entries(positions, group.names)]
    assert group.layer is not None
    found = as_matrix(group.layer, positions).flatten()
    if bool((found < 0).any()):
        raise ValueError(
            f"the selection takes some entries of {list(group.names)} but not all: a Kronecker block cannot be split. "
            "Select whole layers by name, or use co.Subnetwork(co.KFAC(lin), indices) of all parameters, or "
            "co.DiagonalGGN(lin)."
        )
    return found


def kept_entries(positions: Blocks, names: tuple[str, ...]) -> Tensor:
    """Which entries of these tensors, one after the other, are selected."""
    return torch.cat([positions[name].flatten() for name in names]) >= 0


def _silent(lin: Linearization, positions: Blocks, blocks: dict[tuple[str, ...], Block]) -> list[Block]:
    """Zero blocks for the parameters that no output depends on."""
    seen = {name for names in blocks for name in names}
    found = []
    for name in (name for name in positions if name not in seen):
        kept = positions[name][positions[name] >= 0]
        if len(kept):
            found.append(Block((name,), kept, exact=lin.theta.new_zeros(len(kept))))
    return found
