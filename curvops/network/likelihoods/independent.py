"""Likelihoods with a diagonal output Fisher."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from curvops.network.likelihoods.likelihood import Likelihood, OutputBlock, Outputs, RootBlock, Weights


class Independent(Likelihood):
    """A likelihood with H = diag(h) and L = diag(sqrt h); subclasses define h and its root."""

    @abstractmethod
    def curvature(self, f: Outputs, y: Tensor) -> Tensor:
        """Return h of each point without sample weights, broadcastable to (n, C)."""

    @abstractmethod
    def curvature_root(self, f: Outputs, y: Tensor) -> Tensor:
        """Return the square root of h, from logarithms or halves so that it does not underflow where h does."""

    def hessian_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        return weighted(self.curvature(f, y) * u, w)

    def root_product(self, f: Outputs, z: RootBlock, y: Tensor, w: Weights = None) -> OutputBlock:
        return weighted(self.curvature_root(f, y) * z, None if w is None else w.sqrt())

    def root_transpose_product(self, f: Outputs, u: OutputBlock, y: Tensor, w: Weights = None) -> RootBlock:
        return self.root_product(f, u, y, w)


def weighted(x: Tensor, w: Tensor | None) -> Tensor:
    """Multiply x (..., n, C) by one factor per point, if any."""
    return x if w is None else x * w.unsqueeze(-1)


def normal_like(f: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw standard normal numbers in the shape, dtype and device of f."""
    return torch.randn(f.shape, dtype=f.dtype, device=f.device, generator=generator)


def check_rows(y: Tensor, columns: int | None, name: str) -> None:
    """Raise ValueError unless targets are (n, C) with C = `columns`, where that is known."""
    if y.ndim != 2:
        hint = "Use y.unsqueeze(-1)." if y.ndim == 1 else "Flatten each target to C numbers."
        raise ValueError(f"{name} targets have the outputs' shape (n, C); given {tuple(y.shape)}. {hint}")
    if columns is not None and y.shape[1] != columns:
        raise ValueError(f"The model has {columns} outputs, but the targets have shape {tuple(y.shape)}.")
