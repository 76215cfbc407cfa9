"""The Kronecker product nearest to a sum of Kronecker products, in Frobenius norm (Van Loan & Pitsianis 1993)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.linalg.operators.dense import round_with_rest
from curvops.linalg.operators.kronecker import Kronecker
from curvops.linalg.operators.kronecker_factors import Details, to_double


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
    lefts, rights = (torch.stack(each, 1) for each in zip(*both))  # (g, k, …)
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
    kept, rest = round_with_rest(total, terms[0].dtype)
    rounding, of_rows = (max(getattr(t.details[side], name) for t in terms) for name in ("rounding", "of_rows"))
    return kept, Details(rest if total.ndim == 3 else None, None, rounding, of_rows)
