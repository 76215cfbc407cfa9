"""A + diag(d), the operator of every posterior precision, its closed forms, and lazy inverses."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.algebra import Product, is_psd, is_symmetric
from curvops.linalg.base import Operator
from curvops.linalg.cg import cg
from curvops.linalg.contract import default_rtol
from curvops.linalg.differentiable import accept
from curvops.linalg.logdet import logdet
from curvops.linalg.nystrom import nystrom
from curvops.linalg.results import Estimate
from curvops.linalg.structured import Dense, Diagonal, LowRank, draw

# Right-hand sides solved for in one block: beyond, the K × K work and the vectors grow faster than the products fall.
MOST_COLUMNS = 128


@dataclass(eq=False)
class Cache:
    """What one operator has computed for itself: its preconditioner. Dropped by pickling and copying."""

    preconditioner: Any = None
    columns: int = 0
    lock: Any = field(default_factory=threading.RLock)

    def __reduce__(self) -> tuple[type[Cache], tuple[()]]:
        return Cache, ()


class Damped(Operator):
    """P = A + diag(d) for a symmetric A (n, n) and a shift d: a number, a vector (n,), or a batch of vectors.

    Made by `A.add_diagonal(d)`. Solves, log-determinants and samples come from the operand's row in `CLOSED_FORMS`
    where there is one, else from block CG with a Nyström preconditioner (Frangella, Tropp & Udell 2023), from
    stochastic Lanczos quadrature, and from perturb-and-solve.
    """

    def __init__(self, base: LinearOperator, shift: Tensor, cache: Cache | None = None) -> None:
        super().__init__(base, shift, cache=cache)

    @property
    def base(self) -> LinearOperator:
        """The operand A."""
        return self._args[0]

    @property
    def shift(self) -> Tensor:
        """The shift d: 0-d, (n,) or (..., n)."""
        return self._args[1]

    @property
    def symmetric(self) -> bool:
        return is_symmetric(self.base)

    @property
    def psd(self) -> bool:
        return is_psd(self.base) and bool((self.shift >= 0).all())

    def _size(self) -> torch.Size:
        batch = torch.broadcast_shapes(self.base.batch_shape, self.shift.shape[:-1])
        return torch.Size((*batch, *self.base.shape[-2:]))

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed = self.base.mT
        return self if transposed is self.base else Damped(transposed, self.shift, cache=Cache())

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base._matmul(rhs) + self._shift_against(rhs) * rhs

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.base._t_matmul(rhs) + self._shift_against(rhs) * rhs

    def _shift_against(self, rhs: Tensor) -> Tensor:
        return self.shift if self.shift.ndim == 0 or rhs.ndim == 1 else self.shift.unsqueeze(-1)

    def _diagonal(self) -> Tensor:
        return self.base._diagonal() + self.shift

    def add_diagonal(self, diag: float | Tensor) -> LinearOperator:
        total = super().add_diagonal(diag)
        return Damped(self.base, self.shift + total.shift, cache=Cache())

    def _map_batch(self, base: LinearOperator, change: Any) -> LinearOperator:
        return Damped(base, change(self.shift) if self.shift.ndim > 1 else self.shift, cache=Cache())

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        operator = self
        if batch_indices:
            everything = slice(None)
            base = self.base._getitem(everything, everything, *batch_indices) if self.base.batch_shape else self.base
            operator = self._map_batch(base, lambda shift: shift[batch_indices])
        return Operator._getitem(operator, row_index, col_index)

    def _get_indices(self, row_index: Tensor, col_index: Tensor, *batch_indices: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(row_index.shape, col_index.shape, *(i.shape for i in batch_indices))
        row_index, col_index = row_index.expand(shape), col_index.expand(shape)
        of_base = batch_indices if self.base.batch_shape else ()
        values = self.base._get_indices(row_index, col_index, *of_base)
        if self.shift.ndim == 0:
            on_diagonal = self.shift
        else:
            on_diagonal = self.shift[(*batch_indices[: self.shift.ndim - 1], row_index)]
        return torch.where(row_index == col_index, values + on_diagonal, values)

    # Solving

    def preconditioner(self, columns: int = 1, generator: torch.Generator | None = None) -> Any:
        """M ≈ P⁻¹ for solves with `columns` right-hand sides, an object with `@`; None where none pays.

        A Nyström sketch of A^-½-scaled A, its rank chosen by expected total cost and kept for later solves. With a
        vector shift d the sketch is of S A S, S = diag(d)^-½, so that the prior's scales cost no iterations.
        """
        cache: Cache | None = self._kwargs["cache"]
        if cache is None or not is_symmetric(self.base) or self.base.batch_shape or self.shift.ndim > 1:
            return None
        with cache.lock:
            if cache.preconditioner is None or columns > 4 * cache.columns:
                cache.preconditioner, cache.columns = self._build_preconditioner(columns, generator), columns
            return cache.preconditioner

    def _build_preconditioner(self, columns: int, generator: torch.Generator | None) -> Any:
        shift = self.shift.detach()
        if not bool((shift > 0).all()):
            return None
        base, level, scale = self._whitened(shift)
        sketch = nystrom(base, rank=None, shift=level, rhs=columns, generator=generator)
        inner = sketch.preconditioner(level)
        return inner if scale is None else _Scaled(scale, inner)

    def _whitened(self, shift: Tensor) -> tuple[LinearOperator, float, Tensor | None]:
        """B, λ, s with P = S⁻¹ (B + λ I) S⁻¹: nothing to do for a scalar shift."""
        if shift.ndim == 0:
            return self.base.detach(), float(shift), None
        scale = shift.rsqrt()
        return Product(Diagonal(scale), self.base.detach(), Diagonal(scale)), 1.0, scale

    def shifted_form(self) -> tuple[LinearOperator, float, Tensor] | None:
        """B, λ and an offset with log det P = log det(B + λ I) + offset; None where the shift is not positive."""
        shift = self.shift.detach()
        if self.base.batch_shape or shift.ndim > 1 or not bool((shift > 0).all()):
            return None
        base, level, scale = self._whitened(shift)
        return base, level, shift.new_zeros(()) if scale is None else shift.log().sum()

    def _solve_block(self, block: Tensor, rtol: float | None = None) -> Tensor:
        form = closed_form(self.base)
        if form is not None:
            return by_vector(form.solve, self.base, self.shift, block)
        rtol = default_rtol(self.dtype) if rtol is None else rtol
        preconditioner = self.preconditioner(1 if block.ndim == 1 else block.shape[-1])
        if block.ndim == 1:
            return accept(cg(self, block, preconditioner=preconditioner, rtol=rtol), rtol)
        parts = [
            accept(cg(self, part, preconditioner=preconditioner, rtol=rtol), rtol)
            for part in block.split(MOST_COLUMNS, dim=1)
        ]
        return torch.cat([part.mT for part in parts]).mT

    def _logdet_estimate(self) -> Estimate:
        form = closed_form(self.base)
        if form is not None:
            value = form.logdet(self.base, self.shift)
            return Estimate(value=value, stderr=torch.zeros_like(value), samples=0, matvecs=0)
        parts = self.shifted_form()
        if parts is None:
            return logdet(self)
        base, level, offset = parts
        return logdet(base, shift=level) + offset

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        noise = draw(Diagonal(self.shift.expand(self.shape[-1])), k, generator)
        return draw(self.base, k, generator) + noise

    def _draw_inverse(self, k: int, generator: torch.Generator | None, rtol: float | None) -> Tensor:
        return self.solve_to(self._draw(k, generator), rtol)  # P⁻¹ ε with ε ~ N(0, P)


class Inverse(Operator):
    """A⁻¹ by its solves: one solve with A per column; entries as `A.inverse()` gives them."""

    def __init__(self, base: LinearOperator, rtol: float | None = None) -> None:
        super().__init__(base, rtol=rtol)

    @property
    def base(self) -> LinearOperator:
        """The operator A."""
        return self._args[0]

    @property
    def symmetric(self) -> bool:
        return is_symmetric(self.base)

    @property
    def psd(self) -> bool:
        return is_psd(self.base)

    def _size(self) -> torch.Size:
        return self.base.shape

    def _transpose_nonbatch(self) -> LinearOperator:
        transposed = self.base.mT
        return self if transposed is self.base else Inverse(transposed, rtol=self._kwargs["rtol"])

    def _matmul(self, rhs: Tensor) -> Tensor:
        return self.base.solve_to(rhs, self._kwargs["rtol"])

    def _t_matmul(self, rhs: Tensor) -> Tensor:
        return self.mT._matmul(rhs)

    def inverse(self, rtol: float | None = None) -> LinearOperator:
        return self.base

    def _solve_block(self, block: Tensor, rtol: float | None = None) -> Tensor:
        return self.base._matmul(block)

    def _draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        if isinstance(self.base, Damped):
            return self.base._draw_inverse(k, generator, self._kwargs["rtol"])
        return self.base.solve_to(draw(self.base, k, generator), self._kwargs["rtol"])


@dataclass(frozen=True, eq=False)
class _Scaled:
    """S M S for a diagonal S and a preconditioner M."""

    scale: Tensor
    inner: Any

    def __matmul__(self, block: Tensor) -> Tensor:
        scale = self.scale if block.ndim == 1 else self.scale.unsqueeze(-1)
        return scale * (self.inner @ (scale * block))


# Closed forms of A + diag(d), one row per class of operand: solve a block, and the log-determinant.


class _OfDiagonal:
    @staticmethod
    def solve(base: Any, shift: Tensor, block: Tensor) -> Tensor:
        return block / (base.entries + shift).unsqueeze(-1)

    @staticmethod
    def logdet(base: Any, shift: Tensor) -> Tensor:
        return (base.entries + shift).log().sum(-1)


class _OfLowRank:
    """Woodbury with W = U √s: (D + W Wᵀ)⁻¹ = D⁻¹ − D⁻¹W (I + WᵀD⁻¹W)⁻¹ WᵀD⁻¹, D = diag(d)."""

    @staticmethod
    def solve(base: Any, shift: Tensor, block: Tensor) -> Tensor:
        scaled = base.root / shift.expand(base.shape[-1]).unsqueeze(-1)
        chol = torch.linalg.cholesky(_capacitance(base.root, scaled))
        direct = block / shift.expand(base.shape[-1]).unsqueeze(-1)
        return direct - scaled @ torch.cholesky_solve(base.root.mT @ direct, chol)

    @staticmethod
    def logdet(base: Any, shift: Tensor) -> Tensor:
        shift = shift.expand(base.shape[-1])
        small = _capacitance(base.root, base.root / shift.unsqueeze(-1))
        return shift.log().sum() + torch.linalg.slogdet(small)[1]


class _OfDense:
    @staticmethod
    def solve(base: Any, shift: Tensor, block: Tensor) -> Tensor:
        return torch.cholesky_solve(block, torch.linalg.cholesky(_dense(base, shift)))

    @staticmethod
    def logdet(base: Any, shift: Tensor) -> Tensor:
        return 2 * torch.linalg.cholesky(_dense(base, shift)).diagonal().log().sum()


CLOSED_FORMS: dict[type, Any] = {Diagonal: _OfDiagonal, LowRank: _OfLowRank, Dense: _OfDense}


def closed_form(base: LinearOperator) -> Any:
    """The row of `CLOSED_FORMS` for an operand, None where there is none."""
    return CLOSED_FORMS.get(type(base)) if not base.batch_shape else None


def by_vector(solve: Any, base: LinearOperator, shift: Tensor, block: Tensor) -> Tensor:
    """Call a block solve with a vector (n,) or a block (n, K)."""
    if block.ndim == 1:
        return solve(base, shift, block.unsqueeze(-1)).squeeze(-1)
    return solve(base, shift, block)


def _capacitance(root: Tensor, scaled: Tensor) -> Tensor:
    return torch.eye(root.shape[-1], dtype=root.dtype, device=root.device) + root.mT @ scaled


def _dense(base: LinearOperator, shift: Tensor) -> Tensor:
    return base.to_dense() + torch.diag_embed(shift.expand(base.shape[-1]))
