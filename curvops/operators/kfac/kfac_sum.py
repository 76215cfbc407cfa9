"""A sum of KFACs kept as one: in each layer the Kronecker product nearest to the sum, and the error that this makes.

B₁ ⊗ A₁ + B₂ ⊗ A₂ + λ I has no common eigenbasis, but (B ⊗ A) + λ I has one: solves, determinants and draws keep a
closed form, and the memory is that of one KFAC, whatever the number of terms (Van Loan & Pitsianis 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg import Dense, Diagonal, Estimate, Kronecker, Operator
from curvops.linalg.core.matrix_identity import common, merge_sources
from curvops.linalg.core.partition import Partition
from curvops.linalg.core.vectors import ROUNDINGS
from curvops.linalg.operators.given_matrix import round_with_rest
from curvops.linalg.operators.kronecker_factors import Details, to_double
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
    blocks_by_names = {names: blocks for names, blocks in reached.items() if blocks}
    seen = [name for names in blocks_by_names for name in names]
    for names in members:
        if names not in blocks_by_names and not set(names) & set(seen):
            blocks_by_names[names], seen = members[names][:1], [*seen, *names]
    if len(set(seen)) < len(seen):
        twice = sorted({name for name in seen if seen.count(name) > 1})
        raise ValueError(f"the curvatures divide {twice} into different blocks: build both with one bias= of co.KFAC.")
    order = [names for names in members if names in blocks_by_names]
    sums = [_block_sum(blocks_by_names[names]) for names in order]
    error, size = (torch.stack([block_sum[i] for block_sum in sums]).sum() for i in (1, 2))
    value = (error / size).sqrt() if bool(size > 0) else torch.zeros_like(size)
    sources = merge_sources(*(term.sources for term in terms))
    parts = Partition(tuple(places[names] for names in order))
    operator = LayerBlocks(
        *(block_sum[0] for block_sum in sums),
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


class Nearest(NamedTuple):
    """A Kronecker product B ⊗ A, and the squares of ‖S − B ⊗ A‖_F and ‖S‖_F for the sum S that it approximates."""

    operator: Kronecker
    error: Float[Tensor, ""]
    size: Float[Tensor, ""]


@torch.no_grad()
def nearest_kronecker(terms: Sequence[Kronecker]) -> Nearest:
    """Return the Kronecker product nearest to Σ_i B_i ⊗ A_i in each group, for factors of equal sizes.

    Rearranged, Σ_i B_i ⊗ A_i is the matrix Σ_i vec(B_i) vec(A_i)ᵀ, and its nearest product is that matrix's first
    singular pair: B = Σ_i b_i B_i and A = σ Σ_i a_i A_i with b an eigenvector of K_A K_B, the matrices of the inner
    products ⟨A_i, A_j⟩ and ⟨B_i, B_j⟩. These products are non-negative for positive semidefinite factors, and so are b
    and a (Perron): B and A are positive semidefinite. Errors are exact, to rounding of √ε.

    Cost: k² inner products of the factors for k terms, in float64.
    """
    if len({(term.sizes, *(factor.ndim for factor, *_ in term.factors)) for term in terms}) != 1:
        raise ValueError(f"the factors differ in their sizes: {[term.sizes for term in terms]}.")
    both = [[to_double(factor, details) for factor, details, _ in term.factors] for term in terms]
    lefts, rights = (torch.stack(factors, 1) for factors in zip(*both))  # (g, k, …)
    of_lefts, of_rights = _inner_products(lefts), _inner_products(rights)
    values, vectors = torch.linalg.eigh(of_lefts)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)) @ vectors.mT
    squares, pairs = torch.linalg.eigh(root @ of_rights @ root)  # squared singular values, ascending
    squares = squares.clamp_min(0)
    sigma, first = squares[:, -1].sqrt(), pairs[:, :, -1]
    scale = sigma.clamp_min(torch.finfo(sigma.dtype).tiny).reciprocal().unsqueeze(1)
    b = (of_rights @ (root @ first.unsqueeze(2))).squeeze(2) * scale.square()
    a = (of_lefts @ b.unsqueeze(2)).squeeze(2) * scale
    b, a = b.abs(), a.abs()  # one sign, up to rounding
    left, of_left = _combine(lefts, b, terms, 0)
    right, of_right = _combine(rights, a * sigma.unsqueeze(1), terms, 1)
    total = squares.sum()
    error = torch.zeros_like(total) if len(terms) == 1 else squares[:, :-1].sum()
    return Nearest(Kronecker(left, right, details=(of_left, of_right)), error, total)


def _inner_products(factors: Float[Tensor, "g k *m"]) -> Float[Tensor, "g k k"]:
    flat = factors.flatten(2)
    return flat @ flat.mT


def _combine(
    factors: Float[Tensor, "g k *m"], weights: Float[Tensor, "g k"], terms: Sequence[Kronecker], side: int
) -> tuple[Tensor, Details]:
    """Return Σ_i w_i F_i in the terms' dtype, with the part lost in rounding."""
    total = (weights.unsqueeze(1) @ factors.flatten(2)).squeeze(1).unflatten(1, factors.shape[2:])
    rounded, rest = round_with_rest(total, terms[0].dtype)
    rounding, of_rows = (max(getattr(t.details[side], name) for t in terms) for name in ("rounding", "of_rows"))
    return rounded, Details(rest if total.ndim == 3 else None, None, rounding, of_rows)
