"""LowRank + diag(d) in closed form."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvops.linalg.core.cache import recorded
from curvops.linalg.functions.root_gradients import inverse_root, inverse_root_product
from curvops.linalg.operators.algebra import is_psd
from curvops.linalg.operators.closed_form import ClosedForm
from curvops.linalg.operators.structured import draw
from curvops.linalg.solvers.solve import default_rtol


class OfLowRank(ClosedForm):
    """Woodbury: (D + U S Uᵀ)⁻¹ = D⁻¹ − D⁻¹U S (I + UᵀD⁻¹U S)⁻¹ UᵀD⁻¹ for S ≥ 0 and D = diag(d) > 0."""

    @staticmethod
    def fits(base: Any, shift: Tensor) -> bool:
        return bool((shift > 0).all()) and is_psd(base)

    @property
    def inverse_shift(self) -> Tensor:
        """D⁻¹ as a column, (n, 1) or 0-d."""
        return self.shift.reciprocal() if self.shift.ndim == 0 else self.shift.reciprocal().unsqueeze(-1)

    @cached_property
    def scaled(self) -> Tensor:
        """D⁻¹U, (n, r)."""
        return self.inverse_shift * self.base.vectors

    def _pulled(self, block: Tensor) -> Tensor:
        """UᵀD⁻¹B, (r, K): without a second matrix of U's size where d is one number."""
        if self.shift.ndim == 0:
            return self.inverse_shift * (self.base.vectors.mT @ block)
        return self.scaled.mT @ block

    @cached_property
    def capacitance(self) -> Tensor:
        """I + UᵀD⁻¹U S, (r, r): not symmetric, but with a gradient where an eigenvalue in S is zero."""
        return self._eye + self._pulled(self.base.vectors) * self.base.values

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The LU factors of the capacitance."""
        lu, pivots = torch.linalg.lu_factor(self.capacitance)
        return lu, pivots

    @property
    def _eye(self) -> Tensor:
        return torch.eye(len(self.base.values), dtype=self.base.dtype, device=self.base.device)

    @cached_property
    def _needs_splitting(self) -> bool:
        """Whether Woodbury's difference would cancel more digits than `solve` promises, and U is orthonormal."""
        base = self.base
        if self.shift.ndim or recorded((base.vectors, base.values, self.shift)) or not len(base.values):
            return False
        eps = torch.finfo(base.dtype).eps
        slack = (base.vectors.mT @ base.vectors - self._eye).abs().max() / (100 * eps)
        return bool((base.values.max() / self.shift * eps > default_rtol(base.dtype)) & (slack <= 1))

    def _split_solve(self, block: Tensor) -> Tensor:
        """U (Uᵀb)/(s + d) + (b − UUᵀb)/d, the second part cleaned of U twice."""
        U = self.base.vectors
        inside = U.mT @ block
        outside = block - U @ inside
        left = inside / (self.base.values + self.shift).unsqueeze(-1) - (U.mT @ outside) / self.shift
        return outside / self.shift + U @ left

    def solve(self, block: Tensor, rtol: float | None = None) -> Tensor:
        if self._needs_splitting:
            return self._split_solve(block)
        U = self.base.vectors
        inner = torch.linalg.lu_solve(*self.factors, self._pulled(block))
        weights = self.base.values.unsqueeze(-1) * inner
        # As (K, n): the layout of a block, and as few passes over it as there can be.
        if self.shift.ndim or recorded((U, self.base.values, self.shift, block)):
            return torch.addmm(block.mT, weights.mT, U.mT, alpha=-1).mT.mul_(self.inverse_shift)
        return torch.addmm(block.mT, (weights * self.inverse_shift).mT, U.mT, beta=self._scale, alpha=-1).mT

    @cached_property
    def _scale(self) -> float:
        """1/d on the host, fetched once."""
        return float(self.inverse_shift)

    def logdet(self) -> Tensor:
        shift = self.shift.expand(self.base.shape[-1])
        return shift.log().sum() + torch.linalg.slogdet(self.capacitance)[1]

    def inverse_diagonal(self) -> Tensor:
        if self._needs_splitting:
            inside = self.base.vectors.square()
            outside = (1 - inside.sum(1)).clamp_min(0)
            return inside @ (self.base.values + self.shift).reciprocal() + outside / self.shift
        middle = self.base.values.unsqueeze(-1) * torch.linalg.lu_solve(*self.factors, self.scaled.mT)
        return self.shift.reciprocal() - (self.scaled * middle.mT).sum(-1)

    @cached_property
    def whitened(self) -> tuple[Tensor, Tensor]:
        """W = D^-½U√S and f = (R² (I + R)⁻¹) with R = (I + WᵀW)^-½: (I + W Wᵀ)^-½ = I − W f Wᵀ."""
        W = self.inverse_shift.sqrt() * self.base.root
        R = inverse_root(self._eye + W.mT @ W)
        return W, R @ torch.linalg.solve(self._eye + R, R)

    def _whitened_root(self, block: Tensor) -> Tensor:
        W, f = self.whitened
        return block - W @ (f @ (W.mT @ block))

    def draw(self, k: int, generator: torch.Generator | None) -> Tensor:
        noise = self.inverse_shift.rsqrt() * self._normal(k, generator)
        return draw(self.base, k, generator) + noise

    def draw_inverse(self, k: int, generator: torch.Generator | None, rtol: float | None = None) -> Tensor:
        return self.inverse_shift.sqrt() * self._whitened_root(self._normal(k, generator))

    def inverse_root(self, block: Tensor) -> Tensor:
        if self.shift.ndim and not bool((self.shift == self.shift[0]).all()):
            # D^-½ (I + W Wᵀ)^-½ is a root, but not the symmetric one, of which no closed form is known.
            least = float(self.shift.detach().min())
            return inverse_root_product(self.base.add_diagonal(self.shift), block, lower_bound=least)
        return self.inverse_shift.sqrt() * self._whitened_root(block)
