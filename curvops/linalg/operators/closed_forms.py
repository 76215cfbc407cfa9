"""P = A + diag(d) in closed form: one table, a row per class of the operand A.

A row is built from (A, d), d a number or a vector, factorises when first asked and keeps what it found. All of it is
exact and made of differentiable operations; only the eigenvectors of a Kronecker product have no gradient where
eigenvalues of a factor coincide (its solves, through `linalg.solve`, and log-determinants have).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, cast

import torch
from linear_operator.operators import LinearOperator
from torch import Tensor

from curvops.linalg.functions.root_gradients import inverse_root
from curvops.linalg.operators.algebra import is_symmetric
from curvops.linalg.operators.block_diagonal import BlockDiagonal
from curvops.linalg.operators.closed_form import ClosedForm, Spectral, not_definite, warn_of_rounding
from curvops.linalg.operators.kronecker import EigenKronecker, Kronecker
from curvops.linalg.operators.structured import Dense, Diagonal, LowRank, draw
from curvops.linalg.operators.woodbury import OfLowRank

# Blocks without a closed form are formed and factorised up to this many rows; larger ones are solved for iteratively.
DENSE_BLOCK = 2048


class OfDiagonal(Spectral):
    """Elementwise."""

    @property
    def spectrum(self) -> Tensor:
        return self.base.entries + self.shift

    def rotate(self, block: Tensor) -> Tensor:
        return block

    def rotate_back(self, block: Tensor) -> Tensor:
        return block

    def solve(self, block: Tensor, rtol: float | None = None) -> Tensor:
        if bool((self.spectrum == 0).any()):
            raise not_definite(self.base, 0.0)
        return block / self.spectrum.unsqueeze(-1)  # of any sign

    def inverse_diagonal(self) -> Tensor:
        return self.definite_spectrum.reciprocal()


class OfEigenKronecker(Spectral):
    """U_g (diag(values_g) + d_g I) U_gᵀ: the shift must be one number per group."""

    @cached_property
    def eigen(self) -> EigenKronecker:
        """The eigendecomposition of the operand."""
        return cast(EigenKronecker, self.base)

    @cached_property
    def level(self) -> Tensor:
        """The shift of each group, (g, 1) or 0-d."""
        if self.shift.ndim == 0:
            return self.shift
        by_group = self.shift.reshape(self.base.sizes[0], -1)
        if not bool((by_group == by_group[:, :1]).all()):
            raise ValueError(
                f"{type(self.base).__name__} + diag(d) has a closed form only where d is one number per group (a "
                "layer); this d varies within one. Use one prior precision a layer, KFAC or EKFAC with "
                'bias="separate" where weights and biases have their own, or a curvature that takes any positive d: a '
                "diagonal approximation (Diagonal), low_rank(...), or the GGN itself."
            )
        return by_group.mean(1, keepdim=True)

    def require_fit(self) -> None:
        _ = self.level

    @cached_property
    def spectrum(self) -> Tensor:
        return (self.eigen.values.flatten(1) + self.level).flatten()

    @cached_property
    def definite_spectrum(self) -> Tensor:
        found = self.spectrum.detach().reshape(self.eigen.values.shape[0], -1)
        # Without a shift, eigenvalues at the rounding level of the largest one are not known to be positive.
        floor = torch.finfo(found.dtype).eps * found.amax(1, keepdim=True) * (self.level.detach() == 0)
        if not bool((found > floor).all()):
            raise not_definite(self.base, float((found - floor).min()))
        if self.eigen.rounding:
            warn_of_rounding(self.base, float((self._error / found).max()))
        return self.spectrum

    @property
    def _error(self) -> Tensor:
        """The largest error of the eigenvalues of each group, (g, 1)."""
        return self.eigen.rounding * self.eigen.values.detach().flatten(1).amax(1, keepdim=True)

    def logdet_error(self) -> float:
        found = self.definite_spectrum.detach().reshape(self.eigen.values.shape[0], -1)
        return float(torch.log1p(self._error / found).double().sum()) if self.eigen.rounding else 0.0

    def rotate(self, block: Tensor) -> Tensor:
        return self.eigen.rotate(block)

    def rotate_back(self, block: Tensor) -> Tensor:
        return self.eigen.rotate_back(block)

    def logdet(self) -> Tensor:
        value = super().logdet()
        if self.shift.ndim and self.shift.requires_grad:
            # d log det P / dd_i = (P⁻¹)_ii: what the mean over the group does not carry, with the value zero.
            missing = self.shift.reshape(len(self.level), -1) - self.level
            value = value + (self.inverse_diagonal().detach() * missing.flatten()).sum()
        return value

    def inverse_diagonal(self) -> Tensor:
        return self.eigen.diagonal_of(self.definite_spectrum.reciprocal())


class OfKronecker(OfEigenKronecker):
    """Through the eigendecomposition of the factors, which the operand keeps."""

    @cached_property
    def eigen(self) -> EigenKronecker:
        return cast(Kronecker, self.base).eigen()


class OfDense(ClosedForm):
    """Cholesky of an operand that may be formed, in float64 up to `DENSE_BLOCK` rows and where its `rest` is known."""

    @staticmethod
    def fits(base: Any, shift: Tensor) -> bool:
        return is_symmetric(base)

    @cached_property
    def dense(self) -> Tensor:
        """P, (n, n)."""
        dense, n = self.base.to_dense(), self.base.shape[-1]
        rest = self.base.rest if isinstance(self.base, Dense) else None
        if rest is not None or n <= DENSE_BLOCK:
            dense = dense.double() if rest is None else dense.double() + rest
        return dense + torch.diag_embed(self.shift.to(dense.dtype).expand(n))

    @cached_property
    def chol(self) -> Tensor:
        """L with P = L Lᵀ."""
        L, info = torch.linalg.cholesky_ex(self.dense)
        if bool(info != 0):
            raise not_definite(self.base, float(torch.linalg.eigvalsh(self.dense.detach()).min()))
        warn_of_rounding(self.base, self._error)
        return L

    @property
    def _error(self) -> float:
        """The largest error of P's eigenvalues, relative to the smallest shift; 0 where it was formed in float64."""
        if self.dense.dtype == torch.float64:
            return 0.0
        largest = float(torch.linalg.matrix_norm(self.dense.detach(), ord=torch.inf))
        least = float(self.shift.detach().min())
        return torch.finfo(self.dense.dtype).eps * largest / least if least > 0 else 0.0

    def logdet_error(self) -> float:
        return len(self.dense) * math.log1p(self._error)

    def require_definite(self) -> None:
        _ = self.chol

    def solve(self, block: Tensor, rtol: float | None = None) -> Tensor:
        return torch.cholesky_solve(block.to(self.chol.dtype), self.chol).to(block.dtype)

    def logdet(self) -> Tensor:
        return (2 * self.chol.diagonal().log().sum()).to(self.base.dtype)

    def inverse_diagonal(self) -> Tensor:
        eye = torch.eye(len(self.chol), dtype=self.chol.dtype, device=self.chol.device)
        return torch.linalg.solve_triangular(self.chol, eye, upper=False).square().sum(0).to(self.base.dtype)

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self.chol.to(self.base.dtype) @ self._normal(k, generator)

    def draw_inverse(self, k: int, generator: torch.Generator | None, rtol: float | None = None) -> Tensor:
        noise = self._normal(k, generator)
        return torch.linalg.solve_triangular(self.chol.mT, noise.to(self.chol.dtype), upper=True).to(noise.dtype)

    def inverse_root(self, block: Tensor) -> Tensor:
        self.require_definite()
        return self.root @ block

    @cached_property
    def root(self) -> Tensor:
        """P^-½."""
        return inverse_root((self.dense + self.dense.mT) / 2).to(self.base.dtype)


