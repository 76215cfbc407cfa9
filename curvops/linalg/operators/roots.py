"""Roots of an operator: the Cholesky factor with the smallest jitter, Ritz pairs, and products with A^-½."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from linear_operator import settings
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.core.results import indefinite
from curvops.linalg.functions.root_gradients import inverse_root, inverse_root_product
from curvops.linalg.spectra.lanczos import lanczos


def cholesky_factor(operator: LinearOperator, strict: bool = False) -> Tensor:
    """Return the Cholesky factor L; a matrix singular to rounding gets the smallest jitter that makes it definite.

    With `strict` no jitter is added, as for densities, which the jitter would determine; a matrix that needs one is an
    error.

    The jitter is relative to the largest entry of the diagonal (linear_operator's is absolute, and could be the whole
    variance of small targets), from n eps up to a hundred times linear_operator's. Raises NotPositiveSemidefiniteError
    if that is not enough.
    """
    dense: Tensor = operator._dense()
    if not dense.numel():
        return dense
    largest = dense.detach().diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
    unit = dense / torch.where(largest > 0, largest, 1.0)
    eye, of_unit = torch.eye(dense.shape[-1], dtype=dense.dtype, device=dense.device), unit.detach().diagonal(0, -2, -1)
    added, most = 0.0, 0.0 if strict else 100 * settings.cholesky_jitter.value(dense.dtype)
    while added <= most:
        L, info = torch.linalg.cholesky_ex(unit + added * eye if added else unit)
        lost = L.detach().diagonal(dim1=-2, dim2=-1).square() <= 2 * len(eye) * torch.finfo(dense.dtype).eps * of_unit
        if not bool(info.any() | (lost.any() & strict)):
            return L * largest.sqrt()
        added = max(10 * added, len(eye) * torch.finfo(dense.dtype).eps)
    beyond = "to working precision, and no jitter is added" if strict else "beyond what rounding explains"
    raise indefinite(f"this {type(operator).__name__} has no Cholesky factor: it is not positive definite, {beyond}.")


def ritz_pairs(operator: LinearOperator) -> tuple[Tensor, Tensor]:
    """Return all Ritz values and vectors of Lanczos with as many steps as linear_operator allows for a root."""
    result = lanczos(operator, min(operator.shape[-1], operator._root_decomposition_size()))
    values, rotation = torch.linalg.eigh(result.T)
    return values.to(result.Q.dtype), result.Q @ rotation.to(result.Q.dtype)


def multiply_inverse_root(operator: LinearOperator, right: Tensor, left: Tensor | None) -> Any:
    """Return A^-½ B, or with L the pair (L A^-½ B, diag(L A⁻¹ Lᵀ)), for one matrix or a batch of small ones."""
    root = _inverse_root(operator)
    if left is None:
        return root(right.unsqueeze(-1)).squeeze(-1) if right.ndim == 1 else root(right)
    rows = root(left.mT).mT
    return rows @ right, rows.square().sum(-1)


def _inverse_root(operator: LinearOperator) -> Callable[[Tensor], Tensor]:
    """Return the map B -> A^-½ B: dense if A is small, otherwise by its closed form or by Lanczos."""
    if operator._is_small:
        root: Callable[[Tensor], Tensor] = inverse_root(operator._dense()).matmul
        return root
    form = operator._closed_form()
    if form is not None:
        own: Callable[[Tensor], Tensor] = form.inverse_root
        return own
    return partial(inverse_root_product, operator, lower_bound=operator._lower_bound())


def multiply_inverse_roots(members: list[Any], batch: torch.Size, right: Tensor, left: Tensor | None) -> Any:
    """Return the result of `multiply_inverse_root` for a batch of large operators, one after the other."""

    def expand(given: Tensor) -> Tensor:
        return given.expand(*batch, *given.shape[-2:]).flatten(0, -3)

    columns = expand(right.unsqueeze(-1) if right.ndim == 1 else right)
    if left is None:
        found = torch.stack([one.sqrt_inv_matmul(B) for one, B in zip(members, columns)]).unflatten(0, batch)
        return found.squeeze(-1) if right.ndim == 1 else found
    pairs = [one.sqrt_inv_matmul(B, L) for one, B, L in zip(members, columns, expand(left))]
    return tuple(torch.stack(part).unflatten(0, batch) for part in zip(*pairs))
