"""A sum of KFACs kept as one: in each layer the Kronecker product nearest to the sum, and the error that this makes.

B₁ ⊗ A₁ + B₂ ⊗ A₂ + λ I has no common eigenbasis, but (B ⊗ A) + λ I has one: solves, determinants and draws keep a
closed form, and the memory is that of one KFAC, whatever the number of terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Dense, Diagonal, Estimate, Kronecker, Operator
from curvops.linalg.core.partition import Partition
from curvops.linalg.core.rounding import ROUNDINGS
from curvops.linalg.core.sources import merge_sources
from curvops.linalg.core.spaces import common
from curvops.linalg.operators.nearest_kronecker import nearest_kronecker
from curvops.operators.kfac.kfac import LayerBlocks
from curvops.operators.kfac.kfac_factors import exact_block

Names = tuple[str, ...]


class KFACSum(NamedTuple):
    """Layer blocks K̂, and their error ‖S − K̂‖_F / ‖S‖_F for the sum S that they approximate."""

    operator: LayerBlocks
    error: Estimate


def has_kronecker_blocks(operator: LinearOperator) -> bool:
    """Return whether it is made of Kronecker products, as KFAC is, and exact blocks of layers without factors."""
    if not isinstance(operator, LayerBlocks):
        return False
    return all(isinstance(block, Kronecker | Dense | Diagonal) for block in operator.blocks)


def kfac_sum(*terms: LayerBlocks) -> KFACSum:
    """Return the layer blocks nearest to a sum in Frobenius norm; exact blocks add up.

    A layer that an operator's data do not reach (the head of another task, say) gets nothing from it. Raises ValueError
    if the layers are divided differently (bias="joint" and "separate").

    Cost: k² inner products of each layer's factors for k terms, in float64. Source: Van Loan & Pitsianis 1993.
    """
    space = common(*(term.spaces[0] for term in terms))
    members: dict[Names, list[Operator]] = {}
    places: dict[Names, Tensor | range] = {}
    for term in terms:
        for names, block, positions in zip(term.names, term.blocks, term.partition.parts):
            members.setdefault(names, []).append(block)
            places.setdefault(names, positions)
    reached = {names: [block for block in blocks if not _is_silent(block)] for names, blocks in members.items()}
    kept = {names: blocks for names, blocks in reached.items() if blocks}
    seen = [name for names in kept for name in names]
    for names in members:
        if names not in kept and not set(names) & set(seen):
            kept[names], seen = members[names][:1], [*seen, *names]
    if len(set(seen)) < len(seen):
        twice = sorted({name for name in seen if seen.count(name) > 1})
        raise ValueError(f"the curvatures divide {twice} into different blocks: build both with one bias= of co.KFAC.")
    order = [names for names in members if names in kept]
    found = [_block_sum(kept[names]) for names in order]
    error, size = (torch.stack([each[i] for each in found]).sum() for i in (1, 2))
    value = (error / size).sqrt() if bool(size > 0) else torch.zeros_like(size)
    sources = merge_sources(*(term.sources for term in terms))
    parts = Partition(tuple(places[names] for names in order))
    operator = LayerBlocks(
        *(each[0] for each in found),
        positions=parts,
        space=space,
        names=tuple(order),
        sources=sources,
        progress=next((term.progress for term in terms if term.progress is not None), None),
        memory=next((term.memory for term in terms if term.memory is not None), None),
    )
    # Squares are known up to the rounding of the sum's square.
    rounding = ROUNDINGS * torch.finfo(value.dtype).eps
    return KFACSum(operator, Estimate.rounded(value, rounding / value.clamp_min(rounding**0.5), size=1.0))


def _is_silent(block: Operator) -> bool:
    """Return whether no output of these data depends on the block's parameters."""
    return isinstance(block, Dense | Diagonal) and not bool(block._args[0].any())


def _block_sum(blocks: Sequence[Operator]) -> tuple[Operator, Tensor, Tensor]:
    """Return one block for a sum of blocks, with the squares of the Frobenius norms of its error and of the sum."""
    if all(isinstance(block, Kronecker) for block in blocks):
        return nearest_kronecker([block for block in blocks if isinstance(block, Kronecker)])
    zero = torch.zeros((), dtype=torch.float64, device=blocks[0].device)
    if all(isinstance(block, Diagonal) for block in blocks):
        entries = torch.stack([block.diagonal() for block in blocks]).sum(0)
        return Diagonal(entries), zero, entries.double().square().sum()
    if not all(isinstance(block, Dense | Diagonal) for block in blocks):
        kinds = sorted({type(block).__name__ for block in blocks})
        raise ValueError(f"a layer has blocks of different kinds, {kinds}: build both KFACs from the same model.")
    total = torch.stack([block.to_dense().double() for block in blocks]).sum(0)
    for block in blocks:
        if isinstance(block, Dense) and block.rest is not None:
            total += block.rest
    return exact_block(total, blocks[0].dtype), zero, total.square().sum()
