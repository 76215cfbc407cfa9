"""Rows times a root of (left ⊗ right + d I)⁻¹ for a small and a wide factor, without eigenvectors of the wide one.

If S is the small factor, S = V diag(a) Vᵀ, and W the wide one, then a row has a part x_i (w) for each column of V, and
its own matrix P_i = a_i W + d I. Few rows need only the Cholesky factors of these matrices, each of which takes a tenth
of an eigendecomposition of W. If W = RᵀR has a root R with fewer rows than columns, only the matrix a_i R Rᵀ + d I of
its rows is factorised:

    xᵀ P_i⁻¹ x = ‖x − √a_i Rᵀ y‖² / d + ‖y‖²,    y = (a_i R Rᵀ + d I)⁻¹ √a_i R x,

which is the least value over all y, so that the rounding errors of y enter by their squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvops.checks import carries_graph
from curvops.linalg.core.vectors import ROUNDING_SEEN
from curvops.linalg.operators import kronecker_factors
from curvops.linalg.operators.kronecker import Kronecker, KroneckerForm
from curvops.linalg.operators.kronecker_factors import Details, Factor, noise_of, to_double, without_rounding


class _Sides(NamedTuple):
    small: Factor
    wide: Factor
    turned: bool
    """Whether the wide factor is the left one."""

    @classmethod
    def of(cls, base: Kronecker) -> _Sides:
        left, right = base.factors
        turned = left[0].shape[-1] > right[0].shape[-1]
        return cls(right, left, True) if turned else cls(left, right, False)

    @property
    def root(self) -> Tensor | None:
        return self.wide[1].root_of(self.wide[0])

    @property
    def order(self) -> int:
        """The number of rows of the matrices to be factorised."""
        root = self.root
        return self.wide[0].shape[-1] if root is None else root.shape[1]


def serves_rows(form: KroneckerForm, count: int) -> bool:
    """Return whether the rows of one call, `count` of them, are to be multiplied by `half_solved`.

    They are if this takes less than the eigendecomposition that is missing: a Cholesky factorisation for each of at
    most 8 columns of the small factor, in at most two calls, since once it is decomposed further rows are cheaper. And
    the rounding of a sum in single precision must be too small to be seen: eigenvalues within it count as zero in an
    eigendecomposition only.
    """
    base, sides = form.base, _Sides.of(form.base)
    small, wide = sides.small[0], sides.wide[0]
    columns, cache = small.shape[-1], base._kwargs["cache"]
    if small.ndim == 2 or wide.ndim == 2 or columns > 8 or count * columns > sides.order:
        return False
    if len(wide) * sides.order**3 < kronecker_factors.AT_ONCE or carries_graph((*base._args, form.shift)):
        return False
    calls = cache.get("calls for rows", base._args) or 0
    if base.known_eigen is not None or calls == 2 or not _is_accurate(sides, form.level.detach()):
        return False
    cache.put("calls for rows", base._args, calls + 1)
    return True


def _is_accurate(sides: _Sides, level: Tensor) -> bool:
    """Return whether rounding moves no eigenvalue of the sum by a share that is seen; False for NaN."""
    (small, of_small, _), (wide, of_wide, _) = sides.small, sides.wide
    bounds = [_norms(factor, detail) for factor, detail in ((small, of_small), (wide, of_wide))]
    moved = noise_of(of_wide, wide) * bounds[0] * bounds[1]
    return bool((moved <= ROUNDING_SEEN * level.double().reshape(-1)).all())


def _norms(factor: Tensor, details: Details) -> Float[Tensor, " g"]:
    """Return bounds of the largest eigenvalues."""
    norms = torch.linalg.matrix_norm(factor).double()
    return norms.square() if details.by_root else norms


def work_bytes(form: KroneckerForm, rows: Float[Tensor, "m g p q"]) -> int:
    """Return the bytes that `half_solved` works with: the matrices that are factorised, the root, and copies of rows.

    There are four copies: turned, in the small factor's eigenvectors, and two of the results.
    """
    sides, groups = _Sides.of(form.base), form.base.sizes[0]
    root = 0 if sides.root is None else sides.root.numel()
    return 8 * (kronecker_factors.WORK_COPIES * groups * sides.order**2 + root + 4 * rows.numel())


@torch.no_grad()
def half_solved(form: KroneckerForm, rows: Float[Tensor, "m g p q"]) -> Iterator[Float[Tensor, "m k"]]:
    """Yield parts of Z with Σ Z Zᵀ = rows P⁻¹ rowsᵀ over all parts.

    Costs a Cholesky factorisation in float64 for each column of the small factor. Should one fail, Z comes from the
    eigenbasis.
    """
    sides, level = _Sides.of(form.base), form.level.detach().double().reshape(-1, 1)
    factor, details, name = sides.small
    values, V = torch.linalg.eigh(to_double(factor, details))
    values = without_rounding(values, factor, details, name)
    x = rows.double().permute(1, 3, 2, 0) if sides.turned else rows.double().permute(1, 2, 3, 0)
    parts = (V.mT @ x.flatten(2)).view(x.shape).transpose(1, 2)  # (g, w, s, m)
    root = None if sides.root is None else sides.root.double()
    product = to_double(*sides.wide[:2]) if root is None else root @ root.mT
    images = parts if root is None else (root @ parts.flatten(2)).unflatten(2, parts.shape[2:])
    solved, failed = [], []
    for a, image in zip(values.unbind(1), images.unbind(2)):
        shifted = product * a[:, None, None]
        shifted.diagonal(dim1=1, dim2=2).add_(level)
        chol, info = torch.linalg.cholesky_ex(shifted)
        failed.append(info)
        if root is None:
            solved.append(torch.linalg.solve_triangular(chol, image, upper=False))
        else:
            solved.append(a.sqrt()[:, None, None] * torch.cholesky_solve(image, chol))
    if bool(torch.stack(failed).any()):  # once, as the host waits for it
        yield (form.rotate_back(rows.flatten(1).mT) * form.definite_spectrum.rsqrt().unsqueeze(1)).mT
        return
    y = torch.stack(solved, 2)
    yield y.flatten(0, 2).mT.to(rows.dtype)
    if root is not None:
        scaled = (y * values.sqrt()[:, None, :, None]).flatten(2)
        rest = torch.baddbmm(parts.flatten(2), root.mT, scaled, alpha=-1).unflatten(2, parts.shape[2:])
        yield (rest / level.sqrt()[:, :, None, None]).flatten(0, 2).mT.to(rows.dtype)