class OfBlocks(ClosedForm):
    """Block by block: each by its own row, else by Cholesky up to `DENSE_BLOCK` rows, else iteratively."""

    @cached_property
    def rows(self) -> list[ClosedForm]:
        """The closed form of each block."""
        blocks = self.base.blocks
        shifts = [self.shift] * len(blocks) if self.shift.ndim == 0 else self.base.partition.split(self.shift)
        return [_of_block(block.add_diagonal(shift)) for block, shift in zip(blocks, shifts)]

    def _join(self, parts: list[Tensor]) -> Tensor:
        return self.base.partition.join([part.mT for part in parts]).mT

    def _split(self, block: Tensor) -> list[Tensor]:
        return [part.mT for part in self.base.partition.split(block.mT)]

    def require_fit(self) -> None:
        names = getattr(self.base, "names", None)
        for i, row in enumerate(self.rows):
            try:
                row.require_fit()
            except ValueError as error:
                of = f" ({', '.join(names[i])})" if names else ""
                raise ValueError(f"block {i}{of} of {type(self.base).__name__}: {error}") from None

    def require_definite(self) -> None:
        for row in self.rows:
            row.require_definite()

    def solve(self, block: Tensor, rtol: float | None = None) -> Tensor:
        return self._join([row.solve(part, rtol) for row, part in zip(self.rows, self._split(block))])

    def logdet(self) -> Tensor:
        return torch.stack([row.logdet() for row in self.rows]).sum()

    def logdet_error(self) -> float:
        return sum(row.logdet_error() for row in self.rows)

    def inverse_diagonal(self) -> Tensor:
        diagonal: Tensor = self.base.partition.join([row.inverse_diagonal() for row in self.rows])
        return diagonal

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return self._join([row.draw(k, generator) for row in self.rows])

    def draw_inverse(self, k: int, generator: torch.Generator | None, rtol: float | None = None) -> Tensor:
        return self._join([row.draw_inverse(k, generator, rtol) for row in self.rows])

    def inverse_root(self, block: Tensor) -> Tensor:
        return self._join([row.inverse_root(part) for row, part in zip(self.rows, self._split(block))])


class OfProducts(ClosedForm):
    """No closed form: a large block among others, which is solved for and sampled by its products."""

    def __init__(self, damped: Any) -> None:
        super().__init__(damped, damped.shift)

    def solve(self, block: Tensor, rtol: float | None = None) -> Tensor:
        return self.base.solve_to(block, rtol)

    def logdet(self) -> Tensor:
        return self.base.logdet()

    def inverse_diagonal(self) -> Tensor:
        return self.base.inverse().diagonal()

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        return draw(self.base, k, generator)

    def draw_inverse(self, k: int, generator: torch.Generator | None, rtol: float | None = None) -> Tensor:
        return draw(self.base.inverse(rtol), k, generator)

    def inverse_root(self, block: Tensor) -> Tensor:
        return self.base.sqrt_inv_matmul(block)


CLOSED_FORMS: dict[type, type[ClosedForm]] = {
    Diagonal: OfDiagonal,
    LowRank: OfLowRank,
    Dense: OfDense,
    Kronecker: OfKronecker,
    EigenKronecker: OfEigenKronecker,
    BlockDiagonal: OfBlocks,
}


def row_of(base: LinearOperator) -> type[ClosedForm] | None:
    """The row of `CLOSED_FORMS` for the operand's class, or for the nearest that it derives from; None without one."""
    return next((CLOSED_FORMS[cls] for cls in type(base).__mro__ if cls in CLOSED_FORMS), None)


def closed_form(base: LinearOperator, shift: Tensor) -> ClosedForm | None:
    """A + diag(d) in closed form; None where there is none, for batches, and where the row's conditions fail."""
    row = row_of(base) if not base.batch_shape and shift.ndim <= 1 else None
    return row(base, shift) if row is not None and row.fits(base, shift) else None


def _of_block(damped: Any) -> ClosedForm:
    row = damped._closed_form()
    if row is None and damped.shape[-1] <= DENSE_BLOCK and is_symmetric(damped.base):
        return OfDense(damped.base, damped.shift)
    return OfProducts(damped) if row is None else row
